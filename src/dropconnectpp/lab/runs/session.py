"""One sitting of one stack: trained from its start or its checkpoint as far as time allows, and then measured."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.stack import Stack, Unit
from dropconnectpp.lab.runs.checkpoints import Checkpoint, Checkpoints
from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import FinalStatus, Store

HEARTBEAT_S = 60.0
SMALLEST_CHUNK = 50
SAVING_SHARE = 0.03
"""Of the time that checkpoints may take: those of many wide networks are gigabytes."""
SAVING_BYTES_S = 2e8
"""Bytes that a checkpoint writes in a second, until one was written and tells."""


class Display:
    """What a run says as it goes; this one says nothing."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        """A stack starts or goes on after ``done`` epochs."""

    def within(self, done: float) -> None:
        """So many epochs are over, and a share of the next."""

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        """An epoch is over; means over the replicas."""

    def evaluating(self, what: str, done: int, total: int) -> None:
        """The final evaluation goes on."""

    def timing(self, done: int, total: int) -> None:
        """So many rounds of timing are over."""

    def group_finished(self) -> None:
        """The stack's rows are stored."""


class OutOfTimeError(Exception):
    """The time limit is near; what was trained is in the stack's checkpoint."""

    def __init__(self, needed_s: float | None = None) -> None:
        super().__init__()
        self.needed_s = needed_s
        """What the next thing would have taken, where this sitting did nothing at all and an earlier one tells."""


class ClaimsLostError(Exception):
    """Another process took the work, having heard nothing of this one for too long."""


@dataclass
class Progress:
    """What has been measured of each replica so far."""

    losses: list[list[float]]
    curves: list[list[dict[str, Any]]]
    seconds: float = 0.0
    epoch_s: float = 0.0
    evaluation_s: float = 0.0

    def diverged_at(self, r: int) -> int | None:
        """The first epoch whose loss is not finite."""
        return next((epoch for epoch, loss in enumerate(self.losses[r], 1) if not math.isfinite(loss)), None)

    @property
    def all_diverged(self) -> bool:
        """Whether there is nothing left to train."""
        return all(self.diverged_at(r) is not None for r in range(len(self.losses)))

    def result(self, r: int, measured: dict[str, Any]) -> tuple[FinalStatus, dict[str, Any]]:
        """Status and results of a replica; of one that diverged nothing that came after, which tells nothing."""
        at = self.diverged_at(r)
        if at is None and not math.isfinite(measured["nll"]):
            at = len(self.losses[r])  # the last step of all was one too many
        if at is None:
            return "done", {"losses": self.losses[r], "curve": self.curves[r], **measured}
        curve = [point for point in self.curves[r] if point["epoch"] < at]
        return "diverged", {"losses": self.losses[r][:at], "curve": curve, "diverged_at": at}


