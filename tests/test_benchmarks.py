"""The benchmarks through their real command, on tiny sizes: the rows are there and the numbers finite. Never a time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *options],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def tables(script: str, folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Run a benchmark and read its JSON back: rows by title, each a mapping by column."""
    out = folder / "result.json"
    found = run(script, *options, "--out", str(out))
    assert found.returncode == 0, found.stderr[-2000:]
    result = json.loads(out.read_text())
    assert set(result["provenance"]) == {"date", "device", "threads", "torch", "commit"}
    for table in result["tables"]:
        assert f"### {table['title']}" in found.stdout
        for row in table["rows"]:
            assert f"| {row[0]} " in found.stdout
            assert all(math.isfinite(cell) for cell in row if isinstance(cell, int | float))
    return {
        table["title"]: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        for table in result["tables"]
    }


TINY = ("--batch", "16", "--examples", "32", "--training-steps", "4", "--reference-masks", "2")


def test_gradient_quality(tmp_path: Path) -> None:
    options = (*TINY, "--gates", "9", "25", "--draws", "4", "--tiny-draws", "40")
    found = tables("gradient_quality.py", tmp_path, *options)
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


def test_training_step(tmp_path: Path) -> None:
    size = ("--inputs", "12", "--outputs", "6", "--batch", "4", "--repeats", "2")
    training, inference = tables("training_step.py", tmp_path, *size, "--every").values()
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
    found = run("training_step.py", *size, "--cases", "local", "--out", str(out))
    assert found.returncode == 0, found.stderr[-2000:]
    text = out.read_text()
    assert text.startswith("## ")
    assert "torch " in text
    assert "commit " in text
    assert "| local " in text
    assert "| bbvi, running " not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--gates", "10"), "square numbers, got 10"), (("--batch", "5", "--examples", "32"), "multiple of --batch")],
)
def test_settings_that_cannot_work_say_so(options: tuple[str, ...], message: str) -> None:
    found = run("gradient_quality.py", *options)
    assert found.returncode != 0
    assert message in found.stderr


@pytest.mark.parametrize("script", ["gradient_quality.py", "training_step.py"])
def test_help_explains_the_numbers(script: str) -> None:
    found = run(script, "--help")
    assert found.returncode == 0
    for word in ("--device", "--out", "minibatch"):
        assert word in found.stdout


def test_data_preparation(tmp_path: Path) -> None:
    found = tables("data_preparation.py", tmp_path, "--pictures", "60", "--repeats", "1")
    works = [row["work"] for row in found["60 pictures"]]
    assert works == ["unpack", "checksum", "prepare", "open", "open and read", "verify"]


def test_replica_step(tmp_path: Path) -> None:
    options = ("--batch", "4", "--steps", "1", "--repeats", "1", "--replicas", "2", "--growth", "1", "--hidden", "8")
    found = tables("replica_step.py", tmp_path, *options, "--classes", "3")
    methods = [row["method"] for row in found["Methods"]]
    assert methods[:3] == ["one replica, eager PyTorch, none", "none", "dropout"]
    assert [row["stack"] for row in found["Number of replicas"]] == ["1 replicas"]
    assert [row["dense layer"] for row in found["Width and classes"]] == ["8 units, 3 classes"]


def test_compare_groups(tmp_path: Path) -> None:
    stores = [str(ROOT / "records" / "2026-11-16-replicas" / f"pilot_seed{seed}.sqlite") for seed in (0, 1)]
    found = run("compare_groups.py", *stores, "--out", str(tmp_path / "groups.md"))
    assert found.returncode == 0, found.stderr[-2000:]
    recorded = (ROOT / "records" / "2026-11-16-replicas" / "groups_cuda.md").read_text()
    assert (tmp_path / "groups.md").read_text() == recorded
