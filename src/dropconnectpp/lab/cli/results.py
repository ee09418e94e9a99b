"""`dcpp results` and `report`: the commands that show stored results."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dropconnectpp.lab.cli.console import say, warn
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.runs.store import MENDING, Store, listed

if TYPE_CHECKING:
    from dropconnectpp.lab.report.views.paper import TableName

Format = Literal["table", "csv", "json"]
ResultsFolder = Annotated[Path, typer.Option("--out", help="Folder that holds the results.")]


def results(
    out: ResultsFolder = Path("dcpp-results"),
    format: Annotated[Format, typer.Option("--format", help="Output format.")] = "table",
) -> None:
    """List the finished networks of a folder, one per line.

    Damaged records are named and left out, and the command ends with exit code 1.

    Example:

      dcpp results --out dcpp-results --format csv > results.csv
    """
    from dropconnectpp.lab.runs.flat_rows import to_table, write_csv, write_json

    with Store.open(out / "results.sqlite", read_only=True) as store:
        content = store.content()
    rows = [row for row in content.rows if row.status != "running"]
    if format == "csv":
        write_csv(rows, sys.stdout, checks=True)
    elif format == "json":
        write_json(rows, sys.stdout, checks=True)
    else:
        table = Table(title=Text(printable(f"Results in {out}")), title_justify="left")
        names = ("digest", "label", "data", "replica", "status", "accuracy", "nll", "seconds")
        for name in names:
            number = name in ("replica", "accuracy", "nll", "seconds")
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for line in to_table(rows, checks=True):
            line["status"] += "" if line["has_digest"] else ", unverified"
            table.add_row(*(_cell(line.get(name)) for name in names))
        console = Console()
        console.width = console.width if console.is_terminal else 1000  # a pipe has no width
        console.print(table)
    if content.damaged:
        warn(f"{out / 'results.sqlite'}: {listed(content.damaged)}. Left out. {MENDING}.")
        raise typer.Exit(1)


def _cell(value: object) -> Text:
    return Text(f"{value:.4g}" if isinstance(value, float) else printable(str("" if value is None else value)))


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
            say(f"{time.strftime('%H:%M:%S')} {page}")
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
    "uci": ("uci_log_likelihood", "uci_rmse", "uci_tests"),
    "small-data": ("small_data", "small_data_tests"),
    "uncertainty": ("probabilities", "detection", "corruptions", "probability_tests"),
}
"""The tables that a command prints at its end; the others are on the page."""
ANY = ""
"""No experiment in particular: a demo's lines where there was one, else the tables of "table1"."""


def write_report(out: Path, what: str = ANY, folder: Path | None = None) -> Path:
    """Build the report, print the tables of the experiment ``what``, or a demo's lines, and return the page's path."""
    from dropconnectpp.lab import report as reports

    page = reports.build(out / "results.sqlite", folder or out)
    lines = reports.lines(out / "results.sqlite") if what in ("demo", ANY) else ()
    if lines:
        say("\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1)))
    else:
        say(reports.text(out / "results.sqlite", SHOWN.get(what, (*SHOWN["table1"], *SHOWN["uci"]))))
    say(f"The page with all tables and figures: {page}")
    return page


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        say(f"There is no browser here. Open this file in one: {page}")
