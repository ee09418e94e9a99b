"""All of a store at once: what is sound is read, what is not is named, also where pages of the file are damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress

from dropconnectpp.lab.runs.database import Database, StoreError
from dropconnectpp.lab.runs.rows import NOTE, PROTOCOL, RUN, Content, Damage, Record

COLUMNS = {"protocol": PROTOCOL, "note": NOTE, "run": RUN}
KEYS = {"protocol": 1, "note": 2, "run": 2}
"""How many of the columns, the first, tell records apart."""


def read_content(
    store: Database, digest: str | None = None, *, tables: Sequence[str] = tuple(COLUMNS), whole_file: bool = False
) -> Content:
    """What a store holds of one protocol or of all, in order, each record checked.

    Args:
        store: an open store.
        digest: the protocol; None for all.
        tables: which to read; rows need the protocols.
        whole_file: let SQLite check the file too, which finds rows that have vanished.

    Raises:
        StoreError: the file cannot be read at all.
    """
    found = Content()
    with store.reading():
        if whole_file:
            found.damaged += [Damage("the file", problem) for problem in _problems(store)]
        for table in tables:
            for record in _records(store, table, digest, found):
                found.take(record)
    return found


def _problems(store: Database) -> list[str]:
    try:
        return store.problems()
    except StoreError as error:
        if not _is_corrupt(error):
            raise
        return [str(error.__cause__)]


def _records(store: Database, table: str, digest: str | None, found: Content) -> Iterator[Record]:
    """The records of a table by their keys; where the file is damaged, those that can be reached."""
    sql = f"SELECT {', '.join(('rowid', *COLUMNS[table], store.seal_column))} FROM {table}"
    order = ", ".join(COLUMNS[table][: KEYS[table]])
    try:
        lines = store.read(f"{sql} WHERE ?1 IS NULL OR digest = ?1 ORDER BY {order}", (digest,))
    except StoreError as error:
        if not _is_corrupt(error):
            raise
        lines = []
        for rowid, name in sorted(_reachable(store, table).items()):
            try:
                lines += store.read(f"{sql} WHERE rowid = ?", (rowid,))
            except StoreError:
                found.damaged.append(Damage(name, "its place in the file is damaged", (table, rowid)))
        lines = sorted((one for one in lines if digest in (None, one[1])), key=lambda one: tuple(map(str, one[1:3])))
    for rowid, *values, sealed in lines:
        yield Record(table, rowid, tuple(values), sealed)


def _reachable(store: Database, table: str) -> dict[int, str]:
    """The records that the index or the table itself leads to, with what they are called."""
    found: dict[int, str] = {}
    names = COLUMNS[table][: KEYS[table]]
    for columns, how in (((), "NOT INDEXED"), (names, f"INDEXED BY sqlite_autoindex_{table}_1")):
        with suppress(StoreError):  # as far as it goes
            for rowid, *key in store.steps(f"SELECT {', '.join(('rowid', *columns))} FROM {table} {how}"):
                record = Record(table, rowid, (*key, ""))
                found[rowid] = record.name if key else f"record {rowid} of table {table}"
    return found


def _is_corrupt(error: StoreError) -> bool:
    cause = error.__cause__
    return isinstance(cause, sqlite3.Error) and getattr(cause, "sqlite_errorname", "").startswith("SQLITE_CORRUPT")
