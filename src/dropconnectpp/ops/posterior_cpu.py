"""`fused.posterior_pass` for the CPU's common case, a known q(pi): no allocation inside the loop.

It computes what `functional.collapsed_kl`, `bernoulli_score` and `disarm_gradient` define, in five
buffers of one chunk's size. Fresh memory costs a CPU more than the arithmetic, and so do logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials
from dropconnectpp.layers.sampling import transformed
from dropconnectpp.ops.gated_weight import CHUNK, chunks

if TYPE_CHECKING:
    from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer

# As in `functional`, but in float32 no longer than its rounding asks for: errors of 4e-8 (value), 2e-8 (slope).
_VALUE = {
    torch.float32: polynomials.economise(polynomials.VALUE_SERIES, 3),
    torch.float64: polynomials.VALUE_POLYNOMIAL[torch.float64],
}
_SLOPE = {
    torch.float32: polynomials.economise(polynomials.SLOPE_SERIES, 4),
    torch.float64: polynomials.SLOPE_POLYNOMIAL[torch.float64],
}

_FACTORS = 64
"""How many numbers in [1/2, 1] are multiplied before one logarithm is taken: 2^-64 is far from underflow."""


def covers(layer: DropConnectPPLayer, gate: Tensor, kept: Tensor | None) -> bool:
    """Whether this pass is the common case: nothing pruned, pi~ behind its logit, the best q(pi).

    The prior is uniform, or, in float32, one with polynomials.
    """
    return (
        gate.device.type == "cpu"
        and gate.dtype in polynomials.SLOPE_POLYNOMIAL
        and gate.is_contiguous()
        and kept is None
        and layer.hyper == "optimal"
        and layer.parameterisation == "logit"
        and not transformed()
        and (layer.alpha == layer.beta == 1.0 or _has_polynomials(gate.dtype, layer.alpha, layer.beta))
    )


def _has_polynomials(dtype: torch.dtype, alpha: float, beta: float) -> bool:
    return dtype == torch.float32 and polynomials.prior_value_polynomial(alpha, beta) is not None


@dataclass(frozen=True)
class Terms:
    """What the gradient is made of besides the KL: the arguments of `fused.posterior_pass`."""

    kl_scale: float
    masks: Sequence[Tensor]
    mirrored: Sequence[Tensor]
    coefficients: Tensor | None
    likelihood: Tensor | None
    prior: tuple[float, float] = (1.0, 1.0)


class _Buffers:
    """Room for one chunk: pi~, 1 - pi~, and three to work in."""

    def __init__(self, gate: Tensor) -> None:
        self.memory = torch.empty((5, min(gate.numel(), CHUNK)), dtype=gate.dtype)

    def load(self, logit: Tensor) -> tuple[Tensor, ...]:
        """p = pi~ and q = 1 - pi~, each to its own full precision, and the rest of the room."""
        p, q, *rest = self.memory[:, : logit.numel()]
        torch.sigmoid(logit, out=p)
        torch.neg(logit, out=q).sigmoid_()
        return p, q, *rest


def posterior_pass(
    logit: Tensor, terms: Terms, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:  # (), (L,), like logit
    """KL sum, sums of squared scores and gradient, as `fused.posterior_pass` has them."""
    kl = torch.zeros((), dtype=torch.float64)
    squared = torch.zeros(max(len(terms.masks), 1), dtype=torch.float64)
    result = torch.empty_like(logit) if gradient else None
    flat, flat_result = logit.view(-1), None if result is None else result.view(-1)
    flat_masks = [[m.reshape(-1).view(torch.uint8) for m in masks] for masks in (terms.masks, terms.mirrored)]
    likelihood = None if terms.likelihood is None else terms.likelihood.reshape(-1)
    weights = [] if terms.coefficients is None or likelihood is not None else terms.coefficients.tolist()
    buffers = _Buffers(logit)
    uniform = terms.prior == (1.0, 1.0)
    for part in chunks(flat.numel()):
        x = flat[part]
        p, q, t, s, s2 = buffers.load(x)
        slope = None if flat_result is None else flat_result[part]
        kl += _negative_entropy(x, p, q, t, s)
        torch.sub(p, q, out=t)  # tanh(logit / 2), to the last digit of pi~
        torch.mul(t, t, out=s)
        q.mul_(p)  # from here on q is pi~ (1 - pi~) = (1 - t^2) / 4
        if uniform:
            torch.mul(s, s, out=s2)
            kl += 4.0 * torch.dot(_polynomial(_VALUE[x.dtype], s, s2, t if slope is None else slope), q)
        else:
            kl += _polynomial(_powers(polynomials.prior_value_polynomial(*terms.prior)), t, s, s2).sum()
        if slope is None:
            continue
        if uniform:
            _polynomial(_SLOPE[x.dtype], s, s2, slope)
            torch.addcmul(x, t, slope, value=-1.0, out=slope)
        else:
            _polynomial(_powers(polynomials.prior_polynomial(*terms.prior)), t, s, slope)
            torch.sub(x, slope, out=slope)
        slope.mul_(q).mul_(terms.kl_scale)
        if likelihood is not None:
            slope.sub_(likelihood[part])
        for index, weight in enumerate(weights):
            score = s2.copy_(flat_masks[0][index][part])
            if terms.mirrored:
                score.sub_(t.copy_(flat_masks[1][index][part])).mul_(_largest(p, s))
            else:
                score.sub_(p)
                squared[index] += torch.dot(score, score)
            slope.add_(score, alpha=-weight)
    if uniform:
        kl += logit.numel() * math.log(2.0)
    return kl.to(logit.dtype), squared.to(logit.dtype), result


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


def _powers(parts: tuple[tuple[float, ...], tuple[float, ...]] | None) -> tuple[float, ...]:
    """Even and odd part as one polynomial in t, highest power first."""
    assert parts is not None
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
