"""A training from arrays: a network with scaling around it, minibatches, early stopping; no framework but torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dropconnectpp.conversion import convert
from dropconnectpp.errors import ArgumentError, check_count
from dropconnectpp.inference.elbo import ELBO
from dropconnectpp.inference.parameter_groups import parameter_groups
from dropconnectpp.inference.plan import SparsityPlan
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.prediction.progress import Progress

FASTER = 10.0
"""Step size of log-odds and of a noise's logarithm as a multiple of the weights': they have farther to go."""
ModuleLike = nn.Module | Callable[[int, int], nn.Module] | None
"""A network, or what makes one for so many features and outputs; None: fully connected layers."""


class Affine(nn.Module):
    """(x - shift) / scale, or back: constants of a data set, which travel with the network."""

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: Tensor, scale: Tensor, inverse: bool = False) -> None:
        super().__init__()
        self.inverse = inverse
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift if self.inverse else (x - self.shift) / self.scale

    def extra_repr(self) -> str:
        return f"features={self.shift.numel()}, inverse={self.inverse}"


def standardising(values: Tensor, inverse: bool = False) -> Affine:
    """The map that brings each column to mean 0 and deviation 1, or back; a constant column is left at its scale."""
    scale = values.std(0, correction=0)
    rounding = 10.0 * torch.finfo(values.dtype).eps * values.abs().amax(0)
    return Affine(values.mean(0), torch.where(scale > rounding, scale, torch.ones_like(scale)), inverse)


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """torch's generators start at a seed, and the user's own go on afterwards as if nothing had been."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def make_network(module: ModuleLike, widths: Sequence[int], features: int, outputs: int) -> nn.Module:
    """A network of one's own, copied, or fully connected layers with ReLU."""
    if isinstance(module, nn.Module):
        return copy.deepcopy(module)
    if module is not None:
        made = module(features, outputs)
        if not isinstance(made, nn.Module):
            raise ArgumentError(f"module must make a torch.nn.Module, and made {type(made).__name__}.")
        return made
    layers: list[nn.Module] = []
    width = features
    for size in widths:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def with_gates(network: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """The network converted, unless it has learned gates already."""
    if any(isinstance(layer, DropConnectPPLayer) for layer in masked_layers(network).values()):
        return network
    return convert(network, inplace=True, **options)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a training goes."""

    learning_rate: float
    epochs: int
    batch_size: int
    keep: float | None = None
    """The share of weights that a `SparsityPlan` ends with; None: no plan."""
    patience: int | None = None
    """Epochs without a better validation score after which the training ends; None: no early stopping."""
    verbose: bool = False


@dataclass
class Fitted:
    """A network in training: what going on needs, and what came of it."""

    model: nn.Module
    elbo: ELBO
    optimizer: torch.optim.Optimizer
    fixed: bool = False
    """Whether a plan has fixed the connections, so that every network drawn is the same."""
    losses: list[float] = field(default_factory=list)
    """For each epoch, the mean of -ELBO per example, in nats."""
    scores: list[float] = field(default_factory=list)
    """For each epoch, the mean network's log-likelihood per validation example."""

    @classmethod
    def start(cls, model: nn.Module, likelihood: Any, num_data: int, learning_rate: float) -> Fitted:
        """A training that has not begun."""
        elbo = ELBO(model, likelihood, num_data)
        groups = parameter_groups(elbo, learning_rate, logit_lr=FASTER * learning_rate)
        for group in groups:
            if group["name"] == "noise":
                group["lr"] = FASTER * learning_rate
        return cls(model, elbo, torch.optim.Adam(groups))

    @property
    def sparsity(self) -> float:
        """The share of gated weights that are off: pruned, or with a keep probability of at most a half."""
        layers = {layer.tie("weight"): layer for layer in masked_layers(self.model).values()}
        on = sum(int((layer.keep_probability("weight") > 0.5).sum()) for layer in layers.values())
        return 1.0 - on / sum(layer.weight.numel() for layer in layers.values())

    def epoch(self, x: Tensor, y: Tensor, batch_size: int, random: np.random.RandomState, after: Any = None) -> None:
        """One pass over the examples, in minibatches of nearly equal sizes."""
        self.model.train()
        order = torch.from_numpy(random.permutation(len(x))).to(x.device)
        total = 0.0
        for rows in order.tensor_split(math.ceil(len(x) / batch_size)):
            loss = self.elbo(x[rows], target=y[rows]).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += float(loss.detach()) * len(rows)
            if after is not None:
                after()
        self.losses.append(total / len(x))

    @torch.no_grad()
    def validate(self, x: Tensor, y: Tensor) -> float:
        """The mean network's log-likelihood per example, Eq. (19)."""
        self.model.eval()
        score = float(self.elbo.log_likelihood(self.model(x), y).mean())
        self.scores.append(score)
        return score


def fit(
    fitted: Fitted,
    x: Tensor,
    y: Tensor,
    options: FitOptions,
    random: np.random.RandomState,
    validation: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Train: the step size falls to 0 over the second half; with early stopping the best state is put back."""
    per_epoch = math.ceil(len(x) / check_count("batch_size", options.batch_size))
    steps = options.epochs * per_epoch
    plan = None if options.keep is None else SparsityPlan(fitted.elbo, steps, keep=options.keep)
    falling = torch.optim.lr_scheduler.LambdaLR(
        fitted.optimizer, lambda step: max(0.0, min(1.0, 2.0 * (1.0 - step / steps)))
    )

    def after() -> None:
        falling.step()
        if plan is not None:
            plan.step()

    best: tuple[float, dict[str, Any]] | None = None
    waited = 0
    with Progress("fit", options.epochs, options.verbose) as bar:
        for _ in range(options.epochs):
            fitted.epoch(x, y, options.batch_size, random, after)
            bar.step()
            if validation is None or options.patience is None:
                continue
            score = fitted.validate(*validation)
            if plan is not None and plan.phase != "fixed":
                continue  # a network whose connections are not chosen yet is no candidate
            if best is None or score > best[0]:
                best, waited = (score, copy.deepcopy(fitted.elbo.state_dict())), 0
            else:
                waited += 1
            if waited >= options.patience:
                break
    if best is not None:
        fitted.elbo.load_state_dict(best[1])
    for group in fitted.optimizer.param_groups:
        group["lr"] = group.pop("initial_lr")
    fitted.fixed = plan is not None
    fitted.model.eval()
