"""Keep a report up to date: rebuild it whenever its store changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dropconnectpp.lab.runs.status import FOLDER

EVERY_S = 2.0
STATE_EVERY_S = 10.0
"""How often the page is built anew for the progress of a run alone."""
REFRESH_S = 5
"""How often a page that is being watched reloads itself."""


def watch(
    store_path: Path,
    rebuild: Callable[[int | None], object],
    *,
    every_s: float = EVERY_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Call ``rebuild`` at once and after each change of the store, until Ctrl-C; then once more, for the final page.

    ``rebuild`` gets the seconds after which the page should reload itself, and None for the final page.
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
    """Times and sizes of the store's files; new rows may be in its journal first."""
    found = []
    for file in (path, path.with_name(f"{path.name}-wal")):
        try:
            state = file.stat()
            found.append((state.st_mtime_ns, state.st_size))
        except FileNotFoundError:
            found.append((0, 0))
    states = sorted((path.parent / FOLDER).glob("*.json"))
    found += [(hash(one.name), int(time.time() / STATE_EVERY_S)) for one in states]
    return found
