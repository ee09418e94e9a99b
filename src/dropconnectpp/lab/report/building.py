"""A store in, a report out: the page, and the same tables and figures in other forms beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dropconnectpp.lab.report import figures, provenance, sentences, writing
from dropconnectpp.lab.report.render import drawing, latex, markdown, page, spreadsheets
from dropconnectpp.lab.report.render.text import as_text
from dropconnectpp.lab.report.selection import Experiment, Notes, Selected, plain_experiment, select
from dropconnectpp.lab.report.tables.paper import report_tables, tables_of
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.views.paper import lay_out
from dropconnectpp.lab.runs.store import Row, Store, StoredProtocol

PAGE = "index.html"


def build(
    store_path: Path | str,
    out_dir: Path | str,
    *,
    command: str = "",
    pictures: bool = True,
    refresh_s: int | None = None,
) -> Path:
    """Write the report of a store into a folder and return the page's path.

    Written are `index.html`, a page that needs nothing else, and beside it `tables.md`, `tables.tex` with a document
    that shows it, `tables/*.csv` and `figures/*.svg`, `.png` and `.pdf`. The same store gives the same bytes.

    ``command`` is shown as what made the results, instead of the commands in the store. Without ``pictures`` there
    is no `figures/`, which takes most of the time; the page has its figures all the same. With ``refresh_s`` the page
    loads itself anew that often. Raises `ReportError` if the folder cannot be written.
    """
    with Store.open(store_path, read_only=True) as store:
        rows, notes, protocols = store.rows(), store.notes(), store.protocols()
    commands = (command,) if command else provenance.commands(notes)
    folder = Path(out_dir).expanduser()
    selected = select(rows, notes)
    found = files(selected, notes, protocols, commands=commands, pictures=pictures, refresh_s=refresh_s)
    writing.write(folder, found)
    return folder / PAGE


def files(
    selected: Selected,
    notes: Notes,
    protocols: Sequence[StoredProtocol],
    *,
    commands: Sequence[str] = (),
    pictures: bool = True,
    refresh_s: int | None = None,
) -> dict[str, bytes]:
    """Every file of the report, by its path in the folder."""
    found = tables_of(selected, notes, protocols)
    laid, drawings = lay_out(found), figures.drawings(selected, found)
    summary, findings = page.summary(selected), sentences.findings(found["accuracy"], found["significance"])
    drawn = [figure for kind in drawings.values() for figure in kind]
    texts = {
        "tables.md": markdown.document(summary, findings, laid.values()),
        "tables.tex": latex.tables(laid.values()),
        "tables-document.tex": latex.document(drawn if pictures else ()),
        **{f"tables/{name}.csv": spreadsheets.as_csv(table) for name, table in found.items() if table},
    }
    saved: dict[str, bytes] = {}
    for figure in drawn if pictures else ():
        saved |= {f"figures/{name}": content for name, content in drawing.files(figure).items()}
    behind = [*selected.experiments, *_timed_only(selected, found["time"], protocols)]
    texts[PAGE] = page.render(
        summary=summary,
        findings=findings,
        tables=laid,
        drawings=drawings,
        evidence=[provenance.evidence(experiment, notes) for experiment in behind],
        anchors={experiment.digest: provenance.anchor(experiment.digest) for experiment in behind},
        trials=selected.trials,
        commands=commands,
        files=sorted([*texts, *saved]),
        refresh_s=refresh_s,
    )
    return {**{name: text.encode(errors="replace") for name, text in texts.items()}, **saved}


def _timed_only(selected: Selected, time: Table, protocols: Iterable[StoredProtocol]) -> list[Experiment]:
    """Experiments that were timed and have no results."""
    timed = {row["digest"] for row in time} - {experiment.digest for experiment in selected.experiments}
    return [plain_experiment(protocol) for protocol in protocols if protocol.digest in timed]


def text(store_path: Path | str, only: Sequence[str] | None = None) -> str:
    """The tables of a store as plain text, for a terminal; ``only`` names some of `report_tables`."""
    with Store.open(store_path, read_only=True) as store:
        return text_tables(store.rows(), store.notes(), store.protocols(), only)


def text_tables(
    rows: Iterable[Row], notes: Notes, protocols: Iterable[StoredProtocol] = (), only: Sequence[str] | None = None
) -> str:
    """All tables, or those of the names given, as aligned plain text, for a terminal."""
    rows = list(rows)
    laid = lay_out(report_tables(rows, notes, protocols))
    shown = [table for name, table in laid.items() if only is None or name in only]
    return "\n\n".join(as_text(table) for table in shown) or select(rows, notes).absence
