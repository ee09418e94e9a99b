"""A layer's weights and gates through a training step: gates are drawn in one pass, gradients and steps in another.

One launch each on a GPU with Triton, where the noise is drawn again in the second pass instead of stored. Elsewhere,
and for what the kernels do not take, the twin runs, with the same result to rounding. Weights and gates of neighbouring
replicas lie side by side; what differs between replicas comes as a table, one row each, with the columns `COLUMNS`.

| kind            | the weight that a step uses                        | the gate is            |
| --------------- | -------------------------------------------------- | ---------------------- |
| "plain"         | w                                                  | none                   |
| "mask"          | w, where the mask is on and a draw below `keep`    | none                   |
| "bernoulli"     | w z, z ~ Bernoulli(pi~), straight through          | logit of pi~           |
| "variance"      | w, and apart from it the variance of its noise     | log sigma^2            |
| "hard-concrete" | w z, z of the hard concrete distribution           | log alpha              |

Shapes: R replicas, then a layer's own axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dropconnectpp.lab.kernels.arguments import Draws, Rule, Stepped
from dropconnectpp.lab.kernels.bits import unpack
from dropconnectpp.lab.kernels.noise import draw_uniform
from dropconnectpp.lab.kernels.support import step_tensor, supported
from dropconnectpp.lab.philox import Stream

Kind = Literal["plain", "mask", "bernoulli", "variance", "hard-concrete"]
COLUMNS = (
    "lr", "gate_lr", "kl", "correction1", "correction2", "keep", "fixed", "alpha", "beta", "temperature", "stretch",
    "ceiling", "least", "target",
)  # fmt: skip
"""Step sizes of weights and gates; the KL's weight over N; Adam's 1 - beta^t; the share that noise keeps; whether the
support is fixed; the prior (where beta is 0: of z alone, with log-odds alpha); the hard concrete's shape; the highest
log-odds of a gate and those above which it is kept; the share below which gates stand still."""
(
    LR, GATE_LR, KL, CORRECTION1, CORRECTION2, KEEP, FIXED, ALPHA, BETA, TEMPERATURE, STRETCH, CEILING, LEAST, TARGET,
) = range(len(COLUMNS))  # fmt: skip
BETA1, BETA2, ADAM_EPSILON = 0.9, 0.999, 1e-8
SMALL = 1e-8
"""Keeps log w^2 finite."""
LOG_ALPHA_LIMIT = 10.0
K1, K2, K3 = 0.63576, 1.87320, 1.48695
"""Of the approximation to the KL of Gaussian multiplicative noise from a log-uniform prior."""
HALF_WORD = 2.0**-25
"""Added to a uniform number, so that its logarithm is finite."""
TENSORS = ("weight", "first", "second", "gate", "gate_first", "gate_second", "mask")
BLOCK = 256
"""Blocks of four synapses that a program takes."""


@dataclass(frozen=True)
class StepRule:
    """The optimiser of weights and biases; gates take Adam's."""

    name: Literal["adagrad", "adam", "sgd"]
    epsilon: float = 1e-6
    epsilon_inside: bool = True
    momentum: float = 0.9


