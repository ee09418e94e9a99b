"""`dcpp results`, `report` and `store merge`: the commands that read stored results."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.runs.store import Store

if TYPE_CHECKING:
    from dropconnectpp.lab.report.views.paper import TableName

Format = Literal["table", "csv", "json"]
ResultsFolder = Annotated[Path, typer.Option("--out", help="Folder that holds the results.")]
store_app = typer.Typer(no_args_is_help=True, help="Merge stores of results.")


def results(
    out: ResultsFolder = Path("dcpp-results"),
    format: Annotated[Format, typer.Option("--format", help="Output format.")] = "table",
) -> None:
    """List the finished networks of a folder, one per line.

    Example:

      dcpp results --out dcpp-results --format csv > results.csv
    """
    from dropconnectpp.lab.runs.flat_rows import to_table, write_csv, write_json

    with Store.open(out / "results.sqlite", read_only=True) as store:
        rows = [row for row in store.rows() if row.status != "running"]
    if format == "csv":
        write_csv(rows, sys.stdout)
    elif format == "json":
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
        console.width = console.width if console.is_terminal else 1000  # a pipe has no width
        console.print(table)


@store_app.command()
def merge(
    into: Annotated[Path, typer.Argument(help="Folder or store file that receives the rows.", show_default=False)],
    others: Annotated[list[Path], typer.Argument(help="Folders or store files to add.", show_default=False)],
) -> None:
    """Merge results from several machines without duplicating a row.

    A row that differs from the receiver's is a conflict: the receiver's is kept, and the command ends with exit code 1.

    Example:

      dcpp store merge all machine1 machine2
    """
    if not into.is_file():
        make_folder(into)
    conflicts = 0
    with Store.open(into if into.is_file() else into / "results.sqlite") as store:
        for other in others:
            merged = store.merge(other / "results.sqlite" if other.is_dir() else other)
            conflicts += len(merged.conflicts)
            print(
                f"{other}: {len(merged.added)} rows added, {len(merged.already_there)} already there, "
                f"{len(merged.conflicts)} in conflict (ours kept)"
            )
    if conflicts:
        raise typer.Exit(1)


def report(
    out: ResultsFolder = Path("dcpp-results"),
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder for the report (default: the folder of the results).")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Rebuild the report whenever new results arrive, until Ctrl-C.")
    ] = False,
) -> None:
    """Build the tables, the figures and the page of a folder of results, even while a run is filling it.

    Examples:

      dcpp report --out dcpp-results --open

      dcpp report --out dcpp-results --watch
    """
    store, folder = out / "results.sqlite", to or out
    Store.open(store, read_only=True).close()  # if there is none, say so before matplotlib and scipy are imported
    if watch:
        from dropconnectpp.lab import report as reports

        opened = not open_page

        def rebuild(refresh_s: int | None) -> None:
            nonlocal opened
            page = reports.build(store, folder, figures=refresh_s is None, refresh_s=refresh_s)
            print(f"{time.strftime('%H:%M:%S')} {page}", flush=True)
            if not opened:
                _open(page)
            opened = True

        reports.watch(store, rebuild)
        return
    page = write_report(out, folder=folder)
    if open_page:
        _open(page)


# ------------------------------------------------------------------------ shared with other commands


def make_folder(path: Path) -> None:
    """Make a folder for results, or raise an error that says why it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProtocolError(f"{path}: the folder cannot be made ({error.strerror}). Give another path.") from error


SHOWN: dict[str, tuple[TableName, ...]] = {
    "table1": ("accuracy", "significance"),
    "table2": ("time", "prediction"),
    "table3": ("samples",),
    "figure1": ("accuracy", "shares"),
    "sparsity": ("connections", "connections_tests", "units"),
}
"""The tables that a command prints at its end; the others are on the page."""


def write_report(out: Path, what: str = "table1", folder: Path | None = None) -> Path:
    """Build the report, print the tables of the experiment ``what``, and return the page's path."""
    from dropconnectpp.lab import report as reports

    page = reports.build(out / "results.sqlite", folder or out)
    print(reports.text(out / "results.sqlite", SHOWN.get(what, SHOWN["table1"])))
    print(f"The page with all tables and figures: {page}")
    return page


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print(f"There is no browser here. Open this file in one: {page}")
