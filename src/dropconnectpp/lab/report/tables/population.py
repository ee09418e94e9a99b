"""Populations as plain data: what each found, what fresh networks made of it, what it cost, and its whole history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dropconnectpp.lab.config.notes import POPULATION
from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.selection import Notes, ReportedExperiment
from dropconnectpp.lab.report.statistics import Comparison, holm, welch
from dropconnectpp.lab.report.tables.rows import ByReplica, Table, compared, identity, plain, statistic

SCORE = "score"
"""What the history calls the judge's number, among the names of settings."""
FOUND = "found"
"""What the history calls the schedule that is replayed, among the numbers of members."""
RANKED_BY = "product"
"""How weights are ranked where the judge looks at few of them."""


def population_tables(experiments: Sequence[ReportedExperiment], notes: Notes) -> dict[str, Table]:
    """The tables of this module, by name."""
    found = [(e, note) for e in experiments if isinstance(note := notes.get((e.digest, POPULATION)), Mapping)]
    return {
        "population": [_row(experiment, note) for experiment, note in found],
        "population_tests": _tests(experiments, [experiment.digest for experiment, _ in found]),
        "population_history": [row for experiment, note in found for row in _history(experiment, note)],
    }


def _row(experiment: ReportedExperiment, note: Mapping[str, Any]) -> dict[str, Any]:
    keep, line = finite(note.get("keep")), _lists(note.get("line"))
    seconds = [row.seconds or 0.0 for row in experiment.finished]
    return {
        **identity(experiment),
        "members": int(finite(note.get("members")) or 0),
        "every": int(finite(note.get("every")) or 0),
        "keep": keep,
        "held_out": finite(note.get("score")),
        **statistic(experiment.values("accuracy").values()),
        "kept": statistic(_kept(experiment, keep)),
        "first": {name: values[0] for name, values in line.items() if values},
        "last": {name: values[-1] for name, values in line.items() if values},
        "population_s": finite(note.get("seconds")),
        "replay_s": sum(seconds),
    }


def _tests(experiments: Sequence[ReportedExperiment], found: Sequence[str]) -> Table:
    """Each schedule that was found against the same kind of method with settings that stay, Holm over all of them."""
    table: Table = []
    for one in (e for e in experiments if e.digest in found):
        for other in experiments:
            alike = (other.column, other.kind) == (one.column, one.kind)
            if not alike or other.digest in found or "by_epoch" in other.settings:
                continue
            samples = one.values("accuracy"), other.values("accuracy")
            test = compared(_welch, *samples)
            counts = dict(zip(("n", "other_n"), map(len, samples), strict=True))
            table.append({**identity(one), "other": other.label, "other_digest": other.digest, **counts, "test": test})
    tested = [row for row in table if row["test"] is not None]
    for row, p in zip(tested, holm([row["test"].p for row in tested]), strict=True):
        row["test"] = plain(row["test"]) | {"adjusted_p": p}
    return table


def _welch(one: ByReplica, other: ByReplica) -> Comparison:
    return welch(list(one.values()), list(other.values()))


def _kept(experiment: ReportedExperiment, keep: float | None) -> list[float]:
    """Accuracy of fresh networks with the share of weights that the judge looked at."""
    return [
        value
        for _, item in experiment.entries("pruning")
        if item.get("score") == RANKED_BY and item.get("share") == keep
        if (value := finite(item.get("accuracy"))) is not None
    ]


def _history(experiment: ReportedExperiment, note: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each member's settings where they change, and its scores; the schedule that was found among them."""
    who = identity(experiment)
    lines: list[tuple[Any, object]] = [*enumerate(_list(note.get("paths"))), (FOUND, note.get("line"))]
    for member, path in lines:
        for name, values in _lists(path).items():
            for epoch, value in enumerate(values):
                if epoch in (0, len(values) - 1) or value != values[epoch - 1]:
                    yield {**who, "setting": name, "member": member, "epoch": epoch, "value": value, "parent": None}
    every, last = finite(note.get("every")) or 0.0, finite(note.get("epochs")) or 0.0
    parents = _list(note.get("parents"))
    for member, scores in enumerate(_list(note.get("scores"))):
        for place, score in enumerate(_list(scores)):
            known = finite(score)
            if known is None:
                continue
            taken = dict(enumerate(_list(parents[member]))).get(place) if member < len(parents) else None
            epoch = int(min((place + 1) * every, last))
            yield {**who, "setting": SCORE, "member": member, "epoch": epoch, "value": known, "parent": taken}


def _lists(value: object) -> dict[str, list[float]]:
    """Lists of finite numbers by name; others are left out."""
    found = {}
    for name, numbers in value.items() if isinstance(value, Mapping) else ():
        known = [finite(one) for one in _list(numbers)]
        if known and None not in known:
            found[str(name)] = [one for one in known if one is not None]
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
