"""Choose what a report shows of a store, and name it. Trials of step sizes and rates are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.notes import WAYS
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.config.pruning import PRUNING, Plan, Pruning
from dropconnectpp.lab.config.settings import ProtocolError, from_dict, late_settings
from dropconnectpp.lab.config.sparsity import control, family
from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import finite, setting
from dropconnectpp.lab.runs.store import FINAL, Row, StoredProtocol

Notes = Mapping[tuple[str, str], Any]
"""The store's notes, by digest and name."""
OTHER_TITLES = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
"""Titles of data sets that the paper does not use."""
NETWORK_TITLES = {
    "lenet-300-100": "LeNet-300-100",
    "lenet-5-caffe": "LeNet-5-Caffe",
    "paper-dense": "the paper's dense layer",
    "paper-dense-512": "the paper's dense layer of 512 units",
    "paper-gated": "the paper's network, all layers gated",
    "layers": "layers of your own",
}
"""Titles of networks other than the paper's."""


@dataclass(frozen=True, kw_only=True)
class ReportedExperiment:
    """One method on one data set: one protocol with its replicas."""

    digest: str
    label: str
    """The method's label, made unique among the methods it is compared with."""
    data: str
    variant: str
    """The settings that distinguish it from other experiments on the same data; empty if there are none."""
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    expected: frozenset[int] = frozenset()
    """Replicas that at least one method of the comparison has."""
    trusted: bool = True
    """Whether every method of the comparison was trained on the official data."""

    @property
    def kind(self) -> str:
        """The method's kind, as in the protocol."""
        settings = _table(self.settings, "pruning") or _table(self.settings, "method")
        return str(settings.get("kind", ""))

    @property
    def network(self) -> str:
        """The name of a network other than the paper's; empty for the paper's."""
        return str(_table(self.settings, "architecture").get("name", ""))

    @property
    def examples(self) -> int:
        """With how many training examples, where they are not all; else 0."""
        count = _table(self.settings, "training").get("examples", 0)
        return count if isinstance(count, int) else 0

    @property
    def pruning(self) -> Pruning | None:
        """How the network was made small, where these settings are known here."""
        settings = _table(self.settings, "pruning")
        kind = PRUNING.get(str(settings.get("kind")))
        try:
            return None if kind is None else from_dict(kind, settings)
        except ProtocolError:  # of another version
            return None

    @property
    def family(self) -> str:
        """What tables of networks with few connections call the method, whatever its settings."""
        unknown = self.pruning is None and self.kind != "none"
        apart = "by_epoch" in self.settings  # else a schedule would stand under the name of the plan without one
        return self.label if unknown or apart else family(self.pruning)

    @property
    def structured(self) -> bool:
        """Whether whole inputs or units were removed."""
        return isinstance(self.pruning, Plan) and self.pruning.structured

    @property
    def control(self) -> str:
        """The name of a control of DropConnect++ where few connections are kept; empty for a method."""
        return control(self.pruning)

    @property
    def title(self) -> str:
        """The data set's name in tables."""
        name = (paper_values.TITLES | OTHER_TITLES).get(self.data, self.data)
        name += f", {NETWORK_TITLES.get(self.network, self.network)}" if self.network else ""
        return f"{name} ({self.variant})" if self.variant else name

    @property
    def paper_data(self) -> str:
        """The data set whose values in the paper are comparable; empty if the network is not the paper's."""
        known = self.data in paper_values.TITLES and not self.network
        usual = late_settings(paper(self.data, "none").architecture) if known else {}
        given = _table(self.settings, "architecture")
        same = all(given.get(name) in (value, _as_list(value)) for name, value in usual.items())
        return self.data if known and same else ""

    @property
    def paper_kind(self) -> str:
        """The kind whose values in the paper are comparable; empty for a method that the paper does not have."""
        given, usual = _table(self.settings, "method"), asdict(Method())
        open_there = ("kind", "rate", "evaluation")
        same = all(given.get(name, value) == value for name, value in usual.items() if name not in open_there)
        return self.kind if same else ""

    @property
    def column(self) -> tuple[str, str]:
        """Experiments with the same column are compared with each other."""
        return f"{self.data} {self.network}".strip(), self.variant

    @property
    def done(self) -> tuple[Row, ...]:
        """Replicas trained to the end."""
        return tuple(row for row in self.rows if row.status == "done")

    @property
    def finished(self) -> tuple[Row, ...]:
        """Replicas trained to the end, or until they diverged."""
        return tuple(row for row in self.rows if row.status in FINAL)

    @property
    def diverged(self) -> dict[int, object]:
        """Replicas that diverged, with the epoch in which they did."""
        return {r.key.replica: r.results.get("diverged_at") for r in self.rows if r.status == "diverged"}

    @property
    def missing(self) -> list[int]:
        """Replicas that other methods have and this one does not have, or not yet."""
        return sorted(self.expected - {row.key.replica for row in self.finished})

    @property
    def verified(self) -> bool:
        """Whether no row says that its data is unofficial."""
        return all(row.provenance.get("verified") is not False for row in self.finished)

    def values(self, *path: str) -> dict[int, float]:
        """A result by replica, where it exists and is finite: `values("uncertainty", "entropy")`."""
        found = {}
        for row in self.done:
            value: Any = row.results
            for name in path:
                value = value.get(name) if isinstance(value, Mapping) else None
            number = finite(value)
            if number is not None:
                found[row.key.replica] = number
        return found

    def entries(self, name: str) -> list[tuple[int, Mapping[str, Any]]]:
        """The items of a result that is a list of mappings, each with its replica."""
        return [
            (row.key.replica, item)
            for row in self.done
            for item in _list(row.results.get(name))
            if isinstance(item, Mapping)
        ]


