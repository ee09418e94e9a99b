"""The figures of judged networks: against the number of training examples, and against the severity of corruptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import fixed
from dropconnectpp.lab.report.render.drawing import Drawing, LegendEntry, Panel, colour_of, dashes_of
from dropconnectpp.lab.report.tables.judged import ENSEMBLE, NETWORKS, ONE_PASS
from dropconnectpp.lab.report.tables.rows import Table

MEASURES = {"accuracy": ("Accuracy", "accuracy, %", 2), "nll": ("NLL", "NLL, nats", 3), "ece": ("ECE", "ECE", 3)}
"""A panel's heading, its axis, and the digits of what is told of it."""
Row = Mapping[str, Any]
Slugs = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class _Axis:
    """What a figure's panels have along the horizontal axis, from left to right."""

    name: str
    label: str
    places: Sequence[object]
    ticks: Sequence[str]


def small_data_drawings(rows: Table, slugs: Slugs) -> list[Drawing]:
    """Accuracy and NLL against the number of training examples: a figure for each data set."""
    drawn = []
    for title, slug in _titles(rows, slugs):
        mine = [row for row in rows if row["title"] == title]
        sizes = list(dict.fromkeys(row["examples"] for row in mine))
        axis = _Axis("examples", "training examples", sizes, [_short(size) for size in sizes])
        points = {name: [row | row[name] for row in mine] for name in ("accuracy", "nll")}
        caption = (
            f"{title}. Accuracy and NLL by the number of training examples; bars are 95% intervals of the mean. "
            "Methods with random masks average over drawn networks."
        )
        drawn.append(_drawing(points, axis, f"small-data-{slug}", caption, "With the fewest"))
    return drawn


def corruption_drawings(rows: Table, slugs: Slugs) -> list[Drawing]:
    """Accuracy, NLL and calibration error against the severity of corruptions: a figure for each data set."""
    rows = [row for row in rows if row["severity"] is not None and row["n"] and _stands_for_its_method(row)]
    drawn = []
    for title, slug in _titles(rows, slugs):
        mine = [row for row in rows if row["title"] == title]
        severities = sorted({row["severity"] for row in mine})
        axis = _Axis("severity", "severity", severities, ["none", *map(str, severities[1:])])
        points = {name: [row for row in mine if row["measure"] == name] for name in MEASURES}
        caption = (
            f"{title}, corrupted test images: means over all corruptions by severity; bars are 95% intervals of the "
            "mean. Methods with random masks average over drawn networks."
        )
        drawn.append(_drawing(points, axis, f"corruptions-{slug}", caption, "Without corruption"))
    return drawn


def _stands_for_its_method(row: Row) -> bool:
    """One line for each method: over drawn networks where there are any; ensembles of plain networks alone."""
    if row["kind"] == ENSEMBLE:
        return "," not in row["method"]
    return bool(row["prediction"] == (ONE_PASS if row["kind"] == "none" else NETWORKS))


def _titles(rows: Table, slugs: Slugs) -> list[tuple[str, str]]:
    titles = list(dict.fromkeys(str(row["title"]) for row in rows))
    return list(zip(titles, slugs(titles), strict=True))


def _drawing(points: Mapping[str, Table], axis: _Axis, name: str, caption: str, first: str) -> Drawing:
    """A panel for each measure, a line for each method."""
    methods = _places([row for rows in points.values() for row in rows])
    panels = []
    for measure, rows in points.items():
        heading, label, digits = MEASURES[measure]

        def draw(axes: Axes, rows: Table = rows, label: str = label) -> None:
            for method, place in methods.items():
                mine = [row for row in rows if row["method"] == method and row["n"]]
                _line(axes, [axis.places.index(row[axis.name]) for row in mine], mine, place)
            axes.set(xlabel=axis.label, ylabel=label)
            axes.xaxis.set_major_locator(FixedLocator(range(len(axis.places))))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels(axis.ticks)

        begin = [row for row in rows if row[axis.name] == axis.places[0] and row["n"]]
        told = "; ".join(f"{row['method']} {fixed(row['mean'], digits)}" for row in begin)
        panels.append(Panel(f"{name}-{measure}", heading, f"{heading} by {axis.label}", f"{first}: {told}.", draw))
    legend = tuple(LegendEntry(method, place) for method, place in methods.items())
    return Drawing(name, caption, tuple(panels), legend)


def _places(rows: Table) -> dict[str, int]:
    """Methods by their place among colours and dashes: each of the paper's looks alike in every figure."""
    kinds = {str(row["method"]): str(row["kind"]) for row in rows}
    found: dict[str, int] = {}
    for method, kind in kinds.items():
        known = paper_values.KINDS.index(kind) if kind in paper_values.KINDS else -1
        last = max([len(paper_values.KINDS) - 1, *found.values()])
        found[method] = last + 1 if known < 0 or known in found.values() else known
    return found


def _line(axes: Axes, x: Sequence[int], rows: Sequence[Row], place: int) -> None:
    means = [row["mean"] for row in rows]
    ends = [row["interval"] or (mean, mean) for row, mean in zip(rows, means, strict=True)]
    spread = [
        [mean - low for mean, (low, _) in zip(means, ends, strict=True)],
        [high - mean for mean, (_, high) in zip(means, ends, strict=True)],
    ]
    axes.errorbar(x, means, yerr=spread, color=colour_of(place), linestyle=dashes_of(place), marker="o", capsize=2.0)


def _short(size: int | None) -> str:
    """A number that fits under an axis.

    >>> _short(250), _short(2500), _short(25_000), _short(None)
    ('250', '2.5k', '25k', 'all')
    """
    if size is None:
        return "all"
    return f"{size / 1000:g}k" if size >= 1000 else str(size)
