"""Running work on this machine: claim replicas, train them in stacks, put the results in the store.

A run that is killed loses what came after its last checkpoint; run again, it goes on and ends with the same rows.
"""

from __future__ import annotations

import gc
import math
import platform
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch

import dropconnectpp
from dropconnectpp.lab import device as devices
from dropconnectpp.lab.config.notes import PASS
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.kernels import launch_config
from dropconnectpp.lab.replicas import evaluation, layered_evaluation
from dropconnectpp.lab.replicas.layered_front import fitting_front
from dropconnectpp.lab.replicas.layered_stack import LayeredStack
from dropconnectpp.lab.replicas.network import Shape, Unit
from dropconnectpp.lab.replicas.stack import Stack
from dropconnectpp.lab.runs.checkpoints import Checkpoint, Checkpoints
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.predictions import Predictions
from dropconnectpp.lab.runs.progress import Display
from dropconnectpp.lab.runs.session import ClaimsLostError, Heartbeat, OutOfTimeError, Session
from dropconnectpp.lab.runs.store import FINAL, MENDING, Damage, Key, Store, listed

CPU_GROUP = 8
"""Replicas of a stack on a CPU, where more at once gain nothing."""
GPU_GROUP = 64
LAYERED_GROUP = 200
STORE, CHECKPOINTS, PREDICTIONS = "results.sqlite", "checkpoints", "predictions"


