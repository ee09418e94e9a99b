"""A few hundred damages of each kind of file; `make test-faults` does ten thousand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mutations import FAULT, KINDS, again, attack_of, batch, run
from tally import Tally

COUNTS = {"checkpoints": 56, "models": 210, "experiments": 200, "stores": 120}


@pytest.mark.skipif(sys.platform != "linux", reason="bounds the memory of its processes as Linux does")
@pytest.mark.parametrize("kind", COUNTS)
def test_no_damage_is_silent_or_ends_in_a_raw_error(kind: str, tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally.json")
    run(kind, COUNTS[kind], tally)
    assert tally.faults == []
    assert tally.total == COUNTS[kind]
    assert set(tally.counts) == set(attack_of(kind).kinds)
    harmless = attack_of(kind).harmless
    assert all(set(counts) <= harmless for counts in tally.counts.values())
    assert sum(bool({"refused", "named", "told, the same rows"} & set(counts)) for counts in tally.counts.values()) >= 3


class Broken:
    """Readers that do what must be found."""

    title, kinds, harmless = "Broken", ("a", "b"), frozenset({"refused"})

    def attack(self, number: int) -> object:
        from damage import Found

        if number == 5:
            bytearray(1 << 33)
        return Found("ab"[number % 2], "", "refused" if number < 4 else "a silent difference")


def test_what_ends_the_process_and_what_is_silent_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [one.outcome for one in batch(Broken(), range(3, 8))]  # type: ignore[arg-type]
    assert found == ["refused", "a silent difference", "the process ended with 1"]
    monkeypatch.setattr("mutations.attack_of", lambda kind: lambda folder: Broken())
    tally = Tally(tmp_path / "tally.json")
    run("models", 5, tally)
    assert Tally(tmp_path / "tally.json").counts == {"a": {"refused": 2, FAULT: 1}, "b": {"refused": 2}}
    assert tally.faults == ["models 4, a of : a silent difference"]
    run("models", 5, tally)  # nothing is left to do
    assert tally.total == 5
    monkeypatch.setattr(Broken, "harmless", frozenset({"refused", "a silent difference"}))
    again("models", tally)
    assert (tally.faults, tally.total, tally.get("a", FAULT)) == ([], 5, 0)


def test_the_kinds_can_be_imported() -> None:
    assert all(attack_of(kind).title for kind in KINDS if kind in COUNTS)
