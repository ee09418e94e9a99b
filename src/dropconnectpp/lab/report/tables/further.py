"""The tables behind Figure 1, and those that go beyond the paper, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.selection import ReportedExperiment
from dropconnectpp.lab.report.tables.rows import Table, identity, statistic
from dropconnectpp.lab.runs.store import Row

SHARES = tuple(paper_values.SHARES)
RULES = {"accuracy": "one pass", "mc_accuracy": "Monte Carlo"}
"""How a point of Figure 1(a) was predicted, by the name of the result."""
NLL_RULES = {"nll": "one pass", "mc_nll": "Monte Carlo"}
"""The same for the negative log-likelihood by epoch."""


def further_tables(experiments: Sequence[ReportedExperiment]) -> dict[str, Table]:
    """The tables of this module, by name."""
    makers = {
        "convergence": convergence,
        "likelihood": likelihood,
        "lowest_nll": lowest_nll,
        "shares": shares,
        "shares_by_replica": shares_by_replica,
        "keep_histogram": keep_histogram,
        "keep_sorted": keep_sorted,
        "calibration": calibration,
        "reliability": reliability,
        "pruning": pruning,
        "correlation": correlation,
        "uncertainty": uncertainty,
    }
    return {name: [row for e in experiments for row in make(e)] for name, make in makers.items()}


# -------------------------------------------------------------------------------------------- Figure 1


def convergence(experiment: ReportedExperiment) -> Table:
    """Figure 1(a): accuracy by epoch."""
    return _by_epoch(experiment, RULES)


def _by_epoch(experiment: ReportedExperiment, rules: Mapping[str, str]) -> Table:
    by_point: dict[tuple[str, float], list[float]] = defaultdict(list)
    for _, point in experiment.entries("curve"):
        epoch = finite(point.get("epoch"))
        for name in rules:
            value = finite(point.get(name))
            if epoch is not None and value is not None:
                by_point[name, epoch].append(value)
    return [
        {**identity(experiment), "rule": rules[name], "epoch": epoch, **statistic(values)}
        for (name, epoch), values in sorted(by_point.items())
    ]


def _posteriors(experiment: ReportedExperiment) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for row in experiment.done:
        posterior = row.results.get("posterior")
        if isinstance(posterior, Mapping):
            yield row.key.replica, posterior


def shares_by_replica(experiment: ReportedExperiment) -> Table:
    """Figure 1(b) in numbers: how many keep probabilities lie in each part of the range, for each replica."""
    table = []
    for replica, posterior in _posteriors(experiment):
        found = [finite(posterior.get(name)) for name in ("synapses", *SHARES)]
        if found[0] and None not in found:
            counts = {name: int(value or 0) for name, value in zip(("synapses", *SHARES), found, strict=True)}
            table.append({**identity(experiment), "replica": replica, **counts})
    return table


def shares(experiment: ReportedExperiment) -> Table:
    """The same as shares of all replicas' synapses, beside the paper's."""
    found = shares_by_replica(experiment)
    if not found:
        return []
    synapses = sum(row["synapses"] for row in found)
    paper = paper_values.SHARES if experiment.paper_data == paper_values.FIGURE_1B_DATA else {}
    return [
        {
            **identity(experiment),
            "n": len(found),
            "synapses": synapses / len(found),
            **{name: sum(row[name] for row in found) / synapses for name in SHARES},
            **{f"paper_{name}": paper.get(name) for name in SHARES},
        }
    ]


def keep_histogram(experiment: ReportedExperiment) -> Table:
    """Figure 1(b): shares of synapses by keep probability, replicas pooled."""
    counts = [sum(values) for values in _columns(experiment, "histogram")]
    if not sum(counts):
        return []
    size = len(counts)
    return [
        {**identity(experiment), "low": i / size, "high": (i + 1) / size, "share": counts[i] / sum(counts)}
        for i in range(size)
    ]


def keep_sorted(experiment: ReportedExperiment) -> Table:
    """Figure 1(b): keep probabilities in ascending order, averaged over replicas."""
    columns = _columns(experiment, "quantiles")
    last = max(1, len(columns) - 1)
    return [
        {**identity(experiment), "share": i / last, "keep_probability": sum(values) / len(values)}
        for i, values in enumerate(columns)
    ]


def _columns(experiment: ReportedExperiment, name: str) -> list[tuple[float, ...]]:
    """A list in the posterior, element by element over the replicas whose list is as long as the first replica's."""
    found: list[list[float]] = []
    for _, posterior in _posteriors(experiment):
        numbers = _numbers(posterior.get(name))
        if numbers and (not found or len(numbers) == len(found[0])):
            found.append(numbers)
    return list(zip(*found, strict=True))


