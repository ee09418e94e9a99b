"""One session of one stack: trained from its start or its checkpoint as far as time allows, then measured."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from dropconnectpp.lab.config.corruptions import SEVERITIES
from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.config.pruning import Plan
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas import evaluation, judging, layered_deployment, layered_evaluation
from dropconnectpp.lab.replicas.layered_population import LayeredPopulation, judged_as_deployed
from dropconnectpp.lab.replicas.layered_stack import LayeredStack
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.population import PopulationStack, judged_points
from dropconnectpp.lab.replicas.stack import Stack
from dropconnectpp.lab.runs.checkpoints import Checkpoint, Checkpoints, require_alike
from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.predictions import Images, Logs
from dropconnectpp.lab.runs.progress import Display, History
from dropconnectpp.lab.runs.store import Store

HEARTBEAT_S = 60.0
SMALLEST_CHUNK = 50
SAVING_SHARE = 0.03
"""Share of the time that checkpoints may take: those of many wide networks are gigabytes."""
SAVING_BYTES_S = 2e8
"""Bytes that a checkpoint writes in a second, until one was written and measured."""


LAYERED_FINAL_SHARE = 3.0
"""Roughly how many times as long the final evaluation of a network given as layers takes as one along the way."""


def make_stack(units: Sequence[Unit], dataset: Dataset, device: torch.device) -> Stack | LayeredStack:
    """The stack that trains such networks: the paper's, those given as layers, or a population of them."""
    protocol = units[0].protocol
    if protocol.architecture.layered:
        return (LayeredStack if protocol.population is None else LayeredPopulation)(units, dataset, device)
    return (Stack if protocol.population is None else PopulationStack)(units, dataset, device)


class OutOfTimeError(Exception):
    """The time limit is near; what was trained is in the stack's checkpoint."""

    def __init__(self, needed_s: float | None = None) -> None:
        super().__init__()
        self.needed_s = needed_s
        """What the next step would have taken, where this session did nothing and an earlier one tells."""


class ClaimsLostError(Exception):
    """Another process took the work over, as it had not heard of this one for too long."""


