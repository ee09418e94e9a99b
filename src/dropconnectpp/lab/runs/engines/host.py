"""The engine of one host: a process for each device, which takes the next task when it is done with one."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from dropconnectpp.lab import device as devices
from dropconnectpp.lab.runs.engines.engine import Began, Died, Ended, EngineError, Tell, Told, Worker
from dropconnectpp.lab.runs.engines.worker import Limits, Orders, Station, free_bytes
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.tasks import Interrupted, Task, Workplace

MOST_STARTS = 3
"""How often a worker may die before it is ready."""
START_S = 300.0
"""How long a worker may take to get ready: torch may come from a slow disk."""
LEAVE_S = 10.0
"""How long an idle worker may take to end."""
STOP = None
"""Sent to a worker that shall write a checkpoint and end its task."""


Given = tuple[int, Task, Limits]


# ------------------------------------------------------------------------------------------- in a worker


def serve(connection: Connection, device: str, orders: Orders) -> None:
    """Run the tasks that come through a connection, one after the other, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the driver decides
    interruption, tasks = Interruption(), queue.SimpleQueue[Given | None]()

    def leave(*_: object) -> None:
        interruption.requested = True
        tasks.put(None)

    signal.signal(signal.SIGTERM, leave)
    chosen = devices.choose(device)
    station = Station(orders, chosen, interruption)
    connection.send(("ready", free_bytes(chosen)))
    threading.Thread(target=_listen, args=(connection, interruption, tasks, leave), daemon=True).start()
    while (given := tasks.get()) is not None:
        number, task, limits = given
        try:
            outcome = station.carry_out(task, limits, partial(_send, connection, number))
            connection.send(("ended", number, outcome, free_bytes(chosen)))
        except ConnectionError:
            return  # the driver is gone; what was finished lies in the outbox


def _send(connection: Connection, number: int, what: str, arguments: tuple[Any, ...]) -> None:
    connection.send(("told", number, what, arguments))


