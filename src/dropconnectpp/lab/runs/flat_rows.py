"""A store's rows as a flat table, in CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from typing import Any, TextIO

from dropconnectpp.lab.config.json_values import to_json, word
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.runs.store import Row


def to_table(rows: Iterable[Row], *, checks: bool = False) -> list[dict[str, Any]]:
    """Flat rows, all with the same columns: who, each result that is one number or text, and the evidence.

    A result that is missing is None; one whose name another column has is called ``results.NAME``. With ``checks``, the
    last column says which rows agree with a digest that was written with them; those of version 0.1 have none.
    """
    table = []
    for row in rows:
        who = {"digest": row.key.digest, "label": row.protocol.label, "data": row.protocol.settings.get("data")}
        who |= {"replica": row.key.replica, "status": row.status}
        evidence = {"seconds": row.seconds, "device": row.device, "commit": row.commit, "started": row.started}
        evidence |= {"finished": row.finished, "versions": to_json(row.versions, "versions")}
        evidence |= {"provenance": to_json(row.provenance, "provenance")}
        evidence |= {"has_digest": row.verified} if checks else {}
        taken = {*who, *evidence}
        scalars = {
            f"results.{name}" if name in taken else name: value
            for name, value in row.results.items()
            if isinstance(value, str | int | float)
        }
        table.append((who, scalars, evidence))
    names = sorted({name for _, scalars, _ in table for name in scalars})
    return [who | {name: scalars.get(name) for name in names} | evidence for who, scalars, evidence in table]


def write_csv(rows: Iterable[Row], stream: TextIO, *, checks: bool = False) -> None:
    """Write the table as CSV; open the stream with ``newline=""``.

    A text that begins with = + - or @ gets a single quote before it, so that no spreadsheet runs it as a formula, and
    characters that do not print are written as escapes, so that no terminal obeys them. Numbers that are not finite are
    written NaN, Infinity and -Infinity.
    """
    table = to_table(rows, checks=checks)
    writer = csv.writer(stream, lineterminator="\n")
    for line in [list(table[0]), *(row.values() for row in table)] if table else []:
        writer.writerow([_cell(value) for value in line])


def _cell(value: object) -> object:
    if isinstance(value, str):
        return printable(f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value)
    return word(value)


def write_json(rows: Iterable[Row], stream: TextIO, *, checks: bool = False) -> None:
    """Write the table as a JSON list of objects; numbers that are not finite are written as the store does."""
    table = [{name: word(value) for name, value in row.items()} for row in to_table(rows, checks=checks)]
    json.dump(table, stream, indent=1, allow_nan=False)
    stream.write("\n")
