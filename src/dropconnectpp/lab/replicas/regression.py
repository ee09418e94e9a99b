"""Regression networks with one hidden layer, many at once: trained, and drawn from.

Shapes: G settings, P problems (rows of a training split to learn from), M = G x P networks, B examples, D inputs,
H hidden units, K = D H + H + H + 1 weights and biases, T draws. A network's numbers depend on nothing but its setting
and problem: starts and orders of examples are those of every method, noise is shared by a problem's settings.

The step is written out, since networks of so few weights would spend their time in autograd; a test compares it with
the library's layers under an `ELBO`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.config.uci import Kind, Setting, Training

Settings = Sequence[Sequence[Setting]]
"""G lists of one setting for each problem."""

ORDERS = 64
"""Minibatches whose rows are drawn at once."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What one network learns from, in the target's own unit, and whom it draws random numbers like."""

    key: tuple[int, ...]
    """Seed, and what tells this problem from others: split, fold, member."""
    x: NDArray[np.float64]
    y: NDArray[np.float64]

    def generator(self, purpose: str) -> np.random.Generator:
        """Random numbers for a purpose."""
        return np.random.Generator(np.random.SFC64([zlib.crc32(purpose.encode()), *self.key]))


@dataclass(frozen=True)
class Scaling:
    """Mean and standard deviation of each problem's inputs (P, 1, D) and targets (P, 1)."""

    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Scaling:
        x = [(p.x.mean(0), p.x.std(0)) for p in problems]
        y = np.array([(p.y.mean(), p.y.std()) for p in problems])
        means, scales = (torch.tensor(np.stack([one[k] for one in x])).unsqueeze(1) for k in (0, 1))
        y_scale = np.where(y[:, 1:] > 0, y[:, 1:], 1.0)
        # A column that does not change within the rows says nothing: left at zero, whatever rounding makes of it.
        still = scales <= 1e-9 * means.abs().clamp_min(1e-300)
        return cls(means, torch.where(still, torch.inf, scales), torch.tensor(y[:, :1]), torch.tensor(y_scale))

    def inputs(self, x: Tensor) -> Tensor:
        """Standardised inputs (P, N, D)."""
        return ((x - self.x_mean) / self.x_scale).float()


@dataclass(frozen=True)
class Shape:
    """Where the weights and biases of a network lie among its K numbers."""

    inputs: int
    hidden: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the first layer's weights and biases, and of the second's."""
        return self.inputs * self.hidden, self.hidden, self.hidden, 1

    def parts(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of (M, K): weights (M, D, H), biases (M, 1, H), weights (M, H, 1), biases (M, 1, 1)."""
        first, bias, second, last = values.split(self.sizes, 1)
        return first.unflatten(1, (self.inputs, self.hidden)), bias.unsqueeze(1), second.unsqueeze(2), last.unsqueeze(2)

    @property
    def decayed(self) -> Tensor:
        """1 where a number is a weight, 0 where it is a bias, (K,)."""
        return torch.cat([torch.full((size,), 1.0 - k % 2) for k, size in enumerate(self.sizes)])


@dataclass(frozen=True)
class Networks:
    """M trained networks of one method."""

    kind: Kind
    settings: Settings
    problems: tuple[Problem, ...]
    scaling: Scaling
    shape: Shape
    weights: Tensor
    """Weights and biases (M, K)."""
    logits: Tensor | None
    """The log-odds of each one's keep probability (M, K), of DropConnect++."""
    log_noise: Tensor
    """(M,)."""

    @property
    def noise(self) -> Tensor:
        """The learned noise's standard deviation in the target's unit, (G, P)."""
        return self.log_noise.double().exp().view(len(self.settings), -1) * self.scaling.y_scale.T

    def of_setting(self, g: int) -> Networks:
        """The networks of one setting."""
        size = len(self.problems)
        rows = slice(g * size, (g + 1) * size)
        return replace(
            self,
            settings=[self.settings[g]],
            weights=self.weights[rows],
            logits=None if self.logits is None else self.logits[rows],
            log_noise=self.log_noise[rows],
        )

    @torch.no_grad()
    def draw(self, x: Tensor, draws: int) -> Tensor:
        """What drawn networks expect of inputs (P, N, D), in the target's unit: (T, G, P, N)."""
        inputs = self.scaling.inputs(x).repeat(len(self.settings), 1, 1)
        noise = Noise(self, "draws")
        drawn = []
        for _ in range(draws if self.kind != "plain" else 1):
            weights, units = noise.gated(), noise.units(None)
            output = _forward(self.shape, weights, inputs, units)[-1].view(len(self.settings), -1, x.shape[1])
            drawn.append(output.double() * self.scaling.y_scale + self.scaling.y_mean)
        return torch.stack(drawn)


