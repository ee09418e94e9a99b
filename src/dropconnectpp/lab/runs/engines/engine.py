"""What an engine is: it takes tasks, gives back how they ended, and tells which workers died."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.runs.tasks import Outcome, Task, Workplace


class EngineError(DropConnectError, RuntimeError):
    """Workers cannot be started or reached; the message says what to do."""


@dataclass(frozen=True)
class Worker:
    """A process that runs tasks."""

    name: str
    host: str
    pid: int
    device: str = ""

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} on {self.host})"


@dataclass(frozen=True)
class Began:
    """A worker has begun a task, or goes on with one whose worker died."""

    number: int
    worker: Worker


@dataclass(frozen=True)
class Told:
    """What a task says: a method of `Display` and its arguments."""

    number: int
    what: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Ended:
    """A task is over."""

    number: int
    outcome: Outcome


@dataclass(frozen=True)
class Died:
    """A worker is gone. Its task has to be submitted again, unless the engine does that itself."""

    number: int | None
    worker: Worker
    why: str
    again: bool = False
    """Whether the engine runs the task again, from its last checkpoint."""


Event = Began | Told | Ended | Died


Tell = Callable[[Event], None]
"""Hears of every event, in the thread that waits."""


class Engine(Protocol):
    """Where tasks run. `open`, then `submit` and `wait` by turns, at the end `close`."""

    name: str
    several: bool
    """Whether workers are processes of their own, so that tasks run side by side."""

    @property
    def workers(self) -> int:
        """How many tasks can run now."""

    @property
    def device_type(self) -> str:
        """What the workers compute on: cpu or cuda."""

    def free_bytes(self) -> int:
        """Memory that is free on a worker's GPU; the least of all of them."""

    def open(self, at: Workplace, tell: Tell) -> None:
        """Get ready for a run's tasks. Workers that were started for an earlier run go on."""

    def submit(self, number: int, task: Task) -> None:
        """Take a task; ``number`` is its name in events."""

    def wait(self, timeout_s: float) -> None:
        """Tell what happens, after at most so long if nothing does."""

    def stop(self) -> None:
        """Ask all workers to write a checkpoint; each task then ends as `Interrupted`."""

    def close(self) -> None:
        """End all workers at once."""
