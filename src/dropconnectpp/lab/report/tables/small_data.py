"""Accuracy and probabilities against the number of training examples, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dropconnectpp.lab.report.selection import Selected
from dropconnectpp.lab.report.statistics import holm
from dropconnectpp.lab.report.tables.judged import ENSEMBLE, NETWORKS, ONE_PASS, Judged, compare, judged
from dropconnectpp.lab.report.tables.rows import OURS, Table, statistic

MEASURES = ("accuracy", "nll", "ece")
TESTED = ("accuracy", "nll")


def small_data_tables(selected: Selected) -> dict[str, Table]:
    """The tables of this module, by name; empty where no network had fewer training examples than there are."""
    sets = {one.data for one in selected.experiments if one.examples}
    found = [one for one in judged(selected) if one.experiment.data in sets and _stands_for_its_method(one)]
    found.sort(key=_place)
    return {"small_data": [_row(one) for one in found], "small_data_tests": _tests(found)}


def _stands_for_its_method(one: Judged) -> bool:
    """One way to predict for each method: drawn networks where there are any, and ensembles of plain networks."""
    if one.kind == ENSEMBLE:
        return one.experiment.kind == "none"
    return one.prediction == (ONE_PASS if one.kind == "none" else NETWORKS)


def _place(one: Judged) -> tuple[str, float]:
    """Data sets by name, then by the number of examples; all of them come last."""
    return one.experiment.data, one.experiment.examples or float("inf")


def _title(one: Judged) -> str:
    return one.experiment.title.partition(" (")[0]


def _row(one: Judged) -> dict[str, Any]:
    found = {name: statistic(one.values(name).values()) for name in MEASURES}
    return {**one.identity, "title": _title(one), "examples": one.experiment.examples or None, **found}


def _tests(found: Sequence[Judged]) -> Table:
    """DropConnect++ against each other method at each size; p adjusted by Holm over all of a data set's pairs."""
    by_size: dict[tuple[str, float], list[Judged]] = defaultdict(list)
    for one in found:
        by_size[_place(one)].append(one)
    table: Table = []
    for column in by_size.values():
        for ours in (one for one in column if one.kind == OURS):
            for other in (one for one in column if one.kind != OURS):
                row: dict[str, Any] = {**ours.identity, "title": _title(ours), "other": other.label}
                row |= {"examples": ours.experiment.examples or None, "other_digest": other.digest}
                row |= {"other_prediction": other.prediction, "other_count": other.count}
                table.append(row | {name: compare(ours, other, name) for name in TESTED})
    for name in TESTED:
        for data in {row["data"] for row in table}:
            tested = [row for row in table if row["data"] == data and row[name] is not None]
            for row, p in zip(tested, holm([row[name]["p"] for row in tested]), strict=True):
                row[name]["adjusted_p"] = p
    return table