class Noise:
    """The masks of a method, drawn for each problem and shared by its settings."""

    def __init__(self, networks: Networks, purpose: str) -> None:
        self.networks = networks
        self.generators = [problem.generator(purpose) for problem in networks.problems]
        keep = torch.tensor([[1.0 - one.rate for one in row] for row in networks.settings], dtype=torch.float64)
        self.keep = keep.float().view(len(networks.settings), -1, 1)
        self.prior = prior_logits(networks.settings) if networks.logits is not None else torch.empty(0)
        self.mask: Tensor | None = None

    def _uniform(self, *shape: int) -> Tensor:
        numbers = np.empty((len(self.generators), *shape), dtype=np.float32)
        for place, generator in zip(numbers, self.generators, strict=True):
            generator.random(out=place, dtype=np.float32)
        return torch.from_numpy(numbers)

    def gated(self) -> Tensor:
        """Weights and biases (M, K) under one mask for the minibatch, Eq. (1)."""
        networks = self.networks
        if networks.kind not in ("dropconnect", "dropconnect++"):
            return networks.weights
        uniform = self._uniform(networks.weights.shape[1])
        if networks.logits is None:
            self.mask = (uniform < self.keep).float().flatten(0, 1)
        else:
            pi = torch.sigmoid(networks.logits)
            self.mask = (uniform < pi.view(len(networks.settings), *uniform.shape)).float().flatten(0, 1)
        return networks.weights * self.mask

    def units(self, batch: int | None) -> tuple[Tensor, Tensor] | None:
        """Factors of inputs (M, B, D) and hidden units (M, B, H), of MC dropout; for all examples where B is None."""
        if self.networks.kind != "mc-dropout":
            return None
        shape = self.networks.shape
        uniform = self._uniform((batch or 1) * (shape.inputs + shape.hidden))
        factors = ((uniform < self.keep).float() / self.keep).flatten(0, 1)
        first, second = factors.split([(batch or 1) * shape.inputs, (batch or 1) * shape.hidden], 1)
        return first.unflatten(1, (-1, shape.inputs)), second.unflatten(1, (-1, shape.hidden))