def _numbers(values: object) -> list[float]:
    """The values if they are a list of finite numbers, else an empty list."""
    numbers = [finite(value) for value in values] if isinstance(values, list) else []
    return [number for number in numbers if number is not None] if None not in numbers else []


# ------------------------------------------------------------------------------------ beyond the paper


def likelihood(experiment: ReportedExperiment) -> Table:
    """Negative log-likelihood by epoch."""
    return _by_epoch(experiment, NLL_RULES)


def lowest_nll(experiment: ReportedExperiment) -> Table:
    """The epoch at which the one-pass mean is lowest, beside the last epoch: what longer training costs."""
    points = [row for row in likelihood(experiment) if row["rule"] == NLL_RULES["nll"]]
    if len(points) < 2:
        return []
    best, last = min(points, key=lambda row: row["mean"]), max(points, key=lambda row: row["epoch"])
    return [{**best, "last_epoch": last["epoch"], "last_mean": last["mean"], "last_interval": last["interval"]}]


def calibration(experiment: ReportedExperiment) -> Table:
    """Negative log-likelihood, expected calibration error and Brier score."""
    found = {name: statistic(experiment.values(name).values()) for name in ("nll", "ece", "brier")}
    return [{**identity(experiment), **found}] if any(line["n"] for line in found.values()) else []


def reliability(experiment: ReportedExperiment) -> Table:
    """Accuracy by confidence, in equal bins, replicas pooled; bins without images are left out."""
    kept: list[list[list[float]]] = []
    for row in experiment.done:
        found = row.results.get("calibration")
        given = found if isinstance(found, Mapping) else {}
        lists = [_numbers(given.get(name)) for name in ("counts", "confidence", "correct")]
        bins = len(kept[0][0]) if kept else len(lists[0])
        if bins > 1 and all(len(one) == bins for one in lists):
            kept.append(lists)
    if not kept:
        return []
    totals = [[sum(values) for values in zip(*part, strict=True)] for part in zip(*kept, strict=True)]
    counts, confidence, correct = totals
    return [
        {
            **identity(experiment),
            "low": i / len(counts),
            "high": (i + 1) / len(counts),
            "images": int(count),
            "share": count / sum(counts),
            "confidence": confidence[i] / count,
            "accuracy": correct[i] / count,
        }
        for i, count in enumerate(counts)
        if count > 0
    ]


def pruning(experiment: ReportedExperiment) -> Table:
    """Accuracy by share of weights kept, for each score that ranks them."""
    by_point: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
    for replica, item in experiment.entries("pruning"):
        share, accuracy = finite(item.get("share")), finite(item.get("accuracy"))
        if share is not None and accuracy is not None:
            by_point[str(item.get("score")), share][replica] = accuracy
    return [
        {**identity(experiment), "score": score, "share": share, **statistic(values.values())}
        for (score, share), values in sorted(by_point.items())
    ]


def correlation(experiment: ReportedExperiment) -> Table:
    """Correlation of a synapse's keep probability with the magnitude of its weight."""
    line = statistic(experiment.values("posterior", "correlation_with_magnitude").values())
    return [{**identity(experiment), **line}] if line["n"] else []


def uncertainty(experiment: ReportedExperiment) -> Table:
    """Mutual information in nats, on the test set and on images of other data sets."""
    inside = statistic(experiment.values("uncertainty", "mutual_information").values())
    table = [{**identity(experiment), "images": "", **inside}] if inside["n"] else []
    by_set: dict[str, list[Row]] = defaultdict(list)
    for row in experiment.done:
        foreign = row.results.get("foreign")
        if isinstance(foreign, Mapping):
            by_set[str(foreign.get("data", ""))].append(row)
    for name in sorted(by_set):
        part = replace(experiment, rows=tuple(by_set[name]))
        line = statistic(part.values("foreign", "mutual_information").values())
        if line["n"]:
            table.append({**identity(experiment), "images": name or "another set", **line})
    return table
