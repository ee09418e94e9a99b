"""Train the networks that `deployment.py` measures: on MNIST and CIFAR-10, prepared by `dcpp data fetch`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from deployment_networks import BUILD, GROUPS, TORCH_PRUNING, Trained, read, weights_of
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.lab.data import access

BATCH = 128
LR = 1e-3


@dataclass(frozen=True)
class Images:
    """A data set, standardised, and its number of classes."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """Percent of the test images that are wrong."""
        model.eval()
        wrong = sum(
            int((model(x).argmax(1) != y).sum())
            for x, y in zip(self.x_test.split(500), self.y_test.split(500), strict=True)
        )
        return 100.0 * wrong / len(self.x_test)


def images(name: str, crop: int) -> Images:
    """A prepared data set of the laboratory (`dcpp data fetch NAME`)."""
    data = access.load(name)
    parts = []
    for split in (data.train, data.test):
        x = torch.from_numpy(split.images[:, :, crop : 32 - crop, crop : 32 - crop].copy()).float() / 255.0
        if name == "mnist":
            x = (x - 0.1307) / 0.3081
        else:  # the paper's: each image by its own mean and standard deviation
            flat = x.flatten(1)
            x = ((flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)).view_as(x)
        parts += [x, torch.from_numpy(split.labels.copy())]
    return Images(*parts)


def fit(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], data: Images, epochs: int, after: Callable[[], None]
) -> None:
    """Adam with a step size that falls to 0 over the second half; ``after`` is called after each step."""
    steps = epochs * (len(data.x) // BATCH)
    weights = [p for name, p in model.named_parameters() if not name.endswith("_logit")]
    optimizer = torch.optim.Adam(weights, lr=LR)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2.0 * (1.0 - step / steps)))
    order: list[Tensor] = []
    model.train()
    for step in range(steps):
        if not order:
            order = [rows for rows in torch.randperm(len(data.x)).split(BATCH) if len(rows) == BATCH]
        rows = order.pop()
        optimizer.zero_grad()
        value = loss(data.x[rows], data.y[rows])
        value.backward()
        optimizer.step()
        falling.step()
        after()
        if step % 500 == 0:
            print(f"  step {step} of {steps}: loss {float(value.detach()):.3f}", flush=True)
    model.eval()


def plain(name: str, data: Images, epochs: int) -> nn.Module:
    """The dense network, by cross-entropy."""
    torch.manual_seed(0)
    model = BUILD[name]()
    fit(model, lambda x, y: F.cross_entropy(model(x), y), data, epochs, lambda: None)
    return model


def planned(
    name: str, data: Images, keep: float, epochs: int, include: list[str] | None = None, *, by_input: bool = False
) -> Trained:
    """Trained with the preset "sparse" and a `SparsityPlan`, then folded; with a gate for each connection or input."""
    torch.manual_seed(0)
    granularity = "input" if by_input else "synapse"
    model = dcpp.convert(BUILD[name](), include=include, preset="sparse", granularity=granularity)
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=len(data.x))
    steps = epochs * (len(data.x) // BATCH)
    plan = dcpp.SparsityPlan(elbo, steps, keep=keep)
    fit(model, lambda x, y: elbo(x, target=y).loss, data, epochs, plan.step)
    dense = dcpp.to_dense(model.eval())
    where = "a gate for each input" if by_input else "all layers" if include is None else f"layer {', '.join(include)}"
    made = f'preset "sparse" with SparsityPlan(keep={keep:g}) on {where}, {epochs} epochs'
    return Trained(name + (GROUPS if by_input else ""), dense, made, error=data.error(dense))


@dataclass(frozen=True)
class Structured:
    """Torch-Pruning's magnitude pruner: units of a trained network go, it trains on, again and again."""

    tune: int
    """Epochs after each pruning."""
    step: float = 0.75
    """The share of units that stays at each pruning."""
    tolerance: float = 0.1
    """Points of test error that the network may be above ours."""
    patience: int = 2
    """How often in a row it may be above that before it ends."""

    def train(self, name: str, data: Images, dense: nn.Module, error: float) -> Trained:
        """The smallest network of equal test error: chosen on the test set, in its favour."""
        found = [self._one(data, copy.deepcopy(dense), error, everywhere) for everywhere in (True, False)]
        ranking, (model, best) = min(
            zip(("over all layers", "within each layer"), found, strict=True), key=lambda one: count(one[1][0])
        )
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        units = [int(layer.weight.shape[0]) for layer in layers][:-1]
        made = f"Torch-Pruning's magnitude pruner, ranked {ranking}, {self.tune} epochs after each pruning"
        return Trained(name + TORCH_PRUNING, model, made, error=best, units=units)

    def _one(self, data: Images, model: nn.Module, error: float, everywhere: bool) -> tuple[nn.Module, float]:
        import torch_pruning

        torch.manual_seed(0)
        found, best, above = copy.deepcopy(model), data.error(model), 0
        while above < self.patience:
            pruner = torch_pruning.pruner.MagnitudePruner(
                model,
                data.x[:2],
                importance=torch_pruning.importance.MagnitudeImportance(p=2),
                global_pruning=everywhere,
                pruning_ratio=1.0 - self.step,
                ignored_layers=[list(model.modules())[-1]],
            )
            pruner.step()
            fit(model, lambda x, y: F.cross_entropy(model(x), y), data, self.tune, lambda: None)
            now = data.error(model)
            print(f"  {count(model):,} weights: error {now:.2f}", flush=True)
            above = above + 1 if now > error + self.tolerance else 0
            if not above:
                found, best = copy.deepcopy(model), now
        return found, best


def count(model: nn.Module) -> int:
    """How many weights the layers have."""
    return sum(weight.numel() for weight in weights_of(model))


@dataclass(frozen=True)
class Task:
    """A network, its data, and what stands beside it."""

    data: str
    crop: int
    keep: float
    include: list[str] | None = None
    rival: bool = False


TASKS = {
    "lenet-300-100": Task("mnist", 2, 0.01, rival=True),
    "lenet-5-caffe": Task("mnist", 2, 0.01),
    "paper-cifar10": Task("cifar10", 0, 0.02, ["9"]),
}


def train(folder: Path, epochs: tuple[int, ...], only: list[str]) -> None:
    """Make the networks that are not in the folder; ``epochs`` are those of each task."""
    folder.mkdir(parents=True, exist_ok=True)
    for (name, task), length in zip(TASKS.items(), epochs, strict=True):
        if name in only:
            _train(folder, name, task, length)


def _train(folder: Path, name: str, task: Task, epochs: int) -> None:
    wanted = [name, name + GROUPS, name + TORCH_PRUNING] if task.rival else [name]
    if all(read(folder, one) for one in wanted):
        return
    print(f"training {name} for {epochs} epochs into {folder}", flush=True)
    data = images(task.data, task.crop)
    dense = plain(name, data, epochs)
    dense_error = data.error(dense)
    ours = read(folder, name)
    if ours is None:
        ours = replace(planned(name, data, task.keep, epochs, task.include), dense_error=dense_error)
        ours.write(folder)
    if not task.rival:
        return
    assert ours.error is not None
    if read(folder, name + GROUPS) is None:
        replace(planned(name, data, 0.35, 2 * epochs // 3, by_input=True), dense_error=dense_error).write(folder)
    if read(folder, name + TORCH_PRUNING) is None:
        rival = Structured(max(1, epochs // 6)).train(name, data, dense, ours.error)
        replace(rival, dense_error=dense_error).write(folder)
