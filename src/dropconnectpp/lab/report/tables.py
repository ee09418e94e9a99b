"""The report's tables as plain data: lists of flat mappings, each row with its evidence, numbers unrounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.experiments import (
    Experiment,
    Notes,
    Selected,
    plain_experiment,
    select,
    selection_notes,
)
from dropconnectpp.lab.report.number_formats import finite
from dropconnectpp.lab.statistics import (
    SIGNIFICANCE,
    Comparison,
    SampleError,
    holm,
    paired,
    sentence,
    student,
    summarise,
    welch,
)
from dropconnectpp.lab.store import Row, StoredProtocol

Table = list[dict[str, Any]]
OURS = "dropconnect++"
SHARES = tuple(paper_values.SHARES)
PREDICTIONS = ("none", "dropout", "mean", "folded", "mc30")


def report_tables(rows: Iterable[Row], notes: Notes, protocols: Iterable[StoredProtocol] = ()) -> dict[str, Table]:
    """Every table of the report by name.

    ``protocols`` are those of the store; they name the timings of protocols without rows.
    A statistic is four entries: n, mean, standard_deviation and interval, the last three None where there is none.
    """
    return tables_of(select(rows, notes), notes, protocols)


def tables_of(selected: Selected, notes: Notes, protocols: Iterable[StoredProtocol]) -> dict[str, Table]:
    """`report_tables` of experiments that are already selected."""
    experiments = selected.experiments
    return {
        "accuracy": [row for column in selected.columns().values() for row in _accuracy(column)],
        "significance": [row for column in selected.columns().values() for row in _significance(column)],
        "time": _time(experiments, notes, protocols),
        "samples": [row for column in selected.columns().values() for e in _ours_first(column) for row in _samples(e)],
        "shares": [row for experiment in experiments for row in _shares(experiment)],
        "calibration": [row for experiment in experiments for row in _calibration(experiment)],
        "pruning": [row for experiment in experiments for row in _pruning(experiment)],
        "correlation": [row for experiment in experiments for row in _correlation(experiment)],
        "uncertainty": [row for experiment in experiments for row in _uncertainty(experiment)],
    }


def statistic(values: Iterable[float]) -> dict[str, Any]:
    """A sample's line; an empty sample is a line too."""
    numbers = list(values)
    if not numbers:
        return {"n": 0, "mean": None, "standard_deviation": None, "interval": None}
    found = summarise(numbers)
    return {
        "n": found.n,
        "mean": found.mean,
        "standard_deviation": found.standard_deviation,
        "interval": found.interval,
    }


def _who(experiment: Experiment) -> dict[str, Any]:
    return {
        "data": experiment.data,
        "variant": experiment.variant,
        "title": experiment.title,
        "method": experiment.label,
        "kind": experiment.kind,
        "digest": experiment.digest,
    }


def _ours_first(column: Iterable[Experiment]) -> list[Experiment]:
    return sorted(column, key=lambda experiment: experiment.kind != OURS)


def _difference(mean: float | None, paper: float | None) -> float | None:
    return None if mean is None or paper is None else mean - paper


# ------------------------------------------------------------------------------- Table 1 and its tests


def _accuracy(column: Sequence[Experiment]) -> Table:
    best = best_of(column)
    table = []
    for experiment in column:
        values = experiment.values("accuracy")
        line = statistic(values.values())
        paper = paper_values.accuracy(experiment.paper_data, experiment.kind)
        statuses = [row.status for row in experiment.rows]
        table.append(
            {
                **_who(experiment),
                **line,
                "paper": paper,
                "difference": _difference(line["mean"], paper),
                "best": experiment.digest == best,
                "diverged": sorted(experiment.diverged),
                "missing": experiment.missing,
                "running": statuses.count("running"),
                "failed": statuses.count("failed"),
                "not_finite": sorted({row.key.replica for row in experiment.done} - set(values)),
                "verified": experiment.verified,
                "epochs": finite((experiment.settings.get("training") or {}).get("epochs")),
            }
        )
    return table


