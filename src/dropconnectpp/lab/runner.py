"""Running work on this machine: claims replicas, trains them in stacks, checkpoints, and puts results in the store.

Killed at any moment it loses what came after the last checkpoint; run again it goes on, and ends with the same rows.
"""

from __future__ import annotations

import math
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dropconnectpp.lab import device as devices
from dropconnectpp.lab import evaluation
from dropconnectpp.lab.checkpoints import Checkpoint, Checkpoints
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.network import Shape
from dropconnectpp.lab.ownership import Owner
from dropconnectpp.lab.protocol import Evaluation, ProtocolError
from dropconnectpp.lab.store import FINAL, Store
from dropconnectpp.lab.training import Stack, Unit

CPU_GROUP = 8
"""Replicas of a stack on a CPU, where more at once gain nothing."""
GPU_GROUP = 64
STORE, CHECKPOINTS = "results.sqlite", "checkpoints"


class Display:
    """What a run says as it goes; this one says nothing."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        """A stack starts or goes on after ``done`` epochs."""

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        """An epoch is over; means over the replicas."""

    def evaluating(self, what: str, done: int, total: int) -> None:
        """The final evaluation goes on."""

    def group_finished(self) -> None:
        """The stack's rows are stored."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    finished: int
    """Rows of the work asked for that are in the store now."""
    left: int
    stopped: bool
    """The time limit came first; the same command goes on."""


