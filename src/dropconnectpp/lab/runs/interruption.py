"""Ctrl-C and SIGTERM while networks train: the first time a checkpoint is written, the second time it ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interruption:
    """Whether a run was asked to stop.

    Outside of `postponed` a signal raises `KeyboardInterrupt` at once, as it would without this class.
    """

    def __init__(self) -> None:
        self.requested = False
        self._postponed = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Take the signals while inside; only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self._take) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """While inside, the first signal only sets `requested`; what runs there asks, and stops where it can go on."""
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if somebody asked to stop."""
        if self.requested:
            raise KeyboardInterrupt

    def _take(self, *_: object) -> None:
        if self.requested or not self._postponed:
            raise KeyboardInterrupt
        self.requested = True
