"""Putting records into a store, each with its seal, and all of another store's that are sound."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.reading import COLUMNS, KEYS
from dropconnectpp.lab.runs.rows import FINAL, RUN, Content, Damage, Key, Record, seal

CONTENT = ("status", "results", "versions", "device", "provenance", "revision", "seconds")
"""What must agree for two rows to be equal. Times are left out: the store itself takes them."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merge did: rows as keys, notes as (digest, name)."""

    added: tuple[Key, ...]
    already_there: tuple[Key, ...]
    conflicts: tuple[Key, ...]
    """Finished in both stores with different content; ours was kept."""
    notes_added: tuple[tuple[str, str], ...]
    note_conflicts: tuple[tuple[str, str], ...]
    """Notes that differ; ours were kept."""
    mended: tuple[Key, ...] = ()
    """Rows that were damaged here, and have the other store's content now."""
    left_out: tuple[Damage, ...] = ()
    """What is damaged in the other store."""


def put(connection: sqlite3.Connection, table: str, values: Sequence[object], sealed: object = ...) -> None:
    """Write a record in place of any with its key. Its seal is made here, unless it comes with one or with None."""
    columns = (*COLUMNS[table], "seal")
    marks = ", ".join("?" * len(columns))
    line = (*values, seal(values) if sealed is ... else sealed)
    connection.execute(f"INSERT OR REPLACE INTO {table} ({', '.join(columns)}) VALUES ({marks})", line)


def add_protocol(connection: sqlite3.Connection, digest: str, settings: str, label: str) -> None:
    """Make a protocol known, unless it is."""
    record = Record("protocol", 0, (digest, settings, label))
    ours = find(connection, record)
    if ours is None or _compared(ours, record, Content()) == "mended":
        put(connection, "protocol", record.values)
    elif ours.values[1] != settings:
        raise StoreError(f"protocol {digest} stands for other settings in this store. Use one store for each.")


def find(connection: sqlite3.Connection, like: Record) -> Record | None:
    """The store's record with the key of another."""
    columns, keys = COLUMNS[like.table], COLUMNS[like.table][: KEYS[like.table]]
    where = " AND ".join(f"{name} = ?" for name in keys)
    sql = f"SELECT rowid, {', '.join(columns)}, seal FROM {like.table} WHERE {where}"
    found = connection.execute(sql, like.values[: len(keys)]).fetchone()
    return None if found is None else Record(like.table, found[0], tuple(found[1:-1]), found[-1])


def merge_into(connection: sqlite3.Connection, theirs: Content) -> Merged:
    """Write what another store holds and this one has not, inside a transaction."""
    rows: dict[str, list[Key]] = {name: [] for name in ("added", "already_there", "conflicts", "mended")}
    notes: dict[str, list[tuple[str, str]]] = {name: [] for name in ("added", "already_there", "conflicts", "mended")}
    for record in theirs.sound:
        if record.table == "run" and record.values[RUN.index("status")] not in FINAL:
            continue
        ours = find(connection, record)
        how = "added" if ours is None else _compared(ours, record, theirs)
        if how in ("added", "mended"):
            put(connection, record.table, record.values, record.sealed)
        if record.table == "run":
            rows[how].append(Key(*record.values[:2]))
        elif record.table == "note":
            notes[how].append(record.values[:2])
        elif how == "conflicts":
            raise StoreError(f"protocol {record.values[0]} stands for other settings in this store. Use another one.")
    return Merged(
        **{name: tuple(keys) for name, keys in rows.items()},
        notes_added=tuple(notes["added"] + notes["mended"]),
        note_conflicts=tuple(notes["conflicts"]),
        left_out=tuple(theirs.damaged),
    )


def _compared(ours: Record, record: Record, theirs: Content) -> str:
    """What becomes of a record that is here too."""
    if ours.table == "run" and ours.values[RUN.index("status")] in ("running", "failed"):
        return "added"
    checked = Content(protocols=dict(theirs.protocols))
    checked.take(ours)
    if checked.damaged:
        return "mended"
    same = ("settings",) if ours.table == "protocol" else ("value",) if ours.table == "note" else CONTENT
    places = [COLUMNS[ours.table].index(name) for name in same]
    return "already_there" if all(ours.values[i] == record.values[i] for i in places) else "conflicts"
