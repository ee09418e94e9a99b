"""What a store holds, as it is read: each record is compared with the digest that was written with it.

A record is a run, a protocol or a note. Its digest, the seal, is a sha256 over all of its columns. Records of version
0.1 have none: their form is checked instead, and they count as unverified.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config.json_values import canonical, decode
from dropconnectpp.lab.config.protocol import VERSION
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.owner import Owner

FinalStatus = Literal["done", "diverged"]
Status = Literal["running", FinalStatus, "failed"]
FINAL: tuple[FinalStatus, ...] = get_args(FinalStatus)
STATUSES: tuple[str, ...] = ("running", *FINAL, "failed")
LARGEST = 2**63 - 1
"""The largest whole number that SQLite keeps, and so the last replica."""

PROTOCOL = ("digest", "settings", "label")
NOTE = ("digest", "name", "value")
RUN = (
    *("digest", "replica", "status", "owner", "started", "finished", "seconds"),
    *("device", "revision", "versions", "provenance", "results"),
)
"""The columns that a seal covers, in its order. A run that is not finished has an owner, and no seal."""

LISTS = ("losses", "curve", "mc", "pruning", "layers", "judged")
MAPPINGS = ("calibration", "uncertainty", "foreign", "posterior")
NUMBERS = ("accuracy", "nll", "brier", "ece", "diverged_at")
"""What a report takes for granted of results that have such names; others may be anything."""


DIVERGED_NLL = 50.0
"""Nats for each test image from which on a network has diverged, whatever its method: the true class then has a
probability of e^-50. Guessing costs log(classes), 2.3 for ten of them; of 3,713 recorded networks none exceeds 6.7."""


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
    finished: str | None = None
    """UTC, ISO 8601."""
    seconds: float | None = None
    device: str = ""
    commit: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the data came from."""
    results: dict[str, Any] = field(default_factory=dict)
    verified: bool = True
    """Whether a finished row has a digest, with which it agrees."""


@dataclass(frozen=True)
class Record:
    """One record as it lies in the file."""

    table: str
    rowid: int
    values: tuple[Any, ...]
    sealed: object = None

    @property
    def name(self) -> str:
        """What messages call it."""
        first, second = self.values[0], self.values[1]
        return {"run": f"replica {second} of {first}", "note": f"note {second!r} of {first}"}.get(
            self.table, f"protocol {first}"
        )


@dataclass(frozen=True)
class Damage:
    """Something in a store that is not what was written."""

    what: str
    why: str
    place: tuple[str, int] | None = None
    """Table and rowid of a record."""

    def __str__(self) -> str:
        return printable(f"{self.what}: {self.why}")


class DamagedError(StoreError):
    """Records in the store are not what was written; ``damaged`` names them."""

    def __init__(self, text: str, damaged: Sequence[Damage]) -> None:
        super().__init__(text)
        self.damaged = tuple(damaged)


class UnsoundError(DropConnectError, ValueError):
    """A record is not what was written, or never was one."""


@dataclass
class Content:
    """All that a store holds: what is sound, and what is not by name."""

    protocols: dict[str, StoredProtocol] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: dict[tuple[str, str], Any] = field(default_factory=dict)
    damaged: list[Damage] = field(default_factory=list)
    sound: list[Record] = field(default_factory=list)
    """The records behind protocols, rows and notes."""

    @property
    def finished(self) -> list[Row]:
        """The rows that will not change."""
        return [row for row in self.rows if row.status in FINAL]

    @property
    def unverified(self) -> int:
        """How many of them have no digest."""
        return sum(not row.verified for row in self.finished)

    @property
    def diverged_as_done(self) -> int:
        """How many are stored as done that would be stored as diverged today: earlier versions had no limit."""
        values = [row.results.get("nll") for row in self.rows if row.status == "done"]
        return sum(isinstance(value, float) and not value < DIVERGED_NLL for value in values)

    def take(self, record: Record) -> None:
        """Read a record, or list its damage."""
        try:
            if record.table == "protocol":
                protocol = read_protocol(record.values, record.sealed)
                self.protocols[protocol.digest] = protocol
            elif record.table == "note":
                place, value = read_note(record.values, record.sealed)
                self.notes[place] = value
            else:
                self.rows.append(read_row(record.values, record.sealed, self.protocols))
            self.sound.append(record)
        except UnsoundError as error:
            self.damaged.append(Damage(record.name, str(error), (record.table, record.rowid)))


def listed(damaged: Sequence[Damage], most: int = 3) -> str:
    """How many records are damaged, and the first of them."""
    count = f"{len(damaged)} records are damaged" if len(damaged) > 1 else "1 record is damaged"
    more = f"; and {len(damaged) - most} more" if len(damaged) > most else ""
    return f"{count}: {'; '.join(map(str, damaged[:most]))}{more}"


def seal(values: Sequence[object]) -> str:
    """The digest of a record's columns."""
    return hashlib.sha256(canonical(list(values)).encode()).hexdigest()


def settings_digest(settings: object) -> str:
    """The digest of a protocol with such settings; see `Protocol.digest`. Empty where no protocol can have them."""
    try:
        return hashlib.sha256(canonical([VERSION, settings]).encode()).hexdigest()[:16]
    except ValueError:  # a number that is not finite
        return ""


def read_protocol(values: Sequence[object], sealed: object) -> StoredProtocol:
    """A protocol from its columns and its seal.

    Raises:
        UnsoundError: it is not what was written.
    """
    digest, text, label = _texts("digest, settings and label", values)
    _check_seal(values, sealed)
    _lines("digest and label", (digest, label))
    settings = _mapping("settings", text)
    if settings_digest(json.loads(text)) != digest:
        raise UnsoundError(f"its settings do not have the digest {digest}")
    return StoredProtocol(digest, label, settings)


