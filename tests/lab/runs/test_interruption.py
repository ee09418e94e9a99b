"""Ctrl-C: a checkpoint first, wherever training stands, and the same rows afterwards; twice, at once."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import Diary
from tiny_cases import EVALUATION, TINY, TWO_LAYERS, tiny

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack
from dropconnectpp.lab.runs.checkpoints import Checkpoints
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Store

PROTOCOL = replace(TINY, architecture=TWO_LAYERS, training=replace(TINY.training, epochs=3), evaluation=EVALUATION)
UNITS = [Unit(replace(PROTOCOL, method=method), 0) for method in (Method(kind="dropconnect", rate=0.5), Method())]
STEPS = 12
"""Four of each epoch."""


def run(out: Path, interruption: Interruption | None = None) -> Runner:
    runner = Runner(out, torch.device("cpu"), tiny, Diary(), interruption=interruption or Interruption())
    with runner.interruption.caught():
        runner.run(UNITS)
    return runner


def rows(out: Path) -> list[tuple[Any, ...]]:
    with Store.open(out / "results.sqlite", read_only=True) as store:
        return [(row.key, row.status, json.dumps(row.results, sort_keys=True)) for row in store.rows()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    run(out := tmp_path_factory.mktemp("whole"))
    return rows(out)


def press(monkeypatch: pytest.MonkeyPatch, at: int, one: signal.Signals) -> None:
    """Send the signal inside a step."""
    step, taken = Stack._one_step, [0]

    def pressed(self: Stack, batch: int) -> None:
        taken[0] += 1
        if taken[0] == at:
            os.kill(os.getpid(), one)
        step(self, batch)

    monkeypatch.setattr(Stack, "_one_step", pressed)


@pytest.mark.parametrize("one", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 4, 6, STEPS])
def test_a_checkpoint_is_written_first_and_no_step_is_taken_twice(tmp_path, monkeypatch, undisturbed, at, one):
    press(monkeypatch, at, one)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    ((path, _),) = Checkpoints(tmp_path / "checkpoints").all()
    assert Checkpoints(tmp_path / "checkpoints").read(path).state["step"] == at
    assert rows(tmp_path) == []  # given back, not held
    monkeypatch.undo()
    runner = run(tmp_path)
    assert runner.display.groups == [(2, (at - 1) // 4)]
    assert rows(tmp_path) == undisturbed


def test_in_the_final_evaluation_what_was_trained_is_kept(tmp_path, monkeypatch, undisturbed):
    def pressed(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return final(*arguments)

    final = evaluation.final
    monkeypatch.setattr(evaluation, "final", pressed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    monkeypatch.undo()
    runner = run(tmp_path)
    assert runner.display.groups == [(2, 3)]
    assert runner.display.epochs == []
    assert rows(tmp_path) == undisturbed


def test_twice_it_ends_at_once(tmp_path, monkeypatch):
    press(monkeypatch, 6, signal.SIGINT)
    interruption = Interruption()
    interruption.requested = True  # the first time
    monkeypatch.setattr(Interruption, "check", lambda self: None)
    monkeypatch.setattr("dropconnectpp.lab.runs.session.Session._stop_if_asked", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interruption)
    assert list(Checkpoints(tmp_path / "checkpoints").all()) == []


def test_outside_of_training_it_ends_at_once_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    interruption = Interruption()
    with pytest.raises(KeyboardInterrupt), interruption.caught():
        os.kill(os.getpid(), signal.SIGTERM)
    assert not interruption.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_as_the_last_row_is_stored_stops_before_the_next_stack(tmp_path, monkeypatch):
    def pressed(self: Store, *arguments: Any, **content: Any) -> None:
        finish(self, *arguments, **content)
        runner.interruption.requested = True

    finish = Store.finish
    monkeypatch.setattr(Store, "finish", pressed)
    runner = Runner(tmp_path, torch.device("cpu"), tiny, Diary(), group=1)
    with pytest.raises(KeyboardInterrupt):
        runner.run(UNITS)
    assert len(rows(tmp_path)) == 1
