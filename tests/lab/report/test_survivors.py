"""What networks keep, in the report: counts by place, map and unit, and whether networks agree more than chance."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from connection_cases import fill_frontier, note, protocol, result
from report_cases import Checker, fill, tables
from scipy import stats

from dropconnectpp.lab.report import build, text
from dropconnectpp.lab.report.statistics import concordance
from dropconnectpp.lab.report.tables.survivors import common
from dropconnectpp.lab.runs.store import Store

SIDE, MAPS, UNITS = 4, 3, 5
METHODS = {"ours": 0.9, "gradual": 0.0}
"""How much more often the middle of the maps is kept: not at all by the second."""
Tables = dict[str, list[dict[str, Any]]]


def counted(name: str, replica: int, middle: float) -> dict[str, Any]:
    """A row whose first layer says what it keeps."""
    random = Random(f"{name} {replica}")
    kept = [0] * SIDE**2, [0] * MAPS, [0] * UNITS
    for place, one, unit in itertools.product(range(SIDE**2), range(MAPS), range(UNITS)):
        central = place // SIDE in (1, 2) and place % SIDE in (1, 2)
        if random.random() < 0.2 + middle * central * 0.8:
            for counts, index in zip(kept, (place, one, unit), strict=True):
                counts[index] += 1
    row = result(2.0, 0.01)
    row["layers"][0] |= dict(zip(("by_place", "by_map", "by_unit"), kept, strict=True))
    return row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("survivors")
    with Store.open(place / "results.sqlite") as store:
        for name, middle in METHODS.items():
            one = protocol(name, 0.01)
            fill(store, one, {r: counted(name, r, middle) for r in range(20)})
            note(store, one, 0.01)
    build(place / "results.sqlite", place, figures=False)
    return place


@pytest.fixture(scope="module")
def found(folder: Path) -> Tables:
    with Store.open(folder / "results.sqlite", read_only=True) as store:
        return tables(store)


def test_means_are_by_place_and_in_falling_order(found: Tables) -> None:
    ours = [row for row in found["survivors"] if row["ours"]]
    places = [row for row in ours if row["axis"] == "place"]
    rows = [counted("ours", r, METHODS["ours"])["layers"][0] for r in range(20)]
    assert [row["connections"] for row in places] == [
        sum(one) / 20 for one in zip(*(r["by_place"] for r in rows), strict=True)
    ]
    assert {(row["row"], row["column"]) for row in places} == set(itertools.product(range(SIDE), repeat=2))
    units = [row["connections"] for row in ours if row["axis"] == "unit"]
    assert units == sorted(units, reverse=True)
    assert sum(units) == pytest.approx(sum(row["connections"] for row in places))
    assert {row["n"] for row in ours} == {20}


def test_agreement_is_told_from_chance(found: Tables) -> None:
    ours, gradual = sorted(found["agreement"], key=lambda row: row["method"])
    assert ours["common"] > 1.3
    assert ours["adjusted_p"] < 1e-10
    assert 0.95 < gradual["common"] < 1.05
    assert gradual["adjusted_p"] > 0.01
    assert ours["adjusted_p"] == pytest.approx(min(1.0, 2 * min(ours["p"], gradual["p"])))


def test_concordance_is_scipys() -> None:
    random = Random(0)
    raters = [[random.choice((0, 0, 1, 2, 3)) + 0.2 * place for place in range(9)] for _ in range(7)]
    w, p = concordance(raters) or (0.0, 0.0)
    friedman = stats.friedmanchisquare(*zip(*raters, strict=True))
    assert w == pytest.approx(friedman.statistic / (7 * 8))
    assert p == pytest.approx(friedman.pvalue)
    assert concordance([[1.0, 1.0], [2.0, 2.0]]) is None


def test_in_common_is_the_mean_over_all_orders_of_maps_and_units() -> None:
    """By enumeration: two supports of 2 places, 2 maps and 3 units, one with its maps and units in every order."""
    one, other = {(0, 0, 0), (0, 1, 2), (1, 0, 1)}, {(0, 0, 1), (0, 0, 0), (0, 1, 1), (1, 1, 2)}
    shared = [
        len(one & {(place, maps[m], units[u]) for place, m, u in other})
        for maps in itertools.permutations(range(2))
        for units in itertools.permutations(range(3))
    ]
    chance = len(one) * len(other) / (2 * 2 * 3)
    places = [[float(sum(place == p for place, *_ in support)) for p in range(2)] for support in (one, other)]
    assert common(places) == pytest.approx(sum(shared) / len(shared) / chance)


def test_the_page_draws_it(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    ids = {one.removesuffix("-title") for one in Checker.check(page).ids}
    assert {"survivors-mnist-lenet-300-100-unit", "survivors-mnist-lenet-300-100-place-3"} <= ids
    assert "Whether networks with different starts keep connections at the same places" in page
    assert "What survives, MNIST, LeNet-300-100, layer dense0, at 1%" in page
    assert (folder / "tables" / "survivors.csv").exists()
    assert "Kendall" in text(folder / "results.sqlite", ["agreement"])


def test_networks_that_counted_nothing_have_no_such_table(tmp_path: Path) -> None:
    with Store.open(tmp_path / "results.sqlite") as store:
        fill_frontier(store)
        found = tables(store)
    assert not found["survivors"]
    assert not found["agreement"]


def test_counts_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    one = replace(protocol("ours", 0.01), root_seed=3)
    with Store.open(tmp_path / "results.sqlite") as store:
        rows = {r: counted("ours", r, 0.5) for r in range(3)}
        rows[1]["layers"][0]["by_place"] = ["many"] * 16
        rows[2]["layers"][0]["by_unit"] = [1, 2]
        fill(store, one, rows)
        found = tables(store)
    assert {row["n"] for row in found["survivors"] if row["axis"] == "place"} == {2}
    assert not [row for row in found["survivors"] if row["axis"] == "unit"], "networks of one method differ in size"
