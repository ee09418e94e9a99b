"""The report as one web page that opens from disk: nothing is loaded from anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from dropconnectpp.lab.report import figures
from dropconnectpp.lab.report.experiments import Experiment, Notes, Selected, select, selection_notes
from dropconnectpp.lab.report.layout import lay_out
from dropconnectpp.lab.report.number_formats import finite, fixed, ranges, setting
from dropconnectpp.lab.report.plain_text import as_text
from dropconnectpp.lab.report.tables import Table, report_tables, tables_of
from dropconnectpp.lab.store import Row, Store, StoredProtocol

FILE_NAME = "index.html"


@dataclass(frozen=True)
class Evidence:
    """How the numbers of one experiment were made."""

    title: str
    facts: tuple[tuple[str, str], ...]
    trials: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...]
    """Heading, then value, score and n of each trial."""
    settings: tuple[tuple[str, str], ...]


def build(store_path: Path | str, out_dir: Path | str, *, command: str = "") -> Path:
    """Write the report of a store as one self-contained page and return its path.

    ``command`` is shown as what made the results. The same store gives the same bytes.
    """
    with Store.open(store_path, read_only=True) as store:
        rows, notes, protocols = store.rows(), store.notes(), store.protocols()
    page = render(select(rows, notes), notes, protocols, command=command)
    folder = Path(out_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / FILE_NAME, folder / f".{FILE_NAME}.{os.getpid()}"
    try:
        part.write_text(page, encoding="utf-8", newline="\n")
        part.replace(path)  # whole or not at all: a browser may have the old one open
    finally:
        part.unlink(missing_ok=True)
    return path


def text(store_path: Path | str, only: Sequence[str] | None = None) -> str:
    """The tables of a store as plain text, for a terminal; ``only`` names some of `report_tables`."""
    with Store.open(store_path, read_only=True) as store:
        return text_tables(store.rows(), store.notes(), store.protocols(), only)


def text_tables(
    rows: Iterable[Row], notes: Notes, protocols: Iterable[StoredProtocol] = (), only: Sequence[str] | None = None
) -> str:
    """All tables, or those of the names given, as aligned plain text, for a terminal."""
    laid = lay_out(report_tables(rows, notes, protocols))
    shown = [table for name, table in laid.items() if only is None or name in only]
    return "\n\n".join(as_text(table) for table in shown) or "There are no results yet."


def render(selected: Selected, notes: Notes, protocols: Sequence[StoredProtocol], *, command: str = "") -> str:
    """The page's text."""
    found = tables_of(selected, notes, protocols)
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    columns = list(selected.columns().values())
    return environment.from_string(template).render(
        summary=summary(selected),
        tables=lay_out(found),
        sentences=_sentences(found["significance"]),
        convergence=_drawn(figures.convergence(c, f"convergence-{i}") for i, c in enumerate(columns)),
        keep_probabilities=_drawn(figures.keep_probabilities(c, f"keep-{i}") for i, c in enumerate(columns)),
        pruning=_drawn(figures.pruning(c, found["pruning"], f"pruning-{i}") for i, c in enumerate(columns)),
        evidence=[evidence(experiment, notes) for experiment in selected.experiments],
        trials=list(selected.trials),
        command=command,
    )


def _drawn(drawings: Iterable[figures.Drawing | None]) -> list[figures.Drawing]:
    return [drawing for drawing in drawings if drawing is not None]


def _sentences(rows: Table) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["title"], []).append(row["sentence"])
    return list(found.items())


def summary(selected: Selected) -> str:
    """What there is, in a sentence.

    >>> summary(Selected((), ()))
    'There are no results yet.'
    """
    experiments = selected.experiments
    done, diverged = sum(len(e.done) for e in experiments), sum(len(e.diverged) for e in experiments)
    if not done + diverged:
        return "There are no results yet."
    methods, sets = len({e.label for e in experiments}), list(dict.fromkeys(e.title for e in experiments))
    text = f"{_count(methods, 'method')} on {', '.join(sets)}: {_count(done, 'network')} trained to the end"
    return text + (f", {diverged} diverged." if diverged else ", none diverged.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --------------------------------------------------------------------------------------- the evidence


def evidence(experiment: Experiment, notes: Notes) -> Evidence:
    """Seeds, machine, versions, data, choices and settings behind an experiment's numbers."""
    rows = experiment.finished
    versions = _distinct(setting(row.versions) for row in rows if row.versions)
    facts = [
        ("Protocol", experiment.digest),
        ("Replicas", ranges(row.key.replica for row in rows) or "none"),
        ("Root seed", setting(experiment.settings.get("root_seed"))),
        ("Diverged", _diverged(experiment) or "none"),
        ("Device", _distinct(row.device for row in rows)),
        ("Versions", versions),
        ("Commit", _distinct(row.commit for row in rows)),
        ("Data", experiment.data),
        ("Data source", _distinct(setting(row.provenance["source"]) for row in rows if "source" in row.provenance)),
        ("Official checksums", _distinct(_verified(row.provenance) for row in rows)),
    ]
    files = _distinct(setting(row.provenance["files"]) for row in rows if row.provenance.get("files"))
    facts += [("Files", files)] if files else []
    choices = [note for note in selection_notes(notes).values() if note.get("resolved") == experiment.digest]
    return Evidence(
        title=f"{experiment.label} on {experiment.title}",
        facts=tuple((name, value or "not recorded") for name, value in facts),
        trials=tuple(part for note in choices for part in _trials(note)),
        settings=tuple(_settings(experiment.settings)),
    )


def _distinct(values: Iterable[str]) -> str:
    return "; ".join(sorted({value for value in values if value}))


def _verified(provenance: Mapping[str, Any]) -> str:
    return {True: "yes", False: "no"}.get(provenance.get("verified"), "")  # type: ignore[arg-type]


def _diverged(experiment: Experiment) -> str:
    epochs = {replica: finite(epoch) for replica, epoch in experiment.diverged.items()}
    return ", ".join(f"{r}" + (f" (epoch {epoch:g})" if epoch is not None else "") for r, epoch in epochs.items())


def _trials(note: Mapping[str, Any]) -> list[tuple[str, tuple[tuple[str, str, str], ...]]]:
    """How step size and rate were chosen, where there was a choice."""
    kinds = (
        ("step_trials", "step_size", "loss", "Step size {}, chosen by the mean training loss of the first epochs", 4),
        ("rate_trials", "rate", "accuracy", "Rate {}, chosen by the accuracy on held-out training data", 2),
    )
    found = []
    for name, value, score, heading, digits in kinds:
        trials = note.get(name)
        lines = tuple(
            (setting(trial.get(value)), fixed(finite(trial.get(score)), digits), setting(trial.get("n")))
            for trial in (trials if isinstance(trials, list) else [])
            if isinstance(trial, Mapping)
        )
        if lines:
            found.append((heading.format(setting(note.get(value))), lines))
    return found


def _settings(settings: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for name in sorted(settings):
        value = settings[name]
        if isinstance(value, Mapping):
            yield from _settings(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", setting(value)
