"""The figure of what networks with few connections keep: where, of how many maps, and of how many units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dropconnectpp.lab.report.formats import kept
from dropconnectpp.lab.report.frontier import places_of_methods
from dropconnectpp.lab.report.render.drawing import Drawing, LegendEntry, Panel, colour_of, dashes_of
from dropconnectpp.lab.report.squares import squares
from dropconnectpp.lab.report.tables.rows import Table

MOST_PICTURES = 4
"""Methods whose places are drawn."""
HEADINGS = {"map": ("Maps", "connections of a map"), "unit": ("Units", "connections of a unit")}
Row = Mapping[str, Any]


def survivors(rows: Table, name: str) -> Drawing | None:
    """The layer that keeps connections at places, at the smallest share; None where nothing was counted."""
    rows = [row for row in rows if row["asked"] is not None and not row["control"]]
    placed = [row for row in rows if row["axis"] == "place" and row["row"] is not None]
    if not placed:
        return None
    asked = min(row["asked"] for row in placed)
    layer = _largest([row for row in placed if row["asked"] == asked])
    shown = [row for row in rows if row["asked"] == asked and row["layer"] == layer]
    colours = places_of_methods(shown)
    panels = [
        _picture(method, colour, [row for row in shown if row["method"] == method and row["axis"] == "place"], name)
        for method, colour in list(colours.items())[:MOST_PICTURES]
    ]
    for axis, (heading, label) in HEADINGS.items():
        mine = [row for row in shown if row["axis"] == axis]
        if len({row["rank"] for row in mine}) > 1:
            title = f"{heading} in falling order of their connections"
            about = f"Means over networks, of layer {layer}."
            panels.append(Panel(f"{name}-{axis}", heading, title, about, _lines(mine, colours, label)))
    counts = sorted({int(row["n"]) for row in shown})
    caption = (
        f"What survives, {shown[0]['title']}, layer {layer}, at {kept(asked)}: connections at each place, the stronger "
        "the colour the more, and of maps and units in falling order. Means over "
        f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} networks of each method."
    )
    return Drawing(name, caption, tuple(panels), tuple(LegendEntry(method, c) for method, c in colours.items()))


def _largest(rows: Sequence[Row]) -> str:
    """The layer that keeps most connections."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["layer"]] = totals.get(row["layer"], 0.0) + row["connections"]
    return max(totals, key=totals.__getitem__)


def _picture(method: str, colour: int, rows: Sequence[Row], name: str) -> Panel:
    read = sum(row["connections"] > 0 for row in rows)
    about = f"{read} of {len(rows)} places have connections in at least one network."
    return Panel(
        f"{name}-place-{colour}", f"Places: {method}", "Connections at each place", about, squares(colour, rows)
    )


def _lines(rows: Sequence[Row], colours: Mapping[str, int], label: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for method, place in colours.items():
            mine = sorted((row for row in rows if row["method"] == method), key=lambda row: int(row["rank"]))
            if mine:
                x, y = [row["rank"] + 1 for row in mine], [row["connections"] for row in mine]
                axes.plot(x, y, color=colour_of(place), linestyle=dashes_of(place))
        axes.set(xlabel="rank", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))

    return draw
