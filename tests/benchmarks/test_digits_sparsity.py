"""The comparison on digits, on tiny sizes: every method at every share it was asked for."""

from __future__ import annotations

from pathlib import Path

from benchmark_cases import tables


def test_every_method_is_trained_to_every_share(tmp_path: Path) -> None:
    options = ("--repeats", "2", "--tries", "1", "--steps", "40", "--keep", "0.5")
    accuracy, apart, met, tried = tables("benchmarks/digits_sparsity.py", tmp_path, *options).values()
    assert [row["method"] for row in accuracy] == ["plain", "SparsityPlan", "gradual magnitude"]
    assert all(row["50%"] for row in accuracy[1:])
    assert [row["difference"] for row in apart] == ["SparsityPlan - plain", "SparsityPlan - gradual magnitude"]
    assert met[1]["50%"] == "50.00% to 50.00%"
    assert len(tried) == 8
    assert sum("*" in row["50%"] for row in tried) == 2
