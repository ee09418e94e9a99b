"""Who works on what, as small files in the folder of results: written by each run, read by anybody. No torch here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.rows import UnsoundError, read_owner

FOLDER = "status"
SILENT_S = 60.0
"""A run of another machine that has written nothing for so long counts as gone."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one worker does."""

    worker: str
    host: str
    pid: int
    device: str
    title: str
    replicas: int
    epochs: int
    done: float
    """Epochs that are over."""
    figures: str
    since: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Networks that were given up, and why."""

    title: str
    replicas: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where a run stands."""

    owner: str
    """The driver's name in the store."""
    engine: str
    workers: int
    total: int
    """Networks of the work at hand; while settings are chosen, those of the trials."""
    finished: int
    share: float
    """Of the work, what is done."""
    left_s: float | None
    deaths: int
    started: float
    updated: float
    work: tuple[Work, ...] = ()
    failures: tuple[Failure, ...] = field(default=())

    @property
    def waiting(self) -> int:
        """Networks that no worker has begun."""
        lost = sum(one.replicas for one in self.failures)
        return max(self.total - self.finished - lost - sum(one.replicas for one in self.work), 0)

    @property
    def driver(self) -> Owner | None:
        """The process that runs it; None where its name cannot be read."""
        try:
            return read_owner(self.owner)
        except UnsoundError:
            return None

    def is_gone(self, now: float | None = None) -> bool:
        """Whether its process has ended without a word."""
        driver = self.driver
        silent_s = (time.time() if now is None else now) - self.updated
        return driver is None or driver.is_dead(silent_s, SILENT_S)


def path_of(folder: Path, owner: Owner) -> Path:
    """The file of a run in the folder of results."""
    return folder / FOLDER / f"{owner.pid}-{owner.nonce[:12]}.json"


def write(path: Path, status: RunStatus) -> None:
    """Replace a run's file. It tells, and nothing depends on it: what goes wrong is passed over."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(status)), encoding="utf-8")
        os.replace(new, path)


def remove(path: Path) -> None:
    """Remove a run's file, and the folder with the last of them."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.with_suffix(".new").unlink(missing_ok=True)
        path.parent.rmdir()


def read(folder: Path) -> list[RunStatus]:
    """The runs of a folder of results, the oldest first; files that are not what a run writes are passed over."""
    found = []
    for path in (folder / FOLDER).glob("*.json"):
        with suppress(OSError, ValueError, TypeError, LookupError, RecursionError, AttributeError):
            plain = json.loads(path.read_text(encoding="utf-8"))
            work = tuple(Work(**one) for one in plain.pop("work"))
            failures = tuple(Failure(**one) for one in plain.pop("failures"))
            one = RunStatus(**plain, work=work, failures=failures)
            _require_numbers([one.total, one.finished, one.share, one.updated, one.started, one.deaths])
            _require_numbers(
                [number for part in work for number in (part.done, part.epochs, part.replicas, part.since)]
            )
            found.append(one)
    return sorted(found, key=lambda one: one.started)


def _require_numbers(values: Sequence[object]) -> None:
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError("not a number")


def forget_gone(folder: Path) -> None:
    """Remove the files of runs that are gone: the run that takes their work over has a file of its own."""
    for one in read(folder):
        driver = one.driver
        if driver is not None and one.is_gone():
            remove(path_of(folder, driver))
