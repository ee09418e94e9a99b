"""`dcpp run`, `train`, `demo`, `results`, `report` and `store merge` as a user types them."""

from __future__ import annotations

import csv
import html
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_cases import ONE_LAYER_TOML, tiny

import dropconnectpp
from dropconnectpp.lab import data
from dropconnectpp.lab.cli import display as displays
from dropconnectpp.lab.cli.options import duration
from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.config.method import METHODS
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas.modules import build
from dropconnectpp.lab.replicas.network import Shape
from dropconnectpp.lab.replicas.stack import Stack
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Row, Store

SIZES = {"tiny": 8, "other": 8, "large": 12}
MINE = f"""
repeats = 2

[protocol]
data = "tiny"
{ONE_LAYER_TOML}
[protocol.training]
step_size = 0.05
batch_size = 32
epochs = 2

[protocol.evaluation]
every = 1
curve_samples = 2
samples = [1, 2]
shares = [1.0, 0.5]
predictive_samples = 2

[[methods]]
kind = "none"

[[methods]]
kind = "dropconnect"
rate = 0.5

[[methods]]
kind = "dropconnect++"
"""
PAPER = ("--dataset", "tiny", "--epochs", "1", "--repeats", "1", "--rate", "0.5", "--step-size", "0.01")


def made(name: str) -> Dataset:
    return tiny(name, train=160, test=40, side=SIZES[name], seed=len(name))


@pytest.fixture
def dcpp(dcpp, monkeypatch, tmp_path):
    """The command where the tiny data sets and a file of one's own are."""
    real = data.load
    monkeypatch.setattr(
        data, "load", lambda name, directory=None: made(name) if name in SIZES else real(name, directory=directory)
    )
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(MINE)
    return dcpp


def rows(out: str = "dcpp-results") -> list[Row]:
    with Store.open(Path(out) / "results.sqlite", read_only=True) as store:
        return store.rows()


def notes(name: str, out: str = "dcpp-results") -> list[Any]:
    with Store.open(Path(out) / "results.sqlite", read_only=True) as store:
        return [value for (_, one), value in store.notes().items() if one == name]


def fill(out: str, accuracy: float = 50.0, replicas: tuple[int, ...] = (0, 1)) -> None:
    """A store of made-up results."""
    Path(out).mkdir(exist_ok=True)
    me = Owner.here()
    with Store.open(Path(out) / "results.sqlite") as store:
        for protocol in experiments.demo().protocols[:2]:
            digest = store.add(protocol)
            for key in store.claim([(digest, replica) for replica in replicas], me):
                results = {"accuracy": accuracy + key.replica, "nll": 1.0, "losses": [1.0]}
                store.finish(key, me, "done", results=results, seconds=1.0, device="none")


# ------------------------------------------------------------------------------------------------ run


def test_a_file_of_ones_own_is_run_to_tables_and_a_page(dcpp):
    code, out, err = dcpp("run", "mine.toml")
    assert code == 0
    assert [row.status for row in rows()] == ["done"] * 6
    for label in ("No regularization", "DropConnect", "DropConnect++"):
        assert label in out
    assert "tiny: No regularization, DropConnect and 1 more: 6 replicas, 2 epochs" in err
    assert "epoch 2/2, loss" in err
    page = Path("dcpp-results/index.html")
    assert out.rstrip().endswith(f"The page with all tables and figures: {page}")
    assert "6 networks trained to the end, none diverged." in page.read_text()
    assert not any(Path("dcpp-results").glob("checkpoints/*"))


def test_a_finished_experiment_trains_nothing_again(dcpp, monkeypatch):
    first = dcpp("run", "mine.toml")
    before = rows()
    monkeypatch.setattr(Stack, "train_epoch", lambda _: pytest.fail("trained again"))
    again = dcpp("run", "mine.toml")
    assert again == (0, first[1], "")
    assert rows() == before


def test_more_repeats_than_the_file_says_train_only_what_is_new(dcpp):
    dcpp("run", "mine.toml")
    code, _, err = dcpp("run", "mine.toml", "--repeats", "3")
    assert code == 0
    assert "3 replicas, 2 epochs" in err
    assert len(rows()) == 9


