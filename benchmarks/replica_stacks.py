"""What `replica_step.py` is asked for, what it has found, and the laboratory's stack as it times it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Protocol, Training
from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split
from dropconnectpp.lab.replicas.network import Shape, Unit
from dropconnectpp.lab.replicas.stack import EAGER_STEPS, Stack
from dropconnectpp.lab.replicas.timing import median_seconds

OPTIMAL, LEARNED = "dropconnect++ (optimal)", "dropconnect++ (learned)"
METHODS = {
    "none": Method(kind="none"),
    "dropout": Method(kind="dropout", rate=0.5),
    "dropconnect": Method(kind="dropconnect", rate=0.5),
    OPTIMAL: Method(hyper="optimal"),
    LEARNED: Method(),
    "straight-through": Method(estimator="straight-through", hyper="optimal"),
    "local": Method(estimator="local", hyper="optimal"),
}
IMAGES = 8192
STEP_SIZE, EPSILON = 0.005, 1e-6


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    replicas: int
    growth: tuple[int, ...]
    hidden: tuple[int, ...]
    methods: tuple[str, ...]
    classes: int
    batch: int
    steps: int
    repeats: int
    precision: str
    peak: float
    skip: tuple[str, ...]

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    def shape(self, hidden: int) -> Shape:
        """The network that is timed."""
        return Shape(Architecture(hidden=hidden), 3, 32, self.classes)

    def median(self, run: Callable[[], object], steps: int) -> float:
        """Microseconds of one of the steps that a call takes."""
        return 1e6 * median_seconds(run, self.where, self.repeats) / steps


@dataclass
class Figures:
    """Microseconds by comparator, method and width; None where there is none, with a note that says why."""

    found: dict[tuple[str, str, int], float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: tuple[str, str, int]) -> float | None:
        return self.found.get(key)

    def measure(self, comparator: str, method: str, hidden: int, run: Callable[[], float]) -> None:
        """Keep what ``run`` gives; a failure is a note."""
        name = f"{comparator}, {method}, {hidden} units"
        try:
            self.found[comparator, method, hidden] = taken = run()
            print(f"{name}: {taken:.4g} us", file=sys.stderr, flush=True)
        except Exception as error:
            self.found[comparator, method, hidden] = None
            self.note(f"{name}: {reason(error)}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # a graph's memory is its own

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """An error in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0]}"[:200]


@cache
def random_images(classes: int) -> Dataset:
    """Random images of CIFAR's shape."""
    random = np.random.default_rng(0)

    def split(count: int) -> Split:
        return Split(random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), random.integers(0, classes, count))

    return Dataset(
        "random", split(IMAGES), split(128), tuple(map(str, range(classes))), "", "", Provenance("random", True)
    )


def warm_stack(settings: Settings, method: Method, replicas: int, hidden: int) -> Stack:
    """A stack that has trained on a few batches and, on a GPU, captured its step."""
    protocol = Protocol(
        method=method,
        architecture=Architecture(hidden=hidden),
        training=Training(step_size=STEP_SIZE, batch_size=settings.batch),
        precision=settings.precision,  # type: ignore[arg-type]
    )
    stack = Stack(
        [Unit(protocol, replica) for replica in range(replicas)], random_images(settings.classes), settings.where
    )
    stack.batches = stack.batches[: settings.steps]
    stack.train_epoch()
    while settings.gpu and int(stack.step) <= EAGER_STEPS:
        stack.train_epoch()
    return stack


def stack_step(settings: Settings, method: Method, replicas: int, hidden: int) -> float:
    """Microseconds per replica and step."""
    stack = warm_stack(settings, method, replicas, hidden)
    return settings.median(stack.repeat_batches, len(stack.batches) * replicas)
