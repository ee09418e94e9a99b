"""How far a stack of replicas has come: what is shown as it trains, and what has been measured of it so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dropconnectpp.lab.runs.rows import DIVERGED_NLL
from dropconnectpp.lab.runs.store import FinalStatus


class Display:
    """What a run says as it goes; this one says nothing."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def work(self, epochs: int) -> None:
        """How much will be trained, stack after stack: epochs of one network."""

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        """A stack starts, or goes on after ``done`` epochs."""

    def within(self, done: float) -> None:
        """How many epochs are over, with a share of the next."""

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        """An epoch is over; means over the replicas."""

    def evaluating(self, what: str, done: int, total: int) -> None:
        """The final evaluation goes on."""

    def steps(self, what: str, done: int, total: int) -> None:
        """What is being done now, of so many steps of which so many are over."""

    def timing(self, done: int, total: int) -> None:
        """How many rounds of timing are over."""

    def group_finished(self) -> None:
        """The stack's rows are stored."""

    def overall(self, title: str, done: float, total: float, left_s: float | None) -> None:
        """Where the whole of the work stands that several workers do, in epochs of one network."""


class Relay(Display):
    """Passes on what it is told, as the name of a method and its arguments."""

    def __init__(self, tell: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._tell = tell

    def note(self, text: str) -> None:
        self._tell("note", (text,))

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        self._tell("group", (title, replicas, epochs, done))

    def within(self, done: float) -> None:
        self._tell("within", (done,))

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        self._tell("epoch", (done, loss, accuracy))

    def evaluating(self, what: str, done: int, total: int) -> None:
        self._tell("evaluating", (what, done, total))

    def steps(self, what: str, done: int, total: int) -> None:
        self._tell("steps", (what, done, total))


@dataclass
class History:
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
        """Whether nothing is left to train."""
        return all(self.diverged_at(r) is not None for r in range(len(self.losses)))

    def follow(self, parents: Sequence[int]) -> None:
        """Give each replica the past of the one whose weights it has now."""
        self.losses = [list(self.losses[parent]) for parent in parents]
        self.curves = [list(self.curves[parent]) for parent in parents]

    def result(self, r: int, measured: dict[str, Any]) -> tuple[FinalStatus, dict[str, Any]]:
        """Status and results of a replica; where it diverged, only what came before."""
        at = self.diverged_at(r)
        if at is None and not measured["nll"] < DIVERGED_NLL:
            at = len(self.losses[r])  # the last steps of all were too many
        if at is None:
            return "done", {"losses": self.losses[r], "curve": self.curves[r], **measured}
        curve = [point for point in self.curves[r] if point["epoch"] < at]
        return "diverged", {"losses": self.losses[r][:at], "curve": curve, "diverged_at": at}
