"""The benchmarks through their real command, on tiny sizes: the rows are there and the numbers finite. Never a time."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_cases import ONE_LAYER_TOML, tiny

from dropconnectpp.lab import data
from dropconnectpp.lab.config import experiments, protocol
from dropconnectpp.lab.data.dataset import Dataset, Split
from dropconnectpp.lab.data.normalisation import standardise
from dropconnectpp.lab.kernels.dense import linear
from dropconnectpp.lab.replicas import dropconnectpp, evaluation, regularisers
from dropconnectpp.lab.replicas.convolutions import features
from dropconnectpp.lab.replicas.network import log_likelihoods
from dropconnectpp.lab.replicas.stack import Unit
from dropconnectpp.lab.report import statistics
from dropconnectpp.lab.runs.hyperparameters import select
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Store

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


@pytest.mark.parametrize("record", ["2026-11-16-kernels", "2026-11-17-kernels"])
def test_compare_stores(tmp_path: Path, record: str) -> None:
    out = tmp_path / "table.md"
    stores = [str(ROOT / "records" / record / "mixed.sqlite"), str(KERNELS / "float32.sqlite")]
    assert run("compare_stores.py", *stores, "--out", str(out)).returncode == 0
    recorded = (ROOT / "records" / record / "precisions_cuda.md").read_text()
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


TRAINED = f"""
[protocol]
data = "fashion-mini"
{ONE_LAYER_TOML}
[protocol.training]
batch_size = 50
epochs = 1

[protocol.evaluation]
curve_samples = 0
samples = [1]
shares = [1.0]
predictive_samples = 0

[selection]
step_sizes = [0.01, 0.05]
step_replicas = 2
rates = [0.2, 0.5]
rate_replicas = 1
logit_steps = [1, 30]
"""
METHODS = {
    "large": ('kind = "none"', 'kind = "dropconnect"', "logit_step = 1"),
    "small": ("num_samples = 2\nlogit_step = 1", "logit_step = 1", 'kind = "none"'),
    "steps": ('hyper = "optimal"',),
    "partial": ("logit_step = 1", 'kind = "dropout"\nrate = 0.5'),
    "untrained": ('kind = "dropout"\nrate = 0.5', 'kind = "dropout"'),
}
REPEATS = {"large": 3, "small": 2, "steps": 1, "partial": 5, "untrained": 2}
TIMINGS = {"seconds_per_epoch": 1.5, "replicas": 1, "prediction": {"none": 0.25}, "device": "the test's"}


def few(name: str) -> Dataset:
    whole = data.load(name)
    train, test = (Split(part.images[:100], part.labels[:100]) for part in (whole.train, whole.test))
    return replace(whole, train=train, test=test)


@pytest.fixture(scope="module")
def mixed_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of three experiments, of which two share protocols, with the files of all."""
    folder = tmp_path_factory.mktemp("mixed")
    runner = Runner(folder, torch.device("cpu"), few)
    for name, methods in METHODS.items():
        text = f"repeats = {REPEATS[name]}\n" + TRAINED + "".join(f"\n[[methods]]\n{one}\n" for one in methods)
        (folder / f"{name}.toml").write_text(text)
        experiment = experiments.from_file(folder / f"{name}.toml")
        if name in ("large", "small", "steps"):
            complete = select(experiment.protocols, runner, experiment.selection)
            assert complete is not None
            runner.run([Unit(p, replica) for p in complete.values() for replica in experiment.replicas])
    with runner.store() as store:
        store.write_note(experiments.from_file(folder / "large.toml").protocols[0].digest, "timings", TIMINGS)
    return folder


Publish = Callable[..., tuple[dict[str, str], list[tuple[str, int]], str]]


