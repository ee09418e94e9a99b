"""Does doubt rank examples as it should? AUROC and FPR95 of foreign examples, risk against coverage.

All is exact, ties included. Shapes: N examples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropconnectpp.errors import check_probability
from dropconnectpp.metrics.checks import check_finite, check_pairs, check_some
from dropconnectpp.metrics.classes import evened


def auroc(doubt_known: Tensor, doubt_foreign: Tensor) -> float:
    """The chance that a foreign example gets more doubt than a known one: 0.5 is a coin, 1 is perfect.

    >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.3]))
    0.875
    """
    known, foreign = _flat(doubt_known), _flat(doubt_foreign)
    ordered = known.sort().values
    below, up_to = (torch.searchsorted(ordered, foreign, right=side) for side in (False, True))
    return float((below + up_to).double().mean() / (2 * len(known)))


def fpr95(doubt_known: Tensor, doubt_foreign: Tensor, known_kept: float = 0.95) -> float:
    """The share of foreign examples that pass as known at the doubt below which 95% of the known ones lie.

    >>> fpr95(torch.arange(100.0), torch.tensor([50.0, 94.0, 95.0, 200.0]))
    0.5
    """
    check_probability("known_kept", known_kept)
    known, foreign = _flat(doubt_known), _flat(doubt_foreign)
    kept = math.ceil(known_kept * len(known) - 1e-9)  # the least number of known examples that is enough
    threshold = known.sort().values[kept - 1]
    return float((foreign <= threshold).double().mean())


def risk_coverage(doubt: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Share answered, and the error among them, (N,) each, when examples are answered in order of doubt.

    Args:
        doubt: of each example, (N,).
        wrong: its error, (N,): 1 for a wrong class, 0 for a right one; or any loss.

    >>> risk_coverage(torch.tensor([0.3, 0.1]), torch.tensor([1.0, 0.0]))
    (tensor([0.5000, 1.0000], dtype=torch.float64), tensor([0.0000, 0.5000], dtype=torch.float64))
    """
    check_pairs("risk_coverage", doubt, wrong)
    order = _flat(doubt).sort()
    losses = evened(order.values, check_finite("Errors", wrong.flatten().double())[order.indices])
    answered = torch.arange(1, len(losses) + 1, dtype=torch.float64, device=losses.device)
    return answered / len(losses), losses.cumsum(0) / answered


def aurc(doubt: Tensor, wrong: Tensor) -> float:
    """The area under `risk_coverage`: the error averaged over how much is answered. Lower is better.

    >>> aurc(torch.tensor([0.3, 0.1]), torch.tensor([1.0, 0.0]))
    0.25
    """
    return float(risk_coverage(doubt, wrong)[1].mean())


def _flat(doubt: Tensor) -> Tensor:
    check_some(doubt)
    return check_finite("Doubts", doubt.detach().flatten().double())
