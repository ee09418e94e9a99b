"""The cost of a stack's step, on tiny sizes: rows, the projection of Table 1, and a comparator that is what it says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from benchmark_cases import tables

from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.data.normalisation import standardise
from dropconnectpp.lab.kernels.dense import linear
from dropconnectpp.lab.replicas.convolutions import features
from dropconnectpp.lab.replicas.network import log_likelihoods
from scripts import ROOT


def test_replica_step(tmp_path: Path) -> None:
    options = ("--batch", "4", "--steps", "1", "--repeats", "1", "--replicas", "2", "--growth", "1", "2")
    found = tables("benchmarks/replica_step.py", tmp_path, *options, "--hidden", "8", "--classes", "3")
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
    shape = replica_step.Shape(Architecture(), 3, 32, 10)
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
    comparators = importlib.import_module("replica_comparators")
    groups = comparators.Groups(settings, 8)
    rows = groups.order[0]
    found = groups.loss(groups.images, groups.labels, rows, groups.parameters).item()
    inputs = features(standardise(groups.images[rows]), groups.parameters, groups.architecture)
    names = ("dense.weight", "dense.bias", "output.weight", "output.bias")
    weight, bias, *output = (groups.parameters[name] for name in names)
    logits = linear(torch.relu(linear(inputs, weight, bias)), *output)
    assert found == pytest.approx(-log_likelihoods(logits, groups.labels[rows]).mean(1).sum().item(), rel=0.02)
    groups.compiled_loss, groups.compiled_update = groups.loss, comparators.adagrad  # compiling takes long
    before = weight.detach().clone()
    groups.step()
    assert (weight - before).abs().max().item() == pytest.approx(comparators.STEP_SIZE, rel=0.01)
    assert groups.position.item() == 1