def test_the_command_is_remembered_and_shown_on_the_page(dcpp):
    Path("my file.toml").write_text(MINE)
    dcpp("run", "my file.toml", "--out", "o", "--device", "cpu")
    command = "dcpp run 'my file.toml' --out o --device cpu"
    assert notes("command", "o") == [command] * 3
    assert command in html.unescape(Path("o/index.html").read_text())
    Path("o/index.html").unlink()
    assert dcpp("report", "--out", "o")[0] == 0
    assert command in html.unescape(Path("o/index.html").read_text())


def test_what_is_open_is_chosen_first_and_the_page_says_how(dcpp):
    text = MINE.replace("step_size = 0.05\n", "").replace("rate = 0.5\n", "")
    Path("open.toml").write_text(
        f"{text}\n[selection]\nstep_sizes = [0.01, 0.05]\nstep_replicas = 1\nrates = [0.2, 0.5]\nrate_replicas = 1\n"
    )
    code, out, _ = dcpp("run", "open.toml")
    assert code == 0
    assert len(rows()) == 3 * 2 + 2 + 6  # step sizes, rates, results
    assert len(notes("selection")) == 3
    page = Path("dcpp-results/index.html").read_text()
    assert "6 networks trained to the end" in page
    assert "chosen by the mean training loss of the first epochs" in page
    assert "chosen by the accuracy on held-out training data" in page
    assert "Trial" not in out


def test_table_1_with_everything_given(dcpp):
    code, out, _ = dcpp("run", "table1", *PAPER, "--methods", "none, dropconnect++")
    assert code == 0
    assert sorted(row.protocol.label for row in rows()) == ["DropConnect++", "No regularization"]
    settings = rows()[0].protocol.settings
    assert (settings["training"]["epochs"], settings["training"]["step_size"]) == (1, 0.01)
    assert "No regularization" in out
    assert "DropConnect++" in out


def test_step_sizes_are_chosen_on_held_out_data_where_asked(dcpp):
    options = ("--dataset", "tiny", "--methods", "none", "--epochs", "1", "--repeats", "1", "--together")
    assert dcpp("run", "table1", *options)[0] == 0
    (chosen,) = notes("selection together")
    accuracies = {trial["step_size"]: trial["accuracy"] for trial in chosen["together_trials"]}
    assert set(accuracies) == {0.005, 0.01, 0.05}
    assert accuracies[chosen["step_size"]] == max(accuracies.values())
    (trained,) = (row for row in rows() if not row.protocol.settings["training"]["holdout"])
    assert trained.protocol.settings["training"]["step_size"] == chosen["step_size"]


def test_table_2_measures_and_trains_nothing(dcpp, monkeypatch):
    from dropconnectpp.lab.replicas import timing

    monkeypatch.setattr(timing, "MC_SAMPLES", 2)
    monkeypatch.setattr(timing, "PATIENCE", 0.0)
    code, out, err = dcpp("run", "table2", "--dataset", "tiny", "--methods", "dropconnect++,none")
    assert code == 0
    assert rows() == []
    assert err.splitlines() == ["timing in turn: DropConnect++, No regularization, DropConnect++ (hyper=optimal)"]
    assert len(notes("timings")) == 3
    assert "DropConnect++" in out
    assert "per epoch" in out
    command = "dcpp run table2 --dataset tiny --methods dropconnect++,none"
    assert (notes("timing command"), notes("command")) == ([command] * 3, []), "not what trained the networks"
    assert command in html.unescape(next(Path().glob("*/index.html")).read_text())


@pytest.mark.parametrize(("name", "shown"), [("table3", "Monte Carlo"), ("figure1", "DropConnect++")])
def test_table_3_and_figure_1_end_with_their_own_tables(dcpp, name, shown):
    code, out, _ = dcpp("run", name, *PAPER, "--methods", "dropconnect++", "--hyper", "optimal", "--seed", "3")
    assert code == 0
    assert shown in out
    settings = rows()[0].protocol.settings
    assert (settings["method"]["hyper"], settings["root_seed"]) == ("optimal", 3)


def test_foreign_images_are_measured(dcpp):
    dcpp("run", "table1", *PAPER, "--methods", "dropconnect++", "--foreign", "other")
    assert rows()[0].results["foreign"]["data"] == "other"


def test_a_named_experiment_wins_over_a_file_of_that_name(dcpp):
    Path("table1").write_text("no TOML")
    assert dcpp("run", "table1", *PAPER, "--methods", "none")[0] == 0


