"""Which rows of a store a report shows, and under what names: trials of step sizes and rates are left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dropconnectpp.lab.config.notes import WAYS
from dropconnectpp.lab.config.protocol import Method, paper
from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import finite, setting
from dropconnectpp.lab.runs.store import FINAL, Row, StoredProtocol

Notes = Mapping[tuple[str, str], Any]
OTHER_TITLES = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
"""Of data sets that the paper has not."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One method on one data set: the replicas of one protocol."""

    digest: str
    label: str
    """The method's, made unique among those it is compared with."""
    data: str
    variant: str
    """What sets it apart from other experiments with the same data; empty if nothing does."""
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    expected: frozenset[int] = frozenset()
    """Replicas that any method of the comparison has."""
    trusted: bool = True
    """Whether every method of the comparison was trained on the official data."""

    @property
    def kind(self) -> str:
        """The method's kind, as in the protocol."""
        return str(_table(self.settings, "method").get("kind", ""))

    @property
    def title(self) -> str:
        """What tables call the data."""
        name = (paper_values.TITLES | OTHER_TITLES).get(self.data, self.data)
        return f"{name} ({self.variant})" if self.variant else name

    @property
    def paper_data(self) -> str:
        """The data set under which the paper has values to stand beside; empty where the network is another one."""
        known = self.data in paper_values.TITLES
        usual = asdict(paper(self.data, "none").architecture) if known else {}
        given = _table(self.settings, "architecture")
        return self.data if all(given.get(name) in (value, _as_list(value)) for name, value in usual.items()) else ""

    @property
    def paper_kind(self) -> str:
        """The kind under which the paper has values to stand beside; empty for a method that the paper has not."""
        given, usual = _table(self.settings, "method"), asdict(Method())
        open_there = ("kind", "rate", "evaluation")
        same = all(given.get(name, value) == value for name, value in usual.items() if name not in open_there)
        return self.kind if same else ""

    @property
    def column(self) -> tuple[str, str]:
        """Experiments with the same column are compared with each other."""
        return self.data, self.variant

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
        """Replicas that diverged, with the epoch they did."""
        return {r.key.replica: r.results.get("diverged_at") for r in self.rows if r.status == "diverged"}

    @property
    def missing(self) -> list[int]:
        """Replicas that others have and this has not, or not yet."""
        return sorted(self.expected - {row.key.replica for row in self.finished})

    @property
    def verified(self) -> bool:
        """Whether no row says that its data is not the official one."""
        return all(row.provenance.get("verified") is not False for row in self.finished)

    def values(self, *path: str) -> dict[int, float]:
        """A result by replica, where it is there and finite: `values("uncertainty", "entropy")`."""
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
    """What a report shows, in its order, and what it leaves out."""

    experiments: tuple[Experiment, ...]
    trials: tuple[str, ...]
    """Digests of protocols that served to choose, or were evaluated on held-out training data."""

    @property
    def absence(self) -> str:
        """What to say where there is nothing to show."""
        if not self.trials:
            return "There are no results yet."
        return (
            "There are no results on a test set yet. `dcpp results` lists the networks that were evaluated on "
            "held-out training data."
        )

    def columns(self) -> dict[tuple[str, str], list[Experiment]]:
        """The experiments by what they are compared on."""
        found: dict[tuple[str, str], list[Experiment]] = {}
        for experiment in self.experiments:
            found.setdefault(experiment.column, []).append(experiment)
        return found


def select(rows: Iterable[Row], notes: Notes) -> Selected:
    """The experiments to show: those evaluated on the test set, but for what a note marks as a trial and none chose."""
    by_digest: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
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
    return Selected(tuple(_sorted(_named(shown))), tuple(trials))


def plain_experiment(protocol: StoredProtocol, rows: Iterable[Row] = ()) -> Experiment:
    """An experiment by itself, under the name it was stored with."""
    return Experiment(
        digest=protocol.digest,
        label=protocol.label,
        data=str(protocol.settings.get("data", "")),
        variant="",
        settings=protocol.settings,
        rows=tuple(sorted(rows, key=lambda row: row.key.replica)),
    )


def selection_notes(notes: Notes) -> dict[tuple[str, str], Mapping[str, Any]]:
    """How step sizes and rates were chosen, by the digest of the incomplete protocol and the way of choosing."""
    return {place: note for place, note in notes.items() if place[1] in WAYS and isinstance(note, Mapping)}


def resolutions(notes: Notes) -> dict[str, str]:
    """What protocols with open settings became, by digest: the paper's way where they went both."""
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


def _differences(experiments: list[Experiment], leave_out: tuple[str, ...] = ()) -> list[str]:
    """For each experiment, the settings on which they are not all alike."""
    flat = [_flat(experiment.settings) for experiment in experiments]
    names = sorted({name for one in flat for name in one if not name.startswith(leave_out)})
    names = [name for name in names if len({one.get(name) for one in flat}) > 1]
    return [", ".join(f"{name.split('.')[-1]}={one.get(name, 'none')}" for name in names) for one in flat]


def _named(experiments: list[Experiment]) -> list[Experiment]:
    """Give each a variant and a unique label, and tell it what replicas to expect."""
    result = []
    for column in _groups(experiments, lambda e: e.data):
        apart = _differences(column, ("data", "method.", "evaluation.", "training.step_size"))
        column = [replace(e, variant=text) for e, text in zip(column, apart, strict=True)]
        for compared in _groups(column, lambda e: e.variant):
            expected = frozenset(row.key.replica for e in compared for row in e.rows)
            trusted = all(e.verified for e in compared)
            for alike in _groups(compared, lambda e: e.label):
                for e, text in zip(alike, _differences(alike), strict=True):
                    label = f"{e.label} ({text})" if text else e.label
                    result.append(replace(e, label=label, expected=expected, trusted=trusted))
    return result


def _groups(experiments: Iterable[Experiment], key: Any) -> list[list[Experiment]]:
    found: dict[Any, list[Experiment]] = {}
    for experiment in experiments:
        found.setdefault(key(experiment), []).append(experiment)
    return list(found.values())


def _sorted(experiments: list[Experiment]) -> list[Experiment]:
    """Data sets and methods in the paper's order, others after them by name."""
    sets, kinds = list(paper_values.TITLES), list(paper_values.KINDS)

    def place(e: Experiment) -> tuple[Any, ...]:
        of_set = sets.index(e.data) if e.data in sets else len(sets)
        of_kind = kinds.index(e.kind) if e.kind in kinds else len(kinds)
        return of_set, e.data, e.variant, of_kind, e.label, e.digest

    return sorted(experiments, key=place)
