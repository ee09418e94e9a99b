"""accelerate: prepare the ELBO, not the model; the plan steps where gradients were synchronised."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropconnectpp as dcpp

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16.0).float(), torch.tensor(digits.target)
loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=25, shuffle=True)

model = dcpp.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), preset="sparse")
elbo = dcpp.ELBO(model, dcpp.categorical, num_data=1200)
bound, optimizer, loader = accelerator.prepare(elbo, torch.optim.Adam(elbo.parameters(), lr=5e-3), loader)
plan = dcpp.SparsityPlan(elbo, steps=40 * len(loader) // 2, keep=0.2)
for _ in range(40):
    for images, labels in loader:
        with accelerator.accumulate(bound):
            loss = bound(images, target=labels).loss
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.sync_gradients:
                plan.step()
            optimizer.zero_grad()
right = (model.eval()(x[1200:].to(accelerator.device)).argmax(1).cpu() == y[1200:]).float().mean()
accelerator.print(f"{right:.1%} right, with {plan.share_kept:.0%} of the weights")
