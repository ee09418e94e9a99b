"""Results on disk: one SQLite file that several processes share. A finished row never changes.

Nothing here imports torch: a report is rebuilt anywhere. Values are kept as JSON text, see `plain_values`.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from dropconnectpp.errors import ArgumentError, DropConnectError, check_choice, check_count
from dropconnectpp.lab.config.json_values import canonical, check_mapping, check_text, decode, to_json
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.runs.owner import Owner

APPLICATION_ID = 0x44435050  # "DCPP"
LEASE_S = 600.0
"""How long an owner on another machine may be silent before its work is given to somebody else."""
PATIENCE_S = 60.0
"""How long a call waits for other processes that use the file."""

Status = Literal["running", "done", "diverged", "failed"]
FINAL = ("done", "diverged")
CONTENT = ("status", "results", "versions", "device", "provenance", "revision", "seconds")
"""What two rows must share to be equal. Times are left out: the store itself takes them."""

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
MIGRATIONS = (SCHEMA,)
"""What leads from version i to i + 1; an empty file is version 0."""

ADVICE = {
    "SQLITE_BUSY": "Another process keeps it busy; try again, or end that process.",
    "SQLITE_LOCKED": "Another process keeps it busy; try again, or end that process.",
    "SQLITE_FULL": "Nothing was changed; free some space and try again.",
    "SQLITE_READONLY": "It can be read but not written; check the permissions of file and folder, or copy it.",
    "SQLITE_CANTOPEN": "Check the path, and the permissions of file and folder.",
    "SQLITE_NOTADB": "It is no store of results and was left alone; give another path.",
    "SQLITE_CORRUPT": "The file is damaged; use a copy, or save what is left with: sqlite3 FILE .recover",
    "SQLITE_IOERR": "Nothing was changed; check the disk or the network file system and try again. Where file locks do "
    "not work, keep one store for each machine and merge them.",
}


class StoreError(DropConnectError, OSError):
    """The file cannot be used as asked; what it held is as it was."""


class ClaimLostError(StoreError):
    """The row now belongs to somebody else, or to nobody; nothing was written."""


class FinishedError(StoreError):
    """The row is finished with other content, which never changes."""


class Key(NamedTuple):
    """One unit of work: a replica of a protocol."""

    digest: str
    replica: int


@dataclass(frozen=True)
class StoredProtocol:
    """An experiment as it was stored: `from_dict(Protocol, settings)` makes it a `Protocol` again."""

    digest: str
    label: str
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One replica. What is known only of a finished one is empty or None before."""

    key: Key
    protocol: StoredProtocol
    status: Status
    owner: Owner | None
    """Who runs it now; a finished row names no machine."""
    started: str
    finished: str | None
    """UTC, ISO 8601."""
    seconds: float | None
    device: str
    commit: str
    versions: dict[str, Any]
    provenance: dict[str, Any]
    """Where the data came from."""
    results: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merge did: rows as keys, notes as (digest, name)."""

    added: tuple[Key, ...]
    already_there: tuple[Key, ...]
    conflicts: tuple[Key, ...]
    """Finished in both stores, with different content; ours stayed."""
    notes_added: tuple[tuple[str, str], ...]
    note_conflicts: tuple[tuple[str, str], ...]
    """Notes that differ; ours stayed."""


class Store:
    """One file of results. A `Store` serves one thread of one process; open another for the next.

    >>> import tempfile
    >>> from dropconnectpp.lab.config.protocol import paper
    >>> with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/results.sqlite") as store:
    ...     digest = store.add(paper("cifar10", "dropconnect++"))
    ...     me = Owner.here()
    ...     for key in store.claim([(digest, 0), (digest, 1)], me, limit=1):
    ...         store.finish(key, me, "done", results={"accuracy": 0.8}, seconds=1.0, device="cpu")
    ...     [(row.key.replica, row.results) for row in store.rows(status="done")]
    [(0, {'accuracy': 0.8})]
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._connection = connection
        self._pid = os.getpid()

    @classmethod
    def open(cls, path: Path | str, read_only: bool = False) -> Self:
        """Open a store; unless ``read_only``, make it if it is not there. Its folder must exist."""
        path = Path(path).expanduser().absolute()
        if read_only and not path.exists():
            raise StoreError(f"{path}: there is no store to read. Check the path, or run an experiment first.")
        if not path.parent.is_dir():
            raise StoreError(f"{path}: its folder does not exist. Make the folder, or give another path.")
        # Readers open the file for writing too, under query_only: a writer that was killed may have left a journal,
        # and the next to come must put the file back. SQLite falls back to reading where it may not write.
        uri = f"{path.as_uri()}?mode={'rw' if read_only else 'rwc'}"
        with _explained(path):
            connection = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)
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
        if self.read_only:
            if version < len(MIGRATIONS):
                raise StoreError(f"{self.path}: it is empty or of an older version. Open it once for writing.")
            return
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

    # -------------------------------------------------------------------------- protocols and notes

    def add(self, protocol: Protocol, label: str | None = None) -> str:
        """Make an experiment known and return its digest. Its label is the first one given, else its method's."""
        settings, digest = canonical(protocol.to_dict()), protocol.digest
        with self._writing() as connection:
            _add_protocol(
                connection, digest, settings, check_text("label", protocol.method.label if label is None else label)
            )
        return digest

    def protocols(self) -> list[StoredProtocol]:
        """The experiments, by digest."""
        found = self._read("SELECT digest, label, settings FROM protocol ORDER BY digest")
        return [StoredProtocol(digest, label, self._loads(settings)) for digest, label, settings in found]

    def write_note(self, digest: str, name: str, value: object) -> None:
        """Keep a small JSON value beside an experiment, such as how its step size was chosen; replaces the last one."""
        text = to_json(value, f"note {name!r}")
        with self._writing() as connection:
            _require_protocols(connection, [digest])
            connection.execute("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", (digest, check_text("name", name), text))

    def notes(self, digest: str | None = None) -> dict[tuple[str, str], Any]:
        """The notes by (digest, name), in that order."""
        sql = "SELECT digest, name, value FROM note WHERE ?1 IS NULL OR digest = ?1 ORDER BY digest, name"
        return {(one, name): self._loads(value) for one, name, value in self._read(sql, (digest,))}

    # -------------------------------------------------------------------------- work

    def claim(
        self, keys: Iterable[tuple[str, int]], owner: Owner, *, limit: int | None = None, lease_s: float = LEASE_S
    ) -> list[Key]:
        """Take work and return which of the keys ``owner`` now owns, at most ``limit``, in the order given.

        Taken are rows that do not exist, that failed, or whose owner is dead: its process is gone or, on another
        machine, has sent no heartbeat for ``lease_s`` seconds. Machines' clocks must agree much better than that.
        """
        wanted = dict.fromkeys(_check_key(key) for key in keys)
        mine: list[Key] = []
        with self._writing() as connection:
            now = time.time()  # not before: the wait for other processes may be long
            _require_protocols(connection, {key.digest for key in wanted})
            beats = connection.execute("SELECT name, heartbeat FROM owner WHERE name <> ?", (owner.name,)).fetchall()
            dead = {name for name, beat in beats if Owner(**self._loads(name)).is_dead(now - beat, lease_s)}
            connection.execute("INSERT OR REPLACE INTO owner VALUES (?, ?)", (owner.name, now))
            for key in wanted:
                if limit is not None and len(mine) >= limit:
                    break
                status, current = _find(connection, key, "status", "owner") or (None, None)
                if status in (None, "failed") or current in dead:
                    sql = "INSERT OR REPLACE INTO run (digest, replica, status, owner, started) VALUES (?, ?, ?, ?, ?)"
                    connection.execute(sql, (*key, "running", owner.name, _now()))
                elif current != owner.name:
                    continue
                mine.append(key)
            _forget_idle_owners(connection)
        return mine

    def heartbeat(self, owner: Owner) -> list[Key]:
        """Say that ``owner`` lives, and return what it still owns."""
        with self._writing() as connection:
            connection.execute("UPDATE owner SET heartbeat = ? WHERE name = ?", (time.time(), owner.name))
            sql = "SELECT digest, replica FROM run WHERE owner = ? ORDER BY digest, replica"
            return [Key(*found) for found in connection.execute(sql, (owner.name,))]

    def release(self, keys: Iterable[tuple[str, int]], owner: Owner) -> None:
        """Give unfinished work back, for a clean stop: those of the rows that ``owner`` owns exist no more."""
        mine = [(*_check_key(key), owner.name) for key in keys]
        with self._writing() as connection:
            connection.executemany("DELETE FROM run WHERE digest = ? AND replica = ? AND owner = ?", mine)
            _forget_idle_owners(connection)

    def finish(
        self,
        key: tuple[str, int],
        owner: Owner,
        status: Literal["done", "diverged", "failed"],
        *,
        results: Mapping[str, Any],
        seconds: float,
        device: str,
        versions: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        commit: str = "",
    ) -> None:
        """Write all of a finished row in one transaction. To repeat an equal call is harmless.

        Raises `FinishedError` if the row is finished with other content and `ClaimLostError` if ``owner`` does not
        own it; neither changes anything.
        """
        key = _check_key(key)
        check_choice("status", status, (*FINAL, "failed"))
        if not 0.0 <= seconds < math.inf:
            raise ArgumentError(f"seconds must be a finite number of at least 0, got {seconds!r}.")
        content = (
            status,
            to_json(check_mapping("results", results), "results"),
            to_json(check_mapping("versions", versions or {}), "versions"),
            check_text("device", device),
            to_json(check_mapping("provenance", provenance or {}), "provenance"),
            check_text("commit", commit),
            float(seconds),
        )
        with self._writing() as connection:
            found = _find(connection, key, *CONTENT, "owner")
            if found and found[:-1] == content:
                return
            if found and found[0] in FINAL:
                raise FinishedError(
                    f"{self.path}: replica {key.replica} of {key.digest} is finished ({found[0]}) with other content, "
                    "which never changes. To keep both, write to another store."
                )
            if not found or found[-1] != owner.name:
                state = f"is {found[0]}" if found else "is claimed by nobody"
                by = f", owned by {Owner(**self._loads(found[-1]))}" if found and found[-1] else ""
                raise ClaimLostError(
                    f"{self.path}: {owner} does not own replica {key.replica} of {key.digest}, which {state}{by}. "
                    "Its result was not stored; claim it again to run it."
                )
            columns = ", ".join(f"{name} = ?" for name in CONTENT)
            connection.execute(
                f"UPDATE run SET {columns}, owner = NULL, finished = ? WHERE digest = ? AND replica = ?",
                (*content, _now(), *key),
            )
            _forget_idle_owners(connection)

    def rows(self, digest: str | None = None, status: Status | None = None) -> list[Row]:
        """The rows, by digest and replica."""
        if status is not None:
            check_choice("status", status, ("running", *FINAL, "failed"))
        found = self._read(
            "SELECT digest, replica, status, owner, started, finished, seconds, coalesce(device, ''), "
            "coalesce(revision, ''), coalesce(versions, '{}'), coalesce(provenance, '{}'), coalesce(results, '{}') "
            "FROM run WHERE (?1 IS NULL OR digest = ?1) AND (?2 IS NULL OR status = ?2) ORDER BY digest, replica",
            (digest, status),
        )
        protocols = {protocol.digest: protocol for protocol in self.protocols()}  # they only ever grow
        return [self._row(one, protocols) for one in found]

    def finished(self) -> set[Key]:
        """The keys of every finished row; cheaper than `rows`."""
        return {Key(*found) for found in self._read("SELECT digest, replica FROM run WHERE status IN (?, ?)", FINAL)}

    def _row(self, found: tuple[Any, ...], protocols: Mapping[str, StoredProtocol]) -> Row:
        digest, replica, status, owner, started, finished, seconds, device, commit, *texts = found
        versions, provenance, results = map(self._loads, texts)
        return Row(
            key=Key(digest, replica),
            protocol=protocols[digest],
            status=status,
            owner=Owner(**self._loads(owner)) if owner else None,
            started=started,
            finished=finished,
            seconds=seconds,
            device=device,
            commit=commit,
            versions=versions,
            provenance=provenance,
            results=results,
        )

    def merge(self, other_path: Path | str) -> Merged:
        """Copy what another store finished and this one has not; all or nothing, and twice is as once.

        A finished row replaces one that runs or failed here. Where both are finished and differ, ours stays and the
        key is reported. Notes are copied where we have none of the name.
        """
        other = Path(other_path).expanduser()
        if other.exists() and self.path.samefile(other):
            raise StoreError(f"{self.path}: a store cannot be merged into itself. Give the path of another one.")
        columns = ("digest", "replica", *CONTENT, "started", "finished")
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        with Store.open(other, read_only=True) as theirs, theirs._transaction("BEGIN") as connection:
            protocols = connection.execute("SELECT digest, settings, label FROM protocol").fetchall()
            notes = connection.execute("SELECT digest, name, value FROM note ORDER BY digest, name").fetchall()
            sql = f"SELECT {names} FROM run WHERE status IN (?, ?) ORDER BY digest, replica"
            rows = connection.execute(sql, FINAL).fetchall()
        added: list[Key] = []
        already_there: list[Key] = []
        conflicts: list[Key] = []
        notes_added: list[tuple[str, str]] = []
        note_conflicts: list[tuple[str, str]] = []
        with self._writing() as connection:
            for digest, settings, label in protocols:
                _add_protocol(connection, digest, settings, label)
            for row in rows:
                key, content = Key(*row[:2]), row[2 : 2 + len(CONTENT)]
                ours = _find(connection, key, *CONTENT)
                if ours and ours[0] in FINAL:
                    (already_there if ours == content else conflicts).append(key)
                    continue
                connection.execute(f"INSERT OR REPLACE INTO run ({names}) VALUES ({marks})", row)
                added.append(key)
            for note in notes:
                sql = "SELECT value FROM note WHERE digest = ? AND name = ?"
                our_note = connection.execute(sql, note[:2]).fetchone()
                if our_note is None:
                    connection.execute("INSERT INTO note VALUES (?, ?, ?)", note)
                    notes_added.append(note[:2])
                elif our_note != note[2:]:
                    note_conflicts.append(note[:2])
            _forget_idle_owners(connection)
        return Merged(
            added=tuple(added),
            already_there=tuple(already_there),
            conflicts=tuple(conflicts),
            notes_added=tuple(notes_added),
            note_conflicts=tuple(note_conflicts),
        )

    # -------------------------------------------------------------------------- transactions

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

    def _read(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        with _explained(self.path):
            return self._execute(sql, values).fetchall()

    def _loads(self, text: str) -> Any:
        try:
            return decode(json.loads(text))
        except ValueError as error:
            raise StoreError(f"{self.path}: holds {text[:40]!r}, which is not JSON. Use a copy of the file.") from error


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        usual = "Open the store anew: one Store serves one thread, until it is closed."
        advice = next((text for code, text in ADVICE.items() if _code(error).startswith(code)), usual)
        raise StoreError(f"{path}: {str(error).rstrip('.')}. {advice}") from error


def _code(error: sqlite3.Error) -> str:
    return str(getattr(error, "sqlite_errorname", ""))  # missing where Python, not SQLite, found the mistake


def _find(connection: sqlite3.Connection, key: Key, *columns: str) -> tuple[Any, ...] | None:
    sql = f"SELECT {', '.join(columns)} FROM run WHERE digest = ? AND replica = ?"
    found: tuple[Any, ...] | None = connection.execute(sql, key).fetchone()
    return found


def _add_protocol(connection: sqlite3.Connection, digest: str, settings: str, label: str) -> None:
    connection.execute("INSERT OR IGNORE INTO protocol VALUES (?, ?, ?)", (digest, settings, label))
    (ours,) = connection.execute("SELECT settings FROM protocol WHERE digest = ?", (digest,)).fetchone()
    if ours != settings:
        raise StoreError(f"protocol {digest} stands for other settings in this store. Use one store for each.")


def _require_protocols(connection: sqlite3.Connection, digests: Iterable[str]) -> None:
    for digest in digests:
        if connection.execute("SELECT 1 FROM protocol WHERE digest = ?", (digest,)).fetchone() is None:
            raise ArgumentError(f"digest must be that of a protocol in the store, got {digest!r}. First add(protocol).")


def _forget_idle_owners(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM owner WHERE name NOT IN (SELECT owner FROM run WHERE owner IS NOT NULL)")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _check_key(key: tuple[str, int]) -> Key:
    digest, replica = key
    return Key(check_text("digest", digest), check_count("replica", replica, 0))
