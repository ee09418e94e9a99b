"""Results on disk: one file that several processes share. A finished row never changes.

Nothing here imports torch: a report is rebuilt anywhere. Values are kept as JSON text, see `config.json_values`.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from dropconnectpp.errors import ArgumentError, check_choice, check_count
from dropconnectpp.lab.config.json_values import canonical, check_mapping, check_text, to_json
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.runs.database import Database, StoreError
from dropconnectpp.lab.runs.owner import Owner

LEASE_S = 600.0
"""How long an owner on another machine may be silent before its work goes to another."""

FinalStatus = Literal["done", "diverged"]
Status = Literal["running", FinalStatus, "failed"]
FINAL: tuple[FinalStatus, ...] = get_args(FinalStatus)
CONTENT = ("status", "results", "versions", "device", "provenance", "revision", "seconds")
"""What must agree for two rows to be equal. Times are left out: the store itself takes them."""


class ClaimLostError(StoreError):
    """The row now belongs to another owner, or to none; nothing was written."""


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
    """One replica. What is known only once it is finished is empty or None before."""

    key: Key
    protocol: StoredProtocol
    status: Status
    owner: Owner | None
    """Which process runs it now; a finished row names no machine."""
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
    """Finished in both stores with different content; ours was kept."""
    notes_added: tuple[tuple[str, str], ...]
    note_conflicts: tuple[tuple[str, str], ...]
    """Notes that differ; ours were kept."""


class Store(Database):
    """A file of results. A `Store` serves one thread of one process; open another for the next.

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

    # -------------------------------------------------------------------------- protocols and notes

    def add(self, protocol: Protocol, label: str | None = None) -> str:
        """Make an experiment known and return its digest. Its label is the first one given, else its method's."""
        settings, digest = canonical(protocol.to_dict()), protocol.digest
        with self._writing() as connection:
            _add_protocol(connection, digest, settings, check_text("label", protocol.label if label is None else label))
        return digest

    def protocols(self) -> list[StoredProtocol]:
        """The experiments, by digest."""
        found = self._read("SELECT digest, label, settings FROM protocol ORDER BY digest")
        return [StoredProtocol(digest, label, self._loads(settings)) for digest, label, settings in found]

    def write_note(self, digest: str, name: str, value: object) -> None:
        """Keep a small JSON value beside an experiment, such as how its step size was chosen; it replaces the last."""
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

        It takes rows that do not exist, that failed, or whose owner is dead: the owner's process is gone or, on
        another machine, has sent no heartbeat for ``lease_s`` seconds. Clocks must agree much better than that.
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
        """Give unfinished work back, for a clean stop: the rows that ``owner`` owns are removed."""
        mine = [(*_check_key(key), owner.name) for key in keys]
        with self._writing() as connection:
            connection.executemany("DELETE FROM run WHERE digest = ? AND replica = ? AND owner = ?", mine)
            _forget_idle_owners(connection)

    def finish(
        self,
        key: tuple[str, int],
        owner: Owner,
        status: Literal[FinalStatus, "failed"],
        *,
        results: Mapping[str, Any],
        seconds: float,
        device: str,
        versions: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        commit: str = "",
    ) -> None:
        """Write all of a finished row in one transaction. Repeating an equal call is harmless.

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
                state = f"is {found[0]}" if found else "is claimed by no process"
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
            check_choice("status", status, get_args(Status))
        found = self._read(
            "SELECT digest, replica, status, owner, started, finished, seconds, coalesce(device, ''), "
            "coalesce(revision, ''), coalesce(versions, '{}'), coalesce(provenance, '{}'), coalesce(results, '{}') "
            "FROM run WHERE (?1 IS NULL OR digest = ?1) AND (?2 IS NULL OR status = ?2) ORDER BY digest, replica",
            (digest, status),
        )
        protocols = {protocol.digest: protocol for protocol in self.protocols()}  # they only ever grow
        return [self._row(one, protocols) for one in found]

    def finished(self) -> set[Key]:
        """The keys of all finished rows; cheaper than `rows`."""
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
        """Copy what another store finished and this one has not: all or nothing, and twice is the same as once.

        A finished row replaces one that runs or failed here. Where both are finished and differ, ours is kept and the
        key is reported. Notes are copied where this store has none of the name.
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
