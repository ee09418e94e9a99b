"""Write the files of a report: each completely or not at all, and nothing is left over from an earlier report."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.machine.whole_files import write_whole

LIST = ".report-files"
"""Lists the files that a report wrote, so that the next one removes those it no longer writes, and nothing else."""
OURS = re.compile(r"(figures|tables)/[a-z0-9_-]+\.(svg|png|pdf|csv)|tables(-document)?\.(md|tex)|index\.html")
ABANDONED = re.compile(rf"({OURS.pattern}|{re.escape(LIST)})\.\d+\.new")
ABANDONED_S = 3600.0
"""A file that was being written that long ago belongs to a process that was killed."""


class ReportError(DropConnectError, OSError):
    """The report cannot be written to the folder given."""


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files, by their paths in the folder. A file that already has the same bytes is left alone."""
    listing = "".join(f"{name}\n" for name in sorted(files)).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _listed(folder) - set(files):
            (folder / name).unlink(missing_ok=True)
        _forget_abandoned(folder)
        for name, content in {**files, LIST: listing}.items():
            _write(folder / name, content)
    except OSError as error:
        place = error.filename or folder
        raise ReportError(
            f"{folder}: the report cannot be written ({place}: {error.strerror or error}). Check the permissions and "
            "the free space, or give another folder."
        ) from error


def _listed(folder: Path) -> set[str]:
    """The files that the last report wrote; names that no report writes are ignored."""
    try:
        names = (folder / LIST).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, UnicodeDecodeError):
        return set()
    return {name for name in names if OURS.fullmatch(name)}


def _write(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(exist_ok=True)
    write_whole(path, content)  # all at once: a browser may have the old file open


def _forget_abandoned(folder: Path) -> None:
    """Remove what processes left that were killed while they wrote."""
    for path in [*folder.glob("*.new"), *folder.glob("figures/*.new"), *folder.glob("tables/*.new")]:
        name = path.relative_to(folder).as_posix()
        if ABANDONED.fullmatch(name) and time.time() - path.stat().st_mtime > ABANDONED_S:
            path.unlink(missing_ok=True)
