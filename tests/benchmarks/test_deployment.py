"""The benchmark of deployment on recorded networks: sizes, outputs, and what another machine reads. Never a time."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from benchmark_cases import tables

from scripts import ROOT, run

pytest.importorskip("onnxruntime")
OPTIONS = ("--only", "lenet-300-100", "--batches", "2", "--rounds", "1", "--threads", "1")
SCRIPT = "benchmarks/deployment.py"


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_the_recorded_network_is_small_and_gives_the_same_elsewhere(tmp_path: Path) -> None:
    done = run(SCRIPT, *OPTIONS, "--prepare", str(tmp_path / "prepared"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert sum(file.stat().st_size for file in (tmp_path / "prepared").iterdir()) < 2_000_000
    sizes, times = tables(SCRIPT, tmp_path, "--models", str(tmp_path / "prepared"), *OPTIONS).values()
    rows = {row["version"]: row for row in sizes}
    dense, compact, rival = rows["dense"], rows["compact"], rows["Torch-Pruning"]
    assert number(compact["file, bytes"]) < 32_000 < 1_060_000 < number(dense["file, bytes"])
    for column in ("parameters", "FLOPs", "ONNX, bytes"):
        assert number(compact[column]) < number(rival[column]) < number(dense[column])
    assert number(compact["outputs differ by"]) < 1e-5
    assert number(compact["parameters"]) < number(rows["compact, all inputs"]["parameters"])
    assert rows["compact, all inputs"]["file, bytes"] != "-"
    assert rival["error, %"] == pytest.approx(rows["pruned"]["error, %"], abs=0.1)
    assert {row["version"] for row in times} >= {"dense", "compact", "Torch-Pruning"}
    for row in times:
        assert row["batch"] == 2
        assert row["torch, ms"] > 0
        assert row["ONNX differs from torch"] == "-" or number(row["ONNX differs from torch"]) < 1e-4
        assert row["differs from the pruned"] == "-" or number(row["differs from the pruned"]) < 1e-5


def test_a_folder_without_networks_is_an_error(tmp_path: Path) -> None:
    done = run(SCRIPT, *OPTIONS, "--models", str(tmp_path))
    assert done.returncode == 2
    assert "there is no network: give --networks or --models a folder that has some" in done.stderr


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("deployment_timing")


@pytest.mark.parametrize(
    ("rounds", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (15, 4, 12), (20, 6, 15)]
)
def test_the_interval_is_that_of_order_statistics(timing: Any, rounds: int, low: int, high: int) -> None:
    """Tables of the sign test: with 15 rounds the 4th and the 12th ratio."""
    dense, compact = timing.Latency([float(n + 1) for n in range(rounds)]), timing.Latency([1.0] * rounds)
    assert compact.times_faster(dense) == ((rounds + 1) / 2, low, high)


def test_calls_take_turns_and_each_is_waited_for(timing: Any) -> None:
    order: list[str] = []
    found = timing.in_turns([lambda: order.append("a"), lambda: order.append("b")], 3, lambda: order.append("."))
    assert [len(one.seconds) for one in found] == [3, 3]
    text = "".join(order)
    assert "aa" not in text
    assert "ab" not in text
    assert text.count("a.") == text.count("a")
