"""Lightning Fabric: the bound and the optimiser are set up together; the plan steps after the optimiser."""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropconnectpp as dcpp

fabric = lightning.Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(0, verbose=False)
digits = load_digits()
x, y = torch.tensor(digits.data / 16.0).float(), torch.tensor(digits.target)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=50, shuffle=True))

model = dcpp.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), preset="sparse")
elbo = dcpp.ELBO(model, dcpp.categorical, num_data=1200)
plan = dcpp.SparsityPlan(elbo, steps=40 * len(loader), keep=0.2)
bound, optimizer = fabric.setup(elbo, torch.optim.Adam(elbo.parameters(), lr=5e-3))
for _ in range(40):
    for images, labels in loader:
        loss = bound(images, target=labels).loss
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        plan.step()
right = (model.eval()(x[1200:]).argmax(1) == y[1200:]).float().mean()
print(f"{right:.1%} right, with {plan.share_kept:.0%} of the weights")