@pytest.fixture
def publish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mixed_store: Path, tmp_path: Path
) -> Publish:
    """Publishes experiments of the store; the tables by name, the rows by method and replica, and what was warned."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(mixed_store)

    def run(*names: str, store: str = "results.sqlite", options: tuple[str, ...] = ()) -> Any:
        out = tmp_path / "-".join(["record", *names])
        chosen = ["--experiment", *names] if names else []
        monkeypatch.setattr(sys, "argv", ["publish.py", store, str(out), "--prefix", "p", *chosen, *options])
        importlib.import_module("publish").main()
        rows = gzip.decompress((out / "p_rows.csv.gz").read_bytes()).decode().splitlines()
        found = [(row["label"], int(row["replica"])) for row in csv.DictReader(rows)]
        sections = {path.stem.removeprefix("p_"): path.read_text() for path in sorted(out.glob("*.md"))}
        return sections, found, capsys.readouterr().err

    return run


def lines(section: str) -> list[list[str]]:
    """The cells of a table's body."""
    plain = section.replace("\\", "").splitlines()
    body = [line.strip("| ").split(" | ") for line in plain if line.startswith("|")]
    return body[2:]


def test_publish_some_experiments(publish: Publish) -> None:
    two, plain, ours = "DropConnect++ (num_samples=2)", "No regularization", "DropConnect++"
    sections, rows, warned = publish("small.toml")
    assert rows == [(method, replica) for method in (two, ours, plain) for replica in (0, 1)]
    assert [(line[0], line[4]) for line in lines(sections["accuracy"])] == [(two, "2"), (ours, "2"), (plain, "2")]
    assert "missing" not in sections["accuracy"]
    assert warned == ""

    sections, rows, warned = publish("large.toml")
    order = (plain, "DropConnect", ours)
    assert rows == [(method, replica) for method in order for replica in range(3)]
    assert [(line[0], line[4]) for line in lines(sections["accuracy"])] == [(method, "3") for method in order]
    assert [line[0] for line in lines(sections["calibration"])] == list(order)

    sections, rows, warned = publish("small.toml", "large.toml")
    counts = {line[0]: line[4] for line in lines(sections["accuracy"])}
    assert counts == {two: "2", ours: "3", plain: "3", "DropConnect": "3"}
    assert list(counts) == [two, ours, plain, "DropConnect"]
    assert "missing" not in sections["accuracy"], "2 are all that the experiment asks for"
    assert len(rows) == 11


def test_publish_everything(publish: Publish, mixed_store: Path) -> None:
    sections, rows, _ = publish()
    with Store.open(mixed_store / "results.sqlite", read_only=True) as store:
        assert len(rows) == len(store.rows()) > 11
    assert len(lines(sections["accuracy"])) == 5
    assert "0.250" in sections["prediction"]
    assert len(lines(sections["selection"])) == 7


def test_publish_explains_its_marks_and_gives_what_was_recorded(tmp_path: Path) -> None:
    record = ROOT / "records" / "2026-11-17-svhn"
    (tmp_path / "results.sqlite").write_bytes(gzip.decompress((record / "results.sqlite.gz").read_bytes()))
    options = ("--prefix", "svhn", "--dataset", "svhn", "--experiment", "table1")
    found = run("publish.py", str(tmp_path / "results.sqlite"), str(tmp_path / "out"), *options)
    assert found.returncode == 0, found.stderr[-2000:]
    for path in record.glob("svhn_*.md"):
        text = (tmp_path / "out" / path.name).read_text()
        assert text == path.read_text()
        assert "† The files of this data set do not have the official checksums" in text


LIGHTER = "DropConnect++ (estimator=local, hyper=optimal, alpha=2.0, beta=8.0, logit_step=100.0, kl_weight=8.0)"
NOISE = "DropConnect++ (estimator=local, hyper=optimal, keep_probability=0.1, logit_step=1e-09)"
OWN_NOISE = NOISE.replace("=0.1,", "=0.17,")
EACH, SPARSE = "DropConnect++ (per-example)", "DropConnect++ (sparse)"
ALONE, TOGETHER = "DropConnect (rate=0.7, step_size=0.005)", "DropConnect (rate=0.9, step_size=0.01)"
USUAL, BEST = "DropConnect (every=5, rate=0.8)", "DropConnect (every=50, rate=0.9)"
CALLED = {
    LIGHTER: "lighter",
    NOISE: "noise alone",
    OWN_NOISE: "noise alone",
    EACH: "per-example",
    SPARSE: "sparse",
    ALONE: "DropConnect",
    TOGETHER: "DropConnect, chosen together",
    USUAL: "DropConnect, rate 0.8",
    BEST: "DropConnect, rate 0.9",
    "Dropout": "Dropout, rate 0.8",
}


