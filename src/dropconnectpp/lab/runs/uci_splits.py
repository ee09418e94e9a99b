"""Running the UCI benchmark: its splits as tasks, some at a time, and their rows.

Splits are the replicas of a `Regression`, so that a run resumes, merges and shows its evidence like any other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.config.uci import Regression, Setting
from dropconnectpp.lab.data import load
from dropconnectpp.lab.data.dataset import RegressionSet
from dropconnectpp.lab.runs import uci
from dropconnectpp.lab.runs.board import Board
from dropconnectpp.lab.runs.checkpoints import Checkpoints
from dropconnectpp.lab.runs.dispatch import Dispatcher
from dropconnectpp.lab.runs.engines.engine import Engine
from dropconnectpp.lab.runs.engines.here import Here
from dropconnectpp.lab.runs.evidence import commit, versions
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.outbox import Outbox
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.predictions import Predictions
from dropconnectpp.lab.runs.progress import Display
from dropconnectpp.lab.runs.storage import CHECKPOINTS, FINISHED, Storage
from dropconnectpp.lab.runs.store import Key, Store
from dropconnectpp.lab.runs.tasks import DataSets, Finished, Task, Workplace

SPLITS_AT_ONCE = 10
"""In a stack: what a kill can cost, and about what fits a cache."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A method on a set, and which of the published splits are wanted."""

    experiment: Regression
    data: RegressionSet
    splits: Sequence[int]


@dataclass(frozen=True, eq=False)
class SplitTask:
    """Splits whose networks train in one stack."""

    experiment: Regression
    data: RegressionSet
    splits: tuple[int, ...]
    chosen: Sequence[Setting] | None = None
    """Settings of an ensemble's members that are known already."""

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(Key(self.experiment.digest, split) for split in self.splits)

    @property
    def title(self) -> str:
        return f"{self.data.name}, {self.experiment.label}, splits {self.splits[0]} to {self.splits[-1]}"

    @property
    def epochs(self) -> int:
        return 1

    def run(self, at: Workplace) -> list[Finished]:
        begin = time.perf_counter()

        def told(what: str, done: int, total: int) -> None:
            at.display.steps(f"{self.title}: {what}", done, total)
            at.interruption.check()
            at.alive()

        with one_thread():
            results = uci.measure(self.experiment, self.data, self.splits, self.chosen, told)
        seconds = (time.perf_counter() - begin) / len(self.splits)
        return [
            Finished(
                key=key,
                status="done" if _finite(found) else "diverged",
                results=found,
                seconds=seconds,
                device="cpu",
                versions=versions(),
                provenance={"source": self.data.source, "content": self.data.content, "verified": False},
                commit=commit(),
            )
            for key, found in zip(self.keys, results, strict=True)
        ]


def _finite(found: Mapping[str, float]) -> bool:
    return all(math.isfinite(found[name]) for name in ("log_likelihood", "rmse", "held_out"))


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks of fifty units are faster on one thread than on several that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Splits:
    """The splits that are not done, some at a time."""

    plans: Sequence[Plan]
    store: Store
    owner: Owner
    deadline: float | None
    _out: set[Key] = field(default_factory=set)

    def next(self) -> Task | None:
        """The next splits, claimed; None after the deadline."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return None
        done = self.store.finished()
        for plan in self.plans:
            ensemble = plan.experiment.kind == "ensemble"
            todo = [key for key in self._wanted(plan, ensemble) if key not in done and key not in self._out]
            mine = self.store.claim(todo, self.owner, limit=SPLITS_AT_ONCE)
            if mine:
                self._out.update(mine)
                splits = tuple(key.replica for key in mine)
                chosen = uci.plain_choices(plan.experiment, self.store, splits) if ensemble else None
                return SplitTask(plan.experiment, plan.data, splits, chosen)
        return None

    def _wanted(self, plan: Plan, ensemble: bool) -> list[Key]:
        """The splits that can begin: an ensemble takes what plain networks choose, once they have."""
        waits = uci.plain_of(plan.experiment).digest if ensemble else ""
        return [Key(plan.experiment.digest, split) for split in plan.splits if (waits, split) not in self._out]

    def stored(self, task: Task) -> None:
        """The rows of a task are in the store."""
        self._out.difference_update(task.keys)

    def give_back(self, task: Task) -> None:
        """Take splits back that are not done."""
        self._out.difference_update(task.keys)

    def not_fitting(self, task: Task, message: str) -> DropConnectError | None:
        """Splits train on the CPU, whose memory nobody asks for."""
        return ProtocolError(f"{task.title} do not fit the memory: {message}")


def run(
    experiment: Regression,
    data: RegressionSet,
    store: Store,
    owner: Owner,
    splits: Sequence[int] | None = None,
    display: Display | None = None,
    deadline: float | None = None,
) -> bool:
    """Store the rows of one method on one set that are missing and that no other process makes.

    Args:
        experiment: the method and how it is trained.
        data: the set.
        store: where rows are kept; those that are there are not made again.
        owner: who makes them.
        splits: which of the published splits; None: all.
        display: hears of progress.
        deadline: `time.monotonic` after which no stack begins.

    Returns:
        Whether all rows are there.
    """
    plan = Plan(experiment, data, range(len(data.splits)) if splits is None else splits)
    return run_all([plan], store, owner, display=display, deadline=deadline)


def run_all(
    plans: Sequence[Plan],
    store: Store,
    owner: Owner,
    *,
    display: Display | None = None,
    deadline: float | None = None,
    engine: Engine | None = None,
    storage: Storage | None = None,
    interruption: Interruption | None = None,
) -> bool:
    """Store the missing rows of several methods and sets, some splits at a time on each worker.

    Args:
        plans: in the order in which they are begun.
        store: where rows are kept; those that are there are not made again.
        owner: who makes them.
        display: hears of progress.
        deadline: `time.monotonic` after which no stack begins.
        engine: where splits train; None: in this process.
        storage: where finished rows wait for the store; None: beside it.
        interruption: whether somebody asked to stop.

    Returns:
        Whether all rows are there.
    """
    out, cpu = store.path.parent, torch.device("cpu")
    place = Storage.given(None, out) if storage is None else storage
    shown = Display() if display is None else display
    workers: Engine = Here(cpu) if engine is None else engine
    asked = Interruption() if interruption is None else interruption
    wanted = [Key(store.add(plan.experiment), split) for plan in plans for split in plan.splits]
    board = Board(shown, out, owner, workers.name, several=workers.several)
    dispatcher = Dispatcher(store, owner, workers, board, asked, Outbox(place.place(FINISHED)))
    at = Workplace(
        cpu,
        DataSets(load),
        Checkpoints(place.place(CHECKPOINTS)),
        shown,
        deadline,
        math.inf,
        asked,
        Predictions(out / "predictions", shown.note),
    )
    try:
        dispatcher.collect(set(wanted))
        finished = len(store.finished().intersection(wanted))
        board.begin(len(wanted), len(wanted) - finished, finished)
        dispatcher.work(at, _Splits(plans, store, owner, deadline))
    finally:
        store.release(wanted, owner)
        board.close()
    dispatcher.require_success()
    return set(wanted) <= store.finished()
