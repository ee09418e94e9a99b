"""Folders of prepared data that appear whole or not at all, made by one process at a time.

A folder is written under another name and then renamed; the one that it replaces is renamed first. A process that ends
between the two leaves both in its work folder, where the next process finds them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dropconnectpp.lab.data.dataset import DataError
from dropconnectpp.lab.data.download import ProgressCallback, silent
from dropconnectpp.lab.machine.whole_files import sync_file, sync_folder, write_whole

DESCRIPTION = "description.json"
"""Written last: a folder that has it is whole."""
NEW, OLD = "new", "old"


@contextmanager
def locked(directory: Path, key: str, progress: ProgressCallback = silent) -> Iterator[Path]:
    """Let one process at a time prepare a data set; yield a fresh work folder, which is removed afterwards.

    The operating system releases the lock of a process that dies; what it had replaced is put back, and the rest of
    what it left is removed.
    """
    from filelock import FileLock, Timeout

    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / f".{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another process that is preparing it", 0, None)
            lock.acquire()
    except OSError as error:
        raise DataError(
            f"{directory}: cannot be written ({error}). Choose another with --data-dir or DCPP_DATA."
        ) from error
    try:
        try:
            for stale in _left(directory, key):
                _put_back(directory / key, stale)
                shutil.rmtree(stale, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".work", dir=directory))
        except OSError as error:
            raise DataError(f"{directory}: {error}. Nothing was changed. Free some space and try again.") from error
        try:
            yield work
        except OSError as error:
            raise DataError(f"{directory}: {error}. Nothing was changed. Free some space and try again.") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()


def is_there(place: Path) -> bool:
    """Whether a prepared data set is there; one whose replacement was cut short is put back first."""
    if (place / DESCRIPTION).is_file():
        return True
    if any((left / part / DESCRIPTION).is_file() for left in _left(place.parent, place.name) for part in (NEW, OLD)):
        with locked(place.parent, place.name):
            pass
    return (place / DESCRIPTION).is_file()


def install(place: Path, work: Path, description: bytes) -> None:
    """Make the folder ``new`` of a work folder, with its description, the data set at ``place``.

    What was there is replaced once everything is on disk. A process that has it mapped keeps its pages.
    """
    new = work / NEW
    for path in new.iterdir():
        sync_file(path)
    sync_folder(new)
    write_whole(new / DESCRIPTION, description)
    sync_folder(work)
    sync_folder(place.parent)
    if place.exists():
        os.rename(place, work / OLD)
    try:
        os.rename(new, place)
    except OSError:
        _put_back(place, work, parts=(OLD,))
        raise
    try:
        sync_folder(place.parent)
    except OSError as error:
        raise DataError(
            f"{place.parent}: {error}. {place.name} is in place, but a power failure may undo it."
        ) from error


def _left(directory: Path, key: str) -> list[Path]:
    """The work folders of a data set; where one is at work, also its own."""
    beginning = f".{key}."
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [directory / name for name in sorted(names) if name.startswith(beginning) and name.endswith(".work")]


def _put_back(place: Path, work: Path, parts: tuple[str, ...] = (NEW, OLD)) -> None:
    for part in parts:
        if not place.exists() and (work / part / DESCRIPTION).is_file():
            os.rename(work / part, place)
            sync_folder(place.parent)