@dataclass
class Sitting:
    """Trains a stack; `train` then `measure`."""

    units: Sequence[Unit]
    dataset: Dataset
    device: torch.device
    checkpoints: Checkpoints
    display: Display
    deadline: float | None
    checkpoint_s: float
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.protocol = self.units[0].protocol
        self.keys = tuple(unit.key for unit in self.units)
        self.stack = Stack(self.units, self.dataset, self.device)
        self.stack.on_batch = lambda share: self.display.within(self.stack.epoch + share)
        self.progress = Progress([[] for _ in self.units], [[] for _ in self.units])
        self._saving_s = self.stack.state_bytes / SAVING_BYTES_S
        self._trained = self._unsaved = False  # in this sitting; since the last checkpoint

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from where another sitting stopped."""
        self.stack.load_state(checkpoint.state)
        self.progress = Progress(
            checkpoint.losses, checkpoint.curves, checkpoint.seconds, checkpoint.epoch_s, checkpoint.evaluation_s
        )

    @property
    def seconds(self) -> float:
        """Spent on the stack, over all sittings."""
        return self.progress.seconds + time.monotonic() - self.started

    def save(self) -> None:
        """Write a checkpoint."""
        progress, begun = self.progress, time.monotonic()
        self.checkpoints.write(
            Checkpoint(
                self.keys,
                self.stack.state(),
                progress.losses,
                progress.curves,
                self.seconds,
                progress.epoch_s,
                progress.evaluation_s,
                self.dataset.provenance.content,
            )
        )
        self._saving_s, self._unsaved = time.monotonic() - begun, False

    def train(self, alive: Callable[[], None]) -> None:
        """All epochs that are left; ``alive`` is called after each and may raise."""
        saved, wait_s = time.monotonic(), self.checkpoint_s
        epochs, progress = self.protocol.training.epochs, self.progress
        while self.stack.epoch < epochs and not progress.all_diverged:
            self._require(progress.epoch_s + (progress.evaluation_s if self._evaluates(self.stack.epoch + 1) else 0.0))
            begun = time.monotonic()
            losses = self.stack.train_epoch().tolist()
            progress.epoch_s = time.monotonic() - begun
            self._trained = self._unsaved = True
            for one, loss in zip(progress.losses, losses, strict=True):
                one.append(loss)
            accuracy = self._evaluate() if self._evaluates(self.stack.epoch) else None
            self.display.epoch(self.stack.epoch, sum(losses) / len(losses), accuracy)
            alive()
            if time.monotonic() - saved > wait_s:
                self.save()
                saved, wait_s = time.monotonic(), self._wait_s()

    def _wait_s(self) -> float:
        """Until the next checkpoint, by how long the last one took; 0, for each epoch, where ``checkpoint_s`` is."""
        return max(self.checkpoint_s, self._saving_s / SAVING_SHARE) if self.checkpoint_s else 0.0

    def _evaluates(self, epoch: int) -> bool:
        return epoch % self.protocol.evaluation.every == 0 or epoch == self.protocol.training.epochs

    def _evaluate(self) -> float:
        begun = time.monotonic()
        points = self._with_less_memory(lambda: evaluation.along_the_way(self.stack, self.protocol.evaluation))
        for curve, point in zip(self.progress.curves, points, strict=True):
            curve.append({"epoch": self.stack.epoch, **point})
        self.progress.evaluation_s = time.monotonic() - begun
        return float(sum(point["accuracy"] for point in points) / len(points))

    def measure(self, foreign: Dataset | None) -> list[dict[str, Any]]:
        """Everything measured at the end, for each replica."""
        if self._unsaved and self.seconds > self.checkpoint_s:
            self.save()  # the final evaluation may be long
        self._require(self.progress.evaluation_s * _final_share(self.protocol.evaluation), then_save=False)
        settings, report = self.protocol.evaluation, self.display.evaluating
        return self._with_less_memory(lambda: evaluation.final(self.stack, settings, foreign, report))

    def _require(self, needed_s: float, *, then_save: bool = True) -> None:
        """Stop here unless so much can be done in time, and then be saved."""
        needed_s = 1.1 * (needed_s + (self._saving_s if then_save else 0.0))
        if self.deadline is not None and time.monotonic() + needed_s > self.deadline:
            if self._unsaved:
                self.save()
            raise OutOfTimeError(None if self._trained or not self.progress.epoch_s else needed_s)

    def _with_less_memory(self, work: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Evaluate fewer pictures at a time until they fit: nothing that was trained is lost."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                # First a chunk at a time, then smaller ones.
                smaller = evaluation.CHUNK if self.stack.chunk is None else self.stack.chunk // 2
                if smaller < SMALLEST_CHUNK:
                    raise
            self.stack.chunk = smaller
            self.display.note(f"Evaluating {smaller} pictures at a time: more do not fit the device's memory.")
            gc.collect()
            torch.cuda.empty_cache()


def _final_share(settings: Evaluation) -> float:
    """How many times as long as an evaluation along the way the final one takes, roughly."""
    masks = max((*settings.samples, 0)) + settings.predictive_samples + 4 * len(settings.shares)
    return (1.0 + masks) / (1.0 + settings.curve_samples)


class Heartbeat:
    """Tells the store from a thread that this process lives, however long an epoch takes."""

    def __init__(self, path: Path, owner: Owner, keys: Sequence[tuple[str, int]]) -> None:
        self.path, self.owner, self.keys = path, owner, set(keys)
        self.lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                with Store.open(self.path) as store:  # a Store serves one thread
                    owned = store.heartbeat(self.owner)
            except StoreError:
                continue  # busy for once; the lease is ten times as long
            self.lost = not self.keys.issubset(owned)

    def check(self) -> None:
        """Raise if the work is no longer ours."""
        if self.lost:
            raise ClaimsLostError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
