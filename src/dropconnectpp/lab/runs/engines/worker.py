"""What a worker does with a task, whichever engine gave it, and all that it has to know for that."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.runs.checkpoints import Checkpoints
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.outbox import Outbox
from dropconnectpp.lab.runs.predictions import Predictions
from dropconnectpp.lab.runs.progress import Relay
from dropconnectpp.lab.runs.session import ClaimsLostError, OutOfTimeError
from dropconnectpp.lab.runs.storage import CHECKPOINTS, FINISHED, Storage
from dropconnectpp.lab.runs.tasks import (
    DataSets,
    Failed,
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

TELL_EVERY_S = 0.25
"""Seconds between two words on the same stack's progress."""
OFTEN = ("within", "evaluating", "steps")


@dataclass(frozen=True)
class Orders:
    """What workers are told of a run's folders and data, as it can be sent to them."""

    load: Callable[[str], Dataset]
    storage: Storage
    predictions: Path
    threads: int
    """Of the CPU; rows depend on them in their last digits."""


@dataclass(frozen=True)
class Limits:
    """What workers are told with each task."""

    deadline: float | None
    """`time.time` by which to stop."""
    checkpoint_s: float

    @classmethod
    def of(cls, at: Workplace) -> Limits:
        """Those of a driver, by a clock that all processes share."""
        return cls(None if at.deadline is None else time.time() + at.deadline - time.monotonic(), at.checkpoint_s)


class Station:
    """Where a worker works: what it opens once for all its tasks."""

    def __init__(self, orders: Orders, device: torch.device, interruption: Interruption) -> None:
        self.orders, self.device, self.interruption = orders, device, interruption
        self._sets = DataSets(orders.load)
        self._checkpoints = orders.storage.place(CHECKPOINTS)
        self._outbox = Outbox(orders.storage.place(FINISHED))
        torch.set_num_threads(orders.threads)

    def carry_out(self, task: Task, limits: Limits, tell: Callable[[str, tuple[Any, ...]], None]) -> Outcome:
        """Run a task; ``tell`` hears how it goes."""
        report = Report(tell, self.interruption)
        left_s = None if limits.deadline is None else limits.deadline - time.time()
        at = Workplace(
            self.device,
            self._sets,
            Checkpoints(self._checkpoints, report.note),
            report,
            None if left_s is None else time.monotonic() + left_s,
            limits.checkpoint_s,
            self.interruption,
            Predictions(self.orders.predictions, report.note),
        )
        return carry_out(task, at, self._outbox)


class Report(Relay):
    """A worker's display: it passes on what matters, and that not too often."""

    def __init__(self, tell: Callable[[str, tuple[Any, ...]], None], interruption: Interruption) -> None:
        super().__init__(self._now_and_then)
        self._send, self._interruption = tell, interruption
        self._last = 0.0

    def _now_and_then(self, what: str, arguments: tuple[Any, ...]) -> None:
        now = time.monotonic()
        if what in OFTEN and now - self._last < TELL_EVERY_S:
            return
        if what == "note" and self._interruption.requested:
            return  # that it stops is told once, by the driver
        self._last = now
        self._send(what, arguments)


def attempt(task: Task, at: Workplace) -> Outcome:
    """Run a task; what a run goes on after is an outcome, everything else an error."""
    try:
        return Rows(task.run(at))
    except OutOfTimeError as error:
        return OutOfTime(error.needed_s)
    except ClaimsLostError:
        return Lost()
    except torch.OutOfMemoryError as error:
        message = str(error)
    free_memory(at.device)  # only now, with the error gone, does nothing hold the stack
    return OutOfMemory(message)


def carry_out(task: Task, at: Workplace, outbox: Outbox) -> Outcome:
    """Run a task where nobody catches errors; its rows are on disk before anybody hears of them."""
    try:
        if at.interruption.requested:
            return Interrupted()
        rows = outbox.find(task.keys)
        if rows is not None:  # an earlier attempt died just before it could say so
            return Rows(rows)
        outcome = attempt(task, at)
        if isinstance(outcome, Rows):
            outbox.put(task.keys, outcome.rows)
            at.checkpoints.forget(task.keys)
        return outcome
    except KeyboardInterrupt:
        return Interrupted()
    except DropConnectError as error:
        return Refused(str(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Failed(f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})")
    finally:
        if at.device.type == "cuda":  # the next stack is cut to what is free; on a CPU this would only take time
            free_memory(at.device)


def free_memory(device: torch.device) -> None:
    """Give back what torch keeps of the last stack."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a GPU; 0 on a CPU, where nobody asks."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
