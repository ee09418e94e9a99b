"""The figure of small data: accuracy and NLL against the number of training examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import fixed
from dropconnectpp.lab.report.render.drawing import Drawing, LegendEntry, Panel, colour_of, dashes_of
from dropconnectpp.lab.report.tables.rows import Table

MEASURES = {"accuracy": ("Accuracy", "accuracy, %", 2), "nll": ("NLL", "NLL, nats", 3)}
Row = Mapping[str, Any]


def small_data_drawings(rows: Table, slugs: Callable[[Sequence[str]], list[str]]) -> list[Drawing]:
    """A figure for each data set."""
    titles = list(dict.fromkeys(str(row["title"]) for row in rows))
    return [
        _drawing([row for row in rows if row["title"] == title], title, f"small-data-{slug}")
        for title, slug in zip(titles, slugs(titles), strict=True)
    ]


def _drawing(rows: Table, title: str, name: str) -> Drawing:
    sizes = list(dict.fromkeys(row["examples"] for row in rows))
    places = _places(rows)
    panels = []
    for measure, (heading, axis, digits) in MEASURES.items():

        def draw(axes: Axes, measure: str = measure, axis: str = axis) -> None:
            for method, place in places.items():
                mine = [row for row in rows if row["method"] == method and row[measure]["n"]]
                _line(axes, [sizes.index(row["examples"]) for row in mine], [row[measure] for row in mine], place)
            axes.set(xlabel="training examples", ylabel=axis)
            axes.xaxis.set_major_locator(FixedLocator(range(len(sizes))))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticklabels([_short(size) for size in sizes])

        fewest = [row for row in rows if row["examples"] == sizes[0] and row[measure]["n"]]
        about = "; ".join(f"{row['method']} {fixed(row[measure]['mean'], digits)}" for row in fewest)
        told = f"With the fewest: {about}."
        panels.append(Panel(f"{name}-{measure}", heading, f"{heading} by training examples", told, draw))
    caption = (
        f"{title}. Accuracy and NLL by the number of training examples; bars are 95% intervals of the mean. Methods "
        "with random masks average over drawn networks."
    )
    legend = tuple(LegendEntry(method, place) for method, place in places.items())
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


def _line(axes: Axes, x: Sequence[int], lines: Sequence[Row], place: int) -> None:
    means = [line["mean"] for line in lines]
    ends = [line["interval"] or (mean, mean) for line, mean in zip(lines, means, strict=True)]
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
