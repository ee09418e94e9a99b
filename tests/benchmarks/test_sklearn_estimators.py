"""The comparison of estimators, on two splits of the small data set."""

from __future__ import annotations

from pathlib import Path

from benchmark_cases import tables


def test_every_method_has_a_row(tmp_path: Path) -> None:
    (table,) = tables("benchmarks/sklearn_estimators.py", tmp_path, "--repeats", "2", "--datasets", "diabetes").values()
    assert [row["method"] for row in table] == ["MLP of scikit-learn", "ours", "ours, keep=0.2"]
    assert [row["difference"] is None for row in table] == [True, False, False]
