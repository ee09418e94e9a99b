"""Scores of class probabilities: negative log-likelihood, Brier score, calibration errors.

Shapes: B examples, C classes, K bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dropconnectpp.errors import check_count
from dropconnectpp.metrics.checks import check_classes, check_finite, check_pairs

BINS = 15


def nll(probabilities: Tensor, target: Tensor) -> Tensor:
    """The negative log-likelihood of each example, (B,), in nats.

    >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor([0.6931], dtype=torch.float64)
    """
    classes = check_classes(probabilities, target)
    right = probabilities.double().gather(1, classes.unsqueeze(1)).squeeze(1)
    return -right.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def brier(probabilities: Tensor, target: Tensor) -> Tensor:
    """The Brier score of each example, (B,): squared distance of the probabilities from the class, from 0 to 2.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor([0.5000], dtype=torch.float64)
    """
    classes = check_classes(probabilities, target)
    wide = probabilities.double()
    right = wide.gather(1, classes.unsqueeze(1)).squeeze(1)
    return wide.square().sum(1) - 2.0 * right + 1.0


def top_label(probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence in the likeliest class, and whether it was right: (B,) each."""
    classes = check_classes(probabilities, target)
    confidence, guess = probabilities.double().max(1)
    return confidence, (guess == classes).double()


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence beside how often it was right, bin by bin, (K,) each."""

    counts: Tensor
    confidence: Tensor
    """The mean in each bin; NaN in an empty one."""
    accuracy: Tensor

    @property
    def error(self) -> float:
        """The calibration error: the gap between the two, averaged over examples."""
        filled = self.counts > 0
        gaps = (self.confidence - self.accuracy)[filled].abs()
        return float((gaps * self.counts[filled]).sum() / self.counts.sum())


def equal_width(confidence: Tensor, right: Tensor, bins: int = BINS) -> Reliability:
    """Bins of one width between 0 and 1."""
    check_pairs("A calibration error", confidence, right)
    check_finite("Confidences", confidence)
    place = (confidence.double() * check_count("bins", bins)).long().clamp(0, bins - 1)
    return _binned(confidence, right, place, bins)


def equal_counts(confidence: Tensor, right: Tensor, bins: int = BINS) -> Reliability:
    """Bins of as many examples each, by rank of confidence; equal confidences share a bin's accuracy."""
    check_pairs("A calibration error", confidence, right)
    check_finite("Confidences", confidence)
    order = confidence.double().sort(stable=True)
    ranks = torch.arange(len(confidence), device=confidence.device)
    place = ranks * check_count("bins", bins) // len(confidence)
    return _binned(order.values, evened(order.values, right.double()[order.indices]), place, bins)


def ece(probabilities: Tensor, target: Tensor, bins: int = BINS, *, adaptive: bool = False) -> float:
    """The expected calibration error: how far confidence in the likeliest class is from how often it is right.

    Args:
        probabilities: (B, C).
        target: class numbers, (B,).
        bins: how many bins.
        adaptive: whether bins have as many examples each, instead of one width.

    >>> ece(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1]))
    0.3...
    """
    confidence, right = top_label(probabilities, target)
    return (equal_counts if adaptive else equal_width)(confidence, right, bins).error


def evened(ordered: Tensor, values: Tensor) -> Tensor:
    """Values whose keys are equal become their mean, so that nothing hangs on the order of ties."""
    _, place, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).scatter_add_(0, place, values)
    means: Tensor = (sums / counts)[place]
    return means


def _binned(confidence: Tensor, right: Tensor, place: Tensor, bins: int) -> Reliability:
    def summed(values: Tensor) -> Tensor:
        zeros = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
        return zeros.scatter_add_(0, place, values.double())

    counts = summed(torch.ones_like(confidence))
    return Reliability(counts, summed(confidence) / counts, summed(right) / counts)
