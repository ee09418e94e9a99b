"""Running networks: claim replicas, cut them into stacks, give these to an engine, put the rows in the store.

A run that is killed loses what came after its last checkpoint; run again, it goes on and ends with the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.agenda import Agenda
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
from dropconnectpp.lab.runs.stack_sizes import CPU_GROUP, GPU_GROUP, LAYERED_GROUP, MEMORY_SHARE, bytes_of, fair_share
from dropconnectpp.lab.runs.storage import CHECKPOINTS, FINISHED, Storage
from dropconnectpp.lab.runs.store import FINAL, MENDING, Damage, Key, Store, listed
from dropconnectpp.lab.runs.tasks import DataSets, StackTask, Task, Workplace

__all__ = ["Outcome", "Runner", "commit", "versions"]

STORE = "results.sqlite"

Wanted = dict[Key, Unit]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    finished: int
    """Rows of the work asked for that are in the store now."""
    left: int
    stopped: bool
    """The time limit came first; the same command goes on from here."""


@dataclass
class Runner:
    """Runs work into one output folder."""

    out: Path
    device: torch.device
    load: Callable[[str], Dataset]
    display: Display = field(default_factory=Display)
    group: int | None = None
    """Most replicas of a stack; None: as many as fit."""
    deadline: float | None = None
    """`time.monotonic` by which to stop."""
    checkpoint_s: float = 60.0
    """Least time between checkpoints; longer where they take long to write."""
    interruption: Interruption = field(default_factory=Interruption)
    """Whether somebody asked to stop; a checkpoint is then written first."""
    keeps_predictions: bool = False
    """Whether what judged networks predict is kept, for ensembles of them."""
    engine: Engine | None = None
    """Where stacks train; None: in this process."""
    storage: Storage | None = None
    """Where checkpoints are; None: in the output folder."""

    def __post_init__(self) -> None:
        storage = Storage.given(None, self.out) if self.storage is None else self.storage
        self.checkpoints = Checkpoints(storage.place(CHECKPOINTS), self.display.note)
        self.outbox = Outbox(storage.place(FINISHED))
        self.predictions = Predictions(storage.predictions(self.out), self.display.note)
        self._storage = storage
        self.owner = Owner.here()
        self.sets = DataSets(self.load)
        self._engine: Engine = Here(self.device) if self.engine is None else self.engine
        self._told: set[Damage] = set()
        self._most = self.group or (CPU_GROUP if self._engine.device_type == "cpu" else GPU_GROUP)

    def store(self, *, read_only: bool = False) -> Store:
        """The folder's results."""
        if not read_only:
            self.out.mkdir(parents=True, exist_ok=True)
        return Store.open(self.out / STORE, read_only=read_only)

    def dataset(self, name: str) -> Dataset:
        """A data set, opened once."""
        return self.sets.open(name)

    def run(self, units: Sequence[Unit], after_stack: Callable[[], object] | None = None) -> Outcome:
        """Do the part of the work that is not done and that no other process does.

        ``after_stack`` is called whenever rows have been stored.
        """
        if self.keeps_predictions and self._engine.several and self._storage.remote:
            raise ProtocolError(
                f"--storage {self._storage.root}: what networks predict, for their ensembles, needs a folder. Give one."
            )
        self._after_stack = after_stack
        wanted: Wanted = {Key(*unit.key): unit for unit in units}
        with self.store() as store:
            for unit in {unit.protocol.digest: unit for unit in units}.values():
                store.add(unit.protocol)
                self._tell_damage(store, unit.protocol.digest)
            try:
                dispatcher = self._run(store, wanted)
            finally:
                store.release(list(wanted), self.owner)
            finished = len(store.finished() & wanted.keys())
        dispatcher.require_success()
        return Outcome(finished, len(wanted) - finished, dispatcher.out_of_time is not None)

    def _run(self, store: Store, wanted: Wanted) -> Dispatcher:
        board = Board(self.display, self.out, self.owner, self._engine.name, several=self._engine.several)
        dispatcher = Dispatcher(store, self.owner, self._engine, board, self.interruption, self.outbox)
        try:
            dispatcher.collect(wanted)
            self._agenda = Agenda(wanted, store, self.owner, self.checkpoints, self._size, self._task_of(store))
            left = [unit for key, unit in wanted.items() if key not in store.finished()]
            board.begin(len(wanted), sum(unit.protocol.training.epochs for unit in left), len(wanted) - len(left))
            dispatcher.work(self._workplace(), self)
        finally:
            board.close()
        if (late := dispatcher.out_of_time) is not None:
            self.display.note("The time limit is near: stopped. The same command goes on from here.")
            if late.needed_s is not None:
                self.display.note(f"What comes next takes about {late.needed_s:.0f} s without a stop.")
        return dispatcher

    def _workplace(self) -> Workplace:
        return Workplace(
            self.device,
            self.sets,
            self.checkpoints,
            self.display,
            self.deadline,
            self.checkpoint_s,
            self.interruption,
            self.predictions,
        )

    def _tell_damage(self, store: Store, digest: str) -> None:
        new = [one for one in store.content(digest).damaged if one not in self._told]
        self._told.update(new)
        if new:
            self.display.note(f"{store.path}: {listed(new)}. Left out; the rest goes on. {MENDING}.")

    # ------------------------------------------------------------------------------- choosing work

    def next(self) -> Task | None:
        """The next stack of this run, claimed."""
        return self._agenda.next()

    def give_back(self, task: Task) -> None:
        """Take a stack back that somebody else may train."""
        self._agenda.give_back(task)

    def stored(self, task: Task) -> None:
        """The rows of a stack are in the store."""
        self.checkpoints.forget(task.keys)
        self._agenda.done(task)
        if self._after_stack is not None:
            self._after_stack()

    def not_fitting(self, task: Task, message: str) -> DropConnectError | None:
        """Go on with smaller stacks, or say why that is impossible."""
        self._agenda.give_back(task)
        count, where = len(task.keys), self.device if not self._engine.several else "a worker's device"
        if self.checkpoints.exists(task.keys):  # it did fit once
            return ProtocolError(
                f"{count} replicas do not fit the memory of {where} now ({message}). Their checkpoint is "
                "kept: the same command goes on once there is room."
            )
        if isinstance(task, StackTask) and task.units[0].protocol.population is not None:
            return ProtocolError(
                f"a population of {count} is one stack, and does not fit the memory of {where}: {message}. Try fewer "
                "--members."
            )
        if count == 1:
            return ProtocolError(f"one replica does not fit the memory of {where}: {message}")
        self._most = max(1, count // 2)
        self.display.note(f"{count} replicas do not fit the device's memory: going on with {self._most} at once.")
        return None

    def _size(self, unit: Unit, left: int) -> int:
        """How many networks like this one the next stack may have, where so many of all kinds are not done."""
        if unit.protocol.population is not None:
            return unit.protocol.population.members  # its networks meet, so that it cannot be cut
        most = min(self._most_of(unit), self._fitting(unit))
        if self._engine.device_type == "cpu":
            # There torch computes the last few numbers of a tensor in another way than the others, and with them the
            # last digits of a row may depend on its stack: which must not depend on the number of workers.
            return most
        return fair_share(left, self._engine.workers, most)

    def _most_of(self, unit: Unit) -> int:
        """Most replicas at once: more of a network given as layers, where a step is short."""
        wide = self.group is None and self._engine.device_type == "cuda" and unit.protocol.architecture.layered
        return max(self._most, LAYERED_GROUP) if wide and self._most == GPU_GROUP else self._most

    def _fitting(self, unit: Unit) -> int:
        """How many replicas a device's memory should hold."""
        if self._engine.device_type == "cpu":
            return CPU_GROUP
        dataset = self.dataset(unit.protocol.data)
        return max(1, int(MEMORY_SHARE * self._engine.free_bytes() / bytes_of(unit.protocol, dataset)))

    def _task_of(self, store: Store) -> Callable[[list[Unit]], Task]:
        same: set[str] = set()

        def make(units: list[Unit]) -> Task:
            protocol = units[0].protocol
            dataset = self.dataset(protocol.data)
            new = {unit.protocol.digest for unit in units} - same
            _require_same_data(store, new, dataset)
            same.update(new)
            return StackTask(tuple(units), dataset.provenance.content, self.keeps_predictions)

        return make


def _require_same_data(store: Store, digests: Iterable[str], dataset: Dataset) -> None:
    """Replicas of one experiment must have seen the same images."""
    content = dataset.provenance.content
    for digest in digests:
        for row in store.content(digest).rows:
            seen = row.provenance.get("content", "")
            if row.status in FINAL and seen and content and seen != content:
                raise ProtocolError(
                    f"{dataset.name} holds other images than when replica {row.key.replica} was trained "
                    f"(content {content}, then {seen}). Bring the old ones back, or use another --out."
                )