def read_note(values: Sequence[object], sealed: object) -> tuple[tuple[str, str], Any]:
    """A note from its columns and its seal: where it belongs, and its value.

    Raises:
        UnsoundError: it is not what was written.
    """
    digest, name, text = _texts("digest, name and value", values)
    _check_seal(values, sealed)
    _lines("digest and name", (digest, name))
    return (digest, name), _loads("value", text)


def read_row(values: Sequence[object], sealed: object, protocols: Mapping[str, StoredProtocol]) -> Row:
    """A run from its columns and its seal.

    Raises:
        UnsoundError: it is not what was written, or its protocol is not.
    """
    named = dict(zip(RUN, values, strict=True))
    digest, replica, status = named["digest"], named["replica"], named["status"]
    if not isinstance(digest, str) or type(replica) is not int or replica < 0 or status not in STATUSES:
        raise UnsoundError("digest, replica or status are not of their kind")
    if digest not in protocols:
        raise UnsoundError("its protocol is damaged or missing")
    key, protocol = Key(digest, replica), protocols[digest]
    if status == "running":
        owner, started = _lines("owner and start", (named["owner"], named["started"]))
        return Row(key=key, protocol=protocol, status="running", owner=read_owner(owner), started=started)
    _check_seal(values, sealed)
    started, finished, device, commit = _lines(
        "start, end, device and revision", [named[name] for name in ("started", "finished", "device", "revision")]
    )
    seconds = named["seconds"]
    if named["owner"] is not None or not isinstance(seconds, float) or not 0.0 <= seconds < math.inf:
        raise UnsoundError("it has an owner, or its seconds are no number of at least 0")
    results = _mapping("results", named["results"])
    if sealed is None:
        check_results(results)
    return Row(
        key=key,
        protocol=protocol,
        status=status,  # type: ignore[arg-type]  # one of STATUSES
        owner=None,
        started=started,
        finished=finished,
        seconds=seconds,
        device=device,
        commit=commit,
        versions=_mapping("versions", named["versions"]),
        provenance=_mapping("provenance", named["provenance"]),
        results=results,
        verified=sealed is not None,
    )


def gated_counts(results: Mapping[str, Any]) -> tuple[float, float] | None:
    """Weights with gates, and how many of them a network keeps: all weights, but of layers that say they have none.

    >>> layers = [{"weights": 300, "kept": 300, "gated": False}, {"weights": 100, "kept": 10}]
    >>> gated_counts({"weights": 400, "weights_kept": 310, "layers": layers})
    (100.0, 10.0)
    """
    layers = results.get("layers")
    known = [one for one in layers if isinstance(one, Mapping)] if isinstance(layers, list) else []
    own = [one for one in known if one.get("gated", True)]
    if 0 < len(own) < len(known):
        pairs = [(_count(one.get("weights")), _count(one.get("kept"))) for one in own]
    else:
        pairs = [(_count(results.get("weights")), _count(results.get("weights_kept")))]
    weights, kept = (sum(one for one in column if one is not None) for column in zip(*pairs, strict=True))
    complete = all(one is not None for pair in pairs for one in pair)
    return (float(weights), float(kept)) if complete else None


def share_kept(results: Mapping[str, Any]) -> float | None:
    """The share of the weights with gates that a network keeps; None where the row does not say."""
    counts = gated_counts(results)
    return counts[1] / counts[0] if counts is not None and counts[0] else None


def _count(value: object) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST
    return float(value) if known else None  # type: ignore[arg-type]


def check_results(results: Mapping[str, Any]) -> None:
    """Raise `UnsoundError` unless results that reports know by name are of the kind that they expect."""
    for names, kinds, kind in (
        (LISTS, list, "list"),
        (MAPPINGS, dict | None, "mapping"),
        (NUMBERS, int | float | None, "number"),
    ):
        for name in names:
            value = results.get(name)
            if name in results and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise UnsoundError(f"its result {name} is no {kind}")


def read_owner(name: str) -> Owner:
    """An owner from its name in the file.

    Raises:
        UnsoundError: the text names no process.
    """
    try:
        owner = Owner(**json.loads(name))
        if owner.name == name and type(owner.pid) is int:
            return owner
    except (ValueError, TypeError, RecursionError):
        pass
    raise UnsoundError("its owner is the name of no process")


def _check_seal(values: Sequence[object], sealed: object) -> None:
    try:
        agrees = sealed is None or sealed == seal(values)
    except (TypeError, ValueError):  # bytes, or a number that is not finite
        agrees = False
    if not agrees:
        raise UnsoundError("its content does not have the digest that was written with it")


def _texts(names: str, values: Sequence[object]) -> list[str]:
    found = [value for value in values if isinstance(value, str)]
    if len(found) != len(values):
        raise UnsoundError(f"{names}: not a text")
    try:
        "".join(found).encode()
    except UnicodeEncodeError as error:
        raise UnsoundError(f"{names}: no text in UTF-8") from error
    return found


def _lines(names: str, values: Sequence[object]) -> list[str]:
    """Texts that a store takes on one line alone: a terminal obeys no character of them."""
    found = _texts(names, values)
    if not all(text.isprintable() for text in found):
        raise UnsoundError(f"{names}: not one line of text")
    return found


def _mapping(name: str, text: object) -> dict[str, Any]:
    (plain,) = _texts(name, [text])
    value = _loads(name, plain)
    if not isinstance(value, dict):
        raise UnsoundError(f"its {name} are no mapping")
    return value


def _loads(name: str, text: str) -> Any:
    try:
        return decode(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError) as error:
        raise UnsoundError(f"its {name} cannot be read as JSON ({error!s:.60})") from error


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
