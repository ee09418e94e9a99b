"""Mixtures over sampled networks: distribution function, quantiles and CRPS of what each network predicts.

Shapes: S networks, B examples, `*` the rest; outputs (S, B, *), values (B, *).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropconnectpp.likelihoods import Gaussian, HeteroscedasticGaussian, Poisson

ELEMENTS = 2**19
"""Of (S, b, *) worked on at a time."""
BISECTIONS = 60
PANELS, NODES = 16, 6
"""Of the Gauss-Legendre rule where the CRPS has no closed form."""


def in_blocks(work: Callable[..., Tensor], outputs: Tensor, *values: Tensor) -> Tensor:
    """``work(outputs, *values)`` over blocks of examples, put together."""
    each = max(1, outputs[:, :1].numel())
    rows = max(1, ELEMENTS // each)
    if outputs.shape[1] <= rows:
        return work(outputs, *values)
    starts = range(0, outputs.shape[1], rows)
    return torch.cat([work(outputs[:, a : a + rows], *(v[a : a + rows] for v in values)) for a in starts])


def over_networks(function: Callable[..., Tensor], outputs: Tensor, *values: Tensor) -> Tensor:
    """``function(output, *values)`` of each network, (S, B, *)."""
    count = outputs.shape[0]
    repeated = (value.expand(count, *value.shape).flatten(0, 1) for value in values)
    flat = function(outputs.flatten(0, 1), *repeated)
    result: Tensor = flat.unflatten(0, (count, -1))
    return result


def cdf(likelihood: Any, outputs: Tensor, value: Tensor) -> Tensor:
    """The probability of at most ``value`` (B, *), averaged over networks."""
    return over_networks(likelihood.cdf, outputs, value).mean(0)


def quantile(likelihood: Any, outputs: Tensor, probability: float) -> Tensor:
    """The mixture's quantile, by bisection of its distribution function in double precision."""

    def block(part: Tensor) -> Tensor:
        low, high = _bracket(likelihood, part, probability)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            below = cdf(likelihood, part, middle) < probability
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high.round() if isinstance(likelihood, Poisson) else 0.5 * (low + high)

    return in_blocks(block, outputs.double())


def _bracket(likelihood: Any, outputs: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    means = over_networks(likelihood.mean, outputs)
    width = over_networks(likelihood.deviation, outputs).amax(0)
    width = torch.where(torch.isfinite(width) & (width > 0), width, 1.0)
    low, high = means.amin(0) - width, means.amax(0) + width
    for _ in range(100):
        too_high = cdf(likelihood, outputs, low) >= probability
        too_low = cdf(likelihood, outputs, high) < probability
        if not bool((too_high | too_low).any()):
            break
        width = 2 * width
        low, high = torch.where(too_high, low - width, low), torch.where(too_low, high + width, high)
    return low, high


def crps(likelihood: Any, outputs: Tensor, value: Tensor) -> Tensor:
    """The continuous ranked probability score (B, *) of each value: the integral of (F - 1{y <= x})^2.

    In closed form for normal noise, a sum over counts for `poisson`, else by quadrature.
    """
    if isinstance(likelihood, Gaussian | HeteroscedasticGaussian):
        return in_blocks(lambda part, y: _crps_of_normals(likelihood, part, y), outputs.double(), value.double())
    if isinstance(likelihood, Poisson):
        return in_blocks(lambda part, y: _crps_of_counts(likelihood, part, y), outputs.double(), value.double())
    return in_blocks(lambda part, y: _crps_by_integral(likelihood, part, y), outputs.double(), value.double())


def _mean_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """E|X| of a normal X."""
    deviation = variance.sqrt()
    z = mean / deviation
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    distance: Tensor = 2 * deviation * density + mean * (2 * torch.special.ndtr(z) - 1)
    return distance


def _crps_of_normals(likelihood: Any, outputs: Tensor, value: Tensor) -> Tensor:
    """E|X - y| - E|X - X'| / 2, Grimit et al. (2006)."""
    means = over_networks(likelihood.mean, outputs)
    variances = over_networks(likelihood.deviation, outputs).square()
    apart = torch.zeros_like(value)
    for mean, variance in zip(means, variances, strict=True):
        apart += _mean_distance(means - mean, variances + variance).mean(0) / len(means)
    return _mean_distance(value - means, variances).mean(0) - 0.5 * apart


def _crps_of_counts(likelihood: Any, outputs: Tensor, value: Tensor) -> Tensor:
    last = torch.maximum(quantile(likelihood, outputs, 1 - 1e-12), value).max()
    total = torch.zeros_like(value)
    for count in range(int(last) + 1):
        below = cdf(likelihood, outputs, torch.full_like(value, float(count)))
        total += (below - (value <= count).double()).square()
    return total


def _crps_by_integral(likelihood: Any, outputs: Tensor, value: Tensor) -> Tensor:
    """On each side of the value, from it to where next to nothing is left, with points that thin out outwards."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    total = torch.zeros_like(value)
    for probability, above in ((1e-6, 0.0), (1 - 1e-6, 1.0)):
        end = quantile(likelihood, outputs, probability)
        end = torch.maximum(end, value) if above else torch.minimum(end, value)
        for panel in range(PANELS):
            for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
                place = (panel + 0.5 * (1.0 + node)) / PANELS
                height = (cdf(likelihood, outputs, value + place**3 * (end - value)) - above).square()
                total += height * (3.0 * place**2 * 0.5 * weight / PANELS) * (end - value).abs()
    return total
