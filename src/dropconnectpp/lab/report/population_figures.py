"""The figures of populations: each member's settings by epoch, the schedule that was found, and what the judge saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dropconnectpp.lab.config.by_epoch import WORDS
from dropconnectpp.lab.report.formats import fixed
from dropconnectpp.lab.report.render.drawing import Drawing, LegendEntry, Panel, colour_of, dashes_of
from dropconnectpp.lab.report.tables.population import FOUND, SCORE
from dropconnectpp.lab.report.tables.rows import Table

MEMBER, BEST = 0, 3
"""Colours: DropConnect++'s, the solid one, is that of the schedule."""
Row = Mapping[str, Any]


def population_drawings(history: Table, slugs: Callable[[Sequence[str]], list[str]]) -> list[Drawing]:
    """A figure for each population."""
    found = [list(rows) for _, rows in groupby(history, key=lambda row: row["digest"])]
    names = slugs([f"{rows[0]['data']} {rows[0]['method']}" for rows in found])
    return [_population(rows, f"population-{name}") for rows, name in zip(found, names, strict=True)]


def _population(rows: Sequence[Row], name: str) -> Drawing:
    found = {row["setting"] for row in rows}
    settings = [name for name in WORDS if name in found]
    panels = [_setting([row for row in rows if row["setting"] == one], one, f"{name}-{one}") for one in settings]
    scores = [row for row in rows if row["setting"] == SCORE]
    if scores:
        panels.append(_scores(scores, f"{name}-score"))
    caption = (
        f"{rows[0]['title']}, {rows[0]['method']}. Settings of each member by epoch, and the schedule that fresh "
        "networks follow: the settings behind the best member's weights. Settings change where a member takes over."
    )
    legend = (LegendEntry("a member", MEMBER), LegendEntry("the schedule found, and the best", BEST))
    return Drawing(name, caption, tuple(panels), legend)


def _setting(rows: Sequence[Row], setting: str, name: str) -> Panel:
    members = {member: list(mine) for member, mine in groupby(rows, key=lambda row: row["member"])}
    line = members.pop(FOUND, [])

    thin: dict[str, Any] = {"color": colour_of(MEMBER), "linestyle": dashes_of(MEMBER), "alpha": 0.6, "linewidth": 0.8}

    def draw(axes: Axes) -> None:
        for mine in members.values():
            axes.step(*_points(mine), where="post", **thin)
        axes.step(*_points(line), where="post", color=colour_of(BEST), linewidth=2.2)
        if setting != "rate":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set(xlabel="epoch")

    word = WORDS[setting]
    heading = word[0].upper() + word[1:]
    ends = f"from {line[0]['value']:.3g} to {line[-1]['value']:.3g}" if line else "was not found"
    return Panel(name, heading, f"{heading} by epoch", f"The schedule goes {ends}.", draw)


def _scores(rows: Sequence[Row], name: str) -> Panel:
    members = [list(mine) for _, mine in groupby(rows, key=lambda row: row["member"])]
    best = {epoch: max(row["value"] for row in rows if row["epoch"] == epoch) for epoch in {r["epoch"] for r in rows}}
    ordered = sorted(best.items())

    thin: dict[str, Any] = {"color": colour_of(MEMBER), "linestyle": dashes_of(MEMBER), "alpha": 0.6, "linewidth": 0.8}

    def draw(axes: Axes) -> None:
        for mine in members:
            axes.plot(*_points(mine), **thin)
        axes.plot(*zip(*ordered, strict=True), color=colour_of(BEST), linewidth=2.2)
        axes.set(xlabel="epoch", ylabel="held-out accuracy, %")

    about = f"The best member has {fixed(ordered[-1][1])}% after epoch {ordered[-1][0]}."
    return Panel(name, "What the judge saw", "Held-out accuracy by epoch", about, draw)


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["epoch"] for row in rows], [row["value"] for row in rows]
