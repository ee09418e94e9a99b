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
