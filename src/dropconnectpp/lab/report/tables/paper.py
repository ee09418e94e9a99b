"""The paper's tables as plain data, and `report_tables`, which returns every table of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal, get_args

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.selection import (
    Notes,
    ReportedExperiment,
    Selected,
    plain_experiment,
    resolutions,
    select_experiments,
)
from dropconnectpp.lab.report.statistics import (
    SIGNIFICANCE,
    Comparison,
    SampleError,
    holm,
    paired,
    sentence,
    student,
    welch,
)
from dropconnectpp.lab.report.tables.connections import connection_tables, places_by_title
from dropconnectpp.lab.report.tables.demo import demo_tables
from dropconnectpp.lab.report.tables.further import further_tables
from dropconnectpp.lab.report.tables.judged import judged_tables
from dropconnectpp.lab.report.tables.population import population_tables
from dropconnectpp.lab.report.tables.rows import (
    OURS,
    ByReplica,
    Table,
    compared,
    difference,
    identity,
    plain,
    short,
    statistic,
)
from dropconnectpp.lab.report.tables.small_data import small_data_tables
from dropconnectpp.lab.report.tables.survivors import survivor_tables
from dropconnectpp.lab.report.tables.uci import uci_tables
from dropconnectpp.lab.runs.store import Row, StoredProtocol

PairTest = Literal["student", "welch", "paired"]
"""A test of two methods, as the column of its results is named."""
TimedPrediction = Literal["none", "dropout", "mean", "folded", "mc30"]
"""How predictions were made whose time was measured."""


def report_tables(rows: Iterable[Row], notes: Notes, protocols: Iterable[StoredProtocol] = ()) -> dict[str, Table]:
    """Every table of the report by name: lists of flat mappings with unrounded numbers.

    ``protocols`` are those of the store; they name protocols that were timed and have no rows.
    A statistic is four entries: n, mean, standard_deviation and interval; the last three may be None.
    """
    return tables_of(select_experiments(rows, notes), notes, protocols)


def tables_of(selected: Selected, notes: Notes, protocols: Iterable[StoredProtocol]) -> dict[str, Table]:
    """`report_tables` of experiments that have been selected."""
    others, selected = selected.of_other_networks, selected.of_the_papers_network
    few, selected = small_data_tables(selected), selected.with_all_examples
    experiments = selected.experiments
    return {
        "accuracy": [row for column in selected.columns().values() for row in _accuracy(column)],
        "significance": [row for column in selected.columns().values() for row in _significance(column)],
        "time": _time(experiments, notes, protocols),
        "samples": [row for column in selected.columns().values() for e in _ours_first(column) for row in _samples(e)],
        **further_tables(experiments),
        **judged_tables(selected),
        **few,
        **population_tables([*experiments, *others], notes),
        **connection_tables(others, notes),
        **survivor_tables(places_by_title(others, notes)),
        **demo_tables(notes),
        **uci_tables(selected.benchmarks),
    }


def _ours_first(column: Iterable[ReportedExperiment]) -> list[ReportedExperiment]:
    return sorted(column, key=lambda experiment: experiment.kind != OURS)


# ------------------------------------------------------------------------------- Table 1 and its tests


def _accuracy(column: Sequence[ReportedExperiment]) -> Table:
    best = best_of(column)
    table = []
    for experiment in column:
        values = experiment.values("accuracy")
        line = statistic(values.values())
        paper = paper_values.accuracy(experiment.paper_data, experiment.paper_kind)
        statuses = [row.status for row in experiment.rows]
        table.append(
            {
                **identity(experiment),
                **line,
                "paper": paper,
                "difference": difference(line["mean"], paper),
                "best": experiment.digest == best,
                "diverged": sorted(experiment.diverged),
                "missing": experiment.missing,
                "running": statuses.count("running"),
                "failed": statuses.count("failed"),
                "not_finite": sorted({row.key.replica for row in experiment.done} - set(values)),
                "verified": experiment.verified,
                "epochs": epochs(experiment),
            }
        )
    return table


def epochs(experiment: ReportedExperiment) -> float | None:
    """For how many epochs its networks were trained."""
    training = experiment.settings.get("training")
    return finite(training.get("epochs")) if isinstance(training, Mapping) else None


def best_of(column: Sequence[ReportedExperiment]) -> str | None:
    """Digest of the method that beats all others by Welch's test, adjusted for all pairs, or None.

    None also where networks were trained too short for their order to say anything.
    """
    samples = {e.digest: list(e.values("accuracy").values()) for e in column}
    if len(samples) < 2 or not all(samples.values()) or short(epochs(e) for e in column):
        return None
    best = max(samples, key=lambda digest: float(statistic(samples[digest])["mean"]))
    pairs = list(combinations(samples, 2))
    try:
        adjusted = holm([welch(samples[one], samples[other]).p for one, other in pairs])
    except SampleError:
        return None
    return best if all(p < SIGNIFICANCE for pair, p in zip(pairs, adjusted, strict=True) if best in pair) else None


def _significance(column: Sequence[ReportedExperiment]) -> Table:
    """All pairs that include DropConnect++, which comes first. Each test is adjusted by Holm over the pairs."""
    pairs = []
    for one, other in combinations(column, 2):
        if OURS in (one.kind, other.kind):
            pairs.append((one, other) if one.kind == OURS else (other, one))
    tests: dict[PairTest, Callable[[ByReplica, ByReplica], Comparison]] = {
        "student": lambda a, b: student(list(a.values()), list(b.values())),
        "welch": lambda a, b: welch(list(a.values()), list(b.values())),
        "paired": paired,
    }
    table: Table = []
    for a, b in pairs:
        samples = a.values("accuracy"), b.values("accuracy")
        found: dict[str, Comparison | None] = {name: compared(test, *samples) for name, test in tests.items()}
        means = [statistic(sample.values())["mean"] for sample in samples]
        pair = {**identity(a), "other": b.label, "other_digest": b.digest}
        verdict = paper_values.verdict(a.paper_data, a.paper_kind, b.paper_kind)
        table.append({**pair, "difference": difference(*means), **found, "paper": verdict})
    for name in tests:
        possible = [row for row in table if row[name] is not None]
        for row, p in zip(possible, holm([row[name].p for row in possible]), strict=True):
            row[name] = plain(row[name]) | {"adjusted_p": p, "sentence": _said(row, row[name], p)}
    for row, (a, b) in zip(table, pairs, strict=True):
        row["sentence"] = (row["welch"] or {}).get("sentence") or _not_tested(a, b)
    return table


def _said(row: Mapping[str, Any], test: Comparison, adjusted_p: float) -> str:
    return sentence(test, row["method"], row["other"], "points", adjusted_p=adjusted_p) + "."


def _not_tested(a: ReportedExperiment, b: ReportedExperiment) -> str:
    counts = len(a.values("accuracy")), len(b.values("accuracy"))
    if min(counts) < 2:
        why = f"a test needs two replicas of each, there are {counts[0]} and {counts[1]}"
    else:
        why = "neither varies from replica to replica"
    return f"{a.label} and {b.label} were not tested: {why}."


# ------------------------------------------------------------------------------------ Tables 2 and 3


def _time(experiments: Sequence[ReportedExperiment], notes: Notes, protocols: Iterable[StoredProtocol]) -> Table:
    shown = {e.digest: e for e in experiments}
    known = {p.digest: p for p in protocols}
    resolved = resolutions(notes)
    table: Table = []
    for (digest, name), value in notes.items():
        final = resolved.get(digest, digest)
        if name != "timings" or not isinstance(value, Mapping) or final not in shown.keys() | known.keys():
            continue
        experiment = shown[final] if final in shown else plain_experiment(known[final])
        prediction = value.get("prediction")
        prediction = prediction if isinstance(prediction, Mapping) else {}
        table.append(
            {
                **identity(experiment),
                "seconds_per_epoch": finite(value.get("seconds_per_epoch")),
                "replicas": value.get("replicas"),
                "device": str(value.get("device", "")),
                **{f"prediction_{rule}": finite(prediction.get(rule)) for rule in get_args(TimedPrediction)},
                "paper": paper_values.seconds(experiment.paper_data, experiment.paper_kind),
                **_rounds(value),  # none in stores of version 0.1
            }
        )
    sets, kinds = list(dict.fromkeys(e.title for e in experiments)), paper_values.KINDS
    table.sort(
        key=lambda row: (
            sets.index(row["title"]) if row["title"] in sets else len(sets),
            row["title"],
            kinds.index(row["kind"]) if row["kind"] in kinds else len(kinds),
            row["method"],
        )
    )
    for row in table:
        row["ratio"] = _ratio(row, table, "seconds_per_epoch", "title", "replicas", "device")
        row["paper_ratio"] = _ratio(row, table, "paper", "title")
    return table


def _rounds(timings: Mapping[str, Any]) -> dict[str, Any]:
    """What each round of a timing took, and in which session; nothing where that was not stored."""
    given = timings.get("rounds")
    if not isinstance(given, Mapping):
        return {}
    known = {
        str(name): [float(one) for one in several]
        for name, several in given.items()
        if isinstance(several, list) and len(several) > 1 and all((finite(one) or 0.0) > 0.0 for one in several)
    }
    return {"session": str(timings.get("session", "")), "rounds": known}


def _ratio(row: Mapping[str, Any], table: Table, name: str, *alike: str) -> float | None:
    """Ratio to no regularisation, if that was measured under the same conditions."""
    plain = [one for one in table if one["kind"] == "none" and all(one[key] == row[key] for key in alike)]
    if len(plain) != 1 or row[name] is None or not plain[0][name]:
        return None
    return float(row[name]) / float(plain[0][name])


def _samples(experiment: ReportedExperiment) -> Table:
    by_count: dict[int, dict[int, float]] = defaultdict(dict)
    for replica, item in experiment.entries("mc"):
        count, accuracy = item.get("samples"), finite(item.get("accuracy"))
        if isinstance(count, int) and accuracy is not None:
            by_count[count][replica] = accuracy
    if not by_count or experiment.kind == "none":
        return []
    lines: list[tuple[int | None, dict[int, float], float | None]] = [
        (count, by_count[count], paper_values.mc_accuracy(experiment.paper_data, experiment.paper_kind, count))
        for count in sorted(by_count)
    ]
    one_pass = paper_values.accuracy(experiment.paper_data, experiment.paper_kind)
    lines.append((None, experiment.values("accuracy"), one_pass))
    table = []
    for count, values, paper in lines:
        line = statistic(values.values())
        known = {"paper": paper, "difference": difference(line["mean"], paper)}
        test = compared(paired, values, experiment.values("accuracy")) if count else None
        against = None if test is None else plain(test) | {"sentence": _sampled(test, count)}
        table.append({**identity(experiment), "samples": count, **line, **known, "against_one_pass": against})
    return table


def _sampled(test: Comparison, count: int | None) -> str:
    name = f"Eq. (18) with {count} sample{'' if count == 1 else 's'}"
    return sentence(test, name, "one pass", "points") + "."
