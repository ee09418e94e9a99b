"""The driver: gives tasks to an engine until none is left, hears of its workers, and alone writes the store."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.runs.board import Board
from dropconnectpp.lab.runs.engines.engine import Began, Died, Ended, Engine, Event
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.outbox import Outbox
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.session import Heartbeat
from dropconnectpp.lab.runs.store import ClaimLostError, FinishedError, Key, Store
from dropconnectpp.lab.runs.tasks import (
    Failed,
    Finished,
    Interrupted,
    Lost,
    Outcome,
    OutOfMemory,
    OutOfTime,
    Refused,
    Rows,
    Task,
    Workplace,
)

WAIT_S = 0.2
"""Seconds between two looks at Ctrl-C while workers say nothing."""
ASK_AGAIN_S = 5.0
"""Seconds between two looks for work that other processes may have given back."""
WIND_DOWN_S = 120.0
"""How long workers may take for their last checkpoints after an error."""
LONGEST = 1000
"""Letters of a reason that are kept."""
TAKEN = "Another process has taken this work over; going on with what is left."
MOST_DEATHS = 3
"""Workers that may die one after the other on the same networks, none of them with any progress."""


class WorkError(DropConnectError, RuntimeError):
    """Networks could not be trained; everything else was, and is kept."""


class Source(Protocol):
    """Where tasks come from."""

    def next(self) -> Task | None:
        """The next task, whose rows are claimed; None if there is none now."""

    def give_back(self, task: Task) -> None:
        """Take a task back that is not done."""

    def stored(self, task: Task) -> None:
        """The rows of a task are in the store."""

    def not_fitting(self, task: Task, message: str) -> DropConnectError | None:
        """A task does not fit its device: smaller ones follow, or the error says why none can."""


@dataclass
class _Flight:
    """A task that the engine has."""

    task: Task
    deaths: int = 0
    """Since the last progress."""
    at_death: float = 0.0


@dataclass
class Dispatcher:
    """Drives one engine over the work of one store."""

    store: Store
    owner: Owner
    engine: Engine
    board: Board
    interruption: Interruption
    outbox: Outbox

    def __post_init__(self) -> None:
        self.out_of_time: OutOfTime | None = None
        """Set once the time limit came first."""
        self.failed: dict[Key, str] = {}
        """Why networks failed in this run."""
        self._flights: dict[int, _Flight] = {}
        self._number = 0
        self._error: DropConnectError | None = None
        self._ended = False
        self._heartbeat = Heartbeat(self.store.path, self.owner)

    def work(self, at: Workplace, source: Source) -> None:
        """Run what the source gives, as many tasks at a time as there are workers, until it has no more.

        Raises:
            KeyboardInterrupt: somebody asked to stop. What was trained is in checkpoints.
            WorkError: a worker met an error that the user has to mend.
        """
        self._source = source
        # One process takes a Ctrl-C as it comes; while workers train, the first lets them write checkpoints.
        signals = self.interruption.postponed() if self.engine.several else nullcontext()
        with self._heartbeat, signals:
            try:
                self.engine.open(replace(at, alive=self._heartbeat.check), self._handle)
                self._drive()
            except DropConnectError:
                self._wind_down()
                raise
            finally:
                if self._flights:  # a second Ctrl-C, or an error that is nobody's
                    self.engine.close()
        if self._error is not None:
            raise self._error
        self.interruption.check()

    def _drive(self) -> None:
        more, asked, stopping = True, time.monotonic(), False
        while True:
            while more and not stopping and len(self._flights) < self.engine.workers:
                task = self._source.next()
                more, asked = task is not None, time.monotonic()
                if task is not None:
                    self._submit(task)
            if not self._flights:
                return
            self._ended = False
            self.engine.wait(WAIT_S)
            self.board.tick()
            more = more or self._ended or time.monotonic() - asked > ASK_AGAIN_S
            if not self.engine.several:
                self.interruption.check()
            if not stopping and (self.interruption.requested or self._error or self.out_of_time):
                stopping = True
                if not self.out_of_time:  # then each worker stops by itself, as late as it can
                    self.board.display.note("Stopping: workers write checkpoints. Ctrl-C once more stops at once.")
                    self.engine.stop()

    def _submit(self, task: Task) -> None:
        self._number += 1
        self._flights[self._number] = _Flight(task)
        self._heartbeat.watch(task.keys)
        self.board.submitted(self._number, task, self.engine.workers)
        self.engine.submit(self._number, task)

    def _wind_down(self) -> None:
        """Let workers write checkpoints before an error ends the run."""
        if not self.engine.several:
            self._flights.clear()
            return
        deadline = time.monotonic() + WIND_DOWN_S
        with suppress(DropConnectError):
            self.engine.stop()
            while self._flights and time.monotonic() < deadline:
                self.engine.wait(WAIT_S)

    def require_success(self) -> None:
        """Raise if networks failed in this run.

        Raises:
            WorkError: it names how many, and why the first did.
        """
        if self.failed:
            raise WorkError(
                f"{len(self.failed)} networks failed: {next(iter(self.failed.values()))}. The others are trained and "
                "kept; the same command tries these again."
            )

    # ------------------------------------------------------------------------------------- events

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ended):
            if event.number in self._flights:
                self._ended = True
                self._end(event.number, event.outcome)
        elif isinstance(event, Died):
            self._died(event)
        elif isinstance(event, Began):
            self.board.began(event.number, event.worker)
        else:
            self.board.told(event.number, event.what, event.arguments)

    def _died(self, event: Died) -> None:
        flight = self._flights.get(event.number) if event.number is not None else None
        if flight is None or event.number is None:
            self.board.died(None, event.worker, event.why)
            return
        self.board.died(event.number, event.worker, event.why)
        progress = self.board.progress(event.number)
        flight.deaths = flight.deaths + 1 if progress <= flight.at_death else 1
        flight.at_death = max(progress, flight.at_death)
        if event.again:
            return
        if flight.deaths < MOST_DEATHS:
            self.engine.submit(event.number, flight.task)
            return
        text = f"{MOST_DEATHS} workers died on it without progress; the last one {event.why}"
        self._end(event.number, Failed(text))
        self._ended = True

    def _end(self, number: int, outcome: Outcome) -> None:
        task = self._flights.pop(number).task
        self._heartbeat.forget(task.keys)
        stored = 0
        if isinstance(outcome, Rows):
            stored = self.keep(outcome.rows)
            if self.engine.several:
                self.outbox.remove(task.keys)
        elif isinstance(outcome, OutOfTime):
            self.out_of_time = outcome if self.out_of_time is None or outcome.needed_s else self.out_of_time
        elif isinstance(outcome, Lost):
            self.board.display.note(TAKEN)
        elif isinstance(outcome, Refused):
            self._error = self._error or WorkError(outcome.message)
        elif isinstance(outcome, Failed):
            self._fail(task, outcome.message)
        if not isinstance(outcome, Rows | Failed):
            self.store.release(task.keys, self.owner)
        self.board.ended(number, stored)
        if isinstance(outcome, OutOfMemory):
            self._error = self._error or self._source.not_fitting(task, outcome.message)
        elif isinstance(outcome, Lost | Interrupted):
            self._source.give_back(task)
        elif isinstance(outcome, Rows):
            self._source.stored(task)

    # -------------------------------------------------------------------------------------- store

    def keep(self, rows: Iterable[Finished]) -> int:
        """Store rows that are not there yet; how many of them are there now."""
        stored, taken = 0, False
        for row in rows:
            try:
                self.store.finish(
                    row.key,
                    self.owner,
                    row.status,
                    results=row.results,
                    seconds=row.seconds,
                    device=row.device,
                    versions=row.versions,
                    provenance=row.provenance,
                    commit=row.commit,
                )
            except FinishedError:
                pass  # an earlier session was killed between two rows, or another process was faster
            except ClaimLostError:
                taken = True
                continue
            stored += 1
            for name, value in row.notes.items():
                self.store.write_note(row.key.digest, name, value)
        if taken:
            self.board.display.note(TAKEN)
        return stored

    def collect(self, wanted: Container[Key]) -> None:
        """Store what workers finished for a driver that is gone."""
        for rows in list(self.outbox.all()):
            keys = [row.key for row in rows]
            if not all(key in wanted for key in keys):
                continue
            done = self.store.finished()
            mine = self.store.claim([key for key in keys if key not in done], self.owner)
            if not done.union(mine).issuperset(keys):  # a living process has them
                self.store.release(mine, self.owner)
                continue
            stored = self.keep(row for row in rows if row.key in mine)
            if stored:
                self.board.display.note(f"{stored} networks that workers had finished before: stored.")
            self.outbox.remove(keys)

    def _fail(self, task: Task, reason: str) -> None:
        shown = printable(" ".join(reason.split()))[:LONGEST]
        for key in task.keys:
            self.failed[key] = shown
            with suppress(FinishedError, ClaimLostError):
                self.store.finish(key, self.owner, "failed", results={"reason": shown}, seconds=0.0, device="")
        self.board.failed(task.title, len(task.keys), shown)
