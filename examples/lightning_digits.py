"""Lightning: a plan that ends with a fifth of the weights, as a callback; predictions that know how sure they are."""

import logging

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropconnectpp as dcpp
from dropconnectpp.integrations.lightning import DropConnectCallback, DropConnectModule

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
lightning.seed_everything(0, verbose=False)
digits = load_digits()
x, y = torch.tensor(digits.data / 16.0).float(), torch.tensor(digits.target)
train = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=50, shuffle=True)
test = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=597)

network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
module = DropConnectModule(dcpp.convert(network, preset="sparse"), dcpp.categorical, 1200, learning_rate=5e-3)
callback = DropConnectCallback(keep=0.2, histograms_every=500)  # a TensorBoardLogger would show the histograms
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(max_epochs=40, accelerator="cpu", callbacks=[callback], **quiet)
trainer.fit(module, train, test)
found = trainer.predict(module, test)[0]
right = (found["mean"].argmax(1) == y[1200:]).float().mean()
print(f"{right:.1%} right, with {callback.plan.share_kept:.0%} of the weights")
