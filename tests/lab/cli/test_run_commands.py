"""`dcpp run` and `demo` as a user types them: results, stops and resumption, mistakes."""

from __future__ import annotations

import html
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import MINE, PAPER, notes, rows

from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.replicas.stack import Stack
from dropconnectpp.lab.report.render import drawing
from dropconnectpp.lab.runs.demo import measuring, showing
from dropconnectpp.lab.runs.dispatch import Dispatcher
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store

FORMS = drawing.METADATA

# ------------------------------------------------------------------------------------------------ run


def test_a_file_of_ones_own_is_run_to_tables_and_a_page(dcpp, monkeypatch):
    monkeypatch.setattr(drawing, "METADATA", FORMS)
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
    figures = [file.suffix for file in Path("dcpp-results/figures").iterdir()]
    assert {suffix: figures.count(suffix) for suffix in figures} == {".svg": 5, ".png": 5, ".pdf": 5}
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
    assert "chosen by the mean training loss of the last epoch tried" in page
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
    monkeypatch.setattr(timing, "PATIENCE_S", 0.0)
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
    real = Dispatcher.keep

    def keep(*arguments: Any) -> int:
        stored = real(*arguments)
        os.kill(os.getpid(), number)
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "keep", keep)
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
        (["run", "mine.toml", "--epochs", "3"], "--epochs is not for mine.toml. Write it into mine.toml."),
        (["run", "mine.toml", "--together"], "--together is not for mine.toml. Write it into mine.toml."),
        (["run", "mine.toml", "--step-size", "3"], "--step-size is not for mine.toml."),
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


# ----------------------------------------------------------------------------------------- demo


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
    assert (code, out) == (3, "")
    assert err.endswith("Other processes train the rest: 5 left.\n")


def test_the_demo_shows_the_library_and_table_1_and_ends_in_five_lines_and_the_page(dcpp, small_demo, monkeypatch):
    code, out, err = dcpp("demo", "--repeats", "2", "--epochs", "1", "--device", "cpu")
    assert code == 0
    assert "  plain network, seed 0, 0/16\n" in err
    assert sum(int(count) for count in re.findall(r"(\d+) replicas, 1 epoch\n", err)) == 10
    assert "timing in turn: No regularization, Dropout, DropConnect, DropConnect++, DropConnect++ (estimator" in err
    assert [row.status for row in rows("dcpp-demo")] == ["done"] * 10
    assert len(notes("timings", "dcpp-demo")) == 5
    (shown,) = notes("demo", "dcpp-demo")
    assert len(shown["networks"]) == 16
    starts = (
        "Few connections: ",
        "What was kept: ",
        "Foreign images: ",
        "Deployed: ",
        "The paper's Table 1 in small: ",
    )
    *lines, last = out.splitlines()
    assert [line.split(". ")[0] for line in lines] == ["1", "2", "3", "4", "5"]
    for line, start in zip(lines, starts, strict=True):
        assert line[3:].startswith(start)
    assert lines[-1].endswith("1 epoch, n = 2 networks of each method: too small to rank methods.")
    assert last == "The page with all tables and figures: dcpp-demo/index.html"
    page = html.unescape(Path("dcpp-demo/index.html").read_text())
    for line in lines:
        assert line[3:] in page, "the page says what the terminal says"
    assert not any(word in page for word in ("beats", "is beaten by")), "no winner is declared"
    monkeypatch.setattr(measuring, "accuracy", lambda *_: pytest.fail("trained again"))
    assert dcpp("demo", "--repeats", "2", "--epochs", "1", "--device", "cpu")[:2] == (0, out)


def test_a_demo_that_was_stopped_goes_on_with_the_next_network(dcpp, small_demo, monkeypatch):
    real, left = showing._measured, iter(range(5))

    def measured(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(showing, "_measured", measured)
        assert dcpp("demo", "--repeats", "1", "--epochs", "1")[:2] == (130, "")
    (before,) = notes("demo", "dcpp-demo")
    assert len(before["networks"]) == 5
    assert dcpp("demo", "--repeats", "1", "--epochs", "1")[0] == 0
    (after,) = notes("demo", "dcpp-demo")
    assert after["networks"][:5] == before["networks"]
    assert len(after["networks"]) == 8