@pytest.mark.parametrize(
    ("table", "stores", "dataset", "methods", "against"),
    [
        ("cifar10_lighter", "cifar10/results connectivity/cifar10", "cifar10", [LIGHTER], ["DropConnect", EACH, NOISE]),
        (
            "fashion_lighter",
            "fashion-mnist/results connectivity/fashion",
            "fashion-mnist",
            [LIGHTER],
            ["DropConnect", EACH],
        ),
        (
            "svhn_presets",
            "svhn/results connectivity/svhn_best_rate",
            "svhn",
            [SPARSE, EACH, BEST],
            [USUAL, BEST, "Dropout"],
        ),
        (
            "cifar10_controls",
            "cifar10/results connectivity/cifar10 noise/cifar10",
            "cifar10",
            [LIGHTER, OWN_NOISE, TOGETHER],
            [TOGETHER, OWN_NOISE, ALONE],
        ),
        ("cifar10_together", "cifar10/results noise/cifar10", "cifar10", [SPARSE, EACH], [TOGETHER]),
        ("fashion_controls", "noise/fashion", "fashion-mnist", [LIGHTER, OWN_NOISE], ["DropConnect", OWN_NOISE]),
    ],
)
def test_networks_of_several_stores_compare_as_recorded(
    tmp_path: Path, table, stores, dataset, methods, against
) -> None:
    unpacked = []
    for name in stores.split():
        folder, store = name.split("/")
        packed = max((ROOT / "records").glob(f"*-{folder}/{store}.sqlite.gz"))
        unpacked.append(tmp_path / f"{folder}.sqlite")
        unpacked[-1].write_bytes(gzip.decompress(packed.read_bytes()))
    short = [word for name in {*methods, *against} & set(CALLED) for word in ("--call", name, CALLED[name])]
    options = ("--dataset", dataset, "--methods", *methods, "--against", *against, *short)
    found = run("compare_measures.py", *map(str, unpacked), *options, "--out", str(tmp_path / "table.md"))
    assert found.returncode == 0, found.stderr[-2000:]
    (recorded,) = (ROOT / "records").glob(f"*/{table}.md")
    assert (tmp_path / "table.md").read_text() == recorded.read_text()


def searched(folder: Path) -> list[str]:
    """The stores of all searches on held-out data that were recorded."""
    stores = []
    for place, packed in enumerate(sorted((ROOT / "records").glob("*/search.sqlite.gz"))):
        stores.append(folder / f"{place}.sqlite")
        stores[-1].write_bytes(gzip.decompress(packed.read_bytes()))
    return [str(store) for store in stores]


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ("cifar10_search", ("--dataset", "cifar10")),
        ("cifar10_finalists", ("--dataset", "cifar10", "--least", "12")),
        ("fashion_search", ("--dataset", "fashion-mnist")),
        ("cifar10_prices", ("--of", str(ROOT / "experiments" / "price_search.toml"))),
        ("cifar10_late", ("--of", str(ROOT / "experiments" / "late_search.toml"))),
    ],
)
def test_settings_are_listed_as_recorded(tmp_path: Path, table: str, options: tuple[str, ...]) -> None:
    found = run("list_settings.py", *searched(tmp_path), *options, "--out", str(tmp_path / "table.md"))
    assert found.returncode == 0, found.stderr[-2000:]
    recorded = max((ROOT / "records").glob(f"*/{table}.md"))
    assert (tmp_path / "table.md").read_text() == recorded.read_text()


