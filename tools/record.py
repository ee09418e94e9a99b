"""Keep a store as a small text file, and make the store from it again: nothing is lost, and the file is half the size.

    python tools/record.py pack results.sqlite records/cifar10/results.jsonl.xz
    python tools/record.py unpack records/cifar10/results.jsonl.xz results.sqlite

The file is JSON Lines, compressed by xz: `xz -dc results.jsonl.xz | head -3 | cut -c -300` shows what it holds. The
first line names the format. Each further line is a protocol, a note or a run, with the columns of the store, its digest
(the seal) among them where it has one. Results of
single precision, which the first line lists, have as few digits as that needs; `unpack` gives all digits back.

`pack` unpacks what it wrote and compares it with the store, value by value: it leaves no file that says anything else.
The tools of this folder read such a file wherever they read a store. `dcpp report` needs the store.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config.json_values import canonical, decode
from dropconnectpp.lab.runs.store import Key, Row, Store, StoredProtocol, listed

PACKED = ".jsonl.xz"
FORMAT = "dropconnectpp record 1"
COLUMNS = {
    "protocol": ("digest", "label", "settings"),
    "note": ("digest", "name", "value"),
    "run": (
        *("digest", "replica", "status", "started", "finished", "seconds"),
        *("device", "revision", "versions", "provenance", "results"),
    ),
}
"""By table of the store, in the order of a record's lines. `owner` is left out: a finished run has none."""
SEAL = "seal"
"""The column of digests; where a store of version 0.1 or a part that was left out has none, a line has none either."""
JSON = ("settings", "value", "versions", "provenance", "results")
"""Columns that hold JSON: they become part of the line's own."""

Line = tuple[str, dict[str, Any]]
"""A table and its columns by name, JSON parsed."""


@dataclass(frozen=True)
class Record:
    """What a store holds, in its order."""

    rows: list[Row]
    notes: dict[tuple[str, str], Any]
    protocols: list[StoredProtocol]


def read(path: Path) -> Record:
    """What is in a store, or in the file that it was packed into."""
    if not path.name.endswith(PACKED):
        with Store.open(path, read_only=True) as store:
            return Record(store.rows(), store.notes(), store.protocols())
    lines: dict[str, list[dict[str, Any]]] = {table: [] for table in COLUMNS}
    for table, columns in unpacked(path):
        lines[table].append({name: decode(value) if name in JSON else value for name, value in columns.items()})
    protocols = {
        one["digest"]: StoredProtocol(one["digest"], one["label"], one["settings"]) for one in lines["protocol"]
    }
    return Record(
        rows=[_row(run, protocols) for run in lines["run"]],
        notes={(note["digest"], note["name"]): note["value"] for note in lines["note"]},
        protocols=list(protocols.values()),
    )


def name(path: Path) -> str:
    """What a store or a packed one is called in a table."""
    return path.name.removesuffix(PACKED) if path.name.endswith(PACKED) else path.stem


def _row(run: Mapping[str, Any], protocols: Mapping[str, StoredProtocol]) -> Row:
    plain = {name: run[name] for name in ("status", "started", "finished", "seconds")}
    return Row(
        **plain,
        key=Key(run["digest"], run["replica"]),
        protocol=protocols[run["digest"]],
        owner=None,
        device=run["device"] or "",
        commit=run["revision"] or "",
        versions=run["versions"] or {},
        provenance=run["provenance"] or {},
        results=run["results"] or {},
        verified=SEAL in run,
    )


def pack(store: Path, file: Path, leave_out: Sequence[str] = ()) -> None:
    """Write the store's content to the file, and read it back to be sure.

    Results that are named in ``leave_out``, such as the loss of each epoch, are not kept; the first line names them.
    """
    with Store.open(store, read_only=True) as opened:
        if damaged := opened.content().damaged:
            raise SystemExit(f"{store}: {listed(damaged)}. A record has sound ones alone.")
    lines = list(_without(stored(store), leave_out))
    single = sorted(_single_precision(columns["results"] for table, columns in lines if table == "run"))
    left_out = {"left out": sorted(leave_out)} if leave_out else {}
    text = [canonical({"format": FORMAT, "single precision": single, **left_out})]
    for table, columns in lines:
        if table == "run":
            columns = {**columns, "results": _mapped(columns["results"], single, _shortest)}
        text.append(json.dumps({table: columns}, separators=(",", ":"), allow_nan=False))
    file.write_bytes(lzma.compress("\n".join([*text, ""]).encode(), preset=9 | lzma.PRESET_EXTREME))
    try:
        with tempfile.TemporaryDirectory() as folder:
            unpack(file, again := Path(folder) / "again.sqlite")
            same = _values(again) == _values(store)
            if leave_out:
                same = list(map(canonical, stored(again))) == list(map(canonical, lines))
            if not same:
                raise SystemExit(f"{store} holds something that {file} cannot; keep the store.")
    except BaseException:
        file.unlink()
        raise


