"""The benchmark of several workers, on tiny sizes: the same rows, and every task stored."""

from __future__ import annotations

from pathlib import Path

from benchmark_cases import tables


def test_workers(tmp_path: Path) -> None:
    sizes = ("--networks", "2", "--epochs", "1", "--tasks", "20", "--overhead-tasks", "10", "--workers", "2")
    found = tables("benchmarks/workers.py", tmp_path, "--engines", "process", "host", *sizes)
    assert [row["engine, workers"] for row in found["Scaling"]] == ["process, 1", "host, 2"]
    assert {row["the same rows"] for row in found["Scaling"]} == {"yes"}
    assert all(row["ms each"] > 0 for row in found["Overhead of a task"])
    assert [row["tasks"] for row in found["20 tasks"]] == [20, 20]
