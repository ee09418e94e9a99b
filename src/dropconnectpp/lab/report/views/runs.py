"""Who works on what, and what failed, as a reader sees it: for `dcpp status`, and for the page while a run goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from dropconnectpp.lab.machine.terminal_text import printable
from dropconnectpp.lab.report.formats import DASH
from dropconnectpp.lab.report.views.cells import Cell, RowGroup, TableView, cells, count
from dropconnectpp.lab.runs.status import RunStatus, Work
from dropconnectpp.lab.runs.store import Holder, Row, Status

WORKERS = ("Worker", "Runs on", "Works on", "Networks", "Epochs", "So far", "For")
FAILED = ("Method", "Data", "Network", "Why")
ENDED: tuple[Status, ...] = ("done", "diverged", "failed")
LONGEST = 200
"""Letters of a reason that are shown."""


def run_lines(statuses: Sequence[RunStatus], rows: Sequence[Row], holders: Sequence[Holder]) -> list[str]:
    """Where each run of a folder stands, a line each; without one, what the store holds."""
    lines = [_line(one) for one in statuses]
    known = {one.owner for one in statuses}
    lines += [f"{one} holds {one.rows} networks and says nothing of them." for one in holders if one.name not in known]
    if lines:
        return lines
    states = Counter(row.status for row in rows)
    parts = [f"{states[state]:,} {state}" for state in ENDED if states[state]]
    return ["No run is going on here." + (f" Networks: {', '.join(parts)}." if parts else "")]


def _line(status: RunStatus) -> str:
    driver = "A run" if status.driver is None else f"The run of {status.driver}"
    if status.is_gone():
        return (
            f"{driver} is gone, {span_text(time.time() - status.updated)} ago, without a word. The same command goes "
            "on from its checkpoints."
        )
    working = sum(one.replicas for one in status.work)
    failed = sum(one.replicas for one in status.failures)
    parts = [f"{status.finished:,} finished", f"{working:,} in work", f"{status.waiting:,} waiting"]
    parts += [f"{failed:,} failed"] if failed else []
    left = "" if status.left_s is None else f", about {span_text(status.left_s)} left"
    died = f" {status.deaths} workers died." if status.deaths > 1 else " 1 worker died." if status.deaths else ""
    return f"{driver}: {status.total:,} networks, {', '.join(parts)}; {status.share:.0%} of the work done{left}.{died}"


def lay_out_runs(statuses: Sequence[RunStatus], rows: Sequence[Row]) -> list[TableView]:
    """The tables of this module that have rows."""
    found = []
    alive = [one for one in statuses if not one.is_gone()]
    working = tuple(_work(work) for one in alive for work in one.work)
    if working:
        columns = ("Worker", "Runs on", "Works on", "Networks", "Epochs", "So far", "For")
        caption = (
            f"Who works on what, at {time.strftime('%H:%M:%S', time.localtime(max(one.updated for one in alive)))}"
        )
        found.append(TableView("workers", caption, columns, (RowGroup("", working),), words=(1, 2, 5, 6)))
    failed = tuple(_failed(row) for row in rows if row.status == "failed")
    if failed:
        note = "The same command tries them again."
        found.append(TableView("failed", "What failed", FAILED, (RowGroup("", failed),), (note,), words=(1, 3)))
    return found


def _work(work: Work) -> tuple[Cell, ...]:
    where = f"process {work.pid} on {work.host}, {work.device}" if work.pid else DASH
    epochs = Cell(f"{work.done:.1f} of {work.epochs}", value=work.done)
    since = span_text(time.time() - work.since)
    shown = [printable(text) for text in (work.worker, where, work.title)]
    return cells(*shown, count(work.replicas), epochs, printable(work.figures) or DASH, since)


def _failed(row: Row) -> tuple[Cell, ...]:
    reason = printable(str(row.results.get("reason", "")))
    data = printable(str(row.protocol.settings.get("data", "")))
    return cells(printable(row.protocol.label), data, count(row.key.replica), reason[:LONGEST])


def span_text(seconds: float) -> str:
    """A time, as precise as it matters.

    >>> span_text(42.3), span_text(1200), span_text(9000)
    ('42 s', '20 min', '2 h 30 min')
    """
    if seconds < 600:
        return f"{max(seconds, 0.0):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
