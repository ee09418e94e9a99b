"""The figure of networks with few connections: error against compression, with what others published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dropconnectpp.lab.report.formats import fixed
from dropconnectpp.lab.report.render.drawing import Drawing, LegendEntry, Panel, colour_of, dashes_of
from dropconnectpp.lab.report.tables.rows import Table

OURS_PLACE = 3
"""DropConnect++ has the colour and the line that it has in every figure."""
LEAST_TIMES = 5.0
"""Networks that keep more are not drawn: the dense ones would take half of a logarithmic axis."""
TICKS = (5, 10, 20, 50, 100, 200, 500, 1000)
Row = Mapping[str, Any]


def frontier(rows: Table, published: Table, name: str) -> Drawing | None:
    """Error and NLL against compression for one data set and network; None where nothing is sparse."""
    drawn = [row for row in rows if row["times"] is not None and row["times"] >= LEAST_TIMES and row["error"]["n"]]
    if not drawn:
        return None
    places = places_of_methods(drawn)
    points = [one for one in published if one["times"] is not None and one["times"] >= LEAST_TIMES]

    def draw_error(axes: Axes) -> None:
        _lines(axes, drawn, places, "error")
        for one in points:
            axes.plot(one["times"], one["error"], marker="D", markerfacecolor="none", color="#000000", markersize=4.5)
            axes.annotate(
                one["method"],
                (one["times"], one["error"]),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=7.0,
                color="#000000",
            )
        axes.set(ylabel="error, %")

    def draw_nll(axes: Axes) -> None:
        _lines(axes, drawn, places, "nll")
        axes.set(ylabel="NLL, nats")

    title = drawn[0]["title"]
    legend = tuple(LegendEntry(method, place) for method, place in places.items())
    each = (f"{row['method']} {fixed(row['error']['mean'])}% at {row['times']:.0f} times fewer" for row in drawn)
    panels = [Panel(f"{name}-error", "Error", "Error by compression", f"{'; '.join(each)}.", draw_error)]
    if all(row["nll"]["n"] for row in drawn):
        panels.append(Panel(f"{name}-nll", "NLL", "NLL by compression", "The same networks.", draw_nll))
    caption = (
        f"Networks with few connections, {title}. Error and NLL by how many times fewer weights are kept; bars are "
    )
    caption += "95% intervals of the mean."
    if points:
        caption += " Diamonds are what others published, one network each."
    return Drawing(name, caption, tuple(panels), legend)


def places_of_methods(rows: Sequence[Row]) -> dict[str, int]:
    """Methods by their place among colours and dashes."""
    methods = dict.fromkeys(str(row["method"]) for row in rows)
    ours = {str(row["method"]) for row in rows if row["ours"]}
    others = iter(place for place in range(100) if place != OURS_PLACE)
    return {method: OURS_PLACE if method in ours else next(others) for method in methods}


def _lines(axes: Axes, rows: Sequence[Row], places: Mapping[str, int], measure: str) -> None:
    """A line with intervals for each method, on a logarithmic axis."""
    for method, place in places.items():
        mine = sorted((row for row in rows if row["method"] == method), key=lambda row: float(row["times"]))
        x, means = [row["times"] for row in mine], [row[measure]["mean"] for row in mine]
        ends = [row[measure]["interval"] or (mean, mean) for row, mean in zip(mine, means, strict=True)]
        spread = [[mean - low for mean, (low, _) in zip(means, ends, strict=True)]]
        spread.append([high - mean for mean, (_, high) in zip(means, ends, strict=True)])
        colour = colour_of(place)
        axes.errorbar(x, means, yerr=spread, color=colour, linestyle=dashes_of(place), marker="o", capsize=2.0)
    axes.set_xscale("log")
    low, high = (edge(float(row["times"]) for row in rows) for edge in (min, max))
    axes.set_xlim(0.8 * low, 1.3 * high)
    axes.xaxis.set_major_locator(FixedLocator(TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"×{value:g}"))
    axes.set(xlabel="times fewer weights")
