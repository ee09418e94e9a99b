"""Publish a store: its rows as compressed CSV, and every table of its report as a file of Markdown.

    python tools/publish.py records/cifar10/results.jsonl.xz OUT --prefix cifar10 --experiment table1

writes `OUT/cifar10_rows.csv.gz` and files such as `OUT/cifar10_accuracy.md`. The same store gives the same bytes. A
store may hold several experiments: those that are named are published alone, the replicas that they ask for, in their
order of methods.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import record

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config.ensembles import BENCHMARK
from dropconnectpp.lab.config.notes import SPARSITY, WAYS
from dropconnectpp.lab.config.sparsity import CONTROLS
from dropconnectpp.lab.report import figures
from dropconnectpp.lab.report.formats import DASH, finite, fixed, setting
from dropconnectpp.lab.report.provenance import chosen_names
from dropconnectpp.lab.report.render import drawing, markdown
from dropconnectpp.lab.report.selection import (
    Notes,
    Selected,
    plain_experiment,
    select_experiments,
    selection_notes,
)
from dropconnectpp.lab.report.tables.connections import sparsity_notes
from dropconnectpp.lab.report.tables.paper import tables_of
from dropconnectpp.lab.report.tables.rows import Table, identity
from dropconnectpp.lab.report.views.cells import Cell, TableView, cells, grouped, method, title, trust_notes
from dropconnectpp.lab.report.views.paper import lay_out
from dropconnectpp.lab.runs.flat_rows import write_csv
from dropconnectpp.lab.runs.rows import settings_digest
from dropconnectpp.lab.runs.store import FINAL, Row, StoredProtocol

if TYPE_CHECKING:
    from dropconnectpp.lab.config.experiments import Experiment

LARGEST_RECORD = 5_000_000
"""Bytes of a file that belongs in the repository."""

CHOICES = (
    ("step_trials", "loss", "training loss", 4),
    ("rate_trials", "accuracy", "held-out accuracy, %", 2),
    ("logit_step_trials", "accuracy", "held-out accuracy, %", 2),
    ("together_trials", "accuracy", "held-out accuracy, %", 2),
)
"""Where trials are noted, by which score they are compared, the score in words, and its digits."""


@dataclass(frozen=True)
class Content:
    """What is published of a store."""

    rows: Sequence[Row]
    notes: Notes
    protocols: Sequence[StoredProtocol]
    wanted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Replicas by digest, in the experiments' order; empty where no experiment was named."""


def named(what: str, dataset: str) -> Experiment:
    """The experiment of a file, or Table 1 with more rows: DropConnect++ at its best alpha~ and beta~, and presets."""
    from dropconnectpp.lab.config.experiments import from_file, of_the_paper  # not above: they take torch
    from dropconnectpp.lab.config.method import PRESETS

    if what != "table1":
        if not what.endswith(".toml") and not Path(what).is_file():
            raise SystemExit(f"--experiment must be table1 or a TOML file, got {what!r}.")
        return from_file(Path(what))
    table = of_the_paper(what, dataset)
    fifth = of_the_paper(what, dataset, methods=["dropconnect++"], hyper="optimal")
    presets = of_the_paper(what, dataset, methods=list(PRESETS))
    return replace(table, protocols=(*table.protocols, *fifth.protocols, *presets.protocols))


def part(content: Content, experiments: Mapping[str, Experiment]) -> Content:
    """Only what belongs to the experiments, by name; what is not there yet is told on stderr."""
    resolved = {place: str(note.get("resolved")) for place, note in selection_notes(content.notes).items()}
    finished: dict[str, set[int]] = {}
    for row in content.rows:
        if row.status in FINAL:
            finished.setdefault(row.key.digest, set()).add(row.key.replica)
    wanted: dict[str, frozenset[int]] = {}
    written, ways = set(), set()
    for name, experiment in experiments.items():
        if experiment.sparsity is not None:
            chosen = _frontier(content, name, experiment, finished)
            for digest in chosen:
                wanted[digest] = wanted.get(digest, frozenset()) | frozenset(experiment.replicas)
            written |= {*chosen, *(protocol.digest for protocol in experiment.protocols)}
            continue
        for protocol in experiment.protocols:
            way = protocol.digest, WAYS[experiment.selection.together]
            digest = protocol.digest if protocol.complete else resolved.get(way, "")
            there = finished.get(digest, set()) & set(experiment.replicas)
            subject = f"warning: {name}: {protocol.method.label} on {protocol.data}"
            if not there:
                print(f"{subject} has no rows yet and is left out.", file=sys.stderr)
                continue
            if len(there) < experiment.repeats:
                print(f"{subject} has {len(there)} of {experiment.repeats} rows.", file=sys.stderr)
            wanted[digest] = wanted.get(digest, frozenset()) | frozenset(experiment.replicas)
            written |= {protocol.digest, digest}
            ways.add(way)
    if not wanted:
        raise SystemExit(f"The store has no rows of {', '.join(experiments)}.")
    ensembles = _ensembles(content, wanted, {one.ensembles for one in experiments.values()})
    wanted |= ensembles
    written |= ensembles.keys()
    places = {digest: place for place, digest in enumerate(wanted)}
    ended = [row for row in content.rows if row.status != "running"]
    rows = [row for row in ended if row.key.replica in wanted.get(row.key.digest, ())]
    # Not the notes that mark trials: what an experiment names is shown. Nor how other experiments chose.
    left_out = {place for place in content.notes if place[1] == "trial"} | (resolved.keys() - ways)
    notes = {place: note for place, note in content.notes.items() if place[0] in written and place not in left_out}
    notes = {place: note for place, note in notes.items() if _asked(place[1], note, experiments)}
    return Content(
        rows=sorted(rows, key=lambda row: (places[row.key.digest], row.key.replica)),
        notes=notes,
        protocols=[protocol for protocol in content.protocols if protocol.digest in written],
        wanted=wanted,
    )


