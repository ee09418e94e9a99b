"""Where a run stands: gathered from its workers, shown on one display, and written down for `dcpp status`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dropconnectpp.lab.runs import status as states
from dropconnectpp.lab.runs.engines.engine import Worker
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.progress import Display, Relay
from dropconnectpp.lab.runs.tasks import Task

WRITE_EVERY_S = 1.0
"""Seconds between two states on disk. A run that is shorter writes none."""
SHOW_EVERY_S = 0.2


@dataclass
class _Entry:
    """A task in work."""

    task: Task
    worker: Worker | None = None
    done: float = 0.0
    """Epochs that are over."""
    free: float = 0.0
    """Those that an earlier session trained."""
    figures: str = ""
    since: float = field(default_factory=time.time)

    @property
    def replicas(self) -> int:
        return len(self.task.keys)


class Board:
    """Where a run stands. With several workers the display shows the whole; with one, what it does."""

    def __init__(self, display: Display, folder: Path, owner: Owner, engine: str, *, several: bool) -> None:
        self.display, self._engine, self._several = display, engine, several
        self._owner, self._path = owner, states.path_of(folder, owner)
        self._entries: dict[int, _Entry] = {}
        self._failures: list[states.Failure] = []
        self._deaths, self._workers = 0, 1
        self._started = time.time()
        self._written = self._shown = time.monotonic()
        states.forget_gone(folder)
        self._set(0, 0, 0)

    def begin(self, networks: int, epochs: int, finished: int = 0) -> None:
        """So much work begins; ``finished`` networks of it are done already."""
        self._set(networks, epochs, finished)
        self.display.work(epochs)

    def _set(self, networks: int, epochs: int, finished: int) -> None:
        self._total, self._finished, self._epochs = networks, finished, float(epochs)
        self._done = self._free = 0.0
        self._since = time.monotonic()

    def submitted(self, number: int, task: Task, workers: int) -> None:
        """A task was given to the engine."""
        self._entries[number] = _Entry(task)
        self._workers = workers

    def began(self, number: int, worker: Worker) -> None:
        """A worker does it."""
        if entry := self._entries.get(number):
            entry.worker, entry.since = worker, time.time()

    def died(self, number: int | None, worker: Worker, why: str) -> None:
        """A worker is gone."""
        self._deaths += 1
        entry = self._entries.get(number) if number is not None else None
        if entry is None:
            self.display.note(f"{worker} {why}.")
            return
        entry.worker = None
        count = "its network goes" if entry.replicas == 1 else f"its {entry.replicas} networks go"
        self.display.note(f"{worker} {why}: {count} on from the last checkpoint.")

    def failed(self, title: str, replicas: int, reason: str) -> None:
        """Networks were given up."""
        self._failures.append(states.Failure(title=title, replicas=replicas, reason=reason))
        self.display.note(f"{title}: {replicas} failed: {reason}")

    def relay(self, number: int) -> Relay:
        """A display that passes on what one task says."""
        return Relay(lambda what, arguments: self.told(number, what, arguments))

    def told(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        """A task says something: a method of `Display` and its arguments."""
        entry = self._entries.get(number)
        if entry is not None:
            self._note_progress(entry, what, arguments)
        if not self._several or what == "note":
            getattr(self.display, what)(*arguments)
        self.tick()

    @staticmethod
    def _note_progress(entry: _Entry, what: str, arguments: tuple[Any, ...]) -> None:
        if what == "group":
            entry.done = entry.free = float(arguments[3])
        elif what == "within":
            entry.done = float(arguments[0])
        elif what == "epoch":
            entry.done, loss, accuracy = float(arguments[0]), arguments[1], arguments[2]
            shown = f"loss {loss:.3f}" if math.isfinite(loss) else "loss not finite"
            entry.figures = shown if accuracy is None else f"{shown}, accuracy {accuracy:.1f}%"
        elif what in ("evaluating", "steps"):
            entry.figures = f"{arguments[0]} {arguments[1]:,}/{arguments[2]:,}"

    def ended(self, number: int, finished: int) -> None:
        """A task is over; so many of its rows are stored."""
        entry = self._entries.pop(number)
        if finished:
            self._done += entry.replicas * entry.task.epochs
            self._free += entry.replicas * entry.free
            self._finished += finished
            self.display.group_finished()
        self.tick()

    def progress(self, number: int) -> float:
        """How many epochs of a task are over."""
        return self._entries[number].done

    @property
    def done(self) -> float:
        """Epochs of one network that are over, of this work."""
        return self._done + sum(one.replicas * one.done for one in self._entries.values())

    @property
    def left_s(self) -> float | None:
        """Seconds until all is done at the speed so far; None while nothing is known."""
        spent = self.done - self._free - sum(one.replicas * one.free for one in self._entries.values())
        if spent <= 0:
            return None
        return (time.monotonic() - self._since) / spent * max(self._epochs - self.done, 0.0)

    def tick(self) -> None:
        """Show and write down where the run stands, now and then."""
        now = time.monotonic()
        if self._several and now - self._shown >= SHOW_EVERY_S:
            self._shown = now
            self.display.overall(self._title(), self.done, self._epochs, self.left_s)
        if now - self._written >= WRITE_EVERY_S:
            self._written = now
            states.write(self._path, self.status())

    def _title(self) -> str:
        failed = sum(one.replicas for one in self._failures)
        working = sum(one.worker is not None for one in self._entries.values())
        parts = [f"{self._finished} of {self._total} networks", f"{working} of {self._workers} workers busy"]
        return ", ".join(parts + ([f"{failed} failed"] if failed else []))

    def status(self) -> states.RunStatus:
        """Where the run stands, as plain data."""
        return states.RunStatus(
            owner=self._owner.name,
            engine=self._engine,
            workers=self._workers,
            total=self._total,
            finished=self._finished,
            share=min(self.done / self._epochs, 1.0) if self._epochs else 0.0,
            left_s=self.left_s,
            deaths=self._deaths,
            started=self._started,
            updated=time.time(),
            work=tuple(self._work(one) for one in self._entries.values()),
            failures=tuple(self._failures),
        )

    def _work(self, entry: _Entry) -> states.Work:
        worker = entry.worker or Worker("waits for a worker", "", 0)
        return states.Work(
            worker=worker.name,
            host=worker.host,
            pid=worker.pid,
            device=worker.device,
            title=entry.task.title,
            replicas=entry.replicas,
            epochs=entry.task.epochs,
            done=entry.done,
            figures=entry.figures,
            since=entry.since,
        )

    def close(self) -> None:
        """Forget what was written down: the run is over, and the store has its rows."""
        states.remove(self._path)