@pytest.mark.parametrize(
    ("searches", "below", "ran"),
    [
        (["lighter_search"], [0.005], {"cifar10": "lighter", "fashion-mnist": "lighter_fashion"}),
        (["price_search", "price_search_fashion"], [0.005, 0.01], {"fashion-mnist": "price_chosen_fashion"}),
    ],
)
def test_the_setting_that_went_to_the_test_sets_is_the_one_that_the_rule_chooses(
    tmp_path: Path, searches, below, ran
) -> None:
    options = ["--searches", *(str(ROOT / "experiments" / f"{name}.toml") for name in searches)]
    options += ["--below", *(f"DropConnect, rate 0.7, step size {step}" for step in below)]
    options += [word for name in ran for word in ("--write", name, str(tmp_path / f"{name}.toml"))]
    found = run("choose_setting.py", *searched(tmp_path), *options)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == f"chosen: {LIGHTER}"
    for name, file in ran.items():
        expected = experiments.from_file(ROOT / "experiments" / f"{file}.toml")
        assert experiments.from_file(tmp_path / f"{name}.toml") == expected


SEARCH = """
repeats = 2

[protocol]
data = "{data}"

[protocol.training]
step_size = {steps}
holdout = 10

[[methods]]
alpha = [1, 2, 3, 4]

[[methods]]
logit_step = 1e-9
"""


Rows = list[tuple[protocol.Protocol, float, float]]


def store_of(path: Path, rows: Rows) -> Path:
    """Two networks of each protocol, with an accuracy, which the second exceeds by one, and an NLL."""
    me = Owner.here()
    with Store.open(path) as store:
        for one, accuracy, nll in rows:
            for key in store.claim([(store.add(one), replica) for replica in range(2)], me):
                results = {"accuracy": accuracy + key.replica, "nll": nll}
                store.finish(key, me, "done", results=results, seconds=1.0, device="none")
    return path


def test_choose_setting_by_accuracy_over_all_searches_among_those_with_a_low_nll(tmp_path: Path) -> None:
    accuracies = {"cifar10": [60.0, 71.0, 90.0, 75.0, 99.0], "svhn": [60.0, 79.0, 90.0, 70.0, 99.0]}
    likelihoods = {"cifar10": [0.4, 0.4, 0.6, 0.4, 0.4], "svhn": [9.0] * 5}  # svhn has no limit
    rows: Rows = []
    files, other = [], protocol.Method(kind="dropconnect", rate=0.5)
    for name in accuracies:
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(SEARCH.format(data=name, steps=0.01))
        tried = experiments.from_file(files[-1]).protocols
        rows += zip(tried, accuracies[name], likelihoods[name], strict=True)
        rows.append((replace(tried[0], method=other), 50.0, 0.5))
    options = (str(store_of(tmp_path / "results.sqlite", rows)), "--searches", *map(str, files))
    below = ("--below", "DropConnect, rate 0.5, step size 0.01")
    found = run("choose_setting.py", *options, *below, "--write", "svhn", str(tmp_path / "chosen.toml"))
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "chosen: DropConnect++ (alpha=2.0)"
    (chosen,) = experiments.from_file(tmp_path / "chosen.toml").protocols
    assert chosen == protocol.paper("svhn", protocol.Method(alpha=2.0))
    unknown = run("choose_setting.py", *options, "--below", "DropConnect")
    assert "0 settings on cifar10 are called 'DropConnect'; one is needed." in unknown.stderr
    assert "None has a lower NLL." in run("choose_setting.py", *options, *below, below[1]).stderr
    twice = run("choose_setting.py", *options, str(files[0]), *below)
    assert "Two searches have the same data." in twice.stderr
    assert "3 settings to be below, 2 searches." in run("choose_setting.py", *options, *below, "x", "y").stderr
    files[0].write_text(SEARCH.format(data="cifar10", steps=0.01).replace("repeats = 2", "repeats = 3"))
    early = run("choose_setting.py", *options, *below)
    assert "cifar10, DropConnect++: 2 of 3 networks." in early.stderr


