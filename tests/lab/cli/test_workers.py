"""The options of the processes that train, as a user types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_cases import MINE, rows

from dropconnectpp.lab import data
from dropconnectpp.lab.data import access

COMMAND = ("run", "mine.toml", "--device", "cpu")


def test_two_workers_make_the_rows_of_one_process(dcpp, monkeypatch):
    monkeypatch.setattr(data, "load", access.load)  # workers open what they are told by name
    Path("mine.toml").write_text(
        MINE.replace('"tiny"', '"fashion-mini"').replace("batch_size = 16", "batch_size = 100")
    )
    code, _, _ = dcpp(*COMMAND, "--repeats", "1", "--out", "one")
    assert code == 0
    code, out, err = dcpp(
        *COMMAND, "--repeats", "1", "--out", "two", "--workers", "2", "--threads", "1", "--time-limit", "1h"
    )
    assert code == 0, err
    assert "No regularization" in out
    assert [(row.key, row.results, row.device) for row in rows("two")] == [
        (row.key, row.results, row.device) for row in rows("one")
    ]
    assert not Path("two/status").exists()


def test_one_worker_keeps_its_checkpoints_where_it_is_told(dcpp):
    code, _, err = dcpp(*COMMAND, "--storage", "elsewhere", "--threads", "1", "--time-limit", "0s")
    assert code == 3, err
    assert dcpp(*COMMAND, "--storage", "elsewhere")[0] == 0
    assert not Path("dcpp-results/checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*COMMAND, "--engine", "process", "--workers", "2"),
            "--engine process is one worker, got --workers 2. Use ",
        ),
        (
            (*COMMAND, "--storage", "nonesuch://x", "--workers", "2"),
            "--storage nonesuch://x/checkpoints: Protocol not",
        ),
        (("run", "table2", "--workers", "2"), "--workers is not for table2. It times methods in turn, on one device."),
    ],
)
def test_a_mistake_is_one_line_with_nothing_written(dcpp, arguments, message):
    code, _, err = dcpp(*arguments)
    assert code == 1
    assert message in re.sub(r"\s+", " ", err)
    assert not Path("dcpp-results").exists()
