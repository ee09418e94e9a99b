"""The cost of a layer, on tiny sizes: the rows are there and the numbers finite. Never a time."""

from __future__ import annotations

from pathlib import Path

from benchmark_cases import tables

from scripts import run


def test_training_step(tmp_path: Path) -> None:
    size = ("--inputs", "12", "--outputs", "6", "--batch", "4", "--repeats", "2")
    training, inference = tables("benchmarks/training_step.py", tmp_path, *size, "--every").values()
    rows = {row["layer"]: row for row in training}
    for name in ("bbvi, running", "straight-through", "concrete", "disarm"):
        for kind in ("", ", learned", ", mask per example", ", learned, mask per example"):
            assert name + kind in rows
    assert "local" in rows
    assert "eq16, learned" in rows
    for row in training:
        assert row["ratio"] > 0
        assert row["ratio with Adagrad"] > 0
        assert row["memory beyond plain, weights"] > 0
    assert [row["layer"] for row in inference] == ["unfolded, Eq. (19)", "folded by to_dense"]


def test_markdown_and_a_choice_of_rows(tmp_path: Path) -> None:
    out = tmp_path / "result.md"
    size = ("--inputs", "12", "--outputs", "6", "--batch", "4", "--repeats", "1")
    found = run("benchmarks/training_step.py", *size, "--cases", "local", "--out", str(out))
    assert found.returncode == 0, found.stderr[-2000:]
    text = out.read_text()
    assert text.startswith("## ")
    assert "torch " in text
    assert "commit " in text
    assert "| local " in text
    assert "| bbvi, running " not in text
