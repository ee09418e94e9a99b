"""The engine of one process: a task runs inside `wait`, and its errors come out of it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import torch

from dropconnectpp.lab.runs.engines.engine import Began, Ended, Tell, Told, Worker
from dropconnectpp.lab.runs.engines.worker import attempt, free_bytes, free_memory
from dropconnectpp.lab.runs.progress import Relay
from dropconnectpp.lab.runs.tasks import Task, Workplace


class Here:
    """This process is the only worker."""

    name = "process"
    several = False
    workers = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._run: tuple[Workplace, Tell] | None = None
        self._task: tuple[int, Task] | None = None

    @property
    def device_type(self) -> str:
        return self._device.type

    def free_bytes(self) -> int:
        free_memory(self._device)
        return free_bytes(self._device)

    def open(self, at: Workplace, tell: Tell) -> None:
        self._run = at, tell

    def submit(self, number: int, task: Task) -> None:
        self._task = number, task

    def wait(self, timeout_s: float) -> None:
        assert self._run is not None
        assert self._task is not None
        (at, tell), (number, task) = self._run, self._task
        self._task = None
        tell(Began(number, Worker("this process", socket.gethostname(), os.getpid(), str(self._device))))
        display = Relay(lambda what, arguments: tell(Told(number, what, arguments)))
        tell(Ended(number, attempt(task, replace(at, display=display))))

    def stop(self) -> None:
        """Nothing runs while nobody waits."""

    def close(self) -> None:
        """There is nothing to end."""
