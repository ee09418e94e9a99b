"""One SQLite file that several processes share: its tables, its transactions, and what its errors mean."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.machine.user_paths import expanded

APPLICATION_ID = 0x44435050  # "DCPP"
PATIENCE_S = 60.0
"""How long a call waits for other processes that use the file."""

LONGEST = 300
"""Letters of SQLite's errors that are shown."""
SCHEMA = """
CREATE TABLE protocol (digest TEXT PRIMARY KEY, settings TEXT NOT NULL, label TEXT NOT NULL);
CREATE TABLE owner (name TEXT PRIMARY KEY, heartbeat REAL NOT NULL);
CREATE TABLE note (
    digest TEXT NOT NULL REFERENCES protocol, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (digest, name)
);
CREATE TABLE run (
    digest TEXT NOT NULL REFERENCES protocol, replica INTEGER NOT NULL CHECK (replica >= 0),
    status TEXT NOT NULL CHECK (status IN ('running', 'done', 'diverged', 'failed')),
    owner TEXT REFERENCES owner, started TEXT NOT NULL, finished TEXT, seconds REAL,
    device TEXT, revision TEXT, versions TEXT, provenance TEXT, results TEXT,
    PRIMARY KEY (digest, replica),
    CHECK ((status = 'running') = (owner IS NOT NULL)),
    CHECK (status = 'running' OR finished || seconds || device || revision || versions || provenance || results
           IS NOT NULL)
)"""
SEALS = "; ".join(f"ALTER TABLE {table} ADD COLUMN seal TEXT" for table in ("protocol", "note", "run"))
MIGRATIONS = (SCHEMA, SEALS)
"""What turns version i into i + 1; an empty file is version 0. Version 1, of dropconnectpp 0.1, has no seals."""

ADVICE = {
    "SQLITE_BUSY": "Another process keeps it busy; try again, or end that process.",
    "SQLITE_LOCKED": "Another process keeps it busy; try again, or end that process.",
    "SQLITE_FULL": "Nothing was changed; free some space and try again.",
    "SQLITE_READONLY": "It can be read but not written; check the permissions of file and folder, or copy it.",
    "SQLITE_CANTOPEN": "Check the path, and the permissions of file and folder.",
    "SQLITE_NOTADB": "It is no store of results and was left alone; give another path.",
    "SQLITE_CORRUPT": "The file is damaged; use a copy, or save what is sound in it: dcpp store merge NEW THIS "
    "--leave-out-damaged",
    "SQLITE_IOERR": "Nothing was changed; check the disk or the network file system and try again. Where file locks do "
    "not work, keep one store for each machine and merge them.",
}


class StoreError(DropConnectError, OSError):
    """The file cannot be used as asked; it holds what it held."""


