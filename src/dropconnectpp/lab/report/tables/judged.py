"""How good probabilities are, as plain data: on test, corrupted and foreign images, of networks and of ensembles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dropconnectpp.lab.config.corruptions import SEVERITIES
from dropconnectpp.lab.config.ensembles import BENCHMARK
from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.selection import OTHER_TITLES, ReportedExperiment, Selected, plain_experiment
from dropconnectpp.lab.report.statistics import Comparison, holm, paired, welch
from dropconnectpp.lab.report.tables.rows import OURS, ByReplica, Table, compared, identity, statistic
from dropconnectpp.lab.runs.rows import settings_digest
from dropconnectpp.lab.runs.store import Row

SCORES = ("accuracy", "nll", "ece", "brier")
DETECTION = ("auroc", "fpr95")
HIGHER = ("accuracy", "auroc")
"""Measures of which more is better."""
TESTED = ("accuracy", "nll", "ece", "auroc", "corrupted_nll", "corrupted_ece")
"""Measures by which DropConnect++ is compared with each other method."""
ONE_PASS, NETWORKS, ENSEMBLE = "one pass", "networks", "ensemble"
Key = tuple[str, int]
"""Which images, and the severity of their corruption or 0."""


@dataclass(frozen=True)
class Judged:
    """One method that predicts in one way: what was measured of each of its replicas, or of each ensemble."""

    experiment: ReportedExperiment
    label: str
    kind: str
    prediction: str
    found: Mapping[int, Mapping[Key, Mapping[str, Any]]]
    digest: str
    """Of its own protocol; of an ensemble not that of its members."""
    count: int
    """How many networks are averaged."""

    @property
    def identity(self) -> dict[str, Any]:
        """The columns that say what a row is about."""
        own = {"method": self.label, "kind": self.kind, "digest": self.digest}
        return identity(self.experiment) | own | {"prediction": self.prediction, "count": self.count}

    def values(self, measure: str, images: str = "test", severities: Sequence[int] = (0,)) -> dict[int, float]:
        """A measure by replica, averaged over severities; those that lack one are left out."""
        found = {}
        for replica, by_images in self.found.items():
            numbers = [finite(by_images.get((images, severity), {}).get(measure)) for severity in severities]
            known = [number for number in numbers if number is not None]
            if known and len(known) == len(numbers):
                found[replica] = sum(known) / len(known)
        return found

    def corrupted(self, measure: str, severities: Sequence[int] = SEVERITIES) -> dict[int, float]:
        """A measure by replica, averaged over all corruptions."""
        kinds = [self.values(measure, name, severities) for name in self.corruptions]
        common = [replica for replica in (kinds[0] if kinds else ()) if all(replica in kind for kind in kinds)]
        return {replica: sum(kind[replica] for kind in kinds) / len(kinds) for replica in common}

    @property
    def corruptions(self) -> list[str]:
        """Their names, in the order in which they were asked for."""
        names = [name for by_images in self.found.values() for name, severity in by_images if severity]
        return list(dict.fromkeys(names))

    def measured(self, name: str) -> dict[int, float]:
        """One of `TESTED` by replica."""
        if name in DETECTION:
            return self.values(name, "foreign")
        return self.corrupted(name.removeprefix("corrupted_")) if name.startswith("corrupted_") else self.values(name)


def judged_tables(selected: Selected) -> dict[str, Table]:
    """The tables of this module, by name; empty where nothing was judged."""
    found = judged(selected)
    return {
        "probabilities": [
            {**one.identity, **{name: statistic(one.values(name).values()) for name in SCORES}} for one in found
        ],
        "detection": [row for one in found for row in _detection(one)],
        "corruptions": [row for one in found for row in _corruptions(one)],
        "corruption_kinds": [row for one in found for row in _kinds(one)],
        "probability_tests": [row for column in _columns(found).values() for row in _tests(column)],
    }


def judged(selected: Selected) -> list[Judged]:
    """Every method and way of predicting that was judged; a data set's ensembles come after its networks."""
    ensembles: dict[str, list[Row]] = defaultdict(list)
    for row in selected.benchmarks:
        if row.protocol.settings.get("benchmark") == BENCHMARK and row.status == "done":
            ensembles[settings_digest(row.protocol.settings.get("of"))].append(row)
    found: list[Judged] = []
    columns = selected.columns()
    for column in columns.values():
        found += [one for experiment in column for one in _networks(experiment)]
        found += [_ensemble(experiment, ensembles.pop(experiment.digest, [])) for experiment in column]
    # Others' members are not shown, or not here: those with fewer training examples have tables of their own.
    left = [rows for rows in ensembles.values() if not _fewer(rows[0].protocol.settings)]
    found += [_ensemble(plain_experiment(rows[0].protocol, ()), rows) for rows in left]
    return [one for one in found if one.found]


def _fewer(settings: Mapping[str, Any]) -> bool:
    """Whether an ensemble's members had fewer training examples than there are."""
    of = settings.get("of")
    training = of.get("training") if isinstance(of, Mapping) else None
    return bool(training.get("examples")) if isinstance(training, Mapping) else False


