"""Paths as a user types them."""

from __future__ import annotations

from pathlib import Path

from dropconnectpp.errors import ArgumentError


def expanded(path: Path | str) -> Path:
    """The path with a leading ``~`` or ``~name`` replaced by that home folder.

    Raises:
        ArgumentError: there is no such home, or the path holds a zero byte.

    >>> expanded("results").name
    'results'
    """
    if "\0" in str(path):
        raise ArgumentError(f"{str(path)!r} is no path: it holds a zero byte. Give another path.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ArgumentError(f"{path}: there is no home folder of that name. Give the whole path.") from error
