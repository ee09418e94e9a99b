"""`dcpp results`, `report` and `store merge`: what reads results that are there."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dropconnectpp.lab.config.protocol import ProtocolError

store_app = typer.Typer(no_args_is_help=True, help="Work with stores of results.")
Out = Annotated[Path, typer.Option("--out", help="Folder of results and checkpoints; the same one goes on.")]


class Format(StrEnum):
    """How `results` writes."""

    table = "table"
    csv = "csv"
    json = "json"


def results(
    out: Out = Path("dcpp-results"),
    format: Annotated[Format, typer.Option("--format", help="How to write them.")] = Format.table,
) -> None:
    """Write the finished rows of a folder: one line a network.

    Example:

      dcpp results --out dcpp-results --format csv > results.csv
    """
    from dropconnectpp.lab.runs.flat_rows import to_table, write_csv, write_json
    from dropconnectpp.lab.runs.store import Store

    with Store.open(out / "results.sqlite", read_only=True) as store:
        rows = [row for row in store.rows() if row.status != "running"]
    if format is Format.csv:
        write_csv(rows, sys.stdout)
    elif format is Format.json:
        write_json(rows, sys.stdout)
    else:
        table = Table(title=Text(f"Results in {out}"), title_justify="left")
        names = ("digest", "label", "data", "replica", "status", "accuracy", "nll", "seconds")
        for name in names:
            number = name in ("replica", "accuracy", "nll", "seconds")
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for line in to_table(rows):
            cells = (line.get(name) for name in names)
            table.add_row(*(Text(f"{c:.4g}" if isinstance(c, float) else str("" if c is None else c)) for c in cells))
        console = Console()
        console.width = console.width if console.is_terminal else 1000  # a pipe has no edge
        console.print(table)


@store_app.command()
def merge(
    into: Annotated[Path, typer.Argument(help="The folder or store file that receives.", show_default=False)],
    others: Annotated[list[Path], typer.Argument(help="Folders or store files to add.", show_default=False)],
) -> None:
    """Join results from several machines without doubling a row.

    What differs in two folders is counted as a conflict, stays as the first has it, and gives exit code 1. Example:

      dcpp store merge all machine1 machine2
    """
    from dropconnectpp.lab.runs.store import Store

    if not into.is_file():
        make_folder(into)
    conflicts = 0
    with Store.open(into if into.is_file() else into / "results.sqlite") as store:
        for other in others:
            merged = store.merge(other / "results.sqlite" if other.is_dir() else other)
            conflicts += len(merged.conflicts)
            print(
                f"{other}: {len(merged.added)} rows added, {len(merged.already_there)} already there, "
                f"{len(merged.conflicts)} in conflict (ours stayed)"
            )
    if conflicts:
        raise typer.Exit(1)


def report(
    out: Out = Path("dcpp-results"),
    to: Annotated[
        Path | None, typer.Option("--to", help="Where to write the report (default: the folder of the results).")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it anew whenever results come in, until Ctrl-C.")
    ] = False,
) -> None:
    """Write the tables, the figures and the page of a folder anew, also while it is being filled.

    Examples:

      dcpp report --out dcpp-results --open

      dcpp report --out dcpp-results --watch
    """
    from dropconnectpp.lab import report as reports

    store, folder = out / "results.sqlite", to or out
    if watch:
        opened = not open_page

        def rebuild(refresh_s: int | None) -> None:
            nonlocal opened
            page = reports.build(store, folder, pictures=refresh_s is None, refresh_s=refresh_s)
            print(f"{time.strftime('%H:%M:%S')} {page}", flush=True)
            if not opened:
                _open(page)
            opened = True

        reports.watch(store, rebuild)
        return
    page = write_report(out, folder=folder)
    if open_page:
        _open(page)


# ------------------------------------------------------------------------------------------ the parts


def make_folder(path: Path) -> None:
    """Make a folder for results, or say why not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be made a folder ({error.strerror}). Give another path.") from error


SHOWN = {"table2": ("time", "prediction"), "table3": ("samples",), "figure1": ("accuracy", "shares")}
"""Which tables a command ends with; the others are on the page."""


def write_report(out: Path, what: str = "table1", folder: Path | None = None) -> Path:
    """Build the page, print what ``what`` ends with, and return the page's path."""
    from dropconnectpp.lab import report as reports

    page = reports.build(out / "results.sqlite", folder or out)
    print(reports.text(out / "results.sqlite", SHOWN.get(what, ("accuracy", "significance"))))
    print(f"The page with all tables and figures: {page}")
    return page


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print(f"There is no browser to open here. Open this file in one: {page}")
