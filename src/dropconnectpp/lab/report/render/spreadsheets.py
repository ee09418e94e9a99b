"""Tables as CSV files for spreadsheets: one file for each table, every number unrounded."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from dropconnectpp.lab.report.tables.rows import Table

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet might run text that begins with one of these, so such text gets a single quote in front."""


def as_csv(table: Table) -> str:
    """One table. The columns are the names of all rows, in the order of their first use; missing values are empty."""
    rows = [dict(_flat(row)) for row in table]
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_cell(name) for name in names])
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return stream.getvalue()


def _flat(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The columns of a row: nested names are joined by a dot, an interval becomes two columns, a list becomes one."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, tuple):
            yield f"{above}{name}.low", value[0]
            yield f"{above}{name}.high", value[1]
        elif isinstance(value, list):
            yield f"{above}{name}", " ".join(map(str, value))
        elif value is not None or name not in ("interval", "student", "welch", "paired", "against_one_pass"):
            yield f"{above}{name}", value


def _cell(value: object) -> object:
    """Text that cannot be mistaken for a formula; numbers stay numbers.

    >>> _cell("=1+1"), _cell(-1.5), _cell(None)
    ("'=1+1", -1.5, '')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return value
    text = "" if value is None else str(value).replace("\0", "")
    return f"'{text}" if text.lstrip().startswith(FORMULA) or text.startswith(FORMULA) else text