def _listen(
    connection: Connection,
    interruption: Interruption,
    tasks: queue.SimpleQueue[Given | None],
    leave: Any,
) -> None:
    """Take orders while a task runs. A driver that is gone counts as one that wants everything to stop."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            leave()
            return
        interruption.requested = message is STOP
        if message is not STOP:
            tasks.put(message)


# ------------------------------------------------------------------------------------------ in the driver


@dataclass
class _Slot:
    """A device with its worker."""

    device: str
    worker: Worker
    process: BaseProcess
    connection: Connection
    ready: bool = False
    number: int | None = None
    """The task it has."""
    free: int = 0
    starts: int = 1
    """Since it was last ready."""


class Host:
    """Workers on the devices of this host.

    Args:
        devices: one for each worker, such as cuda:0; a CPU may have several.
        orders: what workers have to know.
    """

    name = "host"
    several = True

    def __init__(self, devices: Sequence[str], orders: Orders) -> None:
        self._devices, self._orders = list(devices), orders
        self._slots: list[_Slot] = []
        self._waiting: deque[tuple[int, Task]] = deque()
        self._tell: Tell = lambda _: None
        self._limits = Limits(None, 0.0)
        # A server that has imported torch forks a worker in milliseconds; it never touches a GPU.
        several = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in several else "spawn")
        if "forkserver" in several:
            self._context.set_forkserver_preload([__name__])

    @property
    def workers(self) -> int:
        return len(self._devices)

    @property
    def device_type(self) -> str:
        return self._devices[0].partition(":")[0]

    def free_bytes(self) -> int:
        return min(slot.free for slot in self._slots)

    def open(self, at: Workplace, tell: Tell) -> None:
        self._tell = tell
        self._limits = Limits.of(at)
        if not self._slots:
            self._slots = [self._start(device, index) for index, device in enumerate(self._devices)]
        deadline = time.monotonic() + START_S
        while not all(slot.ready for slot in self._slots):
            if time.monotonic() > deadline:
                raise EngineError(f"workers do not get ready within {START_S:.0f} s. Use fewer --workers.")
            self.wait(1.0)
            at.interruption.check()

    def submit(self, number: int, task: Task) -> None:
        self._waiting.append((number, task))
        self._hand_out()

    def _hand_out(self) -> None:
        for slot in self._slots:
            if not self._waiting:
                return
            if slot.ready and slot.number is None:
                number, task = self._waiting.popleft()
                try:
                    slot.connection.send((number, task, self._limits))
                except OSError:  # it has just died: `wait` will find out
                    self._waiting.appendleft((number, task))
                    continue
                slot.number = number
                self._tell(Began(number, slot.worker))

    def wait(self, timeout_s: float) -> None:
        by_connection = {slot.connection: slot for slot in self._slots}
        for connection in wait(list(by_connection), timeout_s):
            slot = by_connection[connection]  # type: ignore[index]
            try:
                while slot.connection.poll():
                    self._take(slot, slot.connection.recv())
            except (EOFError, OSError):
                self._died(slot)
        self._hand_out()

    def _take(self, slot: _Slot, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "ready":
            slot.ready, slot.starts, slot.free = True, 0, rest[0]
        elif kind == "told":
            self._tell(Told(*rest))
        else:
            number, outcome, slot.free = rest
            slot.number = None
            self._tell(Ended(number, outcome))

    def _died(self, slot: _Slot) -> None:
        slot.process.join(LEAVE_S)
        slot.connection.close()
        worker, number, why = slot.worker, slot.number, _how(slot.process.exitcode)
        if slot.starts >= MOST_STARTS:
            raise EngineError(f"{worker} {why} before it was ready, {MOST_STARTS} times. What it said is above.")
        index = self._slots.index(slot)
        starts = slot.starts + 1
        self._slots[index] = slot = self._start(slot.device, index)
        slot.starts = starts
        self._tell(Died(number, worker, why))

    def _start(self, device: str, index: int) -> _Slot:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, device, self._orders), name=f"worker {index}", daemon=True
        )
        try:
            process.start()
        except OSError as error:
            raise EngineError(f"worker {index} cannot be started ({error}). Use fewer --workers.") from error
        theirs.close()
        worker = Worker(f"worker {index}", socket.gethostname(), process.pid or 0, device)
        return _Slot(device, worker, process, ours)

    def stop(self) -> None:
        for slot in self._slots:
            if slot.number is not None:
                try:
                    slot.connection.send(STOP)
                except OSError:
                    continue
        waiting, self._waiting = list(self._waiting), deque()
        for number, _ in waiting:
            self._tell(Ended(number, Interrupted()))

    def close(self) -> None:
        slots, self._slots = self._slots, []
        for slot in slots:
            if slot.number is not None:
                slot.process.kill()
            slot.connection.close()
        for slot in slots:
            slot.process.join(LEAVE_S)
            if slot.process.is_alive():
                slot.process.kill()
                slot.process.join()


def _how(code: int | None) -> str:
    """How a process ended."""
    if code is None:
        return "is gone"
    if code < 0:
        try:
            return f"was killed ({signal.Signals(-code).name})"
        except ValueError:
            return f"was killed (signal {-code})"
    return f"ended with exit code {code}"


def every_device(device: torch.device, workers: int | None) -> list[str]:
    """The device of each worker: all GPUs, or so many of the first; a CPU as often as asked, else once a core.

    Raises:
        EngineError: there are fewer GPUs.
    """
    if device.type == "cpu":
        return ["cpu"] * (workers or cores())
    count = torch.cuda.device_count()
    if device.index is not None and (workers or count) > 1:
        raise EngineError(f"--device {device} is one GPU. Give --device cuda for all {count}, or --workers 1.")
    if workers is not None and workers > count:
        raise EngineError(f"--workers {workers} and torch sees {count} GPUs. Give at most {count}.")
    return [f"cuda:{device.index or 0}"] if workers == 1 else [f"cuda:{index}" for index in range(workers or count)]


def default_threads(workers: int) -> int:
    """Threads of each worker on a CPU, so that all together use the machine once."""
    return max(1, torch.get_num_threads() // workers)


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