Wanted = dict[tuple[str, int], Unit]
Work = tuple[list[Unit], Checkpoint | None]


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

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.out / CHECKPOINTS, self.display.note)
        self.predictions = Predictions(self.out / PREDICTIONS, self.display.note)
        self.owner = Owner.here()
        self._datasets: dict[str, Dataset] = {}
        self._told: set[Damage] = set()
        self._most = self.group or (CPU_GROUP if self.device.type == "cpu" else GPU_GROUP)

    def store(self, *, read_only: bool = False) -> Store:
        """The folder's results."""
        if not read_only:
            self.out.mkdir(parents=True, exist_ok=True)
        return Store.open(self.out / STORE, read_only=read_only)

    def dataset(self, name: str) -> Dataset:
        """A data set, opened once."""
        if name not in self._datasets:
            self._datasets[name] = self.load(name)
            self._datasets[name].begin_check()
        return self._datasets[name]

    def run(self, units: Sequence[Unit], after_stack: Callable[[], object] | None = None) -> Outcome:
        """Do the part of the work that is not done and that no other process does.

        ``after_stack`` is called whenever rows have been stored.
        """
        wanted: Wanted = {unit.key: unit for unit in units}
        stopped = False
        with self.store() as store:
            for unit in {unit.protocol.digest: unit for unit in units}.values():
                store.add(unit.protocol)
                self._tell_damage(store, unit.protocol.digest)
            left = wanted.keys() - store.finished()
            self.display.work(sum(wanted[key].protocol.training.epochs for key in left))
            try:
                while group := self._resumed(store, wanted) or self._fresh(store, wanted):
                    self._train(store, *group)
                    if after_stack is not None:
                        after_stack()
                    self.interruption.check()
            except OutOfTimeError as error:
                stopped = True
                self.display.note("The time limit is near: stopped. The same command goes on from here.")
                if error.needed_s is not None:
                    self.display.note(f"What comes next takes about {error.needed_s:.0f} s without a stop.")
            finally:
                store.release(list(wanted), self.owner)
            finished = len(store.finished() & wanted.keys())
        return Outcome(finished, len(wanted) - finished, stopped)

    def _tell_damage(self, store: Store, digest: str) -> None:
        new = [one for one in store.content(digest).damaged if one not in self._told]
        self._told.update(new)
        if new:
            self.display.note(f"{store.path}: {listed(new)}. Left out; the rest goes on. {MENDING}.")

    # ------------------------------------------------------------------------------- choosing work

    def _resumed(self, store: Store, wanted: Wanted) -> Work | None:
        """A stack that another process left unfinished, if all of it is ours to finish."""
        for _, keys in self.checkpoints.all():
            if not all(key in wanted for key in keys):
                continue
            done = store.finished()
            if done.issuperset(keys):
                self.checkpoints.forget(keys)
                continue
            mine = store.claim([key for key in keys if key not in done], self.owner)
            if done.union(mine).issuperset(keys):
                units = [wanted[key] for key in keys]
                checkpoint = self.checkpoints.restore(keys)
                content = self.dataset(units[0].protocol.data).provenance.content
                if checkpoint is not None and checkpoint.content == content:
                    return units, checkpoint
                self.checkpoints.forget(keys)  # damaged, or of other images
            store.release(mine, self.owner)
        return None

    def _fresh(self, store: Store, wanted: Wanted) -> Work | None:
        """The next replicas that no process works on and that fit one stack."""
        done = store.finished()
        pending = [unit for key, unit in wanted.items() if key not in done]
        while pending:
            first = pending[0].protocol
            others = {id(unit.protocol): unit.protocol for unit in pending}  # thousands of replicas share a few
            stackable = {name for name, protocol in others.items() if first.stackable(protocol)}
            alike = [unit for unit in pending if id(unit.protocol) in stackable]
            size = min(self._most_of(alike[0]), self._fitting(alike[0]))
            if mine := store.claim([unit.key for unit in alike], self.owner, limit=size):
                return [wanted[(key.digest, key.replica)] for key in mine], None
            pending = [unit for unit in pending if id(unit.protocol) not in stackable]
        return None

    def _most_of(self, unit: Unit) -> int:
        """Most replicas at once: more of a network given as layers, where a step is short."""
        wide = self.group is None and self.device.type == "cuda" and unit.protocol.architecture.layered
        return max(self._most, LAYERED_GROUP) if wide and self._most == GPU_GROUP else self._most

    def _fitting(self, unit: Unit) -> int:
        """How many replicas the device's memory should hold."""
        if self.device.type == "cpu":
            return CPU_GROUP
        self._free_memory()  # what torch keeps of the last stack would count as used
        dataset = self.dataset(unit.protocol.data)
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, int(0.8 * free / bytes_of(unit.protocol, dataset)))

    @staticmethod
    def _free_memory() -> None:
        gc.collect()
        torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------- training

    def _train(self, store: Store, units: list[Unit], checkpoint: Checkpoint | None) -> None:
        keys = [unit.key for unit in units]
        try:
            self._train_stack(store, units, checkpoint)
            return
        except ClaimsLostError:
            self.display.note("Another process has taken this work over; going on with what is left.")
            return
        except torch.OutOfMemoryError as error:
            message = str(error)
        store.release(keys, self.owner)
        if self.checkpoints.path(keys).exists():  # it did fit once
            raise ProtocolError(
                f"{len(units)} replicas do not fit the memory of {self.device} now ({message}). Their checkpoint is "
                "kept: the same command goes on once there is room."
            )
        if len(units) == 1:
            raise ProtocolError(f"one replica does not fit the memory of {self.device}: {message}")
        self._most = max(1, len(units) // 2)
        self._free_memory()
        self.display.note(f"{len(units)} replicas do not fit the device's memory: going on with {self._most} at once.")

    def _train_stack(self, store: Store, units: list[Unit], checkpoint: Checkpoint | None) -> None:
        protocol = units[0].protocol
        dataset = self.dataset(protocol.data)
        self._require_same_data(store, units, dataset)
        foreign = self.dataset(protocol.evaluation.foreign) if protocol.evaluation.foreign else None
        if foreign is not None:
            evaluation.check_foreign(dataset.shape[1], foreign)  # now rather than after the training
        session = self._session(units, dataset, checkpoint)
        self.display.group(_title(units), len(units), protocol.training.epochs, session.stack.epoch)
        done = store.finished()  # an earlier session may have been killed between two rows
        pending = [unit.key for unit in units if unit.key not in done]
        with Heartbeat(store.path, self.owner, pending) as heartbeat, self.interruption.postponed():
            session.train(heartbeat.check)
            measured = session.measure(foreign)
            heartbeat.check()
        self._finish(store, session, measured, done)
        self.checkpoints.forget(session.keys)
        self.display.group_finished()

    def _session(self, units: list[Unit], dataset: Dataset, checkpoint: Checkpoint | None) -> Session:
        """A session at the checkpoint's state or, where that is of another program, at the start."""

        def begin() -> Session:
            return Session(
                units,
                dataset,
                self.device,
                self.checkpoints,
                self.display,
                self.deadline,
                self.checkpoint_s,
                self.interruption,
                self.keeps_predictions,
            )

        session = begin()
        if checkpoint is None:
            return session
        try:
            session.resume(checkpoint)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.checkpoints.refuse(session.keys, f"another version of dropconnectpp wrote it ({error!s:.60})")
            return begin()
        return session

    @staticmethod
    def _require_same_data(store: Store, units: Sequence[Unit], dataset: Dataset) -> None:
        """Replicas of one experiment must have seen the same images."""
        content = dataset.provenance.content
        for digest in {unit.protocol.digest for unit in units}:
            for row in store.content(digest).rows:
                seen = row.provenance.get("content", "")
                if row.status in FINAL and seen and content and seen != content:
                    raise ProtocolError(
                        f"{dataset.name} holds other images than when replica {row.key.replica} was trained "
                        f"(content {content}, then {seen}). Bring the old ones back, or use another --out."
                    )

    def _finish(self, store: Store, session: Session, measured: Sequence[dict[str, object]], done: set[Key]) -> None:
        for dataset in self._datasets.values():
            dataset.require_whole()
        for r, (unit, result) in enumerate(zip(session.units, measured, strict=True)):
            if unit.key in done:
                continue
            status, results = session.history.result(r, result)
            if predictions := session.predictions(r):
                self.predictions.write(unit.key, predictions)  # before the row: what is finished is not made again
            store.finish(
                unit.key,
                self.owner,
                status,
                results=results,
                seconds=session.seconds / len(session.units),
                device=devices.describe(self.device),
                versions=versions() | _how(session.stack),
                provenance={"data": session.dataset.name, **asdict(session.dataset.provenance)},
                commit=commit(),
            )
            deployment = session.deployments[r]
            if deployment is not None:
                store.write_note(unit.protocol.digest, f"{PASS}{unit.replica}", deployment.passes)


def _title(units: Sequence[Unit]) -> str:
    labels = list(dict.fromkeys(unit.protocol.label for unit in units))
    shown = ", ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")
    return f"{units[0].protocol.data}: {shown}"


