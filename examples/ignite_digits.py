"""Ignite: an Engine whose step is the ELBO's, and an evaluator of the mean network."""

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy, RunningAverage
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropconnectpp as dcpp

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16.0).float(), torch.tensor(digits.target)
train = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=50, shuffle=True)
test = DataLoader(TensorDataset(x[1200:], y[1200:]), batch_size=200)

model = dcpp.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), preset="sparse")
elbo = dcpp.ELBO(model, dcpp.categorical, num_data=1200)
plan = dcpp.SparsityPlan(elbo, steps=40 * len(train), keep=0.2)
optimizer = torch.optim.Adam(elbo.parameters(), lr=5e-3)


def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """One minibatch."""
    loss = elbo(*batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


trainer, evaluator = Engine(step), create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: plan.step())
trainer.add_event_handler(Events.EPOCH_STARTED, lambda: model.train())
trainer.add_event_handler(Events.COMPLETED, lambda: evaluator.run(test))
trainer.run(train, max_epochs=40)
print(f"{evaluator.state.metrics['accuracy']:.1%} right, with {plan.share_kept:.0%} of the weights")
