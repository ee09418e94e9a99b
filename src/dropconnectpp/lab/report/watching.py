"""Keep a report as new as its store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

EVERY_S = 2.0
REFRESH_S = 5
"""How often a page that is being watched loads itself anew."""


def watch(
    store_path: Path,
    rebuild: Callable[[int | None], object],
    *,
    every_s: float = EVERY_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call ``rebuild`` at once and whenever the store has changed, until Ctrl-C; then once more, for a page that stays.

    ``rebuild`` gets the seconds after which the page should load itself anew, and None in the end.
    """
    seen: object = None
    try:
        while True:
            stamp = _stamp(store_path)
            if stamp != seen:
                rebuild(REFRESH_S)
                seen = stamp
            sleep(every_s)
    except KeyboardInterrupt:
        rebuild(None)


def _stamp(path: Path) -> object:
    """When the store's files changed; new rows may stand in its journal first."""
    found = []
    for file in (path, path.with_name(f"{path.name}-wal")):
        try:
            state = file.stat()
            found.append((state.st_mtime_ns, state.st_size))
        except FileNotFoundError:
            found.append((0, 0))
    return found