def best_of(column: Sequence[Experiment]) -> str | None:
    """Digest of the method that beats every other by Welch's test, adjusted for all of them; None if there is none."""
    samples = {e.digest: list(e.values("accuracy").values()) for e in column}
    if len(samples) < 2 or not all(samples.values()):
        return None
    best = max(samples, key=lambda digest: float(statistic(samples[digest])["mean"]))
    try:
        tests = [welch(samples[best], other) for digest, other in samples.items() if digest != best]
    except SampleError:
        return None
    decisive = all(p < SIGNIFICANCE for p in holm([test.p for test in tests]))
    return best if decisive and all(test.difference > 0 for test in tests) else None


def _significance(column: Sequence[Experiment]) -> Table:
    """All pairs with DropConnect++ in them, which comes first; adjusted by Holm over the pairs, test by test."""
    pairs = []
    for one, other in combinations(column, 2):
        if OURS in (one.kind, other.kind):
            pairs.append((one, other) if one.kind == OURS else (other, one))
    tests: dict[str, Callable[[Mapping[int, float], Mapping[int, float]], Comparison]] = {
        "student": lambda a, b: student(list(a.values()), list(b.values())),
        "welch": lambda a, b: welch(list(a.values()), list(b.values())),
        "paired": paired,
    }
    table: Table = []
    for a, b in pairs:
        samples = a.values("accuracy"), b.values("accuracy")
        found = {name: _compared(test, *samples) for name, test in tests.items()}
        means = [statistic(sample.values())["mean"] for sample in samples]
        who = {"data": a.data, "variant": a.variant, "title": a.title}
        who |= {"method": a.label, "other": b.label, "digest": a.digest, "other_digest": b.digest}
        verdict = paper_values.verdict(a.paper_data, a.kind, b.kind)
        table.append({**who, "difference": _difference(*means), **found, "paper": verdict})
    for name in tests:
        possible = [row for row in table if row[name] is not None]
        for row, p in zip(possible, holm([row[name].p for row in possible]), strict=True):
            row[name] = _plain(row[name], p) | {"sentence": _said(row, row[name], p)}
    for row, (a, b) in zip(table, pairs, strict=True):
        row["sentence"] = (row["welch"] or {}).get("sentence") or _not_tested(a, b)
    return table


def _compared(
    test: Callable[[Mapping[int, float], Mapping[int, float]], Comparison],
    a: Mapping[int, float],
    b: Mapping[int, float],
) -> Comparison | None:
    try:
        return test(a, b)
    except SampleError:
        return None


def _plain(test: Comparison, adjusted_p: float) -> dict[str, Any]:
    return {
        "difference": test.difference,
        "interval": test.interval,
        "t": test.t,
        "degrees_of_freedom": test.degrees_of_freedom,
        "p": test.p,
        "adjusted_p": adjusted_p,
        "effect_size": test.effect_size,
    }


def _said(row: Mapping[str, Any], test: Comparison, adjusted_p: float) -> str:
    return sentence(test, row["method"], row["other"], "points", adjusted_p=adjusted_p) + "."


def _not_tested(a: Experiment, b: Experiment) -> str:
    counts = len(a.values("accuracy")), len(b.values("accuracy"))
    if min(counts) < 2:
        why = f"a test needs two replicas of each, there are {counts[0]} and {counts[1]}"
    else:
        why = "neither varies from replica to replica"
    return f"{a.label} and {b.label} were not tested: {why}."


# ------------------------------------------------------------------------------------ Tables 2 and 3


def _time(experiments: Sequence[Experiment], notes: Notes, protocols: Iterable[StoredProtocol]) -> Table:
    shown = {e.digest: e for e in experiments}
    known = {p.digest: p for p in protocols}
    resolved = {digest: str(note.get("resolved")) for digest, note in selection_notes(notes).items()}
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
                **_who(experiment),
                "seconds_per_epoch": finite(value.get("seconds_per_epoch")),
                "replicas": value.get("replicas"),
                "device": str(value.get("device", "")),
                **{f"prediction_{rule}": finite(prediction.get(rule)) for rule in PREDICTIONS},
                "paper": paper_values.seconds(experiment.paper_data, experiment.kind),
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


