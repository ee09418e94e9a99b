"""`dcpp status`: who works on what in a folder of results, and what failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dropconnectpp.lab.cli.console import say
from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.runs.store import Store

EVERY_S = 2.0


def status(
    out: Annotated[Path, typer.Option("--out", help="Folder that holds the results.")] = Path("dcpp-results"),
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it anew every two seconds, until no run is left.")
    ] = False,
) -> None:
    """Show who works on what in a folder of results: progress, time left, and what failed with its reason.

    Each run in the folder writes its state once a second, whichever its engine; the page of the report shows it too.

    Examples:

      dcpp status --out dcpp-results

      dcpp status --out dcpp-results --watch
    """
    Store.open(out / "results.sqlite", read_only=True).close()
    if not watch:
        say(_state(out)[0])
        return
    console = Console()
    if not console.is_terminal:
        _follow(out, say)
        return
    with Live(console=console, auto_refresh=False) as live:
        _follow(out, lambda text: live.update(Text(printable(text)), refresh=True))


def _follow(out: Path, show: Callable[[str], None]) -> None:
    while True:
        text, going = _state(out)
        show(text)
        if not going:
            return
        time.sleep(EVERY_S)


def _state(out: Path) -> tuple[str, bool]:
    """The state as text, and whether a run goes on."""
    from dropconnectpp.lab.report.render.text import as_text
    from dropconnectpp.lab.report.state import state_of

    found = state_of(out / "results.sqlite")
    return "\n\n".join(["\n".join(found.lines), *(as_text(table) for table in found.tables)]), found.going