def _without(lines: Iterator[Line], names: Sequence[str]) -> Iterator[Line]:
    for table, columns in lines:
        if table == "run" and names and columns["results"] is not None:
            columns["results"] = {name: one for name, one in columns["results"].items() if name not in names}
            columns.pop(SEAL, None)  # it is that of all results
        yield table, columns


def unpack(file: Path, store: Path) -> None:
    """Write the store that the file was packed from."""
    if store.exists():
        raise SystemExit(f"{store} is there already. Give another path: a store is not overwritten.")
    with Store.open(store):
        pass  # which makes the tables
    with closing(sqlite3.connect(store)) as connection, connection:
        for table, columns in unpacked(file):
            values = [canonical(one) if column in JSON and one is not None else one for column, one in columns.items()]
            marks = ", ".join("?" * len(columns))
            connection.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", values)


def stored(store: Path) -> Iterator[Line]:
    """The lines of a store: protocols by digest, notes by digest and name, runs by digest and replica."""
    for table, values in _values(store).items():
        for one in values:
            columns = dict(zip((*COLUMNS[table], SEAL), one, strict=True))
            if columns[SEAL] is None:
                del columns[SEAL]
            yield (
                table,
                {
                    column: json.loads(value) if column in JSON and value is not None else value
                    for column, value in columns.items()
                },
            )


def unpacked(file: Path) -> Iterator[Line]:
    """The lines of a file, results with all their digits."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        head = json.loads(next(lines))
        if head.get("format") != FORMAT:
            raise SystemExit(f"{file} is no record of this format: it says {head.get('format')!r}.")
        for line in lines:
            ((table, columns),) = json.loads(line).items()
            if table == "run":
                columns["results"] = _mapped(columns["results"], head["single precision"], _widened)
            yield table, columns


def _values(store: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What a store holds, as it is written there."""
    with Store.open(store, read_only=True) as opened:
        seal = opened.seal_column  # an error names a file that is no store
    with closing(sqlite3.connect(store)) as connection:
        (working,) = connection.execute("SELECT count(*) FROM run WHERE status = 'running'").fetchone()
        if working:
            raise SystemExit(f"{store}: {working} runs are not finished. A record has finished runs alone.")
        return {
            table: connection.execute(f"SELECT {', '.join((*columns, seal))} FROM {table} ORDER BY 1, 2").fetchall()
            for table, columns in COLUMNS.items()
        }


def _single_precision(all_results: Iterator[Any]) -> set[str]:
    """The places of results whose numbers are all of single precision."""
    found: set[str] = set()
    others: set[str] = set()
    for results in all_results:
        for place, value in _numbers(results):
            (found if float(np.float32(value)) == value else others).add(place)
    return found - others


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Every number with a point, and its place: the names of the mappings around it."""
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, place)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _numbers(item, f"{place}.{name}" if place else name)


def _mapped(value: Any, single: list[str], function: Any, place: str = "") -> Any:
    """The value with the function applied to every number whose place is in the list."""
    if isinstance(value, float):
        return function(value) if place in single else value
    if isinstance(value, list):
        return [_mapped(item, single, function, place) for item in value]
    if isinstance(value, dict):
        return {
            name: _mapped(item, single, function, f"{place}.{name}" if place else name) for name, item in value.items()
        }
    return value


def _shortest(value: float) -> float:
    """The decimal number with the fewest digits that single precision reads as this one."""
    return float(str(np.float32(value)))


def _widened(value: float) -> float:
    """The number of single precision that was meant, with all its digits."""
    return float(np.float32(value))


def main() -> None:
    """Pack or unpack."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = options.add_subparsers(dest="work", required=True, metavar="WORK")
    packing = works.add_parser("pack", help="write a store as a small text file")
    packing.add_argument("store", type=Path, help="the store, such as results.sqlite; it stays as it is")
    packing.add_argument("file", type=Path, help=f"what to write; its name ends with {PACKED}")
    packing.add_argument(
        "--leave-out", nargs="+", default=[], metavar="RESULT", help="results that are not kept, such as losses"
    )
    unpacking = works.add_parser("unpack", help="make the store again")
    unpacking.add_argument("file", type=Path, help="what `pack` wrote")
    unpacking.add_argument("store", type=Path, help="the store to write; it must not exist")
    given = options.parse_args()
    if not given.file.name.endswith(PACKED):
        options.error(f"the file's name must end with {PACKED}, got {given.file}")
    try:
        if given.work == "pack":
            pack(given.store, given.file, given.leave_out)
        else:
            unpack(given.file, given.store)
    except DropConnectError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
