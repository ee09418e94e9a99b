"""Student's t distribution function, which torch lacks: by the continued fraction of the incomplete Beta function."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TERMS = 200
"""Of the continued fraction: on its fast side, x < (a + 1) / (a + b + 2), fewer than O(sqrt(max(a, b))) are needed."""


def student_t_cdf(value: Tensor, df: float) -> Tensor:
    """P(T <= value) for ``df`` degrees of freedom, element by element, worked out in double precision.

    >>> student_t_cdf(torch.tensor([0.0, 1.0]), 1.0)
    tensor([0.5000, 0.7500])
    """
    t = value.double()
    square = t.square()
    tail = 0.5 * _incomplete_beta(df / (df + square), square / (df + square), 0.5 * df, 0.5)
    return torch.where(t > 0, 1.0 - tail, tail).to(value.dtype)


def _incomplete_beta(x: Tensor, complement: Tensor, a: float, b: float) -> Tensor:
    """I_x(a, b); ``complement`` is 1 - x, given apart because x may be within rounding of 1."""
    turned = x > (a + 1.0) / (a + b + 2.0)
    low = _fraction_side(torch.where(turned, 0.0, x), torch.where(turned, 1.0, complement), a, b)
    high = 1.0 - _fraction_side(torch.where(turned, complement, 0.0), torch.where(turned, x, 1.0), b, a)
    return torch.where(turned, high, low)


def _fraction_side(x: Tensor, complement: Tensor, a: float, b: float) -> Tensor:
    """x^a (1 - x)^b / (a B(a, b)) times the continued fraction, by Lentz's method."""
    constant = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) - math.log(a)
    front = torch.exp(constant + torch.xlogy(torch.full_like(x, a), x) + b * torch.log(complement))
    tiny = 1e-300
    c = torch.ones_like(x)
    d = 1.0 / _away_from_zero(1.0 - (a + b) / (a + 1.0) * x, tiny)
    fraction = d.clone()
    for m in range(1, TERMS + 1):
        even = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m)) * x
        odd = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1)) * x
        for step in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + step * d, tiny)
            c = _away_from_zero(1.0 + step / c, tiny)
            fraction = fraction * c * d
        if bool(((c * d - 1.0).abs() < 1e-15).all()):
            break
    return front * fraction


def _away_from_zero(values: Tensor, tiny: float) -> Tensor:
    return torch.where(values.abs() < tiny, tiny, values)