def test_replicas_at_once_cuts_the_work(dcpp):
    err = dcpp("run", "mine.toml", "--replicas-at-once", "4")[2]
    assert [line.split(": ")[-1] for line in err.splitlines() if "replica" in line] == [
        "4 replicas, 2 epochs",
        "2 replicas, 2 epochs",
    ]


# ------------------------------------------------------------------------------------ stopped and resumed


def test_a_time_limit_stops_cleanly_and_the_same_command_goes_on(dcpp):
    code, out, err = dcpp("run", "mine.toml", "--time-limit", "0s")
    assert (code, out) == (3, "")
    assert "The time limit is near: stopped. The same command goes on from here." in err
    assert rows() == []
    assert not list(Path("dcpp-results").glob("checkpoints/*")), "nothing was trained"
    assert dcpp("run", "mine.toml", "--time-limit", "1h30m")[0] == 0
    assert [row.status for row in rows()] == ["done"] * 6


def test_a_time_limit_while_choosing_stops_too(dcpp):
    Path("open.toml").write_text(MINE.replace("step_size = 0.05\n", ""))
    assert dcpp("run", "open.toml", "--time-limit", "0")[:2] == (3, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_what_was_finished_and_the_same_command_goes_on(dcpp, monkeypatch, request, number):
    before = signal.getsignal(signal.SIGTERM)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ours))
    real = Runner._finish

    def finish(*arguments: Any) -> None:
        real(*arguments)
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_finish", finish)
        code, out, err = dcpp("run", "mine.toml", "--replicas-at-once", "2")
    assert (code, out) == (130, "")
    assert "Stopped. What was finished or checkpointed is kept; the same command resumes." in err
    assert "Traceback" not in err
    assert [row.status for row in rows()] == ["done"] * 2
    assert signal.getsignal(signal.SIGTERM) is before
    kept = rows()
    assert dcpp("run", "mine.toml", "--replicas-at-once", "2")[0] == 0
    assert len(rows()) == 6
    assert [row for row in rows() if row in kept] == kept


def test_work_of_another_process_is_left_to_it_and_told(dcpp):
    experiment = experiments.from_file(Path("mine.toml"))
    Path("dcpp-results").mkdir()
    with Store.open("dcpp-results/results.sqlite") as store:
        store.claim([(store.add(experiment.protocols[0]), 0)], Owner.here())
    code, out, err = dcpp("run", "mine.toml")
    assert (code, out) == (3, "")
    assert "Other processes train the rest: 1 left." in err
    assert sum(row.status == "done" for row in rows()) == 5