def _ratio(row: Mapping[str, Any], table: Table, name: str, *alike: str) -> float | None:
    """How many times what no regularisation takes, if that was measured under like conditions."""
    plain = [one for one in table if one["kind"] == "none" and all(one[key] == row[key] for key in alike)]
    if len(plain) != 1 or row[name] is None or not plain[0][name]:
        return None
    return float(row[name]) / float(plain[0][name])


def _samples(experiment: Experiment) -> Table:
    by_count: dict[int, dict[int, float]] = defaultdict(dict)
    for replica, item in experiment.entries("mc"):
        count, accuracy = item.get("samples"), finite(item.get("accuracy"))
        if isinstance(count, int) and accuracy is not None:
            by_count[count][replica] = accuracy
    if not by_count or experiment.kind == "none":
        return []
    lines: list[tuple[int | None, dict[int, float], float | None]] = [
        (count, by_count[count], paper_values.mc_accuracy(experiment.paper_data, experiment.kind, count))
        for count in sorted(by_count)
    ]
    one_pass = paper_values.accuracy(experiment.paper_data, experiment.kind)
    lines.append((None, experiment.values("accuracy"), one_pass))
    table = []
    for count, values, paper in lines:
        line = statistic(values.values())
        known = {"paper": paper, "difference": _difference(line["mean"], paper)}
        table.append({**_who(experiment), "samples": count, **line, **known})
    return table


# --------------------------------------------------------------------- Figure 1(b), and beyond the paper


def _shares(experiment: Experiment) -> Table:
    """Shares of the keep probabilities, over all replicas together."""
    synapses, counts, networks = 0, dict.fromkeys(SHARES, 0), 0
    for row in experiment.done:
        posterior = row.results.get("posterior")
        found = [finite(posterior.get(name)) for name in ("synapses", *SHARES)] if isinstance(posterior, dict) else []
        if found and found[0] and None not in found:
            networks += 1
            synapses += int(found[0])
            for name, count in zip(SHARES, found[1:], strict=True):
                counts[name] += int(count or 0)
    if not networks:
        return []
    paper = paper_values.SHARES if experiment.paper_data == paper_values.FIGURE_1B_DATA else {}
    return [
        {
            **_who(experiment),
            "n": networks,
            "synapses": synapses / networks,
            **{name: counts[name] / synapses for name in SHARES},
            **{f"paper_{name}": paper.get(name) for name in SHARES},
        }
    ]


def _calibration(experiment: Experiment) -> Table:
    found = {name: statistic(experiment.values(name).values()) for name in ("nll", "ece", "brier")}
    return [{**_who(experiment), **found}] if any(line["n"] for line in found.values()) else []


def _pruning(experiment: Experiment) -> Table:
    by_point: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for replica, item in experiment.entries("pruning"):
        share, accuracy = finite(item.get("share")), finite(item.get("accuracy"))
        if share is not None and accuracy is not None:
            by_point[str(item.get("score")), share][replica] = accuracy
    return [
        {**_who(experiment), "score": score, "share": share, **statistic(values.values())}
        for (score, share), values in sorted(by_point.items())
    ]


def _correlation(experiment: Experiment) -> Table:
    line = statistic(experiment.values("posterior", "correlation_with_magnitude").values())
    return [{**_who(experiment), **line}] if line["n"] else []


def _uncertainty(experiment: Experiment) -> Table:
    """Mutual information in nats, on the test set and on pictures of other data sets."""
    inside = statistic(experiment.values("uncertainty", "mutual_information").values())
    table = [{**_who(experiment), "pictures": "", **inside}] if inside["n"] else []
    by_set: dict[str, list[Row]] = defaultdict(list)
    for row in experiment.done:
        foreign = row.results.get("foreign")
        if isinstance(foreign, Mapping):
            by_set[str(foreign.get("data", ""))].append(row)
    for name in sorted(by_set):
        part = replace(experiment, rows=tuple(by_set[name]))
        line = statistic(part.values("foreign", "mutual_information").values())
        if line["n"]:
            table.append({**_who(experiment), "pictures": name or "another set", **line})
    return table
