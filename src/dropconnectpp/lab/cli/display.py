"""How a run shows its progress: a title above a bar in a terminal, plain lines elsewhere, both with the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from dropconnectpp.lab.cli.console import counted
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.runs.progress import Display

LINE_EVERY_S = 20.0
"""Seconds between two plain lines of one stack, at least."""


@contextmanager
def run_display() -> Iterator[Display]:
    """The display that suits stderr: a bar in a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console)
        return
    with make_progress(console) as progress:
        yield Bars(progress)


class Pace:
    """How long all the work of a command still takes, at the speed so far. It is counted in epochs of one network."""

    def __init__(self) -> None:
        self.begin(0.0)

    def begin(self, total: float) -> None:
        """So much work begins; none of it is done."""
        self._since = time.monotonic()
        self._total, self._finished, self._free = total, 0.0, 0.0
        self._replicas = self._epochs = 0
        self._at = 0.0

    def group(self, replicas: int, epochs: int, done: int) -> None:
        """A stack begins after ``done`` epochs, which take no time."""
        self._finished += self._replicas * self._epochs
        if self._finished >= self._total:  # nobody said how much work there is: take this stack for all of it
            self.begin(replicas * epochs)
        self._replicas, self._epochs, self._at = replicas, epochs, float(done)
        self._free += replicas * done

    def at(self, epochs: float) -> None:
        """So many epochs of the stack are over."""
        self._at = epochs

    @property
    def left_s(self) -> float | None:
        """Seconds until all is done; None while nothing is known."""
        done = self._finished + self._replicas * self._at
        spent = done - self._free
        return (time.monotonic() - self._since) / spent * max(self._total - done, 0.0) if spent > 0 else None


