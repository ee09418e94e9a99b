"""Scores of predicted real values and counts: intervals and samples. `Prediction` has the mixture's own CRPS.

Shapes: S samples, `*` any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, ShapeError
from dropconnectpp.metrics.checks import check_finite, check_pairs


def interval_coverage(low: Tensor, high: Tensor, target: Tensor) -> float:
    """The share of targets inside their intervals, ends included; as high as the interval's level if that is right.

    >>> interval_coverage(torch.zeros(4), torch.ones(4), torch.tensor([0.5, 1.0, 2.0, -1.0]))
    0.5
    """
    check_pairs("interval_coverage", low, high)
    check_pairs("interval_coverage", low, target)
    return float(((target >= low) & (target <= high)).double().mean())


def sharpness(low: Tensor, high: Tensor) -> float:
    """The mean width of intervals, in the target's unit: at equal coverage, narrower is better.

    >>> sharpness(torch.zeros(2), torch.tensor([1.0, 3.0]))
    2.0
    """
    check_pairs("sharpness", low, high)
    if bool((high < low).any()):
        raise ArgumentError("sharpness: an interval ends before it begins. Give the low ends first.")
    return float(check_finite("Ends", high.double() - low.double()).mean())


def crps_of_samples(samples: Tensor, target: Tensor) -> Tensor:
    """The continuous ranked probability score (*) of each target for samples (S, *): E|X - y| - E|X - X'| / 2.

    >>> crps_of_samples(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
    tensor([0.5000], dtype=torch.float64)
    """
    if samples.ndim < 1 or samples.shape[1:] != target.shape or not len(samples):
        raise ShapeError(f"crps_of_samples needs (S, *) and (*), got {tuple(samples.shape)} and {tuple(target.shape)}.")
    ordered = check_finite("Samples", samples.double()).sort(0).values
    count = len(ordered)
    # The sum of |x_i - x_j| over all pairs, from ranks.
    ranks = 2.0 * torch.arange(1, count + 1, dtype=torch.float64, device=ordered.device) - count - 1
    apart = torch.tensordot(ranks, ordered, 1) / count**2
    scores: Tensor = (ordered - target.double()).abs().mean(0) - apart
    return scores
