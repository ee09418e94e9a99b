"""Files that appear whole or not at all, also when the power fails."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dropconnectpp.errors import ArgumentError, MissingPackageError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place when the block ends well."""
    target = _target(path)
    temporary = _beside(target)
    try:
        # Made by open(), so that the permissions are those that any new file would get.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise _cannot_write(target, error) from error
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, target)
        flush(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_with_data(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path of the same name in a folder beside ``path``, for a file and its ``.data`` of the same name.

    Both take their places when the block ends well. There is never an old file with new data: where the old file
    has data of its own, it goes first.
    """
    target = _target(path)
    folder = _beside(target)
    try:
        folder.mkdir()
    except OSError as error:
        raise _cannot_write(target, error) from error
    try:
        temporary = folder / target.name
        yield temporary
        made, place = _data_of(temporary), _data_of(target)
        flush(temporary)
        if made.exists():
            flush(made)
            if target.exists() and place.exists():
                target.unlink()
                flush(target.parent)
            os.replace(made, place)
            flush(target.parent)
            os.replace(temporary, target)
        else:
            os.replace(temporary, target)
            place.unlink(missing_ok=True)
        flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # only POSIX opens folders
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require(module: str, extra: str) -> Any:
    """An optional package's module, or an error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{module.partition('.')[0]} is needed for this: pip install 'dropconnectpp[{extra}]'."
        ) from error


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if not target.name or "\0" in target.name:
        raise ArgumentError(f"{str(path)!r} names no file. Give the path of a file.")
    if not target.parent.is_dir():
        raise ArgumentError(f"{target}: the folder {target.parent} does not exist. Make it first.")
    if target.is_dir():
        raise ArgumentError(f"{target} is a folder. Give the path of a file, such as {target / 'model'}.")
    return target


def _beside(target: Path) -> Path:
    """A free name in the same folder, short enough where the target's own is as long as a name may be."""
    return target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.part")


def _data_of(path: Path) -> Path:
    return path.with_name(path.name + ".data")


def _cannot_write(target: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"{target}: cannot write into the folder {target.parent} ({error.strerror or error}). "
        "Choose another folder, or change its permissions."
    )
