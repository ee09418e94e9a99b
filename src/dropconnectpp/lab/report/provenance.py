"""The evidence behind the numbers of a report: seeds, machine, versions, data, choices, settings and commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dropconnectpp.lab.config.notes import COMMANDS, TIMING_COMMAND
from dropconnectpp.lab.report.formats import finite, fixed, ranges, setting
from dropconnectpp.lab.report.selection import Notes, ReportedExperiment, resolutions, selection_notes


@dataclass(frozen=True)
class Evidence:
    """The evidence behind the numbers of one experiment."""

    anchor: str
    """The id of its place on the page."""
    title: str
    facts: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    trials: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...]
    """For each choice a heading, and the value, score and n of each trial."""
    settings: tuple[tuple[str, str], ...]


def anchor(digest: str) -> str:
    """The id of a protocol on the page: its digest, encoded where it is not safe as an id.

    >>> anchor("0411ab"), anchor('"><b>')
    ('protocol-0411ab', 'protocol-x223e3c623e')
    """
    safe = digest if digest.isascii() and digest.isalnum() else f"x{digest.encode().hex()}"
    return f"protocol-{safe}"


def commands(notes: Notes) -> tuple[str, ...]:
    """The commands in the notes, each once."""
    return tuple(sorted({str(value) for (_, name), value in notes.items() if name in COMMANDS}))


def evidence(experiment: ReportedExperiment, notes: Notes) -> Evidence:
    """Collect the evidence behind an experiment's numbers."""
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
        ("Official checksums", _verified(experiment)),
    ]
    without = [row for row in rows if not row.verified]
    facts += [("Stored without a digest", f"{len(without)} of {len(rows)}, by version 0.1")] if without else []
    files = _distinct(setting(row.provenance["files"]) for row in rows if row.provenance.get("files"))
    facts += [("Files", files)] if files else []
    choices = {
        place: note for place, note in selection_notes(notes).items() if note.get("resolved") == experiment.digest
    }
    timed, given = resolutions(notes), {}
    for (digest, name), note in notes.items():
        went = (digest, COMMANDS.get(name)) in choices
        if name == TIMING_COMMAND:
            went = timed.get(digest) == experiment.digest
        if went or digest == experiment.digest:
            given[digest, name] = note
    return Evidence(
        anchor=anchor(experiment.digest),
        commands=commands(given),
        title=f"{experiment.label} on {experiment.title}",
        facts=tuple((name, value or "not recorded") for name, value in facts),
        trials=tuple(part for note in choices.values() for part in _trials(note)),
        settings=tuple(_settings(experiment.settings)),
    )


def _distinct(values: Iterable[str]) -> str:
    return "; ".join(sorted({value for value in values if value}))


def _verified(experiment: ReportedExperiment) -> str:
    if experiment.data.startswith("folder:"):
        return "there are no official files: it is the user's own folder"
    answers = {True: "yes", False: "no"}
    return _distinct(answers.get(row.provenance.get("verified"), "") for row in experiment.finished)  # type: ignore[arg-type]


def _diverged(experiment: ReportedExperiment) -> str:
    epochs = {replica: finite(epoch) for replica, epoch in experiment.diverged.items()}
    return ", ".join(f"{r}" + (f" (epoch {epoch:g})" if epoch is not None else "") for r, epoch in epochs.items())


def _trials(note: Mapping[str, Any]) -> list[tuple[str, tuple[tuple[str, str, str], ...]]]:
    """How step size and rate were chosen, where they were."""
    kinds = (
        ("step_trials", "loss", "chosen by the mean training loss of the last epoch tried", 4),
        ("rate_trials", "accuracy", "chosen by the accuracy on held-out training data", 2),
        ("logit_step_trials", "accuracy", "chosen by the same accuracy", 2),
        ("together_trials", "accuracy", "chosen together by the accuracy on held-out training data", 2),
    )
    found = []
    for name, score, how, digits in kinds:
        trials = note.get(name)
        given = [trial for trial in (trials if isinstance(trials, list) else []) if isinstance(trial, Mapping)]
        if given:
            names = chosen_names(given[0])
            chosen = " and ".join(f"{one.replace('_', ' ')} {setting(note.get(one))}" for one in names)
            lines = tuple(
                (
                    ", ".join(setting(trial.get(one)) for one in names),
                    fixed(finite(trial.get(score)), digits),
                    setting(trial.get("n")),
                )
                for trial in given
            )
            found.append((f"{chosen[:1].upper()}{chosen[1:]}, {how}", lines))
    return found


def chosen_names(trial: Mapping[str, Any]) -> list[str]:
    """The settings that a trial varies."""
    return [name for name in ("step_size", "rate", "logit_step") if name in trial]


def _settings(settings: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for name in sorted(settings):
        value = settings[name]
        if isinstance(value, Mapping):
            yield from _settings(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", setting(value)
