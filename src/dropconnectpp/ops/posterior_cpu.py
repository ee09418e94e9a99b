"""`posterior.posterior_pass` for the CPU's common case, a known q(pi): no allocation inside the loop.

It computes what `functional.collapsed_kl`, `bernoulli_score` and `disarm_gradient` define, in five
buffers of one chunk's size. Fresh memory costs a CPU more than the arithmetic, and so do logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials
from dropconnectpp.ops.noise import CHUNK, chunks
from dropconnectpp.ops.prior import Prior

# As in `functional`, but in float32 no longer than its rounding asks for: errors of 4e-8 (value), 2e-8 (gradient).
_VALUE = {
    torch.float32: polynomials.economise(polynomials.VALUE_SERIES, 3),
    torch.float64: polynomials.VALUE_POLYNOMIAL[torch.float64],
}
_GRADIENT = {
    torch.float32: polynomials.economise(polynomials.GRADIENT_SERIES, 4),
    torch.float64: polynomials.GRADIENT_POLYNOMIAL[torch.float64],
}

_FACTORS = 64
"""How many numbers in [1/2, 1] are multiplied before one logarithm is taken: 2^-64 is far from underflow."""


def supported(gate: Tensor, prior: Prior) -> bool:
    """Whether this pass is the common case: a KL with polynomials on the CPU, in single or double precision."""
    return gate.device.type == "cpu" and gate.dtype in prior.streamed and gate.is_contiguous()


@dataclass(frozen=True)
class Terms:
    """What the gradient is made of besides the KL: the arguments of `posterior.posterior_pass`."""

    kl_scale: float
    masks: Sequence[Tensor]
    mirrored: Sequence[Tensor]
    coefficients: Tensor | None
    likelihood: Tensor | None
    prior: Prior = field(default_factory=Prior)
    scores: bool = False
    """Whether squared scores are wanted where no gradient is."""
    sizes: Sequence[int] = ()
    """Where one mask holds several parameters' one after the other: how many synapses each has."""


@dataclass(frozen=True)
class _Room:
    """One chunk's buffers: pi~, what becomes pi~ (1 - pi~), and three to work in."""

    p: Tensor
    spread: Tensor
    t: Tensor
    s: Tensor
    s2: Tensor


class _Buffers:
    """Memory for one chunk, used again for the next."""

    def __init__(self, gate: Tensor) -> None:
        self.memory = torch.empty((5, min(gate.numel(), CHUNK)), dtype=gate.dtype)

    def load(self, logit: Tensor) -> _Room:
        """p = pi~ and q = 1 - pi~, each to its own full precision, and the rest of the room."""
        room = _Room(*self.memory[:, : logit.numel()])
        torch.sigmoid(logit, out=room.p)
        torch.neg(logit, out=room.spread).sigmoid_()
        return room


