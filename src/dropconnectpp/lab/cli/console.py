"""What commands print on the terminal: progress bars for the steps of a task, and counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dropconnectpp.lab.data.download import ProgressCallback
from dropconnectpp.lab.machine.terminal_text import printable


def say(text: str) -> None:
    """Print text of which a terminal obeys no character."""
    print(printable(text), flush=True)


def warn(text: str) -> None:
    """Say something on stderr."""
    Console(stderr=True).print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def step_display() -> Iterator[ProgressCallback]:
    """A progress bar in a terminal; elsewhere, one line for each new step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task, current = bar.add_task("", total=None), [""]

        def show(what: str, done: int, total: int | None) -> None:
            if [what] != current:
                current[:] = [what]
                bar.reset(task, description=escape(printable(what)), total=total)
            bar.update(task, completed=done, total=total)

        yield show


def _lines(console: Console) -> ProgressCallback:
    last: list[str] = []

    def show(what: str, done: int, total: int | None) -> None:
        if last != [what]:
            last[:] = [what]
            console.print(printable(what), markup=False, emoji=False, highlight=False)

    return show


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "replica"), counted(2, "replica")
    ('1 replica', '2 replicas')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