# --------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "table9"], "There is no experiment 'table9'. Choose from table1, table2, table3, figure1, or give a"),
        (["run", "none.toml"], "none.toml: there is no such file."),
        (["run", "table1", "--methods", "dropouts"], "method must be one of none, dropout, dropconnect, dropconnect++"),
        (["run", "table1", "--methods", ","], "an experiment needs at least one method."),
        (["run", "table1", "--dataset", "imagenet"], "There is no data set 'imagenet'."),
        (["run", "table1"], "cifar10 is not in "),
        (["run", "table1", "--dataset", "tiny", "--foreign", "imagenet"], "There is no data set 'imagenet'."),
        (
            ["run", "table1", "--dataset", "tiny", "--foreign", "large"],
            "foreign images must be as large as those of tiny, 8 x 8, and those of large are 12 x 12.",
        ),
        (["run", "table1", "--time-limit", "soon"], "time-limit must look like 90s, 9m or 1h30m, got 'soon'."),
        (["run", "table1", "--device", "abacus"], "device must be auto, cpu, cuda or cuda:N, got 'abacus'."),
        (["run", "table1", "--device", "meta"], "device must be auto, cpu, cuda or cuda:N, got 'meta'."),
        (["run", "table1", "--rate", "1.5"], "rate is the share dropped and must lie in [0, 1), got 1.5."),
        (["run", "table1", "--step-size", "0"], "step_size must be positive, got 0.0."),
        (["run", "table1", "--hyper", "best"], "hyper must be one of learned, optimal, got 'best'."),
        (["run", "mine.toml", "--epochs", "3"], "--epochs is for the paper's experiments. Write it into mine.toml."),
        (["run", "mine.toml", "--together"], "--together is for the paper's experiments. Write it into mine.toml."),
        (["run", "mine.toml", "--step-size", "3"], "--step-size is for the paper's experiments."),
        (["run", "mine.toml", "--out", "mine.toml"], "mine.toml: is a file. Give a folder."),
        (["demo", "--device", "abacus"], "device must be auto, cpu, cuda or cuda:N, got 'abacus'."),
        (["train", "--model", "no/net.st"], "no/net.st: its folder does not exist. Make it, or give another path."),
        (["train", "--model", "."], ".: is a folder. Give the path of a file in it."),
        (["train", "--model", "net.st", "--method", "magic"], "method must be one of none, "),
        (["train", "--model", "net.st", "--estimator", "magic"], "estimator must be one of bbvi, "),
        (
            ["train", "--model", "net.st", "--method", "none", "--rate", "0.3"],
            "none has no rate. Leave out --rate",
        ),
        (["train", "--model", "net.st", "--method", "sparse", "--rate", "0.3"], "sparse has no rate. Leave out"),
        (
            ["train", "--model", "net.st", "--method", "dropout", "--hyper", "optimal"],
            "dropout has no hyper. Leave out",
        ),
        (["train", "--model", "net.st", "--dataset", "imagenet"], "There is no data set 'imagenet'."),
        (["train", "--model", "net.st", "--dataset", "tiny", "--device", "abacus"], "device must be auto, cpu, "),
        (["results"], "{here}/dcpp-results/results.sqlite: there is no store to read. Check the path"),
        (["results", "--out", "."], "{here}/results.sqlite: there is no store to read."),
        (["report"], "{here}/dcpp-results/results.sqlite: there is no store to read. Check the path"),
        (["report", "--out", "."], "{here}/results.sqlite: there is no store to read."),
        (["store", "merge", "all", "missing"], "{here}/missing: there is no store to read."),
        (["store", "merge", "all", "mine.toml"], "{here}/mine.toml: "),
        (["store", "merge", "mine.toml/x", "missing"], "mine.toml/x: the folder cannot be made (Not a directory)."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(dcpp, arguments, message, tmp_path):
    code, out, err = dcpp(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"Error: {message.format(here=tmp_path)}")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not Path("dcpp-results/results.sqlite").exists()  # a mistake is no result
    assert not Path("net.st").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(dcpp):
    code, _, err = dcpp("run", "mine.toml", "--device", "cuda")
    assert code == 1
    assert err.startswith("Error: device 'cuda' was asked for and torch sees no GPU. Use --device cpu")


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "table1", "--repeats", "0"), ("train",), ("store", "merge", "a")]
)
def test_a_wrong_usage_is_told_by_exit_code_2(dcpp, arguments):
    code, _, err = dcpp(*arguments)
    assert code == 2
    assert "Usage" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1.5", 1.5), ("90s", 90.0), ("9m", 540.0), ("1h30m", 5400.0), ("2h5s", 7205.0)]
)
def test_times_are_read_as_people_write_them(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5s", "30m1h", "1h 30m", "1d", "nan", "1e3"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ProtocolError, match="time-limit must look like 90s, 9m or 1h30m, got"):
        duration(text)


# ----------------------------------------------------------------------------------------- demo and train


@pytest.fixture
def small_demo(monkeypatch) -> None:
    architecture = Architecture(maps=(2,), pooled=(True,), filter_size=3, padding=1, hidden=3)

    def small(repeats: int, epochs: int) -> experiments.Experiment:
        full = demo(repeats, epochs)
        protocols = tuple(replace(p, data="tiny", architecture=architecture) for p in full.protocols)
        return replace(full, protocols=protocols)

    demo = experiments.demo
    monkeypatch.setattr(experiments, "demo", small)


def test_a_demo_that_another_process_trains_ends_without_a_report(dcpp, small_demo):
    Path("dcpp-demo").mkdir()
    with Store.open("dcpp-demo/results.sqlite") as store:
        for protocol in experiments.demo(1, 1).protocols:
            store.claim([(store.add(protocol), 0)], Owner.here())
    code, out, err = dcpp("demo", "--repeats", "1", "--epochs", "1")
    assert (code, out, err) == (3, "", "Other processes train the rest: 4 left.\n")


def test_the_demo_trains_times_and_reports(dcpp, small_demo):
    code, out, err = dcpp("demo", "--repeats", "2", "--epochs", "1", "--device", "cpu")
    assert code == 0
    assert "8 replicas, 1 epoch\n" in err
    assert "timing in turn: No regularization, Dropout, DropConnect, DropConnect++" in err
    assert [row.status for row in rows("dcpp-demo")] == ["done"] * 8
    assert len(notes("timings", "dcpp-demo")) == 4
    for label in ("No regularization", "Dropout", "DropConnect", "DropConnect++"):
        assert label in out
    assert Path("dcpp-demo/index.html").is_file()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in METHODS),
        ("dropout", {"rate": 0.3}),
        ("dropconnect++", {"hyper": "optimal", "estimator": "disarm"}),
        ("sparse", {"estimator": "concrete"}),
    ],
)
def test_a_trained_network_is_a_model_that_loads(dcpp, kind, options):
    said = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    code, out, err = dcpp(
        *("train", "--model", "net.safetensors", "--dataset", "tiny", "--method", kind, "--epochs", "2", *said)
    )
    assert code == 0
    assert err.splitlines()[0].endswith("1 replica, 2 epochs")
    assert out.endswith("Written: net.safetensors\n")
    method = replace(METHODS[kind], **({"rate": 0.5} if METHODS[kind].has_rate else {}) | options)
    assert err.splitlines()[0].startswith(f"tiny: {method.label}")
    model = dropconnectpp.load("net.safetensors", build(Shape(Architecture(), 1, 8, 3), method)).eval()
    images = torch.from_numpy(made("tiny").test.images).float()
    images = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)
    with torch.no_grad():
        right = model(images).argmax(1) == torch.from_numpy(made("tiny").test.labels)
    assert out.startswith(f"Test accuracy {100 * float(right.float().mean()):.2f}% by Eq. (19).")