@dataclass(frozen=True)
class Selected:
    """The experiments that a report shows, in its order, and what it leaves out."""

    experiments: tuple[ReportedExperiment, ...]
    trials: tuple[str, ...]
    """Digests of protocols that served to choose settings, or were evaluated on held-out training data."""
    benchmarks: tuple[Row, ...] = ()
    """Rows of benchmarks, which have tables of their own."""

    @property
    def of_the_papers_network(self) -> Selected:
        """Without networks that are given as layers, which have tables and a figure of their own."""
        return replace(self, experiments=tuple(one for one in self.experiments if not one.network))

    @property
    def with_all_examples(self) -> Selected:
        """Without networks that had fewer training examples, which have a table and a figure of their own."""
        return replace(self, experiments=tuple(one for one in self.experiments if not one.examples))

    @property
    def of_other_networks(self) -> tuple[ReportedExperiment, ...]:
        """The experiments with such networks."""
        return tuple(one for one in self.experiments if one.network)

    @property
    def absence(self) -> str:
        """What to say when there is nothing to show."""
        if self.benchmarks:
            return "Results of a benchmark, and none on images."
        if not self.trials:
            return "There are no results yet."
        return (
            "There are no results on a test set yet. `dcpp results` lists the networks that were evaluated on "
            "held-out training data."
        )

    def columns(self) -> dict[tuple[str, str], list[ReportedExperiment]]:
        """The experiments by data set and variant: those of one column are compared with each other."""
        found: dict[tuple[str, str], list[ReportedExperiment]] = {}
        for experiment in self.experiments:
            found.setdefault(experiment.column, []).append(experiment)
        return found


