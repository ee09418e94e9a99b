"""Workers of one host: the rows of one process, whoever dies, whatever the number of workers and the order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_cases import CPU, GROUP, alone, host, orders, table, units
from run_cases import Diary
from tiny_cases import tiny

from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.runs.board import Board
from dropconnectpp.lab.runs.dispatch import MOST_DEATHS, WorkError
from dropconnectpp.lab.runs.engines import host as module
from dropconnectpp.lab.runs.engines.engine import EngineError
from dropconnectpp.lab.runs.engines.host import Host, every_device
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.outbox import Outbox
from dropconnectpp.lab.runs.runner import Outcome, Runner
from dropconnectpp.lab.runs.storage import FINISHED, Storage
from dropconnectpp.lab.runs.store import Store

WANTED = units(epochs=40)  # longer than the driver takes to hear of an epoch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    return alone(tmp_path_factory.mktemp("whole"), WANTED)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Host]:
    made = host(tmp_path)
    yield made
    made.close()


def make(out: Path, engine: Host, **options: Any) -> Runner:
    return Runner(out, CPU, tiny, Diary(), engine=engine, **{"group": GROUP, **options})


def notes(runner: Runner) -> list[str]:
    assert isinstance(runner.display, Diary)
    return runner.display.notes


def when_begun(monkeypatch: pytest.MonkeyPatch, act: Any, times: int = 1) -> list[int]:
    """Act on the process of a worker a moment after it has begun a task."""
    seen: list[int] = []
    real = Board.told

    def told(self: Board, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        real(self, number, what, arguments)
        worker = self._entries[number].worker
        if what == "epoch" and worker is not None and worker.pid not in seen and len(seen) < times:
            seen.append(worker.pid)
            act(worker.pid)

    monkeypatch.setattr(Board, "told", told)
    return seen


def test_two_workers_make_the_rows_of_one_process(tmp_path, engine, whole):
    runner = make(tmp_path, engine)
    assert runner.run(WANTED) == Outcome(finished=8, left=0, stopped=False)
    assert table(tmp_path) == whole
    assert {row[4].rpartition(", ")[2] for row in whole} == {"1 threads"}  # recorded with the row
    assert notes(runner) == []
    assert list((tmp_path / FINISHED).iterdir()) == []
    assert not list((tmp_path / "checkpoints").glob("*")) if (tmp_path / "checkpoints").exists() else True
    assert runner.run(units(5, epochs=40)).finished == 10  # the same workers go on


def test_a_killed_worker_is_told_and_costs_nothing(tmp_path, monkeypatch, engine, whole):
    runner = make(tmp_path, engine, checkpoint_s=0.0)
    seen = when_begun(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL))
    runner.run(WANTED)
    assert len(seen) == 1
    (said,) = notes(runner)
    assert "was killed (SIGKILL): its 4 networks go on from the last checkpoint." in said
    assert table(tmp_path) == whole


def test_what_kills_every_worker_is_given_up_with_its_reason_and_the_rest_goes_on(tmp_path, monkeypatch, engine, whole):
    victims: list[int] = []
    real = Board.began

    def began(self: Board, number: int, worker: Any) -> None:
        real(self, number, worker)
        if 0 in [key.replica for key in self._entries[number].task.keys]:
            victims.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(Board, "began", began)
    runner = make(tmp_path, engine, group=1)
    with pytest.raises(WorkError, match=r"2 networks failed: 3 workers died on it without progress"):
        runner.run(WANTED)
    assert len(victims) == 2 * MOST_DEATHS
    assert [row for row in table(tmp_path) if row[2] == "done"] == [row for row in whole if row[1] != 0]
    with Store.open(tmp_path / "results.sqlite", read_only=True) as store:
        assert all("SIGKILL" in row.results["reason"] for row in store.rows(status="failed"))
    monkeypatch.undo()
    assert make(tmp_path, engine).run(WANTED).left == 0  # the same command tries them again
    assert table(tmp_path) == whole


def test_ctrl_c_lets_workers_write_checkpoints(tmp_path, monkeypatch, engine, whole):
    interruption = Interruption()

    def press(_: int) -> None:
        interruption.requested = True

    when_begun(monkeypatch, press)
    runner = make(tmp_path, engine, interruption=interruption)
    with pytest.raises(KeyboardInterrupt):
        runner.run(WANTED)
    assert notes(runner) == ["Stopping: workers write checkpoints. Ctrl-C once more stops at once."]
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 2
    with Store.open(tmp_path / "results.sqlite", read_only=True) as store:
        assert not store.holders()
    monkeypatch.undo()
    again = make(tmp_path, engine)
    again.run(WANTED)
    assert table(tmp_path) == whole


def test_a_time_limit_stops_all_workers(tmp_path, engine, whole):
    late = make(tmp_path, engine, deadline=time.monotonic() - 1.0)
    assert late.run(WANTED) == Outcome(finished=0, left=8, stopped=True)
    assert notes(late)[0] == "The time limit is near: stopped. The same command goes on from here."
    assert make(tmp_path, engine).run(WANTED).left == 0
    assert table(tmp_path) == whole


def test_an_error_in_a_worker_ends_the_run_with_its_text(tmp_path, engine, whole):
    runner = make(tmp_path, engine)
    wanted = units(1, batch_size=10_000)
    with pytest.raises(WorkError, match="batch_size is 10000 and there are only 64 training examples"):
        runner.run(wanted)
    assert table(tmp_path) == []
    assert make(tmp_path, engine).run(WANTED).left == 0


def test_rows_that_a_lost_driver_did_not_store_are_found(tmp_path, engine, whole):
    storage = Storage.given(None, tmp_path)
    done: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outbox, "remove", lambda self, keys: done.append(keys))
        make(tmp_path, engine).run(WANTED)
    (tmp_path / "results.sqlite").unlink()  # as if nothing had been stored
    left = list(Outbox(storage.place(FINISHED)).all())
    assert sorted(row.key for rows in left for row in rows) == sorted(unit.key for unit in WANTED)
    damaged, *_ = (tmp_path / FINISHED).iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-10])
    runner = make(tmp_path, engine)
    runner.run(WANTED)
    assert notes(runner) == ["4 networks that workers had finished before: stored."]
    assert table(tmp_path) == whole


def test_an_address_of_fsspec_holds_checkpoints_and_rows(tmp_path, monkeypatch, whole):
    storage = Storage.given(f"file://{tmp_path}/shared", tmp_path / "out")
    engine = host(tmp_path / "out", storage=storage)
    try:
        seen = when_begun(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL))
        runner = make(tmp_path / "out", engine, storage=storage, checkpoint_s=0.0)
        runner.run(WANTED)
        assert len(seen) == 1
    finally:
        engine.close()
    assert table(tmp_path / "out") == whole
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["results.sqlite"]
    assert not [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]


def test_workers_that_cannot_start_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "START_S", 60.0)
    engine = Host(["cuda:7"], orders(tmp_path))
    with pytest.raises(EngineError, match=r"worker 0 \(process \d+ on .*\) ended with exit code 1 before it was ready"):
        make(tmp_path, engine).run(WANTED)
    engine.close()


def test_workers_end_with_their_driver(tmp_path, engine):
    make(tmp_path, engine).run(units(1, epochs=1))
    for slot in engine._slots:
        slot.connection.close()  # all that a worker sees of a driver that is gone
    deadline = time.monotonic() + 60
    while any(slot.process.is_alive() for slot in engine._slots):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine._slots = []


def test_a_worker_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    cuda = torch.device("cuda")
    assert every_device(cuda, None) == ["cuda:0", "cuda:1", "cuda:2"]
    assert every_device(cuda, 2) == ["cuda:0", "cuda:1"]
    assert every_device(torch.device("cuda:1"), 1) == ["cuda:1"]
    assert every_device(CPU, 2) == ["cpu", "cpu"]
    assert len(every_device(CPU, None)) == module.cores()
    with pytest.raises(EngineError, match="--workers 4 and torch sees 3 GPUs"):
        every_device(cuda, 4)
    with pytest.raises(EngineError, match="--device cuda:1 is one GPU"):
        every_device(torch.device("cuda:1"), None)


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dropconnectpp.lab.runs.engines.host"])


def drive(out: Path) -> None:
    torch.set_num_threads(1)
    workers = host(out)
    make(out, workers, checkpoint_s=0.0).run(WANTED)
    workers.close()


def test_a_killed_driver_is_resumed_and_its_workers_leave_nothing_behind(tmp_path, whole):
    driver = PROCESSES.Process(target=drive, args=(tmp_path,))
    driver.start()
    deadline = time.monotonic() + 60
    while not list((tmp_path / "checkpoints").glob("*.pt")):  # workers train
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.kill()
    driver.join()
    again = PROCESSES.Process(target=drive, args=(tmp_path,))
    again.start()
    again.join()
    assert again.exitcode == 0
    assert table(tmp_path) == whole
    with Store.open(tmp_path / "results.sqlite", read_only=True) as store:
        assert not store.holders()


@pytest.mark.parametrize(("device_type", "sizes"), [("cpu", [8, 8, 8]), ("cuda", [3, 5, 8])])
def test_stacks_follow_the_number_of_workers_only_where_digits_do_not(tmp_path, monkeypatch, device_type, sizes):
    """On a GPU nine networks are three for each of three workers; on a CPU a stack is that of one process."""
    workers = SimpleNamespace(device_type=device_type, workers=3, several=True, free_bytes=lambda: 10**12)
    runner = Runner(tmp_path, CPU, tiny, engine=workers, group=8)  # type: ignore[arg-type]
    assert [runner._size(WANTED[0], left) for left in (9, 15, 48)] == sizes


def test_predictions_of_ensembles_need_a_folder_that_the_driver_reads(tmp_path):
    storage = Storage.given(f"file://{tmp_path}/shared", tmp_path)
    engine = host(tmp_path, storage=storage)
    with pytest.raises(ProtocolError, match=r"what networks predict, for their ensembles, needs a folder"):
        make(tmp_path, engine, storage=storage, keeps_predictions=True).run(WANTED)
    assert Storage.given("elsewhere", tmp_path).predictions(tmp_path).parent.name == "elsewhere"
    assert storage.predictions(tmp_path) == tmp_path / "predictions"