def test_the_same_seed_trains_the_same_network(dcpp):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        dcpp("train", "--model", name, "--dataset", "tiny", "--epochs", "1", "--seed", seed)
    one, same, other = (load_file(name) for name in "abc")
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["dense.weight"], other["dense.weight"])


def test_a_training_that_diverged_is_told_and_not_written(dcpp):
    code, out, err = dcpp("train", "--model", "net", "--dataset", "tiny", "--epochs", "2", "--step-size", "1e30")
    assert (code, out) == (1, "")
    assert "Error: the training diverged at step size 1e+30, and nothing was written. Use a smaller step size." in err
    assert not Path("net").exists()


def test_a_terminal_gets_bars(monkeypatch, capsys):
    monkeypatch.setattr(displays, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=90))
    with displays.run_display() as display:
        display.group("tiny: Dropout", 2, 3, 0)
        display.epoch(3, 1.0, 50.0)
    assert "tiny: Dropout, 2 replicas" in capsys.readouterr().err


# ------------------------------------------------------------------------------- results, report and merge


def test_results_are_written_as_csv(dcpp):
    fill("o")
    code, out, _ = dcpp("results", "--out", "o", "--format", "csv")
    found = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert sorted((row["label"], row["replica"], row["accuracy"]) for row in found) == [
        ("Dropout", "0", "50.0"),
        ("Dropout", "1", "51.0"),
        ("No regularization", "0", "50.0"),
        ("No regularization", "1", "51.0"),
    ]


def test_results_are_written_as_json(dcpp):
    fill("o")
    code, out, _ = dcpp("results", "--out", "o", "--format", "json")
    assert code == 0
    assert {(row["data"], row["status"], row["seconds"]) for row in json.loads(out)} == {("fashion-mini", "done", 1.0)}


@pytest.mark.parametrize("columns", ["60", "200"])
def test_results_are_shown_as_a_table_that_cuts_nothing(dcpp, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    fill("o")
    code, out, _ = dcpp("results", "--out", "o")
    assert code == 0
    assert "Results in o" in out
    assert out.count("No regularization") == 2
    assert all(row.key.digest in out for row in rows("o"))


def test_running_work_is_no_result(dcpp):
    fill("o", replicas=(0,))
    with Store.open("o/results.sqlite") as store:
        store.claim([(store.protocols()[0].digest, 7)], Owner.here())
    assert len(json.loads(dcpp("results", "--out", "o", "--format", "json")[1])) == 2


def test_a_report_is_built_from_the_store_alone(dcpp, monkeypatch):
    fill("o")
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("data was loaded"))
    code, out, err = dcpp("report", "--out", "o")
    assert (code, err) == (0, "")
    assert "No regularization" in out
    assert "4 networks trained to the end" in Path("o/index.html").read_text()