def _forward(
    shape: Shape, weights: Tensor, x: Tensor, units: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and hidden units as they went on, and outputs (M, B), for standardised inputs (M, B, D)."""
    first, bias, second, last = shape.parts(weights)
    x = x if units is None else x * units[0]
    hidden = torch.baddbmm(bias, x, first).clamp_min_(0.0)
    hidden = hidden if units is None else hidden.mul_(units[1])
    return x, hidden, torch.baddbmm(last, hidden, second).squeeze(2)


@torch.no_grad()
def gradients(networks: Networks, noise: Noise, x: Tensor, y: Tensor, counts: Tensor, precision: Tensor) -> None:
    """Leave the loss's gradients for a minibatch x (M, B, D), y (M, B) in ``.grad``.

    The loss is the negative ELBO over the number of examples: -log p(y | x, w) - log p(w) / N + KL / N, the mean over
    the minibatch; the gradient goes straight through a gate to its keep probability. ``counts`` (M, 1) holds N, and
    ``precision`` (M, 1) that of the weights' prior.
    """
    shape, logits = networks.shape, networks.logits
    weights, units = noise.gated(), noise.units(x.shape[1])
    x, hidden, output = _forward(shape, weights, x, units)
    inverse = torch.exp(-networks.log_noise).unsqueeze(1)
    residual = (output - y) * inverse
    by_output = (residual * (inverse / x.shape[1])).unsqueeze(2)
    by_hidden = by_output * shape.parts(weights)[2].transpose(1, 2)
    by_hidden = by_hidden if units is None else by_hidden.mul_(units[1])
    by_hidden.mul_(hidden > 0)
    by_first = torch.bmm(x.transpose(1, 2), by_hidden).flatten(1)
    by_second = torch.bmm(hidden.transpose(1, 2), by_output).flatten(1)
    found = torch.cat([by_first, by_hidden.sum(1), by_second, by_output.sum(1)], 1)
    if logits is not None:
        pi = torch.sigmoid(logits)
        # `functional.marginal_kl_gradient` is pi (1 - pi) times the distance from the prior's log-odds.
        toward = (logits - noise.prior).div_(counts).addcmul_(found, networks.weights)
        logits.grad = toward.mul_(pi * (1.0 - pi))
    if noise.mask is not None:
        found.mul_(noise.mask)
    networks.weights.grad = found.addcmul_(networks.weights, precision / counts * shape.decayed)
    networks.log_noise.grad = 1.0 - residual.square().mean(1)


def train(
    kind: Kind,
    settings: Settings,
    problems: Sequence[Problem],
    training: Training,
    told: Callable[[int], None] = lambda _: None,
) -> Networks:
    """Train a network for each setting and problem.

    Args:
        kind: the method; an ensemble's members are plain.
        settings: G lists of one setting for each problem.
        problems: what each network learns from.
        training: how.
        told: hears of every step.
    """
    networks = start(kind, settings, problems, training.hidden)
    scaling, count = networks.scaling, len(settings)
    longest = max(len(p.y) for p in problems)
    x = torch.stack([torch.from_numpy(np.resize(p.x, (longest, p.x.shape[1]))) for p in problems])
    y = torch.stack([torch.from_numpy(np.resize(p.y, longest)) for p in problems])
    inputs, targets = scaling.inputs(x), ((y - scaling.y_mean) / scaling.y_scale).float()
    counts = torch.tensor([float(len(p.y)) for p in problems]).repeat(count).unsqueeze(1)
    precision = torch.tensor([one.precision for row in settings for one in row]).unsqueeze(1)
    groups: list[dict[str, Any]] = [{"params": [networks.weights, networks.log_noise]}]
    if networks.logits is not None:
        groups.append({"params": [networks.logits], "lr": training.step_size * training.logit_step})
    optimizer = torch.optim.Adam(groups, lr=training.step_size, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    noise = Noise(networks, f"noise of {kind}")
    orders = [problem.generator("order") for problem in problems]
    places = torch.arange(len(problems)).unsqueeze(1)
    rows = torch.empty(0)
    for step in range(training.steps):
        if step % ORDERS == 0:
            drawn = [g.integers(0, len(p.y), (ORDERS, training.batch)) for g, p in zip(orders, problems, strict=True)]
            rows = torch.from_numpy(np.stack(drawn, 1))
        batch = rows[step % ORDERS]
        gradients(
            networks,
            noise,
            inputs[places, batch].repeat(count, 1, 1),
            targets[places, batch].repeat(count, 1),
            counts,
            precision,
        )
        optimizer.step()
        schedule.step()
        told(step + 1)
    return networks


def start(kind: Kind, settings: Settings, problems: Sequence[Problem], hidden: int) -> Networks:
    """Glorot's uniform start, the same for every setting and method; keep probabilities as the prior expects them."""
    shape = Shape(problems[0].x.shape[1], hidden)
    starts = []
    for problem in problems:
        generator = problem.generator("start")
        limits = [math.sqrt(6.0 / (shape.inputs + hidden)), 0.0, math.sqrt(6.0 / (hidden + 1)), 0.0]
        numbers = [generator.uniform(-limit, limit, size) for limit, size in zip(limits, shape.sizes, strict=True)]
        starts.append(np.concatenate(numbers).astype(np.float32))
    weights = torch.from_numpy(np.stack(starts)).repeat(len(settings), 1)
    logits = prior_logits(settings).expand_as(weights).clone() if kind == "dropconnect++" else None
    noise = torch.zeros(len(weights))
    return Networks(kind, settings, tuple(problems), Scaling.of(problems), shape, weights, logits, noise)


def prior_logits(settings: Settings) -> Tensor:
    """The prior's log-odds of keeping a connection, (M, 1)."""
    keep = torch.tensor([1.0 - one.rate for row in settings for one in row], dtype=torch.float64)
    return functional.probability_to_logit(keep).float().unsqueeze(1)
