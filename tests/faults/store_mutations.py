"""Damages to stores of results, and what a reader, a report and a merge make of them.

Disks and networks damage the bytes, and a tool may change a column: then every record that is shown must be the one
that was written, and one that is not shown must be named. Records of version 0.1 have no digest: they may differ, and
are shown as unverified. Somebody who knows the format can write any record with the digest that it needs: then nothing
may end in an error that is none of ours.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from damage import BYTES, SILENT, TEXTS, Found, changed_json, damaged

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.report import text
from dropconnectpp.lab.runs.flat_rows import write_csv, write_json
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.rows import NOTE, PROTOCOL, RUN, Content, Record, seal
from dropconnectpp.lab.runs.store import Store

OLDER = Path(__file__).parents[1] / "lab" / "runs" / "golden" / "finished-0.1.0.sqlite"
COLUMNS = {"protocol": PROTOCOL, "note": NOTE, "run": RUN}
SLOWEST_S = 20.0
SEALED = ("other columns, sealed", "other settings, sealed")
REPORTED = 5
"""One damage in so many is taken to the report and to a merge too."""
RESULTS: dict[str, Any] = {
    "accuracy": 75.0,
    "nll": 0.5,
    "brier": 0.25,
    "ece": 0.0625,
    "losses": [1.5, 0.5],
    "curve": [{"epoch": 1, "accuracy": 70.0, "nll": 0.75}],
    "mc": [{"samples": 1, "accuracy": 70.0, "nll": 0.75}],
    "pruning": [],
    "posterior": None,
}


@dataclass(frozen=True)
class Victim:
    """A store to damage, and what it holds."""

    name: str
    content: bytes
    whole: Content


def filled(path: Path) -> None:
    """A store of three methods with three networks each: finished, diverged and running; notes of several kinds."""
    me = Owner.here()
    with Store.open(path) as store:
        for protocol in experiments.demo().protocols[:3]:
            digest = store.add(protocol)
            store.write_note(digest, "command", "dcpp demo")
            store.write_note(digest, "timings", {"complete": [1.0, 2.0], "n": 3})
            keys = [(digest, replica) for replica in range(4)]
            for key in store.claim(keys[:3], me):
                results = RESULTS | {"accuracy": 70.0 + key.replica, "text": f"{digest} {key.replica} " * 20}
                ended = ("diverged", {"losses": [1.5], "curve": [], "diverged_at": 2}) if key.replica == 2 else None
                status, found = ended or ("done", results)
                store.finish(key, me, status, results=found, seconds=1.5, device="cpu", versions={"torch": "2"})  # type: ignore[arg-type]
            store.claim(keys[3:], me)


def _read(path: Path) -> Content:
    with Store.open(path, read_only=True) as store:
        return store.content()


class Stores:
    """Damages stores in a folder."""

    title = "Stores"
    kinds = (*BYTES, "another column", *SEALED)
    harmless = frozenset({"refused", "named", "the same", "unverified", "another store"})

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "attacked.sqlite"
        filled(ours := folder / "ours.sqlite")
        (older := folder / "older.sqlite").write_bytes(OLDER.read_bytes())
        self.victims = [Victim(path.stem, path.read_bytes(), _read(path)) for path in (ours, older)]

    def attack(self, number: int) -> Found:
        """Damage a store and use it: all of it follows from ``number``."""
        rng = random.Random(number)
        kind, victim = self.kinds[number % len(self.kinds)], self.victims[rng.random() < 0.2]
        begun = time.process_time()
        for left in self._folder.glob("attacked.sqlite-*"):
            left.unlink()
        try:
            if kind in BYTES:
                self._path.write_bytes(damaged(kind, victim.content, rng))
            else:
                self._path.write_bytes(victim.content)
                DAMAGES[kind](self._path, rng)
            outcome = self._used(victim, sealed=kind in SEALED, fully=number // len(self.kinds) % REPORTED == 0)
        except DropConnectError as error:
            shown = str(error).isprintable() and len(str(error)) < 3000
            outcome = "refused" if shown else f"an error that cannot be shown: {error!s:.300}"
        except Exception as error:
            outcome = f"a raw error: {type(error).__name__}: {error!s:.300}"
        if time.process_time() - begun > SLOWEST_S:
            outcome = f"slow: {time.process_time() - begun:.0f} s"
        return Found(kind, victim.name, outcome)

    def _used(self, victim: Victim, *, sealed: bool, fully: bool) -> str:
        found = _read(self._path)
        verdict = "another store" if sealed else compared(found, victim.whole)
        if fully and verdict != SILENT:
            for write in (write_csv, write_json):
                write([row for row in found.rows if row.status != "running"], io.StringIO(), checks=True)
            with contextlib.redirect_stdout(io.StringIO()):
                text(self._path)
            verdict = self._merged(victim, verdict, sealed)
        return verdict

    def _merged(self, victim: Victim, verdict: str, sealed: bool) -> str:
        """Merge what is sound into an empty store, which must then hold nothing else."""
        (new := self._folder / "merged.sqlite").unlink(missing_ok=True)
        with Store.open(new) as store:
            try:
                store.merge(self._path, leave_out_damaged=True)
            except DropConnectError:
                return verdict if not store.rows() else "half of a merge"
            merged = store.content()
        if merged.damaged:
            return f"damage was merged: {merged.damaged[0]}"
        if sealed:
            return verdict
        other = compared(merged, victim.whole, complete=False)
        return SILENT if other == SILENT else verdict


def compared(found: Content, whole: Content, *, complete: bool = True) -> str:
    """What came of an accident: nothing, records that are named or unverified, or another content that nobody told."""
    rows, unverified = {row.key: row for row in whole.finished}, False
    older = not any(row.verified for row in whole.finished)  # whatever is shown of them, also under another key
    for row in found.finished:
        before = rows.get(row.key)
        if before is not None and row == before:
            continue
        if row.verified or not (older or (before is not None and replace(row, verified=True) == before)):
            return SILENT
        unverified = True
    for now, then in ((found.notes, whole.notes), (found.protocols, whole.protocols)):
        if any(then.get(name) != value for name, value in now.items()):  # type: ignore[call-overload]
            if not older:
                return SILENT
            unverified = True
    gone = len(rows) - len(found.finished) + len(whole.notes) - len(found.notes)
    gone += len(whole.protocols) - len(found.protocols)
    if found.damaged:
        return "named"
    if gone and complete:
        return SILENT
    return "unverified" if unverified else "the same"


# ------------------------------------------------------------------------------------------ columns


def _changed(path: Path, table: str, column: str, value: object, rowid: int, sealed: bool) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("PRAGMA foreign_keys = OFF")
        with contextlib.suppress(sqlite3.IntegrityError):  # another record has this key
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, rowid))
        seals = "seal" in {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
        if sealed and seals:
            columns = ", ".join(COLUMNS[table])
            values = connection.execute(f"SELECT {columns} FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
            with contextlib.suppress(TypeError, ValueError):  # none fits bytes and numbers that are not finite
                connection.execute(f"UPDATE {table} SET seal = ? WHERE rowid = ?", (seal(values), rowid))


def _place(path: Path, rng: random.Random) -> tuple[str, str, int, Any]:
    with closing(sqlite3.connect(path)) as connection:
        table = rng.choice(["run", "run", "note", "protocol"])
        where = "WHERE status != 'running'" if table == "run" else ""
        rowid = rng.choice([one for (one,) in connection.execute(f"SELECT rowid FROM {table} {where}")])
        column = rng.choice(COLUMNS[table])
        (value,) = connection.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
    return table, column, rowid, value


def _hostile(value: Any, rng: random.Random) -> object:
    """Another value for a column: JSON with another meaning, another type, absurd sizes."""
    values: tuple[object, ...] = (None, "", 5, -1, 2**62, 0.5, 1e308, math.inf, b"\x00\xff", "null", "[]", "{}", "NaN")
    deep = 10 ** rng.randint(1, 5)
    texts = ("[" * deep + "]" * deep, '{"accuracy": 1e999}', "9" * 5000, '{"a": "\\ud800"}', *TEXTS)
    if isinstance(value, str) and value[:1] in ("{", "[") and rng.random() < 0.7:
        return json.dumps(changed_json(json.loads(value), rng))
    if isinstance(value, str) and rng.random() < 0.3:
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(texts)[:50].encode(errors="replace").decode() + value[at + 1 :]
    return rng.choice([*values, *(one.encode(errors="replace").decode() for one in texts)])


def _other_column(path: Path, rng: random.Random) -> None:
    """A column is another; its digest is not."""
    table, column, rowid, value = _place(path, rng)
    other = value
    while other == value and type(other) is type(value):
        other = _hostile(value, rng)
    _changed(path, table, column, other, rowid, sealed=False)


def _sealed_column(path: Path, rng: random.Random) -> None:
    """A few columns are others, and the digests are those that they need."""
    for _ in range(rng.choice([1, 1, 2])):
        table, column, rowid, value = _place(path, rng)
        _changed(path, table, column, _hostile(value, rng), rowid, sealed=True)


def _resettled(path: Path, rng: random.Random) -> None:
    """A protocol has other settings, with the digests that they need, also in its rows and notes."""
    from dropconnectpp.lab.runs.rows import settings_digest

    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        rowid, digest, settings = rng.choice(
            connection.execute("SELECT rowid, digest, settings FROM protocol").fetchall()
        )
        other = changed_json(json.loads(settings), rng)
        named = settings_digest(other)
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(
            "UPDATE protocol SET digest = ?, settings = ? WHERE rowid = ?", (named, json.dumps(other), rowid)
        )
        for table in ("run", "note"):
            connection.execute(f"UPDATE {table} SET digest = ? WHERE digest = ?", (named, digest))
        if "seal" not in {name for _, name, *_ in connection.execute("PRAGMA table_info(run)")}:
            return
        for table, columns in COLUMNS.items():
            sql = f"SELECT rowid, {', '.join(columns)} FROM {table} WHERE digest = ?"
            for one, *values in connection.execute(sql, (named,)).fetchall():
                running = table == "run" and values[2] == "running"
                sealed = None if running else seal(Record(table, one, tuple(values)).values)
                connection.execute(f"UPDATE {table} SET seal = ? WHERE rowid = ?", (sealed, one))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "another column": _other_column,
    SEALED[0]: _sealed_column,
    SEALED[1]: _resettled,
}
