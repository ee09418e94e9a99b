"""The figure of an `Evaluation`, with matplotlib, which is imported here alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dropconnectpp.metrics.classes import Reliability
from dropconnectpp.metrics.parts import Panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT, WIDTH = 2.8, 3.4
DOUBT_BINS = 25
CURVE_POINTS = 500


def draw(panels: Panels, numbers: Mapping[str, float], sets: Sequence[str]) -> Figure:
    """One panel for each thing measured, side by side; ``sets`` names those that doubts are of."""
    from matplotlib.figure import Figure

    drawers: list[Callable[[Any], None]] = []
    if panels.reliability is not None:
        drawers.append(partial(_reliability, panels.reliability, numbers["ece"]))
    if panels.risk is not None:
        drawers.append(partial(_risk, *panels.risk, numbers["aurc"]))
    if panels.pit is not None:
        drawers.append(partial(_calibration, panels.pit, numbers["crps"]))
    if panels.doubts:
        measure, doubts = next(iter(panels.doubts.items()))
        drawers.append(partial(_doubts, measure, dict(zip(sets, doubts, strict=True))))
    figure = Figure(figsize=(WIDTH * len(drawers), HEIGHT), layout="constrained")
    for axes, drawer in zip(figure.subplots(1, len(drawers), squeeze=False)[0], drawers, strict=True):
        drawer(axes)
    return figure


def _reliability(found: Reliability, error: float, axes: Any) -> None:
    filled = found.counts > 0
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    axes.plot(found.confidence[filled], found.accuracy[filled], marker="o", markersize=4)
    axes.set(xlabel="confidence", ylabel="share that is right", title=f"calibration error {error:.2g}%")


def _risk(answered: Tensor, risk: Tensor, area: float, axes: Any) -> None:
    places = torch.linspace(0, len(answered) - 1, min(len(answered), CURVE_POINTS)).long().unique()
    axes.plot(100 * answered[places], 100 * risk[places])
    axes.set(xlabel="answered, %", ylabel="error among them, %", title=f"AURC {area:.2g}%", ylim=(0, None))


def _calibration(pit: Tensor, crps: float, axes: Any) -> None:
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    axes.plot(torch.linspace(0, 1, len(pit) + 1), torch.cat([torch.zeros(1), pit.cumsum(0)]), marker="o", markersize=3)
    axes.set(xlabel="predicted probability of less", ylabel="share of targets", title=f"CRPS {crps:.2g}")


def _doubts(measure: str, sets: Mapping[str, Tensor], axes: Any) -> None:
    low = min(float(values.min()) for values in sets.values())
    high = max(float(values.max()) for values in sets.values())
    for name, values in sets.items():
        axes.hist(values, bins=DOUBT_BINS, range=(low, max(high, low + 1e-9)), density=True, alpha=0.6, label=name)
    axes.set(xlabel=measure, yticks=[], title="doubt")
    axes.legend(frameon=False)
