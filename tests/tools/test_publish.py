"""Publishing a store, or some of its experiments: the tables, the rows and the warnings."""

from __future__ import annotations

import csv
import gzip
import importlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tool_cases import TRAINED, few, lines

from dropconnectpp.lab.config import experiments, protocol
from dropconnectpp.lab.config.method import PRESETS
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.hyperparameters import choose_hyperparameters
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Store
from scripts import ROOT, call


def test_publish(tmp_path: Path) -> None:
    store = "records/kernels/mixed.jsonl.xz"
    for folder in ("one", "other"):
        assert call("tools/publish.py", store, str(tmp_path / folder), "--prefix", "cifar10").returncode == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    rows = list(csv.DictReader(gzip.decompress(files.pop("cifar10_rows.csv.gz")).decode().splitlines()))
    assert len(rows) == 32
    assert {"cifar10_accuracy.md", "cifar10_significance.md", "cifar10_shares.md"} <= set(files)
    table = files["cifar10_accuracy.md"].decode()
    assert table.startswith("## Table 1.")
    mean = sum(float(row["accuracy"]) for row in rows if row["label"] == "No regularization") / 16
    assert f"| No regularization | {mean:.2f} |" in table


METHODS = {
    "large": ('kind = "none"', 'kind = "dropconnect"', "logit_step = 1"),
    "small": ("num_samples = 2\nlogit_step = 1", "logit_step = 1", 'kind = "none"'),
    "steps": ('hyper = "optimal"',),
    "partial": ("logit_step = 1", 'kind = "dropout"\nrate = 0.5'),
    "untrained": ('kind = "dropout"\nrate = 0.5', 'kind = "dropout"'),
}
REPEATS = {"large": 3, "small": 2, "steps": 1, "partial": 5, "untrained": 2}
TIMINGS = {"seconds_per_epoch": 1.5, "replicas": 1, "prediction": {"none": 0.25}, "device": "the test's"}


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
            complete = choose_hyperparameters(experiment.protocols, runner, experiment.selection)
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
    monkeypatch.syspath_prepend(ROOT / "tools")
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
    complete = choose_hyperparameters(experiment.protocols, runner, experiment.selection)
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
    presets = [protocol.paper("svhn", name) for name in PRESETS]
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


def test_publish_ensembles_of_what_is_named(tmp_path: Path) -> None:
    store, given = "records/uncertainty/fashion.jsonl.xz", "experiments/uncertainty/fashion_mnist.toml"
    options = ("--prefix", "a", "--tables", "probabilities", "probability_tests")
    for folder, named in (("whole", ()), ("named", ("--experiment", given))):
        assert call("tools/publish.py", store, str(tmp_path / folder), *options, *named).returncode == 0
    for name in ("a_probabilities.md", "a_probability_tests.md"):
        lines_of = [sorted((tmp_path / one / name).read_text().splitlines()) for one in ("whole", "named")]
        assert lines_of[0] == lines_of[1]
        assert any("Ensemble of 5" in line for line in lines_of[0])