def posterior_pass(
    logit: Tensor, terms: Terms, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:  # (), (L,), like logit
    """KL sum, sums of squared scores and gradient, as `posterior.posterior_pass` has them."""
    kl = torch.zeros((), dtype=torch.float64)
    squared = torch.zeros(max(len(terms.masks), 1), dtype=torch.float64)
    result = torch.empty_like(logit) if gradient else None
    flat, flat_result = logit.view(-1), None if result is None else result.view(-1)
    data = _Data(terms)
    buffers = _Buffers(logit)
    for part in chunks(flat.numel()):
        x, room = flat[part], buffers.load(flat[part])
        grad = None if flat_result is None else flat_result[part]
        kl += _kl_chunk(x, room, terms.prior, grad)
        if grad is not None:
            grad.mul_(room.spread).mul_(terms.kl_scale)
        data.add(part, room, grad, squared)
    if data.sizes:
        squared = torch.stack([torch.as_tensor(value) for value in data.squared])
    if terms.prior.uniform:
        kl += logit.numel() * math.log(2.0)
    return kl.to(logit.dtype), squared.to(logit.dtype), result


def pruned_pass(
    logit: Tensor, kept: Tensor | None, terms: Terms, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The pass over what pruning left, as `posterior_pass` gives it: zeros for the rest."""
    if kept is None:
        return posterior_pass(logit, terms, gradient)
    left = replace(
        terms,
        masks=[mask[kept] for mask in terms.masks],
        mirrored=[mask[kept] for mask in terms.mirrored],
        likelihood=None if terms.likelihood is None else terms.likelihood[kept],
    )
    kl, squared, grad = posterior_pass(logit[kept], left, gradient)
    return kl, squared, None if grad is None else torch.zeros_like(logit).masked_scatter_(kept, grad)


def _kl_chunk(logit: Tensor, room: _Room, prior: Prior, grad: Tensor | None) -> Tensor:
    """The KL of a chunk, less log 2 a synapse under the uniform prior.

    ``grad`` becomes dKL / dlogit over pi~ (1 - pi~), which is left in `_Room.spread`.
    """
    p, q, t, s, s2 = room.p, room.spread, room.t, room.s, room.s2
    kl = _negative_entropy(logit, p, q, t, s)
    parts = None if prior.uniform else prior.parts(logit.dtype)
    if prior.hyper == "marginal":
        assert parts is not None
        (even, odd), (level, _) = parts
        kl += p.sum().mul(2.0 * odd[-1]).add((even[-1] - odd[-1]) * p.numel())
        q.mul_(p)
        if grad is not None:
            torch.sub(logit, level[-1], out=grad)
        return kl
    torch.sub(p, q, out=t)  # tanh(logit / 2), to the last digit of pi~
    torch.mul(t, t, out=s)
    q.mul_(p)  # from here on q is pi~ (1 - pi~) = (1 - t^2) / 4
    if parts is not None:
        kl += _polynomial(_powers(parts.value), t, s, s2).sum()
        if grad is not None:
            torch.sub(logit, _polynomial(_powers(parts.gradient), t, s, grad), out=grad)
        return kl
    torch.mul(s, s, out=s2)
    kl += 4.0 * torch.dot(_polynomial(_VALUE[logit.dtype], s, s2, t if grad is None else grad), q)
    if grad is not None:
        _polynomial(_GRADIENT[logit.dtype], s, s2, grad)
        torch.addcmul(logit, t, grad, value=-1.0, out=grad)
    return kl


class _Data:
    """The data's part of a pass, a chunk at a time."""

    def __init__(self, terms: Terms) -> None:
        self.masks, self.mirrored = (
            [m.reshape(-1).view(torch.uint8) for m in masks] for masks in (terms.masks, terms.mirrored)
        )
        self.ready = None if terms.likelihood is None else terms.likelihood.reshape(-1)
        self.sizes = list(terms.sizes)
        self.squared: list[Tensor | float] = [0.0] * len(self.sizes)
        self.coefficients = terms.coefficients.tolist() if self.sizes and terms.coefficients is not None else []
        known = terms.coefficients is not None and self.ready is None and not self.sizes
        self.weights = terms.coefficients.tolist() if known and terms.coefficients is not None else []
        self.scores = terms.scores

    def add(self, part: slice, room: _Room, grad: Tensor | None, squared: Tensor) -> None:
        """Take the likelihood's gradient from the KL's, and note the squared scores."""
        if grad is None and not self.scores:
            return
        if grad is not None and self.ready is not None:
            grad.sub_(self.ready[part])
        if self.sizes:
            self._add_parameters(part, room, grad)
        for index, weight in enumerate(self.weights):
            score = room.s2.copy_(self.masks[index][part])
            if self.mirrored:
                score.sub_(room.t.copy_(self.mirrored[index][part])).mul_(_largest(room.p, room.s))
            else:
                score.sub_(room.p)
                squared[index] += torch.dot(score, score)
            if grad is not None:
                grad.add_(score, alpha=-weight)

    def _add_parameters(self, part: slice, room: _Room, grad: Tensor | None) -> None:
        """The same for parameters that lie one after the other."""
        score = room.s2.copy_(self.masks[0][part]).sub_(room.p)
        start = 0
        for index, size in enumerate(self.sizes):
            here = slice(max(start - part.start, 0), max(start + size - part.start, 0))
            start += size
            one = score[here]
            self.squared[index] = self.squared[index] + torch.dot(one, one)
            if grad is not None:
                grad[here].add_(one, alpha=-self.coefficients[index])


def _negative_entropy(logit: Tensor, p: Tensor, q: Tensor, size: Tensor, work: Tensor) -> Tensor:
    """sum of p log p + q log q = log max(p, q) - |logit| min(p, q)."""
    large = torch.maximum(p, q, out=work)
    whole = large.numel() - large.numel() % _FACTORS
    logs = large[:whole].view(_FACTORS, -1).prod(0).log_().sum() + large[whole:].log_().sum()
    small = torch.minimum(p, q, out=work)
    return logs - torch.dot(torch.abs(logit, out=size), small)


def _largest(p: Tensor, work: Tensor) -> Tensor:
    """max(pi~, 1 - pi~) = sigmoid(|logit|)."""
    return torch.sub(p, 0.5, out=work).abs_().add_(0.5)


def _powers(parts: tuple[tuple[float, ...], tuple[float, ...]]) -> tuple[float, ...]:
    """Even and odd part as one polynomial in t, highest power first."""
    return tuple(c for pair in zip(parts[1], parts[0], strict=True) for c in pair)


def _polynomial(coefficients: tuple[float, ...], s: Tensor, s2: Tensor, out: Tensor) -> Tensor:
    """Horner's scheme in s^2, highest power first: a third fewer passes than in s."""
    if len(coefficients) % 2:
        torch.mul(s2, coefficients[0], out=out).add_(s, alpha=coefficients[1]).add_(coefficients[2])
        rest = coefficients[3:]
    else:
        torch.mul(s, coefficients[0], out=out).add_(coefficients[1])
        rest = coefficients[2:]
    for odd, even in zip(rest[::2], rest[1::2], strict=True):
        out.mul_(s2).add_(s, alpha=odd).add_(even)
    return out