class Database:
    """The file behind a store. It serves one thread of one process; open another for the next."""

    def __init__(self, path: Path, connection: sqlite3.Connection, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._connection = connection
        self._pid = os.getpid()
        self._has_seals = True

    @classmethod
    def open(cls, path: Path | str, read_only: bool = False) -> Self:
        """Open a store; unless ``read_only``, make it if it is not there. Its folder must exist."""
        path = expanded(path).absolute()
        try:
            missing, no_folder = not path.exists(), not path.parent.is_dir()
        except OSError as error:
            raise StoreError(f"{path}: cannot be looked at ({error.strerror}). Give another path.") from error
        if read_only and missing:
            raise StoreError(f"{path}: there is no store to read. Check the path, or run an experiment first.")
        if no_folder:
            raise StoreError(f"{path}: its folder does not exist. Make the folder, or give another path.")
        # Readers open the file for writing too, under query_only: a writer that was killed may have left a journal,
        # and the next to come must put the file back. SQLite falls back to reading where it may not write.
        uri = f"{path.as_uri()}?mode={'rw' if read_only else 'rwc'}"
        with _explained(path):
            connection = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)
        # A text with a flipped bit is read all the same, and its row is then found to be damaged.
        connection.text_factory = lambda raw: raw.decode(errors="surrogateescape")
        store = cls(path, connection, read_only)
        try:
            store._prepare()
        except BaseException:
            connection.close()
            raise
        return store

    def _prepare(self) -> None:
        with _explained(self.path):
            self._execute(f"PRAGMA query_only = {int(self.read_only)}")
            self._execute("PRAGMA foreign_keys = ON")
            # What a killed process committed is in the file; EXTRA makes that true of a power cut as well.
            self._execute("PRAGMA synchronous = EXTRA")
        with self._transaction("BEGIN"):
            version = self._version()
            # Not the version's number: where that is damaged, every digest would be taken for missing.
            columns = {str(column) for _, column, *_ in self._execute("PRAGMA table_info(run)")}
        if self.read_only:
            if version == 0:
                raise StoreError(f"{self.path}: it is empty. Check the path, or run an experiment first.")
            self._has_seals = "seal" in columns
            return
        if version == 1 and "seal" in columns:
            raise StoreError(f"{self.path}: its version is 1, its tables are of version 2. {ADVICE['SQLITE_CORRUPT']}")
        if version < len(MIGRATIONS):
            with self._writing() as connection:
                for script in MIGRATIONS[self._version() :]:  # asked again: another process may have been faster
                    for statement in script.split(";"):
                        connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        with _explained(self.path):
            # The rollback journal needs nothing but file locks, so it works on network file systems whose locks
            # work. WAL needs memory that all processes share, hence one machine; another tool may have set it.
            self._execute("PRAGMA journal_mode = DELETE")

    def _version(self) -> int:
        application, version, tables = (
            int(self._execute(sql).fetchone()[0])
            for sql in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if application != APPLICATION_ID and (application, version, tables) != (0, 0, 0):
            raise StoreError(f"{self.path}: an SQLite file of another program. It was left alone; give another path.")
        if version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path}: its version is {version}, this program knows up to {len(MIGRATIONS)}. "
                "Update dropconnectpp to use it."
            )
        return version

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _execute(self, sql: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        """Run one statement, waiting for others. SQLite waits too, but network locks may say busy at once."""
        if os.getpid() != self._pid:
            raise StoreError(f"{self.path}: opened by process {self._pid}. Open the store anew in this one.")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._connection.execute(sql, values)
            except sqlite3.OperationalError as error:
                busy = _code(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL"))
                if not busy or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with _explained(self.path):
            try:
                self._execute(begin)
                yield self._connection
                self._execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # the first error is the one to tell
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        if self.read_only:
            raise StoreError(f"{self.path}: opened for reading only. Open it with read_only=False to write.")
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While inside, all reads see one state of the file, whatever others write meanwhile."""
        with _explained(self.path):
            self._execute("BEGIN")
        try:
            yield
        finally:
            with suppress(sqlite3.Error):  # nothing was written; a damaged file may refuse to COMMIT
                self._connection.execute("ROLLBACK")

    def read(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        """All lines of a query."""
        with _explained(self.path):
            return self._execute(sql, values).fetchall()

    def steps(self, sql: str) -> Iterator[Any]:
        """The lines of a query one by one: where the file is damaged, those before it."""
        with _explained(self.path):
            yield from self._execute(sql)

    @property
    def seal_column(self) -> str:
        """The column of seals, in SQL; version 1 has none."""
        return "seal" if self._has_seals else "NULL"

    def problems(self) -> list[str]:
        """What SQLite finds wrong with the file as a whole; this reads all of it."""
        columns = {table: [one[1:3] for one in self.read(f"PRAGMA table_info({table})")] for table in _columns()}
        wrong = [f"table {name} has other columns" for name, ours in _columns().items() if columns[name] not in ours]
        (version,) = self.read("PRAGMA user_version")[0]
        if version == 1 and self._has_seals:
            wrong.append("its version is 1, its tables are of version 2")
        found = [str(text) for (text,) in self.read("PRAGMA integrity_check(20)")]
        return wrong + [text.replace("\n", " ") for text in found if text != "ok"]


@cache
def _columns() -> dict[str, list[list[tuple[str, str]]]]:
    """Names and types of each table's columns, in each version."""
    with closing(sqlite3.connect(":memory:")) as connection:
        found: dict[str, list[list[tuple[str, str]]]] = {}
        for script in MIGRATIONS:
            connection.executescript(script)
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                columns = [one[1:3] for one in connection.execute(f"PRAGMA table_info({table})")]
                found.setdefault(table, []).append(columns)
    return found


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        usual = "Open the store anew: one Store serves one thread, until it is closed."
        advice = next((text for code, text in ADVICE.items() if _code(error).startswith(code)), usual)
        said = printable(" ".join(str(error).split()))[:LONGEST].rstrip(".")  # it may quote a table's definition
        raise StoreError(f"{path}: {said}. {advice}") from error
    except UnicodeDecodeError as error:  # the message of an error that quotes a damaged table's definition
        raise StoreError(f"{path}: its tables are damaged. {ADVICE['SQLITE_CORRUPT']}") from error


def _code(error: sqlite3.Error) -> str:
    return str(getattr(error, "sqlite_errorname", ""))  # missing where Python, not SQLite, found the mistake