def _networks(experiment: ReportedExperiment) -> list[Judged]:
    by_way: dict[str, dict[int, dict[Key, Mapping[str, Any]]]] = {ONE_PASS: {}, NETWORKS: {}}
    for replica, item in experiment.entries("judged"):
        by_way.setdefault(str(item.get("prediction")), {}).setdefault(replica, {})[_key(item)] = item
    evaluation = experiment.settings.get("evaluation")
    drawn = evaluation.get("predictive_samples") if isinstance(evaluation, Mapping) else None
    counts = {ONE_PASS: 1, NETWORKS: drawn if isinstance(drawn, int) else 0}
    label, kind, digest = experiment.label, experiment.kind, experiment.digest
    return [Judged(experiment, label, kind, way, by_way[way], digest, counts[way]) for way in (ONE_PASS, NETWORKS)]


def _ensemble(experiment: ReportedExperiment, rows: Sequence[Row]) -> Judged:
    found: dict[int, dict[Key, Mapping[str, Any]]] = {}
    for row in rows:
        given = row.results.get("judged")
        items = given if isinstance(given, list) else []
        found[row.key.replica] = {_key(item): item for item in items if isinstance(item, Mapping)}
    label = rows[0].protocol.label if rows else ""
    members = rows[0].protocol.settings.get("members") if rows else None
    # The label that tells the members from other experiments' in this column.
    own = "" if experiment.kind == "none" or not rows else f", {experiment.label}"
    label = f"Ensemble of {members}{own}" if rows and experiment.rows else label
    count = members if isinstance(members, int) else 0
    return Judged(experiment, label, ENSEMBLE, ENSEMBLE, found, rows[0].key.digest if rows else "", count)


def _key(item: Mapping[str, Any]) -> Key:
    severity = item.get("severity")
    return str(item.get("images")), severity if isinstance(severity, int) else 0


def _detection(one: Judged) -> Table:
    lines = {name: statistic(one.values(name, "foreign").values()) for name in DETECTION}
    sets = {str(by_images["foreign", 0].get("data")) for by_images in one.found.values() if ("foreign", 0) in by_images}
    names = {(paper_values.TITLES | OTHER_TITLES).get(name, name) for name in sets}
    return [{**one.identity, "images": ", ".join(sorted(names)), **lines}] if lines["auroc"]["n"] else []


def _corruptions(one: Judged) -> Table:
    """Each measure at each severity, over all corruptions; severity None is all five."""
    table: Table = []
    for measure in SCORES if one.corruptions else ():
        table.append({**one.identity, "measure": measure, "severity": 0, **statistic(one.values(measure).values())})
        for severity in SEVERITIES:
            line = statistic(one.corrupted(measure, (severity,)).values())
            table.append({**one.identity, "measure": measure, "severity": severity, **line})
        line = statistic(one.corrupted(measure).values())
        table.append({**one.identity, "measure": measure, "severity": None, **line})
    return table


def _kinds(one: Judged) -> Table:
    """Each measure for each corruption, over all severities."""
    return [
        {**one.identity, "corruption": name}
        | {measure: statistic(one.values(measure, name, SEVERITIES).values()) for measure in SCORES}
        for name in one.corruptions
    ]


def _columns(found: Iterable[Judged]) -> dict[tuple[str, str], list[Judged]]:
    columns: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in found:
        columns[one.experiment.column].append(one)
    return columns


def _tests(column: Sequence[Judged]) -> Table:
    """DropConnect++ over drawn networks against each other method at its own; p adjusted by Holm for each measure."""
    ours = [one for one in column if one.kind == OURS and one.prediction == NETWORKS]
    others = [one for one in column if _stands_for_its_method(one)]
    table: Table = []
    for one in ours:
        for other in others:
            row: dict[str, Any] = {**one.identity, "other": other.label, "other_prediction": other.prediction}
            row |= {"other_digest": other.digest, "other_count": other.count, "epochs": _epochs(one.experiment)}
            table.append(row | {name: compare(one, other, name) for name in TESTED})
    for name in TESTED:
        tested = [row for row in table if row[name] is not None]
        for row, p in zip(tested, holm([row[name]["p"] for row in tested]), strict=True):
            row[name]["adjusted_p"] = p
    return table


def _epochs(experiment: ReportedExperiment) -> float | None:
    training = experiment.settings.get("training")
    return finite(training.get("epochs")) if isinstance(training, Mapping) else None


def _stands_for_its_method(one: Judged) -> bool:
    """Whether DropConnect++ is compared with it: drawn networks, plain ones, ensembles of plain ones."""
    if one.kind == ENSEMBLE:
        return one.experiment.kind == "none"
    return one.kind != OURS and one.prediction == (ONE_PASS if one.kind == "none" else NETWORKS)


def compare(one: Judged, other: Judged, name: str) -> dict[str, Any] | None:
    """Paired by replica; ensembles, which have no partners, by Welch's test."""
    test: Callable[[ByReplica, ByReplica], Comparison] = paired
    if other.kind == ENSEMBLE:

        def test(a: ByReplica, b: ByReplica) -> Comparison:
            return welch(list(a.values()), list(b.values()))

    found = compared(test, one.measured(name), other.measured(name))
    if found is None:
        return None
    counts = {"n": found.n_a, "other_n": found.n_b}
    return {"difference": found.difference, "interval": found.interval, "p": found.p, **counts}
