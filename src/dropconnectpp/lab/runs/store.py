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
from typing import Any, Literal, get_args

from dropconnectpp.errors import ArgumentError, check_choice, check_count
from dropconnectpp.lab.config.ensembles import Ensemble
from dropconnectpp.lab.config.json_values import canonical, check_mapping, check_text, to_json
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.uci import Regression
from dropconnectpp.lab.machine.user_paths import expanded
from dropconnectpp.lab.runs.database import Database, StoreError
from dropconnectpp.lab.runs.merging import CONTENT, Merged, add_protocol, merge_into, put
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.reading import read_content
from dropconnectpp.lab.runs.rows import (
    FINAL,
    LARGEST,
    RUN,
    Content,
    Damage,
    DamagedError,
    FinalStatus,
    Key,
    Row,
    Status,
    StoredProtocol,
    UnsoundError,
    listed,
    read_owner,
)

__all__ = [
    "FINAL",
    "MENDING",
    "ClaimLostError",
    "Content",
    "Damage",
    "DamagedError",
    "FinalStatus",
    "FinishedError",
    "Holder",
    "Key",
    "Merged",
    "Row",
    "Status",
    "Store",
    "StoredProtocol",
    "listed",
]

LEASE_S = 600.0
"""How long an owner on another machine may be silent before its work goes to another."""

MENDING = (
    "Bring sound ones from a copy with dcpp store merge, or remove these with dcpp store verify --remove: the same "
    "command then trains them again"
)


class ClaimLostError(StoreError):
    """The row now belongs to another owner, or to none; nothing was written."""


class FinishedError(StoreError):
    """The row is finished with other content, which never changes."""


