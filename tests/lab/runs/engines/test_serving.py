"""What a worker does with tasks and orders, in this process: how each ends, and what is on disk before it says so."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CPU, Bare, orders

from dropconnectpp.lab.runs.engines import host, worker
from dropconnectpp.lab.runs.engines.worker import Limits, Orders, Station
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.outbox import Outbox
from dropconnectpp.lab.runs.rows import Key
from dropconnectpp.lab.runs.storage import FINISHED
from dropconnectpp.lab.runs.tasks import Failed, Interrupted, OutOfMemory, Refused, Rows

FREELY = Limits(None, 60.0)
KEY = Key("0" * 64, 0)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A worker sets the threads and the signals of its process."""
    threads, handlers = torch.get_num_threads(), {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    torch.set_num_threads(threads)
    for one, handler in handlers.items():
        signal.signal(one, handler)


def served(given: Orders, drive: Callable[[Connection], None]) -> None:
    """Be a worker, while a thread is its driver."""
    ours, theirs = multiprocessing.Pipe()

    def work() -> None:
        drive(ours)
        ours.close()

    driver = threading.Thread(target=work)
    driver.start()
    host.serve(theirs, "cpu", given)
    driver.join(10.0)
    assert not driver.is_alive()


def outcome_of(connection: Connection) -> Any:
    while (message := connection.recv())[0] != "ended":
        assert message[0] == "told"
    return message[2]


def test_tasks_end_one_after_the_other_and_rows_are_on_disk_first(tmp_path: Path) -> None:
    given, found = orders(tmp_path), []

    def drive(connection: Connection) -> None:
        found.append(connection.recv())
        for number, task in enumerate((Bare(KEY), Bare(KEY, "raise"), Bare(Key(KEY.digest, 1), "raise"))):
            connection.send((number, task, FREELY))
            found.append(outcome_of(connection))

    served(given, drive)
    ready, done, again, broken = found
    assert ready == ("ready", 0)
    assert isinstance(done, Rows)
    assert [row.key for row in done.rows] == [KEY]
    assert isinstance(again, Rows), "rows on disk are not made again"
    assert [row.key for row in again.rows] == [KEY]
    assert isinstance(broken, Failed)
    assert broken.message.startswith("RuntimeError: broken (engine_cases.py, line ")
    kept = Outbox(given.storage.place(FINISHED)).find((KEY,))
    assert kept is not None
    assert [row.key for row in kept] == [KEY]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(KeyboardInterrupt(), Interrupted), (torch.OutOfMemoryError("full"), OutOfMemory)],
    ids=["interrupted", "memory"],
)
def test_what_a_run_goes_on_after_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: type
) -> None:
    station = Station(orders(tmp_path), CPU, Interruption())

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Bare, "run", fail)
    assert isinstance(station.carry_out(Bare(KEY), FREELY, lambda *_: None), kind)


def test_an_error_of_ours_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise worker.DropConnectError("mend it")

    monkeypatch.setattr(Bare, "run", refuse)
    ended = Station(orders(tmp_path), CPU, Interruption()).carry_out(Bare(KEY), FREELY, lambda *_: None)
    assert ended == Refused("mend it")


def test_a_task_that_comes_after_the_order_to_stop_does_not_begin(tmp_path: Path) -> None:
    stopped = Interruption()
    stopped.requested = True
    assert Station(orders(tmp_path), CPU, stopped).carry_out(Bare(KEY), FREELY, lambda *_: None) == Interrupted()