def select_experiments(rows: Iterable[Row], notes: Notes) -> Selected:
    """The experiments to show: all that were evaluated on the test set, except trials that were not chosen."""
    by_digest: dict[str, list[Row]] = defaultdict(list)
    benchmarks = []
    for row in rows:
        if "benchmark" in row.protocol.settings:
            benchmarks.append(row)
        else:
            by_digest[row.key.digest].append(row)
    chosen = {str(note.get("resolved")) for note in selection_notes(notes).values()}
    shown, trials = [], []
    for digest in sorted(by_digest):
        protocol = by_digest[digest][0].protocol
        held_out = bool(_table(protocol.settings, "training").get("holdout", 0))
        if held_out or ((digest, "trial") in notes and digest not in chosen):
            trials.append(digest)
        else:
            shown.append(plain_experiment(protocol, by_digest[digest]))
    return Selected(tuple(_sorted(_named(shown))), tuple(trials), tuple(benchmarks))


def plain_experiment(protocol: StoredProtocol, rows: Iterable[Row] = ()) -> ReportedExperiment:
    """An experiment on its own, under the label with which it was stored."""
    return ReportedExperiment(
        digest=protocol.digest,
        label=protocol.label,
        data=str(protocol.settings.get("data", "")),
        variant="",
        settings=protocol.settings,
        rows=tuple(sorted(rows, key=lambda row: row.key.replica)),
    )


def selection_notes(notes: Notes) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Notes on how step sizes and rates were chosen, by the incomplete protocol's digest and the way of choosing."""
    return {place: note for place, note in notes.items() if place[1] in WAYS and isinstance(note, Mapping)}


def resolutions(notes: Notes) -> dict[str, str]:
    """The complete protocol of each protocol with open settings; the paper's way where both were taken."""
    found = selection_notes(notes)
    places = sorted(found, key=lambda place: WAYS.index(place[1]), reverse=True)
    return {digest: str(found[digest, way].get("resolved")) for digest, way in places}


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = setting(value)
    return flat


def _differences(experiments: list[ReportedExperiment], leave_out: tuple[str, ...] = ()) -> list[str]:
    """For each experiment, its values of the settings in which the experiments differ."""
    flat = [_flat(experiment.settings) for experiment in experiments]
    names = sorted({name for one in flat for name in one if not name.startswith(leave_out)})
    names = [name for name in names if len({one.get(name) for one in flat}) > 1]
    return [", ".join(f"{name.split('.')[-1]}={one.get(name, 'none')}" for name in names) for one in flat]


def _named(experiments: list[ReportedExperiment]) -> list[ReportedExperiment]:
    """Give each experiment a variant and a unique label, and the replicas to expect."""
    result = []
    for column in _groups(experiments, lambda e: (e.data, e.network, e.examples)):
        apart = _differences(column, ("data", "method.", "pruning", "evaluation.", "training.step_size", "by_epoch"))
        few = f"{column[0].examples:,} examples" if column[0].examples else ""
        column = [replace(e, variant=_joined(few, text)) for e, text in zip(column, apart, strict=True)]
        for compared in _groups(column, lambda e: e.variant):
            expected = frozenset(row.key.replica for e in compared for row in e.rows)
            trusted = all(e.verified for e in compared)
            for alike in _groups(compared, lambda e: e.label):
                for e, text in zip(alike, _differences(alike, ("by_epoch",)), strict=True):
                    label = f"{e.label} ({text})" if text else e.label
                    result.append(replace(e, label=label, expected=expected, trusted=trusted))
    return result


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _groups(experiments: Iterable[ReportedExperiment], key: Any) -> list[list[ReportedExperiment]]:
    found: dict[Any, list[ReportedExperiment]] = {}
    for experiment in experiments:
        found.setdefault(key(experiment), []).append(experiment)
    return list(found.values())


def _sorted(experiments: list[ReportedExperiment]) -> list[ReportedExperiment]:
    """Data sets and methods in the paper's order; others follow, by name."""
    sets, kinds = list(paper_values.TITLES), list(paper_values.KINDS)

    def place(e: ReportedExperiment) -> tuple[Any, ...]:
        of_set = sets.index(e.data) if e.data in sets else len(sets)
        of_kind = kinds.index(e.kind) if e.kind in kinds else len(kinds)
        return of_set, e.data, e.network, e.variant, of_kind, e.label, e.digest

    return sorted(experiments, key=place)
