"""The benchmarks through their real command, on tiny sizes: the rows are there and the numbers finite. Never a time."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dropconnectpp.lab.convolutions import features
from dropconnectpp.lab.data.normalisation import standardise
from dropconnectpp.lab.network import linear, log_likelihoods

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
    options = ("--batch", "4", "--steps", "1", "--repeats", "1", "--replicas", "2", "--growth", "1", "2")
    found = tables("replica_step.py", tmp_path, *options, "--hidden", "8", "--classes", "3")
    rows = {row["method"]: row for row in found["Methods, 8 units"]}
    assert list(rows)[:3] == ["none", "dropout", "dropconnect"]
    assert {"dropconnect++ (optimal)", "dropconnect++ (learned)", "straight-through"} < set(rows)
    for row in rows.values():
        assert row["ours, us"] > 0
        assert row["eager, us"] > 0
        assert row["CUDA graph, us"] is row["compiled groups, us"] is row["share of limit"] is None
    assert [row["stack"] for row in found["Number of replicas"]] == ["1 replicas", "2 replicas"]
    assert [row["kernel"] for row in found["Where the time goes: none, 8 units"]] == ["-"]
    last = found["The whole of Table 1, projected"][-1]
    assert (last["data"], last["ours, learned, h"]) == ("all", None), "nothing was measured at the paper's widths"


@pytest.fixture
def replica_step(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("replica_step")


def test_the_projection_of_table_1(replica_step) -> None:
    figures = replica_step.Figures()
    for name in replica_step.METHODS:
        for hidden in (64, 512):
            figures.found["ours", name, hidden] = 100.0 if hidden == 64 else 200.0
    figures.found["ours", replica_step.LEARNED, 512] = 500.0
    table = replica_step.projection(figures, 128)
    by_set = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert by_set["cifar10"]["ours, learned, h"] == pytest.approx(390 * 100 * 50 * 4 * 100e-6 / 3600)
    assert by_set["svhn"]["ours, learned, h"] == pytest.approx(572 * 100 * 50 * 1100e-6 / 3600)
    assert by_set["svhn"]["ours, optimal, h"] == pytest.approx(572 * 100 * 50 * 800e-6 / 3600)
    assert by_set["norb"]["units"] == 512
    assert by_set["all"]["million replica-steps"] == pytest.approx(30.82)
    assert by_set["all"]["eager, h"] is None
    assert replica_step.projection(figures, 64).rows[0][4] is None, "another batch"


def test_the_arithmetic_of_a_step(replica_step) -> None:
    shape = replica_step.Shape(replica_step.Architecture(), 3, 32, 10)
    forward = [32 * 32 * 32 * 75, 16 * 16 * 32 * 800, 8 * 8 * 64 * 800, 64 * 4096, 640]
    assert replica_step.step_operations(shape, 128) == 256 * (3 * sum(forward) - forward[0])


def test_a_comparator_that_fails_is_a_note(replica_step) -> None:
    def fail() -> float:
        raise RuntimeError("no such driver\nand more")

    figures = replica_step.Figures()
    figures.measure("CUDA graph", "none", 64, fail)
    assert figures["CUDA graph", "none", 64] is None
    assert figures.notes == ["CUDA graph, none, 64 units: RuntimeError: no such driver"]


def test_kernel_names_fit_a_table(replica_step) -> None:
    assert replica_step.short("void at::native::(anonymous namespace)::fill<4, float>(int, float)") == "fill<4, float>"
    assert replica_step.short("pool_kernel") == "pool_kernel"
    assert len(replica_step.short("void f<" + 100 * "x|" + ">(int)")) == 64


def test_compiled_groups_are_the_same_network(replica_step) -> None:
    settings = replica_step.Settings(
        device="cpu", replicas=2, growth=(), hidden=(8,), methods=("none",), classes=3, batch=4, steps=2, repeats=1,
        precision="mixed", peak=300.0, skip=(),
    )  # fmt: skip
    groups = replica_step.Groups(settings, 8)
    rows = groups.order[0]
    found = groups.loss(groups.images, groups.labels, rows, groups.parameters).item()
    inputs = features(standardise(groups.images[rows]), groups.parameters, groups.architecture)
    names = ("dense.weight", "dense.bias", "output.weight", "output.bias")
    weight, bias, *output = (groups.parameters[name] for name in names)
    logits = linear(torch.relu(linear(inputs, weight, bias)), *output)
    assert found == pytest.approx(-log_likelihoods(logits, groups.labels[rows]).mean(1).sum().item(), rel=0.02)
    groups.compiled_loss, groups.compiled_update = groups.loss, replica_step.adagrad  # compiling takes long
    before = weight.detach().clone()
    groups.step()
    assert (weight - before).abs().max().item() == pytest.approx(replica_step.STEP_SIZE, rel=0.01)
    assert groups.position.item() == 1


def test_compare_groups(tmp_path: Path) -> None:
    stores = [str(ROOT / "records" / "2026-11-16-replicas" / f"pilot_seed{seed}.sqlite") for seed in (0, 1)]
    found = run("compare_groups.py", *stores, "--out", str(tmp_path / "groups.md"))
    assert found.returncode == 0, found.stderr[-2000:]
    recorded = (ROOT / "records" / "2026-11-16-replicas" / "groups_cuda.md").read_text()
    assert (tmp_path / "groups.md").read_text() == recorded


KERNELS = ROOT / "records" / "2026-11-16-kernels"


def test_compare_stores(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    stores = [str(KERNELS / f"{name}.sqlite") for name in ("mixed", "float32")]
    assert run("compare_stores.py", *stores, "--out", str(out)).returncode == 0
    recorded = (KERNELS / "precisions_cuda.md").read_text()
    assert out.read_text() == recorded
    lines = [line.split(" | ") for line in recorded.splitlines() if "accuracy, %" in line]
    assert len(lines) == 2
    for line in lines:  # accuracy does not move with the kernels
        low, high = map(float, line[5].split(" to "))
        assert low < 0.0 < high


def test_publish(tmp_path: Path) -> None:
    store = str(KERNELS / "mixed.sqlite")
    for folder in ("one", "other"):
        assert run("publish.py", store, str(tmp_path / folder), "--prefix", "cifar10").returncode == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    rows = list(csv.DictReader(gzip.decompress(files.pop("cifar10_rows.csv.gz")).decode().splitlines()))
    assert len(rows) == 32
    assert {"cifar10_accuracy.md", "cifar10_significance.md", "cifar10_shares.md"} <= set(files)
    table = files["cifar10_accuracy.md"].decode()
    assert table.startswith("## Table 1.")
    mean = sum(float(row["accuracy"]) for row in rows if row["label"] == "No regularization") / 16
    assert f"| No regularization | {mean:.2f} |" in table
