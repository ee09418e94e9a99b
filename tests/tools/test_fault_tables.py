"""Tables of the long tests of failures: sums, and outcomes that nobody foresaw."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from tally import Tally

from scripts import ROOT

sys.path.insert(0, str(ROOT / "tools"))
tool = importlib.import_module("fault_tables")
sys.path.pop(0)


def kept(folder: Path) -> None:
    counts = {
        "kills": {"run": {"at a write": 2, "at a moment": 1, "rounds": 2, "ended first": 1, "lost": 1}},
        "failures": {"save": {"of": 18, "resumed": 3, "went on": 1, "fault": 1}},
        "power_cuts": {"save": {"of": 21, "dropped": 2, "torn": 1}},
        "checkpoints": {"torn": {"told, the same rows": 3, "the same rows": 1}},
        "stores": {"torn": {"named": 1200, "unverified": 2, "fault": 1}},
        "models": {"torn": {"refused": 5, "another model": 4}},
        "experiments": {"torn": {"refused": 5, "an experiment": 4}},
    }
    for name, one in counts.items():
        tally = Tally(folder / f"{name}.json")
        tally.counts = one
        tally.keep()


def test_the_tables_have_every_count(tmp_path: Path) -> None:
    kept(tmp_path)
    found = tool.tables(tmp_path)
    assert "| `run` | 3 | 2 | 1 | 2 | 1 | 0 | 0 | 0 |" in found["faults_kills"]
    assert "| all | 3 | 2 | 1 | 2 | 1 | 0 | 0 | 0 |" in found["faults_kills"]
    assert "| `save` | 18 | 5 | 1 | 3 | 0 | 1 |" in found["faults_failures"]
    assert "| `save` | 21 | 3 | 2 | 0 | 1 | 0 |" in found["faults_power"]
    assert "| stores, read, reported, merged | 1,203 | 1,200 | 0 | 2 | 0 | 1 |" in found["faults_mutations"]
    assert "| model files, loaded | 9 | 5 | 0 | 0 | 4 | 0 |" in found["faults_mutations"]
    assert all(text.splitlines()[-1].startswith("Counted until 20") for text in found.values())


def test_an_outcome_of_no_column_is_an_error(tmp_path: Path) -> None:
    kept(tmp_path)
    (tmp_path / "stores.json").write_text(json.dumps({"day": "2026-01-01", "counts": {"torn": {"lost": 1}}}))
    with pytest.raises(ValueError, match="stores: lost is in no column"):
        tool.tables(tmp_path)
