"""The quality of gradients, on tiny sizes: the rows are there, and what has no bias has none."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_cases import tables

from scripts import run

TINY = ("--batch", "16", "--examples", "32", "--training-steps", "4", "--reference-masks", "2")


def test_gradient_quality(tmp_path: Path) -> None:
    options = (*TINY, "--gates", "9", "25", "--draws", "4", "--tiny-draws", "40")
    found = tables("benchmarks/gradient_quality.py", tmp_path, *options)
    assert list(found) == ["9 gates", "25 gates", "Bias on six gates"]
    names = ["bbvi", "mean-network", "leave-one-out", "per synapse", "per example", "disarm"]
    for title in ("9 gates", "25 gates"):
        rows = {row["estimator"]: row for row in found[title]}
        for name in [*names, "straight-through", "local", "concrete"]:
            assert any(name in estimator for estimator in rows), name
        for row in rows.values():
            assert row["draws"] == row["draws, minibatch too"] == 4
            assert row["variance"] > 0
            assert row["variance, minibatch too"] > 0
            assert abs(row["cosine"]) < 2
    exact = {row["estimator"]: row["bias"] for row in found["Bias on six gates"]}
    for name, bias in exact.items():
        if name.startswith(("bbvi", "disarm")):
            assert bias < 1e-10, f"{name} must have no bias"
        else:
            assert bias > 1e-3, f"{name} must have some bias"


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--gates", "10"), "square numbers, got 10"), (("--batch", "5", "--examples", "32"), "multiple of --batch")],
)
def test_settings_that_cannot_work_say_so(options: tuple[str, ...], message: str) -> None:
    found = run("benchmarks/gradient_quality.py", *options)
    assert found.returncode != 0
    assert message in found.stderr
