"""A table whose cells are words, with the numbers behind them: what every form of a report shows alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from dropconnectpp.lab.report.formats import DASH, fixed, interval

UNVERIFIED, OWN = "†", "‡"
TRUST_NOTES = {
    UNVERIFIED: f"{UNVERIFIED} The files of this data set do not have the official checksums: the pictures may differ "
    "from those the paper used, and so may the numbers.",
    OWN: f"{OWN} These pictures are a folder of the owner's: there are no official files to compare them with.",
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A rounded number or a few words."""

    text: str
    strong: bool = False
    value: float | None = None
    """The number unrounded, to sort by; None sorts by the words."""
    protocol: str = ""
    """Digest of the protocol that made it."""


@dataclass(frozen=True)
class Group:
    """Rows under one heading: a data set."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]
    protocol: str = ""
    """Digest, where all rows are one method's."""


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
    sentences: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """What the table says, in words: a heading and lines."""
    long: bool = False
    """Shown folded on the page, and left to the CSV in LaTeX."""


def without_empty_columns(table: Laid) -> Laid:
    """The table without columns in which nothing is said, such as the paper's where it has no such data."""
    rows = [row for group in table.groups for row in group.rows]
    kept = [i for i in range(len(table.columns)) if i == 0 or any(row[i].text not in ("", DASH) for row in rows)]
    groups = [replace(g, rows=tuple(tuple(row[i] for i in kept) for row in g.rows)) for g in table.groups]
    words = [place for place, i in enumerate(kept) if i in table.words]
    columns = [table.columns[i] for i in kept]
    return replace(table, columns=tuple(columns), groups=tuple(groups), words=tuple(words))


# ------------------------------------------------------------------------------------- how cells are made


def cells(*given: str | Cell) -> tuple[Cell, ...]:
    """A row; plain text is a cell of words."""
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in given)


def number(
    value: float | None, digits: int = 2, write: Callable[[float | None, int], str] = fixed, *, strong: bool = False
) -> Cell:
    """A rounded number that sorts by the unrounded one.

    >>> number(75.698)
    Cell(text='75.70', strong=False, value=75.698, protocol='')
    """
    return Cell(write(value, digits), strong, value)


def count(value: int) -> Cell:
    """A whole number."""
    return Cell(f"{value:,}", value=float(value))


def span(ends: Sequence[float] | None, digits: int = 2) -> Cell:
    """An interval, which sorts by its lower end."""
    return Cell(interval(ends, digits), value=None if ends is None else ends[0])


def method(row: Row, name: str = "method", digest: str = "digest") -> Cell:
    """A method's name, with the way to its protocol."""
    return Cell(row[name], protocol=row[digest])


def title(row: Row) -> str:
    """What tables call the data, marked where it is not the official one."""
    return f"{row['title']} {mark(row)}".rstrip()


def method_title(row: Row) -> str:
    """Data and method."""
    return f"{title(row)}: {row['method']}"


def mark(row: Row) -> str:
    """The sign of data that is not the official one; empty where it is."""
    if row.get("trusted", True):
        return ""
    return OWN if str(row["data"]).startswith("folder:") else UNVERIFIED


def trust_notes(rows: Iterable[Row]) -> tuple[str, ...]:
    """What the signs in a table mean."""
    signs = {mark(row) for row in rows}
    return tuple(note for sign, note in TRUST_NOTES.items() if sign in signs)


def grouped(
    rows: Iterable[Row],
    heading: Callable[[Row], str],
    make: Callable[[Row], tuple[Cell, ...]],
) -> tuple[Group, ...]:
    """Neighbours under one heading; a heading of one method leads to its protocol."""
    groups = []
    for name, found in groupby(rows, heading):
        members = list(found)
        digests = {str(row["digest"]) for row in members} if heading is method_title else set()
        groups.append(Group(name, tuple(make(row) for row in members), digests.pop() if len(digests) == 1 else ""))
    return tuple(groups)
