"""Networks with few connections as plain data: error, NLL and ECE by the share kept, tests, layers, units, settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from dropconnectpp.lab.config.notes import PASS, SPARSITY
from dropconnectpp.lab.config.sparsity import OURS
from dropconnectpp.lab.report import published
from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.selection import Notes, ReportedExperiment
from dropconnectpp.lab.report.statistics import Comparison, holm, paired, welch
from dropconnectpp.lab.report.tables.rows import ByReplica, Table, compared, identity, plain, statistic
from dropconnectpp.lab.runs.rows import gated_counts, share_kept

Measure = Literal["error", "nll", "ece"]
"""What is compared; lower is better."""
MEASURES: tuple[Measure, ...] = ("error", "nll", "ece")
SLACK = 0.1
"""A network keeps the share that was asked for if it keeps at most this part more, on average."""


@dataclass(frozen=True)
class Place:
    """One method at one share: a row of the frontier."""

    experiment: ReportedExperiment
    asked: float | None
    """The share of weights that it was chosen or told to keep; None: it was told nothing."""

    @property
    def family(self) -> str:
        """What tables call the method, whatever its settings."""
        return self.experiment.family

    @property
    def ours(self) -> bool:
        """Whether it is DropConnect++, and none of its controls."""
        return self.family == OURS

    def values(self, measure: Measure) -> dict[int, float]:
        """A measure by replica."""
        if measure == "error":
            return {replica: 100.0 - value for replica, value in self.experiment.values("accuracy").items()}
        return self.experiment.values(measure)

    @property
    def kept(self) -> dict[int, float]:
        """The share of weights kept, by replica: of those with gates, where some layers have none."""
        shares = {row.key.replica: finite(share_kept(row.results)) for row in self.experiment.done}
        return {replica: share for replica, share in shares.items() if share is not None}


def connection_tables(experiments: Sequence[ReportedExperiment], notes: Notes) -> dict[str, Table]:
    """The tables of this module, by name."""
    sets = places_by_title(experiments, notes)
    return {
        "connections": [row for places in sets for row in _frontier(places)],
        "connections_tests": [row for places in sets for row in _tests(places)],
        "published": [row for places in sets for row in _published(places)],
        "layers": [row for places in sets for place in places for row in _layers(place)],
        "units": [row for places in sets for row in _units(places, notes)],
        "tried": _tried(experiments, notes),
    }


def places_by_title(experiments: Sequence[ReportedExperiment], notes: Notes) -> list[list[Place]]:
    """Every method at every share, by data set and network."""
    return [places_of(list(group), notes) for _, group in groupby(experiments, lambda e: e.title)]


def places_of(experiments: Sequence[ReportedExperiment], notes: Notes) -> list[Place]:
    """Every method at every share, the largest share first and DropConnect++ first at each."""
    chosen: dict[str, list[float]] = {}
    for note in sparsity_notes(notes):
        share = finite(note.get("keep"))
        if share is not None:
            chosen.setdefault(str(note.get("resolved")), []).append(share)
    places = []
    for experiment in experiments:
        told = finite(getattr(experiment.pruning, "keep", None))
        whole = 1.0 if experiment.pruning is None else None
        asked: list[float | None] = [*chosen.get(experiment.digest, [])] or [whole if told is None else told]
        places += [Place(experiment, share) for share in asked]
    return sorted(places, key=_order)


def _order(place: Place) -> tuple[Any, ...]:
    asked = place.asked if place.asked is not None else -1.0
    return -asked, not place.ours, bool(place.experiment.control), place.family, place.experiment.label


def sparsity_notes(notes: Notes) -> list[Mapping[str, Any]]:
    """How settings were chosen for each method and share."""
    return [note for (_, name), note in notes.items() if name.startswith(SPARSITY) and isinstance(note, Mapping)]


def _mean_of(values: Iterable[float]) -> float | None:
    found = statistic(values)["mean"]
    return None if found is None else float(found)


# --------------------------------------------------------------------------------------- the frontier


def _frontier(places: Sequence[Place]) -> Table:
    table: Table = []
    figures = _own_figures(places)
    for place in places:
        found = {measure: statistic(place.values(measure).values()) for measure in MEASURES}
        share = _mean_of(place.kept.values())
        first = next((row.results for row in place.experiment.done), {})
        row: dict[str, Any] = {
            **identity(place.experiment),
            "method": place.family,
            "ours": place.ours,
            "control": place.experiment.control,
            "setting": place.experiment.label,
            "asked": place.asked,
            "share": share,
            "times": None if not share else 1.0 / share,
            "weights": finite(first.get("weights")),
            "gated": None if (counts := gated_counts(first)) is None else counts[0],
            "kept": _mean_of(place.experiment.values("weights_kept").values()),
            "biases": finite(first.get("biases")),
            **dict(found.items()),
            "reached": place.asked is None or share is None or share <= place.asked * (1.0 + SLACK),
            "diverged": sorted(place.experiment.diverged),
            "missing": place.experiment.missing,
        }
        table.append(row | {"own_figure": figures.get(place.family)})
    return table


def _own_figures(places: Sequence[Place]) -> dict[str, dict[str, Any]]:
    """By method, its own published figure and whether it is as good here: else it does not count as beaten."""
    points: dict[str, list[tuple[float, float]]] = {}
    for place in places:
        error, share = _mean_of(place.values("error").values()), _mean_of(place.kept.values())
        if error is not None and share:
            points.setdefault(place.family, []).append((1.0 / share, error))
    found = {}
    for place in places:
        experiment = place.experiment
        figure = published.own_figure(experiment.data, experiment.network, experiment.kind)
        if figure is not None and not experiment.structured:
            as_good = published.reproduced(figure, points.get(place.family, []))
            about = {"error": figure.error, "times": figure.compression, "source": figure.source}
            found[place.family] = about | {"reproduced": as_good}
    return found


# -------------------------------------------------------------------------------------------- the tests


def _tests(places: Sequence[Place]) -> Table:
    """DropConnect++ against each other method at the same share; p adjusted over the pairs of one data set."""
    pairs, figures = [], _own_figures(places)
    for _, group in groupby(places, lambda place: place.asked):
        members = list(group)
        ours = [one for one in members if one.ours]
        pairs += [(a, b) for a in ours for b in members if b not in ours]
    table: Table = []
    for a, b in pairs:
        table.append(
            {
                **identity(a.experiment),
                "method": a.family,
                "asked": a.asked,
                "other": b.family,
                "other_digest": b.experiment.digest,
                "control": b.experiment.control,
                "share": _mean_of(a.kept.values()),
                "other_share": _mean_of(b.kept.values()),
                "mean": _mean_of(a.values("error").values()),
                "other_mean": _mean_of(b.values("error").values()),
                "own_figure": figures.get(b.family),
            }
        )
    tests: dict[str, Callable[[ByReplica, ByReplica], Comparison]] = {
        "welch": lambda a, b: welch(list(a.values()), list(b.values())),
        "paired": paired,
    }
    for measure in MEASURES:
        for name, test in tests.items():
            found = [compared(test, a.values(measure), b.values(measure)) for a, b in pairs]
            adjusted = iter(holm([one.p for one in found if one is not None]))
            for row, one in zip(table, found, strict=True):
                key = name if measure == "error" else f"{measure}_{name}"
                row[key] = None if one is None else plain(one) | {"adjusted_p": next(adjusted)}
    return table


# --------------------------------------------------------------------------- layers, units, what others have


def _published(places: Sequence[Place]) -> Table:
    if not places:
        return []
    first = places[0].experiment
    return [
        {
            "data": first.data,
            "title": first.title,
            "trusted": True,
            "method": one.method,
            "error": one.error,
            "times": one.compression,
            "units": "-".join(map(str, one.units)),
            "kind": one.kind,
            "remark": one.remark,
            "source": one.source,
        }
        for one in published.of_network(first.data, first.network, (*published.WEIGHTS, *published.UNITS))
    ]


def _by_layer(place: Place) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in place.experiment.done:
        layers = row.results.get("layers")
        for layer in layers if isinstance(layers, list) else []:
            if isinstance(layer, Mapping):
                found.setdefault(str(layer.get("name")), []).append(layer)
    return found


def _mean(layers: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [finite(layer.get(name)) for layer in layers]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _layers(place: Place) -> Table:
    """Weights, inputs and units left in each layer, means over replicas."""
    return [
        {
            **identity(place.experiment),
            "method": place.family,
            "asked": place.asked,
            "layer": name,
            "n": len(layers),
            **{one: _mean(layers, one) for one in ("weights", "kept", "inputs", "inputs_left", "units", "units_left")},
        }
        for name, layers in _by_layer(place).items()
    ]


def _units(places: Sequence[Place], notes: Notes) -> Table:
    """What is left of each network in inputs and units, as the literature writes it, beside its error."""
    table: Table = []
    for place in places:
        layers = list(_by_layer(place).values())
        left = [_mean(layer, "inputs_left") for layer in layers]
        error = statistic(place.values("error").values())
        if None in left or not left or error["mean"] is None:
            continue
        row = {**identity(place.experiment), "method": place.family, "setting": place.experiment.label}
        row |= {"asked": place.asked, "structured": place.experiment.structured, "units": left, **error}
        table.append(row | {"share": _mean_of(place.kept.values()), **_deployed(place.experiment, notes)})
    return table


def _deployed(experiment: ReportedExperiment, notes: Notes) -> dict[str, Any]:
    """Bytes and milliseconds before and after `compact`, means over the networks; None where they were not measured."""
    sizes = [row.results.get("deployed") for row in experiment.done]
    passes = [notes.get((experiment.digest, f"{PASS}{row.key.replica}")) for row in experiment.done]
    known = [one for one in sizes if isinstance(one, Mapping)]
    timed = [one for one in passes if isinstance(one, Mapping)]
    images = {one.get("images") for one in timed}
    return {
        "deployed_n": len(known),
        "bytes": _before_and_after(known, "bytes"),
        "ms": _before_and_after(timed, "ms"),
        "images": images.pop() if len(images) == 1 else None,
    }


def _before_and_after(found: Sequence[Mapping[str, Any]], name: str) -> list[float] | None:
    pairs = [one[name] for one in found if isinstance(one.get(name), list) and len(one[name]) == 2]
    means = [_mean_of(pair[place] for pair in pairs) for place in (0, 1)]
    known = [mean for mean in means if mean is not None]
    return known if len(known) == len(means) else None


def _tried(experiments: Sequence[ReportedExperiment], notes: Notes) -> Table:
    """Every setting that was tried on held-out training data, and which was chosen."""
    shown = {(experiment.data, experiment.network): experiment for experiment in experiments}
    table: Table = []
    ordered = sorted(sparsity_notes(notes), key=lambda one: (str(one.get("family")), -(finite(one.get("keep")) or 0.0)))
    for note in ordered:
        experiment = shown.get((str(note.get("data")), str(note.get("network"))))
        trials = note.get("trials")
        for trial in trials if isinstance(trials, list) else []:
            table.append(
                {
                    "data": note.get("data"),
                    "title": experiment.title if experiment else str(note.get("data")),
                    "trusted": experiment.trusted if experiment else True,
                    "method": note.get("family"),
                    "digest": trial.get("digest"),
                    "asked": finite(note.get("keep")),
                    **{name: trial.get(name) for name in ("setting", "share", "error", "nll", "n", "diverged")},
                    "reached": bool(trial.get("reached")),
                    "chosen": bool(trial.get("chosen")),
                }
            )
    return table
