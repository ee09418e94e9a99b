"""What a layer costs, on tiny sizes: every layer has its row. Never a time."""

from __future__ import annotations

from pathlib import Path

from benchmark_cases import tables


def test_every_layer_is_measured_in_one_run(tmp_path: Path) -> None:
    (rows,) = tables(
        "benchmarks/layer_cost.py", tmp_path, "--cases", "tiny", "--rounds", "1", "--seconds", "0.05"
    ).values()
    names = [row["layer"] for row in rows]
    assert names[:6] == ["nn.Linear", "DropConnect by hand", "DropConnectLinear", "bbvi", "straight-through", "local"]
    for row in rows:
        assert float(row["us"].replace(",", "")) > 0
    assert float(rows[0]["ratio"]) == 1.0


def test_the_hosts_time_is_told_by_operation_and_by_function(tmp_path: Path) -> None:
    options = ("--cases", "tiny", "--host", "--kinds", "straight-through")
    operations, functions = tables("benchmarks/layer_cost.py", tmp_path, *options).values()
    assert {"aten::sigmoid", "_DrawnBackward"} & {row["operation"] for row in operations}
    assert any(row["function"].endswith(("forward", "backward", "apply>")) for row in functions)
    assert all(float(row["calls"]) > 0 for row in (*operations, *functions))
