"""What networks with few connections keep, as plain data: counts by place, map and unit, and whether networks agree.

Networks of one method have different starts, so that maps and units have no order in common: only places compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from dropconnectpp.lab.report.formats import finite
from dropconnectpp.lab.report.statistics import concordance, holm
from dropconnectpp.lab.report.tables.connections import Place
from dropconnectpp.lab.report.tables.rows import Table, identity

AXES = ("place", "map", "unit")
"""What the connections of a layer are counted by."""
Counts = list[list[float]]
"""Of each network, for each place, map or unit."""


def survivor_tables(sets: Sequence[Sequence[Place]]) -> dict[str, Table]:
    """The tables of this module, by name; places are grouped by data set and network."""
    agreement: Table = []
    for places in sets:
        rows = [row for place in places for row in _agreement(place)]
        for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
            agreement.append(row | {"adjusted_p": p})
    return {
        "survivors": [row for places in sets for place in places for row in _survivors(place)],
        "agreement": agreement,
    }


def counts_of(place: Place, axis: str) -> dict[str, Counts]:
    """By layer, the counts of every network that has them."""
    found: dict[str, Counts] = {}
    for row in place.experiment.done:
        layers = row.results.get("layers")
        for layer in layers if isinstance(layers, list) else []:
            values = layer.get(f"by_{axis}") if isinstance(layer, Mapping) else None
            if isinstance(values, list) and values:
                numbers = [finite(value) for value in values]
                if None not in numbers:
                    found.setdefault(str(layer.get("name")), []).append([n for n in numbers if n is not None])
    return {name: counts for name, counts in found.items() if len({len(one) for one in counts}) == 1}


def _survivors(place: Place) -> Table:
    """Means over networks: of each place, and of maps and units in falling order."""
    table: Table = []
    for axis in AXES:
        for layer, counts in counts_of(place, axis).items():
            side = _side(len(counts[0])) if axis == "place" else None
            ordered = counts if axis == "place" else [sorted(one, reverse=True) for one in counts]
            for rank, values in enumerate(zip(*ordered, strict=True)):
                about = {**identity(place.experiment), "method": place.family, "ours": place.ours, "asked": place.asked}
                about |= {"control": place.experiment.control, "layer": layer, "axis": axis, "rank": rank}
                about |= {
                    "row": None if side is None else rank // side,
                    "column": None if side is None else rank % side,
                }
                table.append(about | {"n": len(values), "connections": sum(values) / len(values)})
    return table


def _side(places: int) -> int | None:
    """The side of a square of places; None where they are none."""
    side = round(places**0.5)
    return side if side > 1 and side * side == places else None


def _agreement(place: Place) -> Table:
    """Whether the networks of a method keep connections at the same places."""
    table: Table = []
    for layer, counts in counts_of(place, "place").items():
        if len(counts) < 2 or len(counts[0]) < 2 or not all(map(sum, counts)):
            continue
        found = concordance(counts)
        if found is None:
            continue
        about: dict[str, Any] = {**identity(place.experiment), "method": place.family, "asked": place.asked}
        about |= {"control": place.experiment.control, "layer": layer, "n": len(counts), "places": len(counts[0])}
        table.append(about | {"common": common(counts), "w": found[0], "p": found[1]})
    return table


def common(counts: Counts) -> float:
    """Connections that two networks share, as a multiple of what supports drawn at random would: the mean over pairs.

    Maps and units of networks with different starts are exchangeable, so that how many they share follows from how many
    each keeps at each place.

    >>> common([[2, 0], [2, 0]]), common([[1, 1], [1, 1]]), common([[2, 0], [0, 2]])
    (2.0, 1.0, 0.0)
    """
    pairs = list(combinations(counts, 2))
    shared = (sum(a * b for a, b in zip(one, other, strict=True)) / (sum(one) * sum(other)) for one, other in pairs)
    return len(counts[0]) * sum(shared) / len(pairs)
