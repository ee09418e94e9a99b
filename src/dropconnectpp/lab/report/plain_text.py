"""A table whose cells are words: what the page and the terminal show alike, and how a terminal shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dropconnectpp.lab.report.number_formats import DASH

WIDTH = 80
"""Notes under a table are as wide as the table, and at least this wide."""


@dataclass(frozen=True)
class Cell:
    """A rounded number or a few words."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Group:
    """Rows under one heading: a data set."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Laid:
    """A table ready to be shown; the first cell of a row is its head."""

    name: str
    caption: str
    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()
    words: tuple[int, ...] = ()
    """Columns of words; the others are numbers and stand to the right."""


def without_empty_columns(table: Laid) -> Laid:
    """The table without columns in which nothing is said, such as the paper's where it has no such data."""
    rows = [row for group in table.groups for row in group.rows]
    kept = [i for i in range(len(table.columns)) if i == 0 or any(row[i].text not in ("", DASH) for row in rows)]
    groups = [replace(g, rows=tuple(tuple(row[i] for i in kept) for row in g.rows)) for g in table.groups]
    words = [place for place, i in enumerate(kept) if i in table.words]
    columns = [table.columns[i] for i in kept]
    return replace(table, columns=tuple(columns), groups=tuple(groups), words=tuple(words))


def as_text(table: Laid) -> str:
    """One table as aligned plain text; the best is marked with an asterisk."""
    lines = [[cell.text + "*" * cell.strong for cell in row] for group in table.groups for row in group.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *lines, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if place == 0 or place in table.words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    text = [table.caption, rule, aligned(table.columns), rule]
    rest = iter(lines)
    for group in table.groups:
        text += [group.title] if group.title else []
        text += [aligned(next(rest)) for _ in group.rows]
    notes = [textwrap.fill(note, max(WIDTH, len(rule))) for note in table.notes]
    return "\n".join([*text, rule, *notes])