HEAVY = ("torch", "matplotlib", "scipy", "sklearn", "PIL", "jinja2")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["data", "list"], 0), (["report", "--out", "nothing"], 1)], ids=str
)
def test_what_needs_no_results_imports_nothing_heavy(arguments, code, tmp_path):
    program = f"""
import sys
from dropconnectpp.lab.cli.main import main
sys.argv = ["dcpp", *{arguments!r}]
try:
    main()
finally:
    print("HEAVY", *(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "HEAVY")
    if code:
        assert "nothing/results.sqlite: there is no store to read." in done.stderr


@pytest.mark.parametrize("options", [(), ("--watch",), ("--to", "elsewhere", "--open")], ids=str)
def test_a_report_of_nothing_is_a_mistake_and_writes_nothing(dcpp, options):
    code, out, err = dcpp("report", "--out", "nothing", *options)
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    assert "nothing/results.sqlite: there is no store to read." in err
    assert not Path("nothing").exists()
    assert not Path("elsewhere").exists()


def test_a_merge_adds_what_is_new_and_doubles_nothing(dcpp):
    fill("one", replicas=(0, 1))
    fill("two", replicas=(1, 2))
    code, out, _ = dcpp("store", "merge", "all", "one", "two/results.sqlite")
    assert (code, out.splitlines()) == (
        0,
        [
            "one: 4 rows added, 0 already there, 0 in conflict (ours kept)",
            "two/results.sqlite: 2 rows added, 2 already there, 0 in conflict (ours kept)",
        ],
    )
    code, out, _ = dcpp("store", "merge", "all", "one", "two")
    assert code == 0
    assert [line.split(": ")[1][:12] for line in out.splitlines()] == ["0 rows added"] * 2
    assert len(rows("all")) == 6


def test_a_merge_takes_a_store_file_to_receive(dcpp):
    fill("one", replicas=(0,))
    fill("two", replicas=(1,))
    assert dcpp("store", "merge", "one/results.sqlite", "two")[0] == 0
    assert len(rows("one")) == 4


def test_a_merge_with_a_conflict_keeps_ours_and_gives_exit_code_1(dcpp):
    fill("one", accuracy=50.0)
    fill("two", accuracy=60.0)
    code, out, err = dcpp("store", "merge", "one", "two")
    assert (code, err) == (1, "")
    assert out == "two: 0 rows added, 0 already there, 4 in conflict (ours kept)\n"
    assert {row.results["accuracy"] for row in rows("one")} == {50.0, 51.0}


def test_results_of_two_machines_make_one_report(dcpp):
    for machine in ("one", "two"):
        dcpp("run", "mine.toml", "--out", machine)
    dcpp("store", "merge", "all", "one", "two")
    assert dcpp("report", "--out", "all")[0] == 0
    page = html.unescape(Path("all/index.html").read_text())
    assert "dcpp run mine.toml --out one" in page


# ------------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ([], ["demo", "run", "train", "report", "results", "data", "store"]),
        (
            ["run"],
            [
                "dcpp run table1 --dataset cifar10",
                "dcpp run mine.toml",
                "--time-limit",
                "1h30m",
                "the paper's 100",
                "auto",
            ],
        ),
        (["demo"], ["minutes on a laptop", "dcpp run table1", "--repeats", "dcpp-demo"]),
        (["train"], ["dcpp train --model", "--estimator", "Passes over the training set", "dropconnect++"]),
        (["results"], ["dcpp results --out", "--format", "csv"]),
        (["report"], ["dcpp report --out"]),
        (["store"], ["merge"]),
        (["store", "merge"], ["dcpp store merge all", "exit code 1", "Folders or store files to add"]),
    ],
)
def test_help_teaches(dcpp, command, taught):
    code, out, _ = dcpp(*command, "--help")
    assert code == 0
    for text in taught:
        assert text in out


@pytest.mark.parametrize("command", [["run"], ["demo"], ["train"], ["results"], ["report"], ["store", "merge"]])
def test_every_option_is_explained(dcpp, command):
    out = dcpp(*command, "--help")[1]
    options = [line.strip("│ *").split() for line in out.splitlines() if "│" in line and "--" in line[:8]]
    assert options
    for words in options:
        assert any(word[0].isupper() or word == "auto," for word in words[1:]), words
    assert "[default: the" not in out


def test_a_command_without_arguments_shows_the_help(dcpp):
    code, out, err = dcpp()
    assert code == 2
    assert "Run an experiment of the paper" in out + err