class _OutOfTimeError(Exception):
    pass


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
    """`time.monotonic` at which to have stopped."""
    checkpoint_s: float = 60.0

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.out / CHECKPOINTS)
        self.owner = Owner.here()
        self._datasets: dict[str, Dataset] = {}
        self._most = self.group or (CPU_GROUP if self.device.type == "cpu" else GPU_GROUP)

    def store(self, *, read_only: bool = False) -> Store:
        """The folder's results."""
        return Store.open(self.out / STORE, read_only=read_only)

    def dataset(self, name: str) -> Dataset:
        """A data set, opened once."""
        if name not in self._datasets:
            self._datasets[name] = self.load(name)
        return self._datasets[name]

    def run(self, units: Sequence[Unit]) -> Outcome:
        """Do what of the work is not done yet and is nobody else's."""
        wanted = {unit.key: unit for unit in units}
        stopped = False
        with self.store() as store:
            for unit in {unit.protocol.digest: unit for unit in units}.values():
                store.add(unit.protocol)
            try:
                while group := self._resumed(store, wanted) or self._fresh(store, wanted):
                    self._train(store, *group)
            except _OutOfTimeError:
                stopped = True
                self.display.note("The time limit is near: stopped. The same command goes on from here.")
            finally:
                store.release(list(wanted), self.owner)
            finished = len(self._finished(store, wanted))
        return Outcome(finished, len(wanted) - finished, stopped)

    # ------------------------------------------------------------------------------- choosing work

    @staticmethod
    def _finished(store: Store, wanted: dict[tuple[str, int], Unit]) -> set[tuple[str, int]]:
        return {tuple(row.key) for row in store.rows() if row.status in FINAL} & set(wanted)  # type: ignore[return-value]

    def _resumed(
        self, store: Store, wanted: dict[tuple[str, int], Unit]
    ) -> tuple[list[Unit], Checkpoint | None] | None:
        """A stack that somebody left behind, if all of it is ours to finish."""
        for path, checkpoint in self.checkpoints.all():
            if not all(key in wanted for key in checkpoint.keys):
                continue
            done = self._finished(store, wanted)
            if done.issuperset(checkpoint.keys):
                path.unlink(missing_ok=True)
                continue
            mine = store.claim([key for key in checkpoint.keys if key not in done], self.owner)
            if done.union(mine).issuperset(checkpoint.keys):
                return [wanted[key] for key in checkpoint.keys], checkpoint
            store.release(mine, self.owner)
        return None

    def _fresh(self, store: Store, wanted: dict[tuple[str, int], Unit]) -> tuple[list[Unit], Checkpoint | None] | None:
        """The next replicas that nobody works on and that fit one stack."""
        done = self._finished(store, wanted)
        pending = [unit for key, unit in wanted.items() if key not in done]
        while pending:
            alike = [unit for unit in pending if pending[0].protocol.stackable(unit.protocol)]
            size = min(self._most, self._fitting(alike[0]))
            if mine := store.claim([unit.key for unit in alike], self.owner, limit=size):
                return [wanted[tuple(key)] for key in mine], None  # type: ignore[index]
            pending = [unit for unit in pending if unit not in alike]
        return None

    def _fitting(self, unit: Unit) -> int:
        """How many replicas the device's memory should hold."""
        if self.device.type == "cpu":
            return CPU_GROUP
        dataset = self.dataset(unit.protocol.data)
        shape = Shape(unit.protocol.architecture, dataset.shape[0], dataset.shape[1], len(dataset.classes))
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, int(0.8 * free / bytes_per_replica(shape, unit.protocol.training.batch_size)))

    # ------------------------------------------------------------------------------------- training

    def _train(self, store: Store, units: list[Unit], checkpoint: Checkpoint | None) -> None:
        try:
            self._train_stack(store, units, checkpoint)
        except torch.OutOfMemoryError as error:
            store.release([unit.key for unit in units], self.owner)
            self.checkpoints.forget([unit.key for unit in units])
            if len(units) == 1:
                raise ProtocolError(f"one replica does not fit the memory of {self.device}: {error}") from error
            self._most = max(1, len(units) // 2)
            torch.cuda.empty_cache()
            self.display.note(
                f"{len(units)} replicas do not fit the device's memory: going on with {self._most} at once."
            )

    def _train_stack(self, store: Store, units: list[Unit], checkpoint: Checkpoint | None) -> None:
        protocol = units[0].protocol
        dataset = self.dataset(protocol.data)
        foreign = self.dataset(protocol.evaluation.foreign) if protocol.evaluation.foreign else None
        if foreign is not None:
            evaluation.check_foreign(dataset.shape[1], foreign)  # now rather than after the training
        started = time.monotonic()
        stack = Stack(units, dataset, self.device)
        keys = tuple(unit.key for unit in units)
        progress = _Progress([[] for _ in units], [[] for _ in units], 0.0)
        if checkpoint is not None:
            stack.load_state(checkpoint.state)
            progress = _Progress(checkpoint.losses, checkpoint.curves, checkpoint.seconds)
        self.display.group(_title(units), len(units), protocol.training.epochs, stack.epoch)
        saved = time.monotonic()

        def save() -> None:
            spent = progress.seconds + time.monotonic() - started
            self.checkpoints.write(Checkpoint(keys, stack.state(), progress.losses, progress.curves, spent))

        clock = _Clock(self.deadline)
        while stack.epoch < protocol.training.epochs and not progress.all_diverged:
            self._require_time(clock.epoch_s, save)
            clock.start()
            losses = stack.train_epoch().tolist()
            for one, loss in zip(progress.losses, losses, strict=True):
                one.append(loss)
            accuracy = None
            if stack.epoch % protocol.evaluation.every == 0 or stack.epoch == protocol.training.epochs:
                points = evaluation.along_the_way(stack, protocol.evaluation)
                for curve, point in zip(progress.curves, points, strict=True):
                    curve.append({"epoch": stack.epoch, **point})
                accuracy = sum(point["accuracy"] for point in points) / len(points)
            clock.stop()
            self.display.epoch(stack.epoch, sum(losses) / len(losses), accuracy)
            store.heartbeat(self.owner)
            if time.monotonic() - saved > self.checkpoint_s:
                save()
                saved = time.monotonic()
        if clock.total_s > self.checkpoint_s:
            save()  # the final evaluation may be long
        self._require_time(clock.final_s(protocol.evaluation), save)
        results = evaluation.final(stack, protocol.evaluation, foreign, self.display.evaluating)
        self._finish(store, units, progress, results, dataset, progress.seconds + time.monotonic() - started)
        self.checkpoints.forget(keys)
        self.display.group_finished()

    def _require_time(self, needed_s: float, save: Callable[[], None]) -> None:
        if self.deadline is not None and time.monotonic() + needed_s > self.deadline:
            save()
            raise _OutOfTimeError

    def _finish(
        self,
        store: Store,
        units: list[Unit],
        progress: _Progress,
        results: list[dict[str, Any]],
        dataset: Dataset,
        seconds: float,
    ) -> None:
        done = {tuple(row.key) for row in store.rows() if row.status in FINAL}
        for r, (unit, result) in enumerate(zip(units, results, strict=True)):
            if unit.key in done:  # a sitting before this one was killed between two rows
                continue
            measured = {"losses": progress.losses[r], "curve": progress.curves[r]}
            at = progress.diverged_at(r)
            status = "done" if at is None else "diverged"
            measured |= result if at is None else {"diverged_at": at}
            store.finish(
                unit.key,
                self.owner,
                status,  # type: ignore[arg-type]
                results=measured,
                seconds=seconds / len(units),
                device=devices.describe(self.device),
                versions=versions(),
                provenance={"data": dataset.name, **asdict(dataset.provenance)},
                commit=commit(),
            )


@dataclass
class _Progress:
    losses: list[list[float]]
    curves: list[list[dict[str, Any]]]
    seconds: float

    def diverged_at(self, r: int) -> int | None:
        """The first epoch whose loss is not finite."""
        return next((epoch for epoch, loss in enumerate(self.losses[r], 1) if not math.isfinite(loss)), None)

    @property
    def all_diverged(self) -> bool:
        return all(self.diverged_at(r) is not None for r in range(len(self.losses)))


@dataclass
class _Clock:
    """How long things take, to tell what still fits before the deadline."""

    deadline: float | None
    epoch_s: float = 0.0
    total_s: float = 0.0
    _from: float = 0.0

    def start(self) -> None:
        self._from = time.monotonic()

    def stop(self) -> None:
        taken = time.monotonic() - self._from
        self.epoch_s = max(taken, 0.5 * self.epoch_s)
        self.total_s += taken

    def final_s(self, settings: Evaluation) -> float:
        """A guess at the final evaluation from an epoch that had one."""
        masks = max((*settings.samples, 0)) + settings.predictive_samples
        return 0.5 * self.epoch_s * (1.0 + masks / max(settings.curve_samples, 1))


def _title(units: Sequence[Unit]) -> str:
    labels = list(dict.fromkeys(unit.protocol.method.label for unit in units))
    shown = ", ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")
    return f"{units[0].protocol.data}: {shown}"


def bytes_per_replica(shape: Shape, batch: int) -> int:
    """Roughly what one replica of a stack needs on a GPU, training or being evaluated."""
    architecture = shape.architecture
    weights = sum(math.prod(size) for size in shape.parameters().values())
    maps, side, channels, windows = 0, shape.side, shape.channels, 0
    for count, after in zip(architecture.maps, architecture.sides(shape.side), strict=True):
        maps += count * (3 * side**2 + 2 * after**2)
        windows = max(windows, (channels + 3) // 4 * 4 * architecture.filter_size**2 * side**2)
        side, channels = after, count
    pictures = max(batch, evaluation.CHUNK)
    return 4 * 10 * weights + 2 * pictures * (maps + windows) + 4 * pictures * 3 * shape.dense[1]


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    names = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        names["cuda"] = torch.version.cuda
    try:
        names["dropconnectpp"] = metadata.version("dropconnectpp")
    except metadata.PackageNotFoundError:  # run from a source tree
        names["dropconnectpp"] = "source"
    return names


def commit() -> str:
    """The source's commit, where it is a checkout of this project."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"