@dataclass
class Synapses:
    """One layer of neighbouring replicas: its weights, gates, and what their optimisers remember."""

    kind: Kind
    rule: StepRule
    stream: Stream
    weight: Tensor
    """(R, ...)."""
    first: Tensor
    second: Tensor
    """The weights' moments: both for Adam, the first for SGD, the second for Adagrad."""
    gate: Tensor | None = None
    gate_first: Tensor | None = None
    gate_second: Tensor | None = None
    mask: Tensor | None = None
    """A bit each, as `bits.pack` lays them out; None: all are on."""
    noisy: bool = False
    """For "mask": whether any replica has a `keep` below 1."""
    gate_epsilon: float = ADAM_EPSILON
    _noise: Tensor | None = field(default=None, repr=False)
    _rows: list[Synapses] = field(default_factory=list, repr=False)
    """From `draw` to `update`, where noise is kept: of the twin alone."""

    def row(self, r: int) -> Synapses:
        """One replica's, in the same memory."""
        tensors = {n: v[r : r + 1] for n in TENSORS if (v := getattr(self, n)) is not None}
        return replace(self, **tensors, _noise=None, _rows=[])

    def gates(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gates and their moments."""
        assert self.gate is not None
        assert self.gate_first is not None
        assert self.gate_second is not None
        return self.gate, self.gate_first, self.gate_second

    def by_kernel(self) -> bool:
        """Whether kernels can take it."""
        return supported(self.weight, self.gate)


def beside(now: Tensor, column: int, like: Tensor) -> Tensor:
    """A column of the table in a shape that multiplies (R, ...)."""
    return now[:, column].view(-1, *[1] * (like.ndim - 1))


# ------------------------------------------------------------------------------------------------- drawing


def draw(synapses: Synapses, now: Tensor, replicas: Tensor, step: Tensor, out: Tensor) -> None:
    """The weights that a step uses, into ``out``; for "variance" the variances."""
    if synapses.by_kernel() and supported(out, now):
        _launch_draw(synapses, now, replicas, step, out)
        return
    if len(synapses.weight) > 1 and synapses.weight.device.type == "cpu":
        # One after the other: a logarithm's last digit may depend on where in memory its vector begins.
        pieces = [synapses.row(r) for r in range(len(synapses.weight))]
        for r, one in enumerate(pieces):
            draw(one, now[r : r + 1], replicas[r : r + 1], step, out[r : r + 1])
        synapses._rows = pieces
        return
    weight, kind = synapses.weight, synapses.kind
    if kind == "plain":
        out.copy_(weight)
    elif kind == "variance":
        out.copy_(local_variance(weight, synapses.gates()[0]))
    else:
        needs = kind != "mask" or synapses.noisy
        synapses._noise = draw_uniform(synapses.stream, weight, replicas, step) if needs else None
        out.copy_(weight * factor(synapses, now, synapses._noise))


def factor(synapses: Synapses, now: Tensor, noise: Tensor | None) -> Tensor:
    """What multiplies the weights, given uniform noise."""
    weight, kind = synapses.weight, synapses.kind
    if kind == "mask":
        mask = synapses.mask
        on = torch.ones_like(weight) if mask is None else unpack(mask, weight.shape[1:]).to(weight.dtype)
        return on if noise is None else on * (noise < beside(now, KEEP, weight))
    assert noise is not None
    gate = synapses.gates()[0]
    if kind == "bernoulli":
        return (noise < bernoulli_keep(gate, now)).to(weight.dtype)
    return hard_concrete(gate, noise, beside(now, TEMPERATURE, gate), beside(now, STRETCH, gate))


def bernoulli_keep(logit: Tensor, now: Tensor) -> Tensor:
    """pi~; once the support is fixed, what noise keeps of it and 0 elsewhere."""
    fixed = beside(now, FIXED, logit) > 0
    on = (logit > beside(now, LEAST, logit)).to(logit.dtype)
    return torch.where(fixed, on * beside(now, KEEP, logit), torch.sigmoid(logit))


def hard_concrete(log_alpha: Tensor, noise: Tensor, temperature: Tensor, stretch: Tensor) -> Tensor:
    """A draw of the hard concrete distribution: a stretched concrete number, cut off at 0 and 1."""
    return (_concrete(log_alpha, noise, temperature) * (1 + 2 * stretch) - stretch).clamp(0.0, 1.0)


def _concrete(log_alpha: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
    u = noise + HALF_WORD
    return torch.sigmoid((torch.log(u) - torch.log1p(-u) + log_alpha) / temperature)


def open_probability(log_alpha: Tensor, temperature: Tensor | float, stretch: Tensor | float) -> Tensor:
    """The probability that a hard concrete gate is not 0."""
    odds = torch.as_tensor(stretch / (1 + stretch), dtype=log_alpha.dtype, device=log_alpha.device)
    return torch.sigmoid(log_alpha - temperature * torch.log(odds))


def log_alpha_of(weight: Tensor, log_variance: Tensor) -> Tensor:
    """log alpha = log sigma^2 - log w^2, within limits."""
    free = log_variance - torch.log(weight.square() + SMALL)
    return free.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


def local_variance(weight: Tensor, log_variance: Tensor) -> Tensor:
    """alpha w^2: sigma^2, where log alpha is within its limits."""
    return torch.exp(log_alpha_of(weight, log_variance)) * weight.square()


def log_uniform_kl(log_alpha: Tensor) -> Tensor:
    """KL of Gaussian multiplicative noise from the log-uniform prior, as Molchanov et al. (2017) approximate it."""
    fall = K1 * torch.sigmoid(K2 + K3 * log_alpha) - 0.5 * torch.nn.functional.softplus(-log_alpha) - K1
    return -fall


def gate_kl(logit: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """KL of a gate from its prior: with q(pi) at its optimum, or of z alone where beta is 0 and alpha the log-odds."""
    p = torch.sigmoid(logit)
    negative_entropy = p * torch.nn.functional.logsigmoid(logit) + (1 - p) * torch.nn.functional.logsigmoid(-logit)
    alone = torch.nn.functional.logsigmoid(alpha) * p + torch.nn.functional.logsigmoid(-alpha) * (1 - p)
    a, b = torch.where(beta > 0, alpha, 1.0), torch.where(beta > 0, beta, 1.0)
    lg = torch.lgamma
    with_beta = lg(a + p) + lg(b + 1 - p) - lg(a + b + 1) - lg(a) - lg(b) + lg(a + b)
    return negative_entropy - torch.where(beta > 0, with_beta, alone)


# ------------------------------------------------------------------------------------------------ stepping


def update(
    synapses: Synapses, now: Tensor, replicas: Tensor, step: Tensor, grad: Tensor, grad_variance: Tensor | None = None
) -> None:
    """Optimiser steps on weights and gates, given the loss's gradient by what `draw` gave."""
    grad = grad.contiguous()
    variance = None if grad_variance is None else grad_variance.contiguous()
    if synapses.by_kernel() and supported(grad, variance, now):
        _launch_update(synapses, now, replicas, step, grad, variance)
        return
    if synapses._rows:
        for r, one in enumerate(synapses._rows):
            own = None if variance is None else variance[r : r + 1]
            update(one, now[r : r + 1], replicas[r : r + 1], step, grad[r : r + 1], own)
        synapses._rows = []
        return
    grad_weight, grad_gate = gradients(synapses, now, synapses._noise, grad, variance)
    synapses._noise = None
    if grad_gate is not None:
        step_gates(synapses, now, grad_gate)
    _step_weights(synapses, now, grad_weight)


def gradients(
    synapses: Synapses, now: Tensor, noise: Tensor | None, grad: Tensor, grad_variance: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients by weights and gates; the KL's is in the gates', and for "variance" in both."""
    weight, kind = synapses.weight, synapses.kind
    if kind == "plain":
        return grad, None
    if kind == "mask":
        return grad * factor(synapses, now, noise), None
    gate = synapses.gates()[0]
    if kind == "variance":
        assert grad_variance is not None
        return _variance_gradients(weight, gate, grad, grad_variance, beside(now, KL, gate))
    grad_weight = grad * factor(synapses, now, noise)
    if kind == "bernoulli":
        p = torch.sigmoid(gate)
        slope = p * torch.sigmoid(-gate)
        return grad_weight, slope * (grad * weight + beside(now, KL, gate) * kl_rise(gate, p, now))
    assert noise is not None
    temperature, stretch = beside(now, TEMPERATURE, gate), beside(now, STRETCH, gate)
    s = _concrete(gate, noise, temperature)
    z = s * (1 + 2 * stretch) - stretch
    inside = ((z > 0) & (z < 1)).to(gate.dtype)
    likelihood = grad * weight * inside * (1 + 2 * stretch) * s * (1 - s) / temperature
    q = open_probability(gate, temperature, stretch)
    return grad_weight, likelihood + beside(now, KL, gate) * q * (1 - q)


def kl_rise(logit: Tensor, p: Tensor, now: Tensor) -> Tensor:
    """dKL/dpi~."""
    alpha, beta = beside(now, ALPHA, logit), beside(now, BETA, logit)
    a, b = torch.where(beta > 0, alpha, 1.0), torch.where(beta > 0, beta, 1.0)
    with_beta = torch.digamma(a + p) - torch.digamma(b + 1 - p)
    return logit - torch.where(beta > 0, with_beta, alpha)


def _variance_gradients(
    weight: Tensor, log_variance: Tensor, grad: Tensor, grad_variance: Tensor, kl: Tensor
) -> tuple[Tensor, Tensor]:
    square = weight.square()
    free = log_variance - torch.log(square + SMALL)
    log_alpha = free.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
    inside = (free == log_alpha).to(weight.dtype)
    alpha = torch.exp(log_alpha)
    share = inside / (square + SMALL)  # -dlog alpha/dw = 2 w share
    q = torch.sigmoid(K2 + K3 * log_alpha)
    rise = -(K1 * K3 * q * (1 - q) + 0.5 * torch.sigmoid(-log_alpha)) * kl
    grad_weight = grad + 2 * weight * (grad_variance * alpha * (1 - square * share) - rise * share)
    return grad_weight, inside * (grad_variance * alpha * square + rise)


def step_gates(synapses: Synapses, now: Tensor, grad: Tensor) -> None:
    """Adam's step, where the support is not fixed, up to the gates' ceiling."""
    gate, first, second = synapses.gates()
    learning = beside(now, FIXED, gate) <= 0
    first.copy_(torch.where(learning, torch.lerp(first, grad, 1 - BETA1), first))
    second.copy_(torch.where(learning, torch.lerp(second, grad.square(), 1 - BETA2), second))
    moved = gate - _adam_change(first, second, now, GATE_LR, synapses.gate_epsilon)
    if synapses.kind == "bernoulli":
        moved = torch.minimum(moved, beside(now, CEILING, gate))
    gate.copy_(torch.where(learning, moved, gate))


def _adam_change(first: Tensor, second: Tensor, now: Tensor, size: int, epsilon: float = ADAM_EPSILON) -> Tensor:
    mean = first / beside(now, CORRECTION1, first)
    root = torch.sqrt(second / beside(now, CORRECTION2, first)) + epsilon
    return beside(now, size, first) * mean / root


def _step_weights(synapses: Synapses, now: Tensor, grad: Tensor) -> None:
    rule, weight, first, second = synapses.rule, synapses.weight, synapses.first, synapses.second
    lr = beside(now, LR, weight)
    if rule.name == "adam":
        first.lerp_(grad, 1 - BETA1)
        second.lerp_(grad.square(), 1 - BETA2)
        weight.sub_(_adam_change(first, second, now, LR))
    elif rule.name == "sgd":
        first.mul_(rule.momentum).add_(grad)
        weight.sub_(lr * first)
    else:
        second.add_(grad.square())
        root = torch.sqrt(second + rule.epsilon) if rule.epsilon_inside else torch.sqrt(second) + rule.epsilon
        weight.sub_(lr * grad / root)


# ------------------------------------------------------------------------------------------------ launches


def _launch_draw(synapses: Synapses, now: Tensor, replicas: Tensor, step: Tensor, out: Tensor) -> None:
    from dropconnectpp.lab.kernels.synapses_triton import draw_kernel

    weight, count = synapses.weight, math.prod(synapses.weight.shape[1:])
    draw_kernel[(-(-count // (4 * BLOCK)), len(weight))](
        weight,
        weight if synapses.gate is None else synapses.gate,
        weight if synapses.mask is None else synapses.mask,
        now,
        _draws(synapses, replicas, step),
        out,
        count,
        **_constants(synapses),
    )


def _launch_update(
    synapses: Synapses, now: Tensor, replicas: Tensor, step: Tensor, grad: Tensor, variance: Tensor | None
) -> None:
    from dropconnectpp.lab.kernels.synapses_triton import update_kernel

    weight, rule, count = synapses.weight, synapses.rule, math.prod(synapses.weight.shape[1:])
    gates = (weight, weight, weight) if synapses.gate is None else synapses.gates()
    update_kernel[(-(-count // (4 * BLOCK)), len(weight))](
        Stepped(weight, synapses.first, synapses.second),
        Stepped(*gates),
        weight if synapses.mask is None else synapses.mask,
        grad,
        grad if variance is None else variance,
        now,
        _draws(synapses, replicas, step),
        Rule(rule.momentum, rule.epsilon, synapses.gate_epsilon),
        count,
        RULE=rule.name,
        INSIDE=rule.epsilon_inside,
        **_constants(synapses),
    )


def _draws(synapses: Synapses, replicas: Tensor, step: Tensor) -> Draws:
    return Draws(synapses.stream.seed, replicas, step_tensor(step, synapses.weight.device))


def _constants(synapses: Synapses) -> dict[str, Any]:
    return {
        "KIND": synapses.kind,
        "MASKED": synapses.mask is not None,
        "NOISY": synapses.noisy,
        "WIDTH": len(COLUMNS),
        "BLOCK": BLOCK,
    }
