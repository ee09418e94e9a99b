"""A plain progress bar on stderr for what takes more than a few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

QUIET_S = 2.0
"""Nothing is shown before."""
REDRAW_S = 0.2
WIDTH = 30


class Progress:
    """A bar that appears once a task has taken `QUIET_S`; by itself only where stderr is a terminal."""

    def __init__(self, title: str, total: int | None, shown: bool | None = None) -> None:
        self.title, self.total = title, total
        self.on = sys.stderr.isatty() if shown is None else shown
        self.done = 0
        self._start = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        return self

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        now = time.monotonic()
        if self.on and now - self._start >= QUIET_S and now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._write(self.line(now - self._start))

    def line(self, elapsed_s: float) -> str:
        """What is shown after so long."""
        if not self.total:
            return f"{self.title}  {self.done}  {elapsed_s:.0f} s"
        done = min(self.done, self.total)
        bar = "#" * (WIDTH * done // self.total)
        rest = elapsed_s * (self.total - done) / max(done, 1)
        return f"{self.title} [{bar:<{WIDTH}}] {done}/{self.total}  {elapsed_s:.0f} s, {rest:.0f} s left"

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r{text:<78}")
        sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self._write(self.line(time.monotonic() - self._start))
            sys.stderr.write("\n")
