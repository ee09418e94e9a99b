"""Build a report from a store: the page, the same tables and figures as files beside it, and plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from dropconnectpp.errors import check_choice
from dropconnectpp.lab.machine.user_paths import expanded
from dropconnectpp.lab.report import provenance, sentences, writing
from dropconnectpp.lab.report.demo_lines import demo_lines, demo_sentences
from dropconnectpp.lab.report.figures import drawings as all_drawings
from dropconnectpp.lab.report.render import latex, markdown, page, spreadsheets
from dropconnectpp.lab.report.render.drawing import figure_files
from dropconnectpp.lab.report.render.text import as_text
from dropconnectpp.lab.report.selection import (
    Notes,
    ReportedExperiment,
    Selected,
    plain_experiment,
    select_experiments,
)
from dropconnectpp.lab.report.shortlist import shortened
from dropconnectpp.lab.report.state import State, state_from
from dropconnectpp.lab.report.tables.paper import report_tables, tables_of
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.views.paper import TABLES, TableName, lay_out
from dropconnectpp.lab.runs.rows import DIVERGED_NLL
from dropconnectpp.lab.runs.store import MENDING, Content, Row, Store, StoredProtocol, listed

PAGE = "index.html"


def build(
    store_path: Path | str,
    out_dir: Path | str,
    *,
    command: str = "",
    figures: bool = True,
    refresh_s: int | None = None,
    pictures: bool | None = None,
) -> Path:
    """Write the report of a store into a folder and return the path of its page.

    The report is `index.html`, a page that needs nothing else, and beside it `tables.md`, `tables.tex` with a document
    that shows it, `tables/*.csv` and `figures/*.svg`, `.png` and `.pdf`. The same store gives the same bytes.

    Args:
        store_path: the store to read.
        out_dir: the folder to write to; it is made if it does not exist.
        command: shown as the command that made the results, instead of the commands in the store.
        figures: write `figures/`, which takes most of the time. The page has its figures in any case.
        refresh_s: the page reloads itself at this interval, in seconds.
        pictures: the former name of `figures`; it wins where it is given.

    Raises:
        StoreError: there is no store to read.
        ReportError: the folder cannot be written.
    """
    with Store.open(store_path, read_only=True) as store:
        content = store.content()
        state = state_from(store, content)
    commands = (command,) if command else provenance.commands(content.notes)
    folder = expanded(out_dir)
    found = report_files(
        select_experiments(content.rows, content.notes),
        content.notes,
        list(content.protocols.values()),
        commands=commands,
        warnings=warnings(content),
        state=state if state.shown else None,
        figures=figures if pictures is None else pictures,
        refresh_s=refresh_s,
    )
    writing.write(folder, found)
    return folder / PAGE


def report_files(
    selected: Selected,
    notes: Notes,
    protocols: Sequence[StoredProtocol],
    *,
    commands: Sequence[str] = (),
    warnings: Sequence[str] = (),
    state: State | None = None,
    figures: bool = True,
    refresh_s: int | None = None,
) -> dict[str, bytes]:
    """Every file of the report, by its path in the folder."""
    found = tables_of(selected, notes, protocols)
    views, drawings = lay_out(found), all_drawings(selected, found)
    summary, findings = sentences.summary(selected), sentences.findings(found["accuracy"], found["significance"])
    if found["demo"]:  # its last line is what is found of networks that were trained too short
        told = {one for _, lines in demo_sentences(found) for one in lines}
        findings = (*demo_sentences(found), *(one for one in findings if not _repeats(one[1], told)))
    if found["demo"] and not selected.experiments:
        summary = f"{sum(row['n'] for row in found['demo'])} networks of a demo."
    drawn = [drawing for kind in drawings.values() for drawing in kind]
    texts = {
        "tables.md": markdown.document(summary, findings, views.values(), warnings),
        "tables.tex": latex.tables(views.values()),
        "tables-document.tex": latex.document(drawn if figures else ()),
        **{f"tables/{name}.csv": spreadsheets.as_csv(table) for name, table in found.items() if table},
    }
    saved: dict[str, bytes] = {}
    for drawing in drawn if figures else ():
        saved |= {f"figures/{name}": content for name, content in figure_files(drawing).items()}
    behind = [*selected.experiments, *_timed_only(selected, found["time"], protocols), *_benchmarks(selected)]
    texts[PAGE] = page.render(
        summary=summary,
        findings=findings,
        tables=views,
        drawings=drawings,
        evidence=[provenance.evidence(experiment, notes) for experiment in behind],
        anchors={experiment.digest: provenance.anchor(experiment.digest) for experiment in behind},
        trials=selected.trials,
        commands=commands,
        warnings=warnings,
        state=state,
        files=sorted([*texts, *saved]),
        refresh_s=refresh_s,
    )
    return {**{name: text.encode(errors="replace") for name, text in texts.items()}, **saved}


def _benchmarks(selected: Selected) -> list[ReportedExperiment]:
    """The experiments of benchmarks, in the order of their rows."""
    digests = dict.fromkeys(row.key.digest for row in selected.benchmarks)
    return [
        plain_experiment(rows[0].protocol, rows)
        for digest in digests
        if (rows := [row for row in selected.benchmarks if row.key.digest == digest])
    ]


def _repeats(lines: Sequence[str], told: Iterable[str]) -> bool:
    """Whether all of these lines are ends of what has been told."""
    return all(any(one.endswith(line) for one in told) for line in lines)


def _timed_only(selected: Selected, time: Table, protocols: Iterable[StoredProtocol]) -> list[ReportedExperiment]:
    """Experiments that were timed but have no results."""
    timed = {row["digest"] for row in time} - {experiment.digest for experiment in selected.experiments}
    return [plain_experiment(protocol) for protocol in protocols if protocol.digest in timed]


def text(store_path: Path | str, only: Sequence[TableName] | None = None, *, brief: bool = False) -> str:
    """The tables of a store as plain text for a terminal.

    Args:
        store_path: the store to read.
        only: names of the tables to show (default: all).
        brief: where a data set has more than six methods, show the best five and the pairs of them that differ.

    Raises:
        ArgumentError: a name is not that of a table.
        StoreError: there is no store to read.
    """
    with Store.open(store_path, read_only=True) as store:
        content = store.content()
    tables = text_tables(content.rows, content.notes, content.protocols.values(), only, brief=brief)
    return "\n\n".join([tables, *warnings(content)])


def lines(store_path: Path | str) -> tuple[str, ...]:
    """What the demo of a store found, in a few lines; none where there was no demo."""
    with Store.open(store_path, read_only=True) as store:
        content = store.content()
    return demo_lines(report_tables(content.rows, content.notes, content.protocols.values()))


def warnings(content: Content) -> list[str]:
    """What a reader must know of a store's records: which are damaged and left out, and how many have no digest."""
    found = [f"Left out: {listed(content.damaged)}. {MENDING}."] if content.damaged else []
    if content.unverified:
        found.append(
            f"{content.unverified} of {len(content.finished)} finished networks were stored without a digest, by "
            "version 0.1: no change of their numbers would show."
        )
    if content.diverged_as_done:
        found.append(
            f"{content.diverged_as_done} of {len(content.finished)} finished networks have an NLL of "
            f"{DIVERGED_NLL:.0f} nats or more: by today's rule they diverged. They were stored as done, and the tables "
            "have them."
        )
    return found


def text_tables(
    rows: Iterable[Row],
    notes: Notes,
    protocols: Iterable[StoredProtocol] = (),
    only: Sequence[TableName] | None = None,
    *,
    brief: bool = False,
) -> str:
    """All tables, or those that ``only`` names, as aligned plain text for a terminal; ``brief`` as in `text`."""
    for name in only or ():
        check_choice("only", name, TABLES)
    rows = list(rows)
    found = report_tables(rows, notes, protocols)
    found, left_out = shortened(found) if brief else (found, ())
    shown = [table for name, table in lay_out(found).items() if only is None or name in only]
    if not shown:
        return select_experiments(rows, notes).absence
    return "\n\n".join([*(as_text(table) for table in shown), *(textwrap.fill(line, 80) for line in left_out)])