def _ensembles(content: Content, wanted: Mapping[str, frozenset[int]], members: set[int]) -> dict[str, frozenset[int]]:
    """Ensembles, of as many members as an experiment asks for, whose members are all published: numbers by digest."""
    found = {}
    for protocol in content.protocols:
        count = protocol.settings.get("members")
        if protocol.settings.get("benchmark") != BENCHMARK or count not in members:
            continue
        replicas = wanted.get(settings_digest(protocol.settings.get("of")), frozenset())
        numbers = {replica // count for replica in replicas}
        found[protocol.digest] = frozenset(
            number for number in numbers if replicas.issuperset(range(number * count, (number + 1) * count))
        )
    return {digest: numbers for digest, numbers in found.items() if numbers}


def _asked(name: str, note: Any, experiments: Mapping[str, Experiment]) -> bool:
    """Whether an experiment asks for the share that a note is about, if it is about one."""
    if not name.startswith(SPARSITY):
        return True
    searches = [one.sparsity for one in experiments.values() if one.sparsity is not None]
    return any(note.get("keep") in (1.0, *search.keep) for search in searches)


def _frontier(content: Content, name: str, experiment: Experiment, finished: Mapping[str, set[int]]) -> list[str]:
    """Digests of what a search for few connections chose, and of its controls; what is not there is told on stderr."""
    assert experiment.sparsity is not None
    tried = {protocol.digest for protocol in experiment.protocols}
    sets = {(protocol.data, protocol.architecture.name) for protocol in experiment.protocols}
    found = []
    for note in sparsity_notes(content.notes):
        digest, keep, family = str(note.get("resolved")), note.get("keep"), str(note.get("family"))
        control = family in CONTROLS.values() and bool(experiment.sparsity.controls)
        if (note.get("data"), note.get("network")) not in sets or not (digest in tried or control):
            continue
        if keep not in (1.0, *experiment.sparsity.keep):
            continue
        there = finished.get(digest, set()) & set(experiment.replicas)
        if len(there) < experiment.repeats:
            subject = f"warning: {name}: {family} at {keep}"
            print(f"{subject} has {len(there)} of {experiment.repeats} rows.", file=sys.stderr)
        if there and digest not in found:
            found.append(digest)
    return found


def made(content: Content, kinds: Sequence[str], against: str | None = None) -> tuple[dict[str, str], dict[str, bytes]]:
    """The tables of the report that are not empty, and how settings were chosen, as Markdown by name; SVG by kind."""
    selected = select_experiments(content.rows, content.notes)
    if content.wanted:
        selected = _as_wanted(selected, content.wanted)
    found = tables_of(selected, content.notes, content.protocols)
    if content.wanted:
        places = {experiment.digest: place for place, experiment in enumerate(selected.experiments)}
        found["time"].sort(key=lambda row: places.get(row["digest"], len(places)))
    if against is not None:
        found["significance"] = [row for row in found["significance"] if row["other"] == against]
    laid = lay_out(found)
    chosen = _chosen(selected, content)
    if chosen.groups:
        laid["selection"] = chosen
    drawings = {str(kind): drawn for kind, drawn in figures.drawings(selected, found).items()}
    for kind in kinds:
        if len(drawings.get(kind, ())) != 1:
            raise SystemExit(f"There is no one figure {kind!r}; the kinds are {', '.join(drawings)}.")
    drawn = {kind: drawing.figure_files(drawings[kind][0]) for kind in kinds}
    svgs = {kind: content for kind, files in drawn.items() for name, content in files.items() if name.endswith(".svg")}
    return {name: markdown.section(table) for name, table in laid.items()}, svgs


def _as_wanted(selected: Selected, wanted: Mapping[str, frozenset[int]]) -> Selected:
    """Methods in the experiments' order, each missing the replicas that it should have."""
    columns, places = list(selected.columns()), list(wanted)
    shown = [replace(one, expected=wanted[one.digest]) for one in selected.experiments]
    shown.sort(key=lambda one: (columns.index(one.column), places.index(one.digest)))
    return replace(selected, experiments=tuple(shown))


def _chosen(selected: Selected, content: Content) -> TableView:
    """A row for each choice: what was chosen, and everything that was tried for it."""
    known = {protocol.digest: plain_experiment(protocol) for protocol in content.protocols}
    known |= {experiment.digest: experiment for experiment in selected.experiments}
    places = {experiment.digest: place for place, experiment in enumerate(selected.experiments)}
    notes = [note for note in selection_notes(content.notes).values() if note.get("resolved") in known]
    notes.sort(key=lambda note: places.get(note["resolved"], len(places)))
    table: Table = []

    def values(of: Mapping[str, Any], names: Sequence[str]) -> str:
        return " and ".join(setting(of.get(name)) for name in names)

    for note in notes:
        for where, score, by, digits in CHOICES:
            trials = note.get(where)
            if trials:
                names = chosen_names(trials[0])
                tried = [(values(one, names), fixed(finite(one.get(score)), digits)) for one in trials]
                row = {
                    **identity(known[note["resolved"]]),
                    "setting": " and ".join(name.replace("_", " ") for name in names),
                    "value": values(note, names),
                    "by": by,
                    "tried": ", ".join(f"{value}: {found}" for value, found in tried),
                    "n": ", ".join(dict.fromkeys(setting(one.get("n")) for one in trials)),
                }
                table += [row] if row not in table else []

    def make(row: Mapping[str, Any]) -> tuple[Cell, ...]:
        return cells(method(row), row["setting"], row["value"], row["by"], row["tried"], row["n"])

    notes_below = ["n: networks that were trained for each value; their mean is shown."]
    if any(f": {DASH}" in row["tried"] for row in table):
        notes_below.append(f"{DASH}: at least one of them diverged.")
    return TableView(
        name="selection",
        caption="How step sizes, rates and logit steps were chosen, without the test set",
        columns=("Method", "Setting", "Chosen", "By", "Tried", "n"),
        groups=grouped(table, title, make),
        notes=(*notes_below, *trust_notes(table)),
        words=(1, 3, 4),
    )


def publish(
    store: Path,
    folder: Path,
    prefix: str,
    experiments: Mapping[str, Experiment] | None = None,
    *,
    tables: Sequence[str] = (),
    figures: Sequence[str] = (),
    against: str | None = None,
) -> list[Path]:
    """Write the record of a store, or of some of its experiments by name, and return its files.

    All tables where none are named, and the figures that are.
    """
    stored = record.read(store)
    content = Content(stored.rows, stored.notes, stored.protocols)
    if experiments:
        content = part(content, experiments)
    rows = io.StringIO()
    write_csv(content.rows, rows)
    files = {f"{prefix}_rows.csv.gz": gzip.compress(rows.getvalue().encode(), mtime=0)}
    sections, svgs = made(content, figures, against)
    if absent := [name for name in tables if name not in sections]:
        raise SystemExit(f"There is no table {', '.join(absent)}; there are {', '.join(sections)}.")
    for name, section in sections.items():
        if not tables or name in tables:
            files[f"{prefix}_{name}.md"] = f"{section}\n".encode()
    files |= {f"{prefix}_{kind}.svg": svg for kind, svg in svgs.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, written in files.items():
        if len(written) > LARGEST_RECORD:
            raise SystemExit(f"{name} would have {len(written) / 1e6:.1f} MB, and a record has 5 at most.")
        (folder / name).write_bytes(written)
    return [folder / name for name in files]


def main() -> None:
    """Publish a store."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("store", type=Path, help="packed or not")
    options.add_argument("folder", type=Path, help="where to write; made where it is missing")
    options.add_argument("--prefix", required=True, help="what the files' names begin with")
    options.add_argument(
        "--experiment",
        nargs="+",
        action="extend",
        default=[],
        metavar="WHAT",
        help="table1 or a TOML file (default: all that the store has)",
    )
    options.add_argument("--dataset", default="cifar10", help="of table1 (default: cifar10)")
    options.add_argument("--tables", nargs="+", default=[], metavar="NAME", help="these tables alone (default: all)")
    options.add_argument("--figures", nargs="+", default=[], metavar="KIND", help="these figures too, as SVG")
    options.add_argument(
        "--against", metavar="METHOD", help="tests against this method alone; p stays adjusted for all"
    )
    given = options.parse_args()
    try:
        experiments = {what: named(what, given.dataset) for what in given.experiment}
        wanted = {"tables": given.tables, "figures": given.figures, "against": given.against}
        for path in publish(given.store, given.folder, given.prefix, experiments, **wanted):
            print(path)
    except DropConnectError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