def test_choose_setting_takes_the_best_step_size_whose_nll_is_low(tmp_path: Path) -> None:
    # Two step sizes of each method; the most accurate of all has too high an NLL, the next at one step size has.
    accuracies = [60, 61, 70, 72, 80, 79, 95, 96, 99, 99]
    likelihoods = [0.4, 0.4, 0.4, 0.4, 0.6, 0.4, 0.6, 0.6, 0.4, 0.4]
    search = tmp_path / "search.toml"
    search.write_text(SEARCH.format(data="cifar10", steps=[0.005, 0.01]))
    tried = experiments.from_file(search).protocols
    rows: Rows = [*zip(tried, map(float, accuracies), likelihoods, strict=True)]
    rows.append((replace(tried[0], method=protocol.Method(kind="dropconnect", rate=0.5)), 50.0, 0.5))
    store = store_of(tmp_path / "results.sqlite", rows)
    written = [tmp_path / f"{name}.toml" for name in ("cifar10", "svhn")]
    found = run(
        "choose_setting.py",
        *(str(store), "--searches", str(search), "--below", "DropConnect, rate 0.5, step size 0.005"),
        *("--write", "cifar10", str(written[0]), "--write", "svhn", str(written[1])),
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[1:] == [
        "DropConnect++ (alpha=3.0): accuracy 79.50% (79.50%, NLL 0.4000, step size 0.01)",
        "DropConnect++ (alpha=2.0): accuracy 72.50% (72.50%, NLL 0.4000, step size 0.01)",
        "DropConnect++: accuracy 61.50% (61.50%, NLL 0.4000, step size 0.01)",
        "DropConnect++ (alpha=4.0): out (NLL not below)",
        "chosen: DropConnect++ (alpha=3.0)",
    ]
    steps = [experiments.from_file(path).protocols[0].training.step_size for path in written]
    assert steps == [0.01, None]


def test_publish_gives_the_same_bytes(publish: Publish, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        publish("small.toml", "large.toml")
        (folder,) = tmp_path.iterdir()
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
        folder.rename(tmp_path.with_name(f"{tmp_path.name}-{len(found)}"))
    assert found[0] == found[1]
    assert "p_rows.csv.gz" in found[0]


def test_publish_how_settings_were_chosen(publish: Publish, mixed_store: Path) -> None:
    sections, _, _ = publish("large.toml")
    table = lines(sections["selection"])
    assert sections["selection"].startswith("## How step sizes, rates and logit steps were chosen")
    settings = [("No regularization", "step size"), ("DropConnect", "step size"), ("DropConnect", "rate")]
    assert [tuple(line[:2]) for line in table] == [*settings, ("DropConnect++", "step size")]
    incomplete = experiments.from_file(mixed_store / "large.toml").protocols[1]
    with Store.open(mixed_store / "results.sqlite", read_only=True) as store:
        note = store.notes()[incomplete.digest, "selection"]
    tried = ", ".join(f"{one['rate']:g}: {one['accuracy']:.2f}" for one in note["rate_trials"])
    assert table[2][2:] == [f"{note['rate']:g}", "held-out accuracy, %", tried, "1"]
    tried = ", ".join(f"{one['step_size']:g}: {one['loss']:.4f}" for one in note["step_trials"])
    assert table[1][2:] == [f"{note['step_size']:g}", "training loss", tried, "2"]
    (_, logit_step) = lines(publish("steps.toml")[0]["selection"])
    assert logit_step[1] == "logit step"
    assert logit_step[2] in ("1", "30")
    assert logit_step[4].startswith("1: ")


def test_publish_tells_ways_of_choosing_apart(publish: Publish, mixed_store: Path, tmp_path: Path) -> None:
    text = (mixed_store / "large.toml").read_text().replace("[selection]", "[selection]\ntogether = true")
    (tmp_path / "together.toml").write_text(text)
    shutil.copy(mixed_store / "results.sqlite", tmp_path)
    experiment = experiments.from_file(tmp_path / "together.toml")
    runner = Runner(tmp_path, torch.device("cpu"), few)
    complete = select(experiment.protocols, runner, experiment.selection)
    assert complete is not None
    runner.run([Unit(p, replica) for p in complete.values() for replica in experiment.replicas])
    store = str(tmp_path / "results.sqlite")
    table = lines(publish(str(tmp_path / "together.toml"), store=store)[0]["selection"])
    assert [tuple(line[:2]) for line in table] == [
        ("No regularization", "step size"), ("DropConnect", "step size and rate"), ("DropConnect++", "step size"),
    ]  # fmt: skip
    chosen = complete[experiment.protocols[1].digest]
    assert table[1][2] == f"{chosen.training.step_size:g} and {chosen.method.rate:g}"
    tried = [one.split(": ")[0] for one in table[1][4].split(", ")]
    assert tried == ["0.01 and 0.2", "0.01 and 0.5", "0.05 and 0.2", "0.05 and 0.5"]
    again = lines(publish("large.toml", store=store)[0]["selection"])
    assert again == lines(publish("large.toml")[0]["selection"])


def test_publish_keeps_the_timings_of_what_is_published(publish: Publish) -> None:
    sections, _, _ = publish("large.toml")
    assert [(line[0], line[1]) for line in lines(sections["time"])] == [("No regularization", "1.50")]
    assert lines(sections["prediction"]) == [["No regularization", "0.250"]]
    assert "time" not in publish("steps.toml")[0]


def test_publish_says_what_is_not_there(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    sections, rows, warned = publish("partial.toml")
    assert warned.splitlines() == [
        "warning: partial.toml: DropConnect++ on fashion-mini has 3 of 5 rows.",
        "warning: partial.toml: Dropout on fashion-mini has no rows yet and is left out.",
    ]
    assert rows == [("DropConnect++", replica) for replica in range(3)]
    assert lines(sections["accuracy"])[0][-1] == "2 missing (3, 4)"
    with pytest.raises(SystemExit, match=r"^The store has no rows of untrained\.toml\.$"):
        publish("untrained.toml")
    assert capsys.readouterr().err.count("has no rows yet") == 2


@pytest.mark.parametrize(("what", "message"), [("table2", "must be table1 or a TOML file"), ("no.toml", "no such")])
def test_publish_knows_what_is_no_experiment(publish: Publish, what: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        publish(what)


def test_publish_table_1_with_the_rows_beyond_the_paper(publish: Publish, tmp_path: Path) -> None:
    table = experiments.of_the_paper("table1", "svhn").protocols
    best = experiments.of_the_paper("table1", "svhn", methods=["dropconnect++"], hyper="optimal").protocols
    presets = [protocol.paper("svhn", name) for name in protocol.PRESETS]
    me = Owner.here()
    with Store.open(tmp_path / "svhn.sqlite") as store:
        for place, one in enumerate((*presets, *best, *table)):
            rate = 0.5 if one.method.has_rate else None
            training = replace(one.training, step_size=0.01)
            complete = replace(one, method=replace(one.method, rate=rate), training=training)
            store.add(one)
            store.write_note(one.digest, "selection", {"resolved": store.add(complete), "step_size": 0.01})
            for key in store.claim([(complete.digest, replica) for replica in (0, 49, 50)], me):
                results = {"accuracy": 90.0 + place + 0.1 * key.replica}
                store.finish(key, me, "done", results=results, seconds=1.0, device="none")
    sections, rows, warned = publish("table1", store=str(tmp_path / "svhn.sqlite"), options=("--dataset", "svhn"))
    methods = [line[0] for line in lines(sections["accuracy"])]
    of_the_paper = ["No regularization", "Dropout", "DropConnect", "DropConnect++"]
    assert methods == [
        *of_the_paper,
        "DropConnect++ (hyper=optimal)",
        "DropConnect++ (sparse)",
        "DropConnect++ (per-example)",
    ]
    assert rows == [(method, replica) for method in methods for replica in (0, 49)]
    assert warned.count("has 2 of 50 rows") == 7
    assert "selection" not in sections, "nothing was tried"


def test_publish_only_what_is_named(publish: Publish, tmp_path: Path) -> None:
    options = ("--tables", "significance", "--figures", "convergence", "--against", "No regularization")
    sections, _, _ = publish("small.toml", options=options)
    assert list(sections) == ["significance"]
    everything, _, _ = publish("small.toml")
    wanted = [line for line in lines(everything["significance"]) if line[1] == "No regularization"]
    assert lines(sections["significance"]) == wanted
    assert 0 < len(wanted) < len(lines(everything["significance"]))
    assert (tmp_path / "record-small.toml" / "p_convergence.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(("option", "message"), [("--tables", "no table nothing"), ("--figures", "no one figure")])
def test_publish_knows_its_tables_and_figures(publish: Publish, option: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        publish("small.toml", options=(option, "nothing"))


def test_every_setting_that_was_tried_is_listed(tmp_path: Path) -> None:
    methods = '[[methods]]\nkind = "dropconnect"\nrate = 0.5\n\n'
    methods += '[[methods]]\nestimator = "straight-through"\nlogit_step = [1, 1e-9]\n'
    held_out = TRAINED.replace("[protocol.training]\n", "[protocol.training]\nholdout = 20\n")
    assert held_out != TRAINED
    (tmp_path / "search.toml").write_text(f"repeats = 2\n{held_out}\n{methods}")
    experiment = experiments.from_file(tmp_path / "search.toml")
    protocols = [
        replace(p, training=replace(p.training, step_size=0.01), evaluation=replace(p.evaluation, shares=(0.1,)))
        for p in experiment.protocols
    ]
    runner = Runner(tmp_path, torch.device("cpu"), few)
    units = [Unit(p, r) for p in protocols for r in (0, 1)]
    assert runner.run(units).left == 0
    found = run("list_settings.py", str(tmp_path / "results.sqlite"), "--out", str(tmp_path / "tried.md"))
    assert found.returncode == 0, found.stderr
    rows = lines((tmp_path / "tried.md").read_text())
    learned = "DropConnect++ (estimator=straight-through)"
    still = learned.replace(")", ", logit_step=1e-09)")
    assert sorted(row[0] for row in rows) == [learned, still, "DropConnect, rate 0.5"]
    assert [row[1:4] for row in rows] == [["0.01", "1", "2"]] * 3
    accuracies = [[float(part) for part in row[4].split(" ± ")] for row in rows]
    assert accuracies[0][0] >= accuracies[1][0]
    assert all(len(one) == 2 and one[1] >= 0.0 for one in accuracies)
    by_posterior = {row[0]: row[7] for row in rows}
    assert by_posterior["DropConnect, rate 0.5"] == by_posterior[still] == "–"
    assert 0.0 <= float(by_posterior[learned].split(" ")[0]) <= 100.0
    more = run("list_settings.py", str(tmp_path / "results.sqlite"), "--least", "3")
    assert more.returncode == 1
    empty = run("list_settings.py", str(KERNELS / "mixed.sqlite"))
    assert empty.returncode == 1
    assert "No such setting" in empty.stderr


def test_methods_are_compared_measure_by_measure(tmp_path: Path) -> None:
    ours, other, apart = "DropConnect++ (hyper=optimal)", "DropConnect", ", step size 0.01"
    random = torch.Generator().manual_seed(0)
    found: dict[str, list[dict[str, Any]]] = {}
    me = Owner.here()
    with Store.open(tmp_path / "results.sqlite") as store:
        for method in (protocol.Method(hyper="optimal"), protocol.Method(kind="dropconnect", rate=0.5)):
            for holdout in (0, 10):
                training = protocol.Training(step_size=0.01, holdout=holdout)
                digest = store.add(protocol.Protocol(data="svhn", method=method, training=training))
                for key in store.claim([(digest, replica) for replica in range(4)], me):
                    results = some_results(random)
                    store.finish(key, me, "done", results=results, seconds=1.0, device="none")
                    if not holdout:
                        found.setdefault(method.label, []).append(results)
    options = (str(tmp_path / "results.sqlite"), "--dataset", "svhn", "--methods")
    made = run("compare_measures.py", *options, ours, "--out", str(tmp_path / "compared.md"))
    assert made.returncode == 0, made.stderr
    rows = lines((tmp_path / "compared.md").read_text())
    itself = ["itself, by size", "itself, by π̃·size", "itself, whole"]
    assert [row[2] for row in rows] == [other] * 5 + [f"{other}, by size", *itself] * 2
    assert [row[1] for row in rows[5::4]] == [f"accuracy with {share} kept by π̃, %" for share in ("10%", "5%")]
    mine, theirs = ([one["nll"] for one in found[label]] for label in (ours, other))
    expected = [sum(mine) / 4, sum(theirs) / 4, statistics.welch(mine, theirs).difference]
    assert rows[1][:2] == [ours, "NLL"]
    assert [float(cell) for cell in rows[1][3:6]] == pytest.approx(expected, abs=1e-4)
    cut, size = ({r: one["pruning"][place]["accuracy"] for r, one in enumerate(found[ours])} for place in (3, 0))
    paired = statistics.paired(cut, size)
    assert float(rows[6][5]) == pytest.approx(paired.difference, abs=0.01)
    assert float(rows[6][7]) == pytest.approx(paired.p, abs=1e-4)
    assert float(rows[6][8]) >= float(rows[6][7])
    unknown = run("compare_measures.py", *options, ours + apart, "--held-out", "--against", other)
    assert unknown.returncode == 1
    assert f"There are: {ours}{apart}, {other}, rate 0.5{apart}." in unknown.stderr
    against = ["--against", f"{other}, rate 0.5{apart}", "--call", f"{other}, rate 0.5{apart}", "fixed"]
    held_out = run("compare_measures.py", *options, ours + apart, "--held-out", *against)
    assert len(lines(held_out.stdout)) == 13
    assert [row[2] for row in lines(held_out.stdout)[4:6]] == ["fixed", "fixed, by size"]
    assert lines(held_out.stdout)[1][3] != rows[1][3]


def some_results(random: torch.Generator) -> dict[str, Any]:
    """What a network is judged by, by chance; of the shares that are kept two are compared."""
    accuracy, nll, averaged, brier, ece, *cut = torch.rand(8, generator=random).tolist()
    pruning = [
        {"score": score, "share": share, "accuracy": value + share}
        for score, value in zip(("magnitude", "keep_probability", "product"), cut, strict=True)
        for share in (0.1, 0.05, 0.5)
    ]
    probabilities = {"nll": nll, "uncertainty": {"nll": averaged}, "brier": brier, "ece": ece}
    return {"accuracy": accuracy, **probabilities, "pruning": pruning, "posterior": {"standard_deviation": 0.1}}


@pytest.fixture
def mask_memory(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("mask_memory")


def test_masks_of_a_minibatch_are_those_that_training_drew(mask_memory, monkeypatch) -> None:
    small = tiny("small", train=384)
    drawn: list[torch.Tensor] = []
    real = dropconnectpp.draw_masks

    def noted(stream, keep, *where):
        mask = real(stream, keep, *where)
        if stream.purpose == "mask:weight":
            drawn.append(mask)
        return mask

    monkeypatch.setattr(dropconnectpp, "draw_masks", noted)
    monkeypatch.setattr(regularisers, "draw_masks", noted)
    settings = {"device": "cpu", "dataset": "small", "hidden": 4, "replicas": 2, "epochs": 2, "step_size": 0.005}
    stack = mask_memory.stacked(mask_memory.Settings(**settings), small)
    losses = mask_memory.train(stack)
    assert losses.shape == (3, 6), "the first epoch's minibatches"
    assert losses[0].tolist() == pytest.approx([math.log(3)] * 6, abs=0.3)
    assert len(drawn) == 3 * 6, "three segments, two epochs of three minibatches"
    for number in range(1, 7):
        for segment, mask in zip(stack.segments, drawn[3 * (number - 1) :], strict=False):
            again = mask_memory.masks(stack, segment, number)
            if segment.regulariser.parameters:
                assert (again == mask).double().mean() > 0.95, "but for those between pi~ and one half"
            else:
                assert torch.equal(again, mask)
    keep = 1.0 - 0.1 * again.double()
    assert torch.allclose(mask_memory.shares(keep, again), torch.ones(2, dtype=torch.float64))
    other = mask_memory.masks(stack, stack.segments[0], mask_memory.NEVER)
    assert mask_memory.shares(other.double(), again).max() < 0.05
    found = mask_memory.accuracies(stack, stack.segments[0], [torch.ones_like(again), torch.zeros_like(again)])
    expected = [point["accuracy"] for point in evaluation.along_the_way(stack, stack.protocol.evaluation)[:2]]
    assert found[0].tolist() == pytest.approx(expected)
    assert found[0].tolist() != found[1].tolist(), "without its dense weights a network is another"