def bytes_of(protocol: Protocol, dataset: Dataset) -> int:
    """Roughly what one replica of a stack needs on a GPU, training or being evaluated."""
    channels, side, classes, batch = *dataset.shape[:2], len(dataset.classes), protocol.training.batch_size
    if not protocol.architecture.layered:
        return bytes_per_replica(Shape(protocol.architecture, channels, side, classes), batch)
    given = protocol.architecture.shape(channels, side - 2 * protocol.normalisation.crop, classes)
    layers, images = given.weight_layers(), max(batch, layered_evaluation.CHUNK)
    if fitting_front(given) is not None and protocol.precision == "mixed":
        # Only pooled maps go to memory: each layer's input, its gradient, and what the kernels keep of it.
        maps = sum(one.inputs * (one.side_in**2 if one.convolution else 1) + 2 * one.units for one in layers)
        return 4 * (12 * sum(one.weights for one in layers) + 4 * images * maps) + 8 * len(dataset.train)
    # Windows, maps before and after a pool, and what backward makes of them.
    maps = sum(one.side_out**2 * (3 * one.fan_in * one.convolution + 4 * one.units) for one in layers)
    return 4 * (12 * sum(one.weights for one in layers) + images * maps) + 8 * len(dataset.train)


def bytes_per_replica(shape: Shape, batch: int) -> int:
    """Roughly what one replica of a stack needs on a GPU, training or being evaluated."""
    architecture = shape.architecture
    weights = sum(math.prod(size) for size in shape.parameters().values())
    maps, side, channels, windows = 0, shape.side, shape.channels, 0
    for count, after in zip(architecture.maps, architecture.sides(shape.side), strict=True):
        maps += count * (3 * side**2 + 2 * after**2)
        windows = max(windows, (channels + 3) // 4 * 4 * architecture.filter_size**2 * side**2)
        side, channels = after, count
    images = max(batch, evaluation.CHUNK)
    return 4 * 10 * weights + 2 * images * (maps + windows) + 4 * images * 3 * shape.dense[1]


def versions() -> dict[str, str]:
    """Versions of what made the numbers."""
    names = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        names["cuda"] = torch.version.cuda
    with suppress(ImportError):
        import triton

        names["triton"] = triton.__version__
    names["dropconnectpp"] = dropconnectpp.__version__
    return names


def _how(stack: Stack | LayeredStack) -> dict[str, str]:
    """What of the device's own choices can move the last digits."""
    tuned = launch_config.evidence(stack.device) if stack.fused else {}
    return {"convolutions": str(stack.input_dtype).removeprefix("torch."), **tuned}


@cache
def commit() -> str:
    """The source's commit, where it is a checkout of this project."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"