@dataclass(frozen=True)
class Holder:
    """A process that holds work, and when it was last heard of."""

    name: str
    """Its name in the file."""
    silent_s: float
    """Less than 0 where its clock is ahead of ours; NaN where the file does not say."""
    rows: int

    def __str__(self) -> str:
        return _shown(self.name)

    @property
    def host(self) -> str:
        """The machine; empty where the name is damaged."""
        try:
            return read_owner(self.name).host
        except UnsoundError:
            return ""

    def is_dead(self, lease_s: float = LEASE_S) -> bool:
        """Whether its process is gone or was silent for too long."""
        try:
            return read_owner(self.name).is_dead(self.silent_s, lease_s)
        except UnsoundError:
            return False  # `free` can take its work

    @property
    def ahead(self) -> bool:
        """Whether its clock is ahead by more than a lease: no silence will ever say that it is dead."""
        return not self.silent_s >= -LEASE_S


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

    def add(self, protocol: Protocol | Regression | Ensemble, label: str | None = None) -> str:
        """Make an experiment known and return its digest. Its label is the first one given, else its method's."""
        settings, digest = canonical(protocol.to_dict()), protocol.digest
        with self._writing() as connection:
            add_protocol(connection, digest, settings, check_text("label", protocol.label if label is None else label))
        return digest

    def protocols(self) -> list[StoredProtocol]:
        """The experiments, by digest."""
        return list(self._sound(None, "protocol").protocols.values())

    def write_note(self, digest: str, name: str, value: object) -> None:
        """Keep a small JSON value beside an experiment, such as how its step size was chosen; it replaces the last."""
        text = to_json(value, f"note {name!r}")
        with self._writing() as connection:
            _require_protocols(connection, [digest])
            put(connection, "note", (digest, check_text("name", name), text))

    def notes(self, digest: str | None = None) -> dict[tuple[str, str], Any]:
        """The notes by (digest, name), in that order."""
        return self._sound(digest, "note").notes

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
            dead = {one.name for one in _holders(connection, now) if one.name != owner.name and one.is_dead(lease_s)}
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
        name = owner.name
        mine = [(*_check_key(key), name) for key in keys]
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
            found = _find(connection, key, *CONTENT, "owner", "started")
            if found and found[: len(CONTENT)] == content:
                return
            self._check_claim(key, owner, found)
            values: dict[str, object] = dict(zip(CONTENT, content, strict=True))
            values |= {"digest": key.digest, "replica": key.replica, "owner": None}
            values |= {"started": found[-1] if found else "", "finished": _now()}
            put(connection, "run", [values[name] for name in RUN])
            _forget_idle_owners(connection)

    def _check_claim(self, key: Key, owner: Owner, found: tuple[Any, ...] | None) -> None:
        """Raise unless ``owner`` owns the row, given its content, its owner and its start."""
        status, holder = (found[0], found[-2]) if found else (None, None)
        if status in FINAL:
            raise FinishedError(
                f"{self.path}: replica {key.replica} of {key.digest} is finished ({status}) with other content, "
                "which never changes. To keep both, write to another store."
            )
        if holder != owner.name:
            state = f"is {status}" if status else "is claimed by no process"
            by = f", owned by {_shown(holder)}" if holder else ""
            raise ClaimLostError(
                f"{self.path}: {owner} does not own replica {key.replica} of {key.digest}, which {state}{by}. "
                "Its result was not stored; claim it again to run it."
            )

    def rows(self, digest: str | None = None, status: Status | None = None) -> list[Row]:
        """The rows, by digest and replica.

        Raises:
            DamagedError: some are not what was written; `content` leaves them out.
        """
        if status is not None:
            check_choice("status", status, get_args(Status))
        return [row for row in self._sound(digest, "protocol", "run").rows if status in (None, row.status)]

    def content(self, digest: str | None = None) -> Content:
        """What the store holds of one protocol or of all, and what is damaged; for all, SQLite checks the file too."""
        return read_content(self, digest, whole_file=digest is None)

    def _sound(self, digest: str | None, *tables: str) -> Content:
        found = read_content(self, digest, tables=tables)
        if found.damaged:
            raise DamagedError(f"{self.path}: {listed(found.damaged)}. {MENDING}", found.damaged)
        return found

    def remove(self, damaged: Iterable[Damage]) -> None:
        """Remove damaged records, and with a protocol all that belongs to it: the same command then makes them anew."""
        with self._writing() as connection:
            for table, rowid in sorted(one.place for one in damaged if one.place):
                if table == "protocol":
                    for part in ("run", "note"):
                        sql = f"DELETE FROM {part} WHERE digest = (SELECT digest FROM protocol WHERE rowid = ?)"
                        connection.execute(sql, (rowid,))
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (rowid,))
            _forget_idle_owners(connection)

    def finished(self) -> set[Key]:
        """The keys of all finished rows; cheaper than `rows`."""
        return {Key(*found) for found in self.read("SELECT digest, replica FROM run WHERE status IN (?, ?)", FINAL)}

    def merge(self, other_path: Path | str, *, leave_out_damaged: bool = False) -> Merged:
        """Copy what another store finished and this one has not: all or nothing, and twice is the same as once.

        All of the other store is checked before anything is written. A finished row replaces one that runs, failed or
        is damaged here. Where both are finished and differ, ours is kept and the key is reported. Notes are copied
        where this store has none of the name.

        Raises:
            DamagedError: the other store holds damaged records, and ``leave_out_damaged`` is not set.
        """
        other = expanded(other_path)
        if other.exists() and self.path.samefile(other):
            raise StoreError(f"{self.path}: a store cannot be merged into itself. Give the path of another one.")
        with Store.open(other, read_only=True) as theirs:
            found = theirs.content()
        if found.damaged and not leave_out_damaged:
            raise DamagedError(
                f"{other}: {listed(found.damaged)}. Nothing was merged. Use a copy, or leave these out with: "
                f"dcpp store merge --leave-out-damaged",
                found.damaged,
            )
        with self._writing() as connection:
            merged = merge_into(connection, found)
            _forget_idle_owners(connection)
        return merged

    # -------------------------------------------------------------------------- who holds work

    def holders(self) -> list[Holder]:
        """The processes that hold unfinished work, as far as their names can be read."""
        with self._transaction("BEGIN") as connection:
            return _holders(connection, time.time())

    def free(self, holders: Iterable[Holder]) -> int:
        """Take work from processes that will never finish it; returns how many rows that frees."""
        names = [(one.name,) for one in holders]
        with self._writing() as connection:
            freed = connection.executemany("DELETE FROM run WHERE owner = ? AND status = 'running'", names).rowcount
            _forget_idle_owners(connection)
        return max(freed, 0)


def _find(connection: sqlite3.Connection, key: Key, *columns: str) -> tuple[Any, ...] | None:
    sql = f"SELECT {', '.join(columns)} FROM run WHERE digest = ? AND replica = ?"
    found: tuple[Any, ...] | None = connection.execute(sql, key).fetchone()
    return found


def _holders(connection: sqlite3.Connection, now: float) -> list[Holder]:
    sql = (
        "SELECT owner, heartbeat, count(*) FROM run LEFT JOIN owner ON owner.name = run.owner WHERE status = 'running'"
    )
    found = connection.execute(f"{sql} GROUP BY owner ORDER BY owner").fetchall()
    return [Holder(str(name), _silence(now, beat), count) for name, beat, count in found]


def _silence(now: float, beat: object) -> float:
    return now - beat if isinstance(beat, int | float) else math.nan


def _shown(name: str) -> str:
    try:
        return str(read_owner(name))
    except UnsoundError:
        return "a process whose name is damaged"


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
    replica = check_count("replica", replica, 0)
    if replica > LARGEST:
        raise ArgumentError(f"replica must be at most {LARGEST}, got {replica}.")
    return Key(check_text("digest", digest), replica)