@dataclass
class Session:
    """Trains a stack; `train` then `measure`."""

    units: Sequence[Unit]
    dataset: Dataset
    device: torch.device
    checkpoints: Checkpoints
    display: Display
    deadline: float | None
    checkpoint_s: float
    interruption: Interruption = field(default_factory=Interruption)
    keeps_predictions: bool = False
    """Whether what the networks predict of judged images is kept after `measure`."""
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.protocol = self.units[0].protocol
        self.keys = tuple(unit.key for unit in self.units)
        self.stack = make_stack(self.units, self.dataset, self.device)
        self.stack.on_batch = self._after_batch
        self.history = History([[] for _ in self.units], [[] for _ in self.units])
        self.deployments: list[layered_deployment.Deployment | None] = [None] * len(self.units)
        self._predictions: dict[Images, Logs] = {}
        self._saving_s = self.stack.state_bytes / SAVING_BYTES_S
        self._trained = self._unsaved = False  # in this session; since the last checkpoint

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from where another session stopped."""
        require_alike(checkpoint.state, self.stack.state())
        self._require_possible(checkpoint)
        self.stack.load_state(checkpoint.state)
        self.history = History(
            checkpoint.losses, checkpoint.curves, checkpoint.seconds, checkpoint.epoch_s, checkpoint.evaluation_s
        )

    def _require_possible(self, checkpoint: Checkpoint) -> None:
        epoch, batch = checkpoint.state["epoch"], checkpoint.state.get("batch", 0)
        if not 0 <= epoch <= self.protocol.training.epochs or batch < 0:
            raise ValueError(f"it is after epoch {epoch} and batch {batch}")
        if any(len(losses) != epoch for losses in checkpoint.losses):
            raise ValueError("it has losses of another number of epochs")

    def _after_batch(self, share: float) -> None:
        self.display.within(self.stack.epoch + share)
        self._trained = self._unsaved = True
        self._stop_if_asked()
        self._require(0.0)  # an epoch may take longer than all that is left

    def _stop_if_asked(self) -> None:
        """Write what no checkpoint holds and stop, if somebody asked to."""
        if self.interruption.requested:
            if self._unsaved:
                self.display.note("Stopping: writing a checkpoint. Ctrl-C once more stops at once.")
                self.save()
            self.interruption.check()

    @property
    def seconds(self) -> float:
        """Spent on the stack, over all sessions."""
        return self.history.seconds + time.monotonic() - self.started

    def save(self) -> None:
        """Write a checkpoint."""
        self.dataset.require_whole()  # what was trained on damaged images must not outlive them
        history, begun = self.history, time.monotonic()
        self.checkpoints.write(
            Checkpoint(
                self.keys,
                self.stack.state(),
                history.losses,
                history.curves,
                self.seconds,
                history.epoch_s,
                history.evaluation_s,
                self.dataset.provenance.content,
            )
        )
        self._saving_s, self._unsaved = time.monotonic() - begun, False

    def train(self, alive: Callable[[], None]) -> None:
        """Train all epochs that are left; ``alive`` is called after each and may raise."""
        saved, wait_s = time.monotonic(), self.checkpoint_s
        epochs, history = self.protocol.training.epochs, self.history
        while self.stack.epoch < epochs and not history.all_diverged:
            self._require(history.epoch_s + (history.evaluation_s if self._evaluates(self.stack.epoch + 1) else 0.0))
            begun, whole = time.monotonic(), not self.stack.batch
            losses = self.stack.train_epoch().tolist()
            if whole or not history.epoch_s:
                history.epoch_s = time.monotonic() - begun
            self._trained = self._unsaved = True
            for one, loss in zip(history.losses, losses, strict=True):
                one.append(loss)
            accuracy = self._evaluate() if self._evaluates(self.stack.epoch) else None
            self.display.epoch(self.stack.epoch, sum(losses) / len(losses), accuracy)
            alive()
            self._stop_if_asked()
            if time.monotonic() - saved > wait_s:
                self.save()
                saved, wait_s = time.monotonic(), self._wait_s()

    def _wait_s(self) -> float:
        """How long to wait for the next checkpoint, by how long the last one took; 0 where ``checkpoint_s`` is 0."""
        return max(self.checkpoint_s, self._saving_s / SAVING_SHARE) if self.checkpoint_s else 0.0

    def _evaluates(self, epoch: int) -> bool:
        return epoch % self.protocol.evaluation.every == 0 or epoch == self.protocol.training.epochs

    def _evaluate(self) -> float:
        begun = time.monotonic()
        points = self._with_less_memory(self._points)
        for curve, point in zip(self.history.curves, points, strict=True):
            curve.append({"epoch": self.stack.epoch, **point})
        if isinstance(self.stack, PopulationStack | LayeredPopulation):
            self.history.follow(self.stack.judge(points))
        self.history.evaluation_s = time.monotonic() - begun
        return float(sum(point["accuracy"] for point in points) / len(points))

    def _points(self) -> list[dict[str, Any]]:
        stack, settings = self.stack, self.protocol.evaluation
        if isinstance(stack, LayeredPopulation):
            return judged_as_deployed(stack, settings)
        if isinstance(stack, LayeredStack):
            return layered_evaluation.along_the_way(stack, settings)
        if isinstance(stack, PopulationStack):
            return judged_points(stack, settings)
        return evaluation.along_the_way(stack, settings)

    def _final(self, foreign: Dataset | None) -> list[dict[str, Any]]:
        stack, settings = self.stack, self.protocol.evaluation

        def report(what: str, done: int, total: int) -> None:
            self.display.evaluating(what, done, total)
            self._stop_if_asked()

        if isinstance(stack, LayeredStack):
            found = layered_evaluation.final(stack, settings, report)
            if isinstance(stack, LayeredPopulation):
                return [one | {"population": stack.members.told(r)} for r, one in enumerate(found)]
            # A trial counts by its error and what it keeps; tables show sizes and times of whole units alone.
            structured = any(isinstance(p := u.protocol.pruning, Plan) and p.structured for u in self.units)
            if self.protocol.training.holdout or not structured:
                return found
            self.deployments = layered_deployment.measure(stack)
            pairs = zip(found, self.deployments, strict=True)
            return [one if small is None else one | {"deployed": small.sizes} for one, small in pairs]
        found = evaluation.final(stack, settings, foreign, report)
        if isinstance(stack, PopulationStack):
            return [one | {"population": stack.members.told(r)} for r, one in enumerate(found)]
        if not settings.judged:
            return found
        judged = judging.judge(stack, settings, foreign, report, self._keep if self.keeps_predictions else None)
        return [one | {"judged": each} for one, each in zip(found, judged, strict=True)]

    def _keep(self, images: Images, logs: torch.Tensor) -> None:
        self._predictions[images] = logs.cpu().numpy()

    def predictions(self, r: int) -> dict[Images, Logs]:
        """What a replica predicts of each set of judged images; empty where nothing was kept."""
        return {images: logs[r] for images, logs in self._predictions.items()}

    def measure(self, foreign: Dataset | None) -> list[dict[str, Any]]:
        """Measure everything at the end, for each replica."""
        if self._unsaved and self.seconds > self.checkpoint_s:
            self.save()  # the final evaluation may be long
        layered = isinstance(self.stack, LayeredStack)
        times = LAYERED_FINAL_SHARE if layered else _final_share(self.protocol.evaluation)
        self._require(self.history.evaluation_s * times, then_save=False)
        return self._with_less_memory(lambda: self._final(foreign))

    def _require(self, needed_s: float, *, then_save: bool = True) -> None:
        """Stop here unless this much can be done in time, and then be saved."""
        needed_s = 1.1 * (needed_s + (self._saving_s if then_save else 0.0))
        if self.deadline is not None and time.monotonic() + needed_s > self.deadline:
            if self._unsaved:
                self.save()
            raise OutOfTimeError(None if self._trained or not self.history.epoch_s else needed_s)

    def _with_less_memory(self, work: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Evaluate fewer images at a time until they fit: nothing that was trained is lost."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                # First a chunk at a time, then smaller ones.
                smaller = evaluation.CHUNK if self.stack.chunk is None else self.stack.chunk // 2
                if smaller < SMALLEST_CHUNK:
                    raise
            self.stack.chunk = smaller
            self.display.note(f"Evaluating {smaller} images at a time: more do not fit the device's memory.")
            gc.collect()
            torch.cuda.empty_cache()


def _final_share(settings: Evaluation) -> float:
    """Roughly how many times as long the final evaluation takes as one along the way."""
    masks = max((*settings.samples, 0)) + settings.predictive_samples + 4 * len(settings.shares)
    share = (1.0 + masks) / (1.0 + settings.curve_samples)
    if not settings.judged:
        return share
    sets = 4 + len(SEVERITIES) * len(settings.corruptions)  # foreign images may be several times as many
    return share + sets * (1.0 + settings.predictive_samples / 10)  # most of a set's time goes to the convolutions


class Heartbeat:
    """Tells the store, from a thread, that this process lives, however long an epoch takes."""

    def __init__(self, path: Path, owner: Owner, keys: Iterable[tuple[str, int]] = ()) -> None:
        self.path, self.owner, self.keys = path, owner, set(keys)
        self._lost: set[tuple[str, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def watch(self, keys: Iterable[tuple[str, int]]) -> None:
        """Look out for more work, which is claimed already."""
        self.keys = self.keys.union(keys)
        self._lost = self._lost.difference(keys)

    def forget(self, keys: Iterable[tuple[str, int]]) -> None:
        """Look out no longer for work that is about to be finished or given back."""
        self.keys = self.keys.difference(keys)

    @property
    def lost(self) -> bool:
        """Whether some of the work is another's."""
        return not self.keys.isdisjoint(self._lost)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            watched = frozenset(self.keys)
            try:
                with Store.open(self.path) as store:  # a Store serves one thread
                    owned = store.heartbeat(self.owner)
            except StoreError:
                continue  # busy this once; the lease is ten times as long
            self._lost = set(watched.difference(owned))

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
