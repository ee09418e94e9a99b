"""A part of what `make test-faults` does to whole commands: some kills, failures and power cuts of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from failures import run as fail
from injection import SUPPORTED
from kill_cases import CASES, Save
from kills import Rounds, kill
from power_cuts import run as cut
from tally import Tally
from workshop import Workshop, workshop

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="needs Linux and a C compiler")
KILLS = 6


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    with workshop() as made:
        yield made


def test_what_is_killed_is_resumed_with_nothing_lost_or_different(shop: Workshop, tmp_path: Path) -> None:
    tally = Tally(tmp_path / "kills.json")
    kill(KILLS, tally, shop)
    assert tally.faults == []
    assert set(tally.counts) == set(CASES)
    again = Tally(tmp_path / "kills.json")
    assert again.counts == tally.counts
    kill(KILLS, again, shop)  # nothing is left to do
    assert again.counts == tally.counts


@pytest.mark.parametrize("name", ["store merge", "save"])
def test_what_cannot_write_says_so_and_is_resumed(shop: Workshop, tmp_path: Path, name: str) -> None:
    tally = Tally(tmp_path / "failures.json")
    fail(tally, shop, only=name, most=3)
    assert tally.faults == []
    assert tally.get(name, "resumed", "went on", "not reached") == 3 < tally.get(name, "of")


@pytest.mark.parametrize("name", ["data fetch", "save"])
def test_what_lost_its_power_is_resumed(shop: Workshop, tmp_path: Path, name: str) -> None:
    tally = Tally(tmp_path / "power_cuts.json")
    cut(tally, shop, only=name, most=3)
    assert tally.faults == []
    assert tally.get(name, "dropped", "empty", "torn") == 3 < tally.get(name, "of")


NUMBERS = itertools.count()


class Careless(Save):
    """A command that loses things, and ends in another way each time."""

    name = "careless"

    def faults(self, place: Path) -> list[str]:
        return ["lost: what it was to keep"]

    def found(self, place: Path) -> dict[str, object]:
        return {"number": next(NUMBERS)}


def test_what_is_lost_or_different_is_counted_and_named(shop: Workshop, tmp_path: Path) -> None:
    tally = Tally(tmp_path / "kills.json")
    rounds = Rounds(Careless(shop.world), shop, tally)
    for number in range(3):
        rounds.round(number)
    assert tally.get("careless", "lost") >= 1
    assert tally.get("careless", "different") == 3
    assert any("careless, round 0: lost: what it was to keep" in fault for fault in tally.faults)
    assert Tally(tmp_path / "kills.json").faults == tally.faults
