"""The engine of a Ray cluster, here of one node that Ray starts: rows, deaths, stops, and nodes that do not fit."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_cases import CPU, Bare, alone, orders, table, units
from run_cases import Diary
from tiny_cases import tiny

import dropconnectpp
from dropconnectpp.errors import MissingPackageError
from dropconnectpp.lab.cli.workers import Team
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.runs.board import Board
from dropconnectpp.lab.runs.dispatch import WorkError
from dropconnectpp.lab.runs.engines.cluster import Cluster, Desk, Probe, probe
from dropconnectpp.lab.runs.engines.engine import Ended, EngineError, Told
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.runner import Outcome, Runner
from dropconnectpp.lab.runs.store import Key
from dropconnectpp.lab.runs.tasks import Failed
from forked import environment

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.skipif(sys.platform == "win32", reason="Ray starts slowly there"),
]
WANTED = units(2, epochs=100)  # longer than a worker is silent


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def engine(out: Path, case_folders: list[str]) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:  # Ray's workers import the data's maker
        patch.setenv("PYTHONPATH", environment(case_folders)["PYTHONPATH"])
        yield from started(out)


def started(out: Path) -> Iterator[Cluster]:
    made = Cluster("local", orders(out), "auto", 2, shared=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    return alone(tmp_path_factory.mktemp("whole"), WANTED)


def make(out: Path, engine: Cluster, **options: Any) -> Runner:
    return Runner(out, CPU, tiny, Diary(), engine=engine, group=2, **options)


def notes(runner: Runner) -> list[str]:
    assert isinstance(runner.display, Diary)
    return runner.display.notes


def at_an_epoch(monkeypatch: pytest.MonkeyPatch, act: Any) -> list[int]:
    """Act once on the process of a worker that trains."""
    seen: list[int] = []
    real = Board.told

    def told(self: Board, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        real(self, number, what, arguments)
        if what == "epoch" and not seen:
            seen.append(self._entries[number].worker.pid)  # type: ignore[union-attr]
            act(seen[0])

    monkeypatch.setattr(Board, "told", told)
    return seen


def test_a_worker_killed_a_stop_and_the_rest_make_the_rows_of_one_process(out, engine, whole, monkeypatch):
    interruption = Interruption()

    def press(_: int) -> None:
        interruption.requested = True

    with monkeypatch.context() as patch:
        at_an_epoch(patch, press)
        with pytest.raises(KeyboardInterrupt):
            make(out, engine, interruption=interruption).run(WANTED)
    assert list((out / "checkpoints").glob("*.pt"))
    engine._desk = None  # the command starts anew
    seen = at_an_epoch(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL))
    runner = make(out, engine, checkpoint_s=0.0)
    assert runner.run(WANTED) == Outcome(finished=4, left=0, stopped=False)
    assert len(seen) == 1
    assert any(f"(process {seen[0]} on " in said and "was lost: its" in said for said in notes(runner))
    assert table(out) == whole


def test_what_a_worker_cannot_do_is_told(out, engine):
    with pytest.raises(WorkError, match="batch_size is 10000 and there are only 64 training examples"):
        make(out, engine).run(units(1, batch_size=10_000))
    engine._desk = None
    events: list[Any] = []
    engine.open(make(out, engine)._workplace(), events.append)
    engine.submit(1, Bare(Key("digest", 0), "raise"))
    while not any(isinstance(event, Ended) for event in events):
        engine.wait(1.0)
    outcome = events[-1].outcome
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("RuntimeError: broken (engine_cases.py, line")


def test_nodes_that_do_not_fit_are_named(out, engine, monkeypatch):
    workplace = make(out, engine)._workplace()
    said: list[Any] = []

    def answer(version: str, sees: bool) -> None:
        engine._desk = None
        found = [Probe("near", dropconnectpp.__version__, True), Probe("far", version, sees)]
        monkeypatch.setattr(engine, "_ask_nodes", lambda _: found)
        engine.open(workplace, said.append)

    with pytest.raises(EngineError, match=r"far has dropconnectpp 0\.0, this machine"):
        answer("0.0", True)
    version = dropconnectpp.__version__
    answer(version, False)
    (event,) = said
    assert isinstance(event, Told)
    assert event.arguments[0].startswith("far does not see ")
    monkeypatch.setattr(engine, "_shared", True)
    with pytest.raises(EngineError, match=r"not reached from far\. Give a shared folder\."):
        answer(version, False)
    assert not probe(str(out / "nothing")).sees
    assert not list(out.glob(".reached-*"))


def test_a_cluster_that_is_not_there_is_told(out, engine, monkeypatch):
    monkeypatch.setattr(engine._ray, "shutdown", lambda: None)
    monkeypatch.setattr("dropconnectpp.lab.runs.engines.cluster._connect", lambda *_: None)
    with pytest.raises(EngineError, match=r"--device cuda: the Ray cluster has no GPU"):
        Cluster(None, orders(out), "cuda", None, shared=False)


def test_the_desk_gives_what_it_heard_once():
    desk = Desk()
    assert not desk.hear([("a", Told(1, "note", ("x",)))])
    assert desk.take() == [("a", Told(1, "note", ("x",)))]
    assert desk.take() == []
    desk.stop()
    assert desk.hear([])


def test_the_extra_is_named_where_ray_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"--engine ray needs Ray\. .*dropconnectpp\[cluster\]"):
        Team(engine="ray").gather(tmp_path, "cpu", tiny)
    with pytest.raises(ProtocolError, match=r"--address h:1 is of a Ray cluster\. Add --engine ray\."):
        Team(address="h:1")
    assert Team(engine="ray", address="h:1").name == "ray"
