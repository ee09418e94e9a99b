"""A table ready to be shown: cells of text with the unrounded numbers behind them, the same in every format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from dropconnectpp.lab.report.formats import DASH, fixed, interval

UNVERIFIED, OWN = "†", "‡"
# Recorded tables say "pictures" in these notes: "images" would change them.
TRUST_NOTES = {
    UNVERIFIED: f"{UNVERIFIED} The files of this data set do not have the official checksums: the pictures may differ "
    "from those the paper used, and so may the numbers.",
    OWN: f"{OWN} These pictures are a folder of the owner's: there are no official files to compare them with.",
}
TableRow = Mapping[str, Any]
"""A row of a table as plain data."""


@dataclass(frozen=True)
class Cell:
    """A rounded number or a few words."""

    text: str
    strong: bool = False
    value: float | None = None
    """The unrounded number, to sort by; without one the text is sorted by."""
    protocol: str = ""
    """Digest of the protocol that it belongs to."""


@dataclass(frozen=True)
class RowGroup:
    """Rows under one heading, such as a data set."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]
    protocol: str = ""
    """Digest of the protocol, if all rows belong to one."""


@dataclass(frozen=True)
class TableView:
    """A table ready to be shown; the first cell of a row is its heading."""

    name: str
    caption: str
    columns: tuple[str, ...]
    groups: tuple[RowGroup, ...]
    notes: tuple[str, ...] = ()
    words: tuple[int, ...] = ()
    """Indices of the columns of text; the others hold numbers and are aligned right."""
    sentences: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """What the table shows, in words: a heading and lines."""
    long: bool = False
    """Folded on the page; left out of the LaTeX file, so only the CSV file has it there."""


def without_empty_columns(table: TableView) -> TableView:
    """The table without empty columns, such as the paper's values where the paper has none."""
    rows = [row for group in table.groups for row in group.rows]
    kept = [i for i in range(len(table.columns)) if i == 0 or any(row[i].text not in ("", DASH) for row in rows)]
    groups = [replace(g, rows=tuple(tuple(row[i] for i in kept) for row in g.rows)) for g in table.groups]
    words = [place for place, i in enumerate(kept) if i in table.words]
    columns = [table.columns[i] for i in kept]
    return replace(table, columns=tuple(columns), groups=tuple(groups), words=tuple(words))


# ------------------------------------------------------------------------------------- how cells are made


def cells(*given: str | Cell) -> tuple[Cell, ...]:
    """A row of cells; plain text becomes a cell of text."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in given)


def number(
    value: float | None, digits: int = 2, write: Callable[[float | None, int], str] = fixed, *, strong: bool = False
) -> Cell:
    """A rounded number, sorted by the unrounded one.

    >>> number(75.698)
    Cell(text='75.70', strong=False, value=75.698, protocol='')
    """
    return Cell(write(value, digits), strong, value)


def count(value: int) -> Cell:
    """A whole number."""
    return Cell(f"{value:,}", value=float(value))


def span(ends: Sequence[float] | None, digits: int = 2) -> Cell:
    """An interval, sorted by its lower end."""
    return Cell(interval(ends, digits), value=None if ends is None else ends[0])


def method(row: TableRow, name: str = "method", digest: str = "digest") -> Cell:
    """A method's name, linked to its protocol."""
    return Cell(row[name], protocol=row[digest])


def title(row: TableRow) -> str:
    """The data set's name in tables, marked if the data is not official."""
    return f"{row['title']} {mark(row)}".rstrip()


def method_title(row: TableRow) -> str:
    """Data and method."""
    return f"{title(row)}: {row['method']}"


def mark(row: TableRow) -> str:
    """The sign for data that is not official; empty for official data."""
    if row.get("trusted", True):
        return ""
    return OWN if str(row["data"]).startswith("folder:") else UNVERIFIED


def trust_notes(rows: Iterable[TableRow]) -> tuple[str, ...]:
    """Notes that explain the signs in a table."""
    signs = {mark(row) for row in rows}
    return tuple(note for sign, note in TRUST_NOTES.items() if sign in signs)


def grouped(
    rows: Iterable[TableRow],
    heading: Callable[[TableRow], str],
    make: Callable[[TableRow], tuple[Cell, ...]],
) -> tuple[RowGroup, ...]:
    """Consecutive rows under one heading; a heading that names a method is linked to its protocol."""
    groups = []
    for name, found in groupby(rows, heading):
        members = list(found)
        digests = {str(row["digest"]) for row in members} if heading is method_title else set()
        groups.append(RowGroup(name, tuple(make(row) for row in members), digests.pop() if len(digests) == 1 else ""))
    return tuple(groups)