class Lines(Display):
    """For logs and pipes: a line when something begins or ends, and now and then in between."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._epochs = 0
        self._pace, self._rounds = Pace(), Pace()
        self._round: tuple[int, int] | None = None
        self._last = self._began = time.monotonic()

    def note(self, text: str) -> None:
        _print(self.console, text)

    def work(self, epochs: int) -> None:
        self._pace.begin(epochs)

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        self._epochs = epochs
        self._pace.group(replicas, epochs, done)
        self._last = self._began = time.monotonic()
        resumed = f", resumed after epoch {done}" if done else ""
        self.note(f"{title}: {counted(replicas, 'replica')}, {counted(epochs, 'epoch')}{resumed}")

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        now = self._began = time.monotonic()
        self._pace.at(done)
        if now - self._last < LINE_EVERY_S and done < self._epochs:
            return
        self._last = now
        self.note(f"  epoch {done}/{self._epochs}, {_figures(loss, accuracy)}{_left(self._pace)}")

    def within(self, done: float) -> None:
        self._pace.at(done)
        if time.monotonic() - self._began < LINE_EVERY_S:
            return  # the line at the end of the epoch says more
        epoch = math.ceil(done) or 1
        self._now_and_then(f"  epoch {epoch}/{self._epochs}, {done - epoch + 1:.0%} done{_left(self._pace)}")

    def evaluating(self, what: str, done: int, total: int) -> None:
        self._now_and_then(f"  {what} {done:,}/{total:,}")

    def timing(self, done: int, total: int) -> None:
        self._now_and_then(f"  round {done}/{total}{self._of_rounds(done, total)}")

    def steps(self, what: str, done: int, total: int) -> None:
        text = f"  {what}, {done}/{total}{self._of_rounds(done, total)}"
        if done in (0, total):
            self.note(text)
        else:
            self._now_and_then(text)

    def overall(self, title: str, done: float, total: float, left_s: float | None) -> None:
        share = f", {done / total:.0%} done" if total else ""
        self._now_and_then(f"  {title}{share}" + ("" if left_s is None else f", {left_text(left_s)}"))

    def _of_rounds(self, done: int, total: int) -> str:
        if self._round is None or self._round[1] != total or done < self._round[0]:  # a series begins
            self._rounds.begin(0.0)
            self._rounds.group(1, total, done)
        self._round = done, total
        self._rounds.at(done)
        return _left(self._rounds)

    def _now_and_then(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            self.note(text)


class Bars(Display):
    """For a terminal: the stack's title, and below it a bar with loss, accuracy and the time left in all."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._pace = Pace()
        self._accuracy: float | None = None
        self._several = False  # whether the bar is of all work that several workers do
        self._task = self._new("", None, 0, visible=False)

    def _new(self, title: str, total: float | None, done: float, *, visible: bool = True) -> TaskID:
        task = self.progress.add_task(printable(title), total=total, visible=visible, figures="", left="")
        self.progress.update(task, completed=done)
        return task

    def note(self, text: str) -> None:
        _print(self.progress.console, text)

    def work(self, epochs: int) -> None:
        self._pace.begin(epochs)

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        self._pace.group(replicas, epochs, done)
        self._accuracy = None
        self._next(f"{title}, {counted(replicas, 'replica')}", epochs, done)

    def _next(self, title: str, total: float, done: float) -> None:
        self.progress.remove_task(self._task)
        self._task = self._new(title, total, done)

    def within(self, done: float) -> None:
        self._pace.at(done)
        self.progress.update(self._task, completed=done, left=_left(self._pace, ""))

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        self._accuracy = self._accuracy if accuracy is None else accuracy  # the last accuracy stays visible
        self._pace.at(done)
        figures = _figures(loss, self._accuracy)
        self.progress.update(self._task, completed=done, figures=figures, left=_left(self._pace, ""))

    def evaluating(self, what: str, done: int, total: int) -> None:
        self.progress.update(self._task, figures=f"{what} {done:,}/{total:,}")

    def timing(self, done: int, total: int) -> None:
        self.steps("timing", done, total)

    def steps(self, what: str, done: int, total: int) -> None:
        task = next(task for task in self.progress.tasks if task.id == self._task)
        if task.total != total or done < task.completed:
            self._pace.begin(0.0)
            self._pace.group(1, total, done)
            self._next(what, total, done)
        self._pace.at(done)
        left = _left(self._pace, "")
        self.progress.update(self._task, description=printable(what), completed=done, figures="", left=left)

    def group_finished(self) -> None:
        self.progress.stop_task(self._task)

    def overall(self, title: str, done: float, total: float, left_s: float | None) -> None:
        if not self._several:
            self._several = True
            self._next(title, total, done)
        left = "" if left_s is None else left_text(left_s)
        self.progress.update(self._task, description=printable(title), total=total, completed=done, left=left)


def left_text(seconds: float) -> str:
    """The time left, as precise as it is known.

    >>> left_text(42.3), left_text(1200), left_text(9000)
    ('42 s left', '20 min left', '2 h 30 min left')
    """
    if seconds < 600:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min left"


def _left(pace: Pace, before: str = ", ") -> str:
    left_s = pace.left_s
    return "" if left_s is None else f"{before}{left_text(left_s)}"


def _print(console: Console, text: str) -> None:
    """Print text literally: rich would take `:cat:` for an emoji and brackets for a style."""
    console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _figures(loss: float, accuracy: float | None) -> str:
    shown = f"loss {loss:.3f}" if math.isfinite(loss) else "loss not finite"
    return shown if accuracy is None else f"{shown}, accuracy {accuracy:.1f}%"


class _TitledProgress(Progress):
    """Each task's title on a line of its own, so that the bar has the rest of the width."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            if task.visible:
                yield Text(task.description, no_wrap=True, overflow="ellipsis")
                yield self.make_tasks_table([task])


def make_progress(console: Console) -> Progress:
    """A progress display with the columns of `Bars`; the bar takes what the numbers leave."""
    return _TitledProgress(
        SpinnerColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[figures]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
        console=console,
        expand=True,
    )
