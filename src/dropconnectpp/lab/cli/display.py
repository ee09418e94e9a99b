"""How a run shows its progress: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dropconnectpp.lab.cli.console import counted
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.runs.progress import Display

LINE_EVERY_S = 20.0
"""Seconds between two plain lines of one stack, at least."""


@contextmanager
def run_display() -> Iterator[Display]:
    """The display that suits stderr: bars in a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console)
        return
    with make_progress(console) as progress:
        yield Bars(progress)


class Lines(Display):
    """For logs and pipes: a line when something begins or ends, and now and then in between."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._epochs = self._first = 0
        self._since = self._last = self._began = time.monotonic()

    def note(self, text: str) -> None:
        _print(self.console, text)

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        self._epochs, self._first, self._since = epochs, done, time.monotonic()
        self._last = self._began = self._since
        resumed = f", resumed after epoch {done}" if done else ""
        self.note(f"{title}: {counted(replicas, 'replica')}, {counted(epochs, 'epoch')}{resumed}")

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        now = self._began = time.monotonic()
        if now - self._last < LINE_EVERY_S and done < self._epochs:
            return
        self._last = now
        left = (now - self._since) / max(done - self._first, 1) * (self._epochs - done)
        self.note(f"  epoch {done}/{self._epochs}, {_figures(loss, accuracy)}, {left:.0f} s left")

    def within(self, done: float) -> None:
        if time.monotonic() - self._began < LINE_EVERY_S:
            return  # the line at the end of the epoch says more
        epoch = math.ceil(done) or 1
        self._now_and_then(f"  epoch {epoch}/{self._epochs}, {done - epoch + 1:.0%} done")

    def evaluating(self, what: str, done: int, total: int) -> None:
        self._now_and_then(f"  {what} {done:,}/{total:,}")

    def timing(self, done: int, total: int) -> None:
        self._now_and_then(f"  round {done}/{total}")

    def _now_and_then(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            self.note(text)


class Bars(Display):
    """For a terminal: one bar for each stack, with loss, accuracy and time left."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._task = progress.add_task("", total=None, figures="", visible=False)
        self._accuracy: float | None = None

    def note(self, text: str) -> None:
        _print(self.progress.console, text)

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        self.progress.remove_task(self._task)
        self._accuracy = None
        description = printable(f"{title}, {counted(replicas, 'replica')}")
        self._task = self.progress.add_task(description, total=epochs, completed=done, figures="")

    def within(self, done: float) -> None:
        self.progress.update(self._task, completed=done)

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        self._accuracy = self._accuracy if accuracy is None else accuracy  # the last accuracy stays visible
        self.progress.update(self._task, completed=done, figures=_figures(loss, self._accuracy))

    def evaluating(self, what: str, done: int, total: int) -> None:
        self.progress.update(self._task, figures=f"{what} {done:,}/{total:,}")

    def timing(self, done: int, total: int) -> None:
        self.progress.update(self._task, description="timing", completed=done, total=total, visible=True)

    def group_finished(self) -> None:
        self.progress.stop_task(self._task)


def _print(console: Console, text: str) -> None:
    """Print text literally: rich would take `:cat:` for an emoji and brackets for a style."""
    console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _figures(loss: float, accuracy: float | None) -> str:
    shown = f"loss {loss:.3f}" if math.isfinite(loss) else "loss not finite"
    return shown if accuracy is None else f"{shown}, accuracy {accuracy:.1f}%"


def make_progress(console: Console) -> Progress:
    """A progress display with the columns of `Bars`."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
