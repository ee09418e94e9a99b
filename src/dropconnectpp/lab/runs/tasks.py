"""Work for one worker: networks that train side by side, and the rows that come of them. Nothing here opens a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from dropconnectpp.lab import device as devices
from dropconnectpp.lab.config.notes import PASS
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.checkpoints import Checkpoint, Checkpoints
from dropconnectpp.lab.runs.evidence import commit, how, versions
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.predictions import Predictions
from dropconnectpp.lab.runs.progress import Display
from dropconnectpp.lab.runs.rows import FinalStatus, Key
from dropconnectpp.lab.runs.session import Session


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A row as a worker made it, for the store."""

    key: Key
    status: FinalStatus
    results: dict[str, Any]
    seconds: float
    device: str
    """With its threads, where it is a CPU."""
    versions: dict[str, str]
    provenance: dict[str, Any]
    commit: str
    notes: dict[str, Any] = field(default_factory=dict)
    """By name, for the row's protocol."""


class DataSets:
    """Data sets by name, each opened once and checked while networks train."""

    def __init__(self, load: Callable[[str], Dataset]) -> None:
        self._load = load
        self._opened: dict[str, Dataset] = {}

    def open(self, name: str) -> Dataset:
        """A data set; every byte of it is compared with its checksums in the background."""
        if name not in self._opened:
            self._opened[name] = self._load(name)
            self._opened[name].begin_check()
        return self._opened[name]

    def require_whole(self) -> None:
        """Wait for the checks; raise `DataError` if a set is not what was prepared."""
        for dataset in self._opened.values():
            dataset.require_whole()


def _nothing() -> None:
    pass


@dataclass
class Workplace:
    """What a task needs where it runs."""

    device: torch.device
    sets: DataSets
    checkpoints: Checkpoints
    display: Display
    deadline: float | None
    """`time.monotonic` by which to stop."""
    checkpoint_s: float
    interruption: Interruption
    predictions: Predictions
    alive: Callable[[], None] = _nothing
    """Called now and then; raises `ClaimsLostError` where the work went to another process."""


class Task(Protocol):
    """What a worker is given; it can be pickled."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The rows that it makes."""

    @property
    def title(self) -> str:
        """What it is called where progress is shown."""

    @property
    def epochs(self) -> int:
        """How much work each of its networks is."""

    def run(self, at: Workplace) -> list[Finished]:
        """Do the work; what was interrupted goes on from its checkpoint."""


@dataclass(frozen=True)
class StackTask:
    """Networks that train in one stack."""

    units: tuple[Unit, ...]
    content: str = ""
    """Digest of the images that the driver has; a worker that has others refuses."""
    keeps_predictions: bool = False
    """Whether what the networks predict is kept, for ensembles of them."""

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(Key(*unit.key) for unit in self.units)

    @property
    def title(self) -> str:
        labels = list(dict.fromkeys(unit.protocol.label for unit in self.units))
        shown = ", ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")
        return f"{self.units[0].protocol.data}: {shown}"

    @property
    def epochs(self) -> int:
        return self.units[0].protocol.training.epochs

    def run(self, at: Workplace) -> list[Finished]:
        protocol = self.units[0].protocol
        dataset = at.sets.open(protocol.data)
        if self.content and dataset.provenance.content != self.content:
            raise ProtocolError(
                f"{protocol.data} holds other images here than where the run was started (content "
                f"{dataset.provenance.content}, there {self.content}). Prepare the same on every machine."
            )
        foreign = at.sets.open(protocol.evaluation.foreign) if protocol.evaluation.foreign else None
        if foreign is not None:
            evaluation.check_foreign(dataset.shape[1], foreign)  # now rather than after the training
        session = self._session(at, dataset)
        at.display.group(self.title, len(self.units), self.epochs, session.stack.epoch)
        with at.interruption.postponed():
            session.train(at.alive)
            measured = session.measure(foreign)
            at.alive()
        at.sets.require_whole()
        for r, unit in enumerate(self.units):
            if predictions := session.predictions(r):
                at.predictions.write(unit.key, predictions)  # before the row: what is finished is not made again
        return [_finished(session, r, result) for r, result in enumerate(measured)]

    def _session(self, at: Workplace, dataset: Dataset) -> Session:
        """A session at the checkpoint's state or, where that is of other images or another program, at the start."""

        def begin() -> Session:
            return Session(
                self.units,
                dataset,
                at.device,
                at.checkpoints,
                at.display,
                at.deadline,
                at.checkpoint_s,
                at.interruption,
                self.keeps_predictions,
            )

        session = begin()
        checkpoint = self._checkpoint(at.checkpoints, dataset.provenance.content)
        if checkpoint is None:
            return session
        try:
            session.resume(checkpoint)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            at.checkpoints.refuse(session.keys, f"another version of dropconnectpp wrote it ({error!s:.60})")
            return begin()
        return session

    def _checkpoint(self, checkpoints: Checkpoints, content: str) -> Checkpoint | None:
        keys = [unit.key for unit in self.units]
        checkpoint = checkpoints.restore(keys)
        if checkpoint is not None and checkpoint.content != content:
            checkpoints.forget(keys)
            return None
        return checkpoint


def _finished(session: Session, r: int, measured: dict[str, Any]) -> Finished:
    unit, deployment = session.units[r], session.deployments[r]
    status, results = session.history.result(r, measured)
    return Finished(
        key=Key(*unit.key),
        status=status,
        results=results,
        seconds=session.seconds / len(session.units),
        device=devices.describe(session.device),
        versions=versions() | how(session.stack),
        provenance={"data": session.dataset.name, **asdict(session.dataset.provenance)},
        commit=commit(),
        notes={} if deployment is None else {f"{PASS}{unit.replica}": deployment.passes},
    )


# ------------------------------------------------------------------------------------------ how a task ends


@dataclass(frozen=True)
class Rows:
    """All rows of the task."""

    rows: Sequence[Finished]


@dataclass(frozen=True)
class OutOfTime:
    """The time limit came first; a checkpoint holds what was trained."""

    needed_s: float | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """The stack does not fit the device."""

    message: str


@dataclass(frozen=True)
class Interrupted:
    """The worker was asked to stop; a checkpoint holds what was trained."""


@dataclass(frozen=True)
class Lost:
    """Another process took the work over."""


@dataclass(frozen=True)
class Refused:
    """An error that the user has to mend: the run ends."""

    message: str


@dataclass(frozen=True)
class Failed:
    """An error of the program, or workers that died again and again; the run goes on without these networks."""

    message: str


Outcome = Rows | OutOfTime | OutOfMemory | Interrupted | Lost | Refused | Failed
