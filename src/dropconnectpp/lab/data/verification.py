"""The check of every byte of a prepared data set, done in the background while networks already train."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Verification:
    """A check that runs once, in a thread, and whose outcome is asked for before anything is kept."""

    def __init__(self, check: Callable[[], object]) -> None:
        self._check = check
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start it, unless it was."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def require(self) -> None:
        """Wait for its end, and raise what it raised."""
        self.begin()
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._check()
        except Exception as error:  # raised again where it is asked for
            self._error = error
