"""Files that appear whole or not at all, also when the power fails."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from dropconnectpp.errors import ArgumentError, DropConnectError, FileWriteError, MissingPackageError

ABANDONED_S = 3600.0
"""A file that was being written that long ago belongs to a process that was killed."""
NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""What file systems answer that cannot sync a folder by itself."""


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
        with _said(target):
            yield temporary
            flush(temporary)
            os.replace(temporary, target)
            flush(target.parent)
    finally:
        with suppress(OSError):
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
        with _said(target):
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
    folder = path.is_dir()
    if folder and os.name != "posix":
        return  # only POSIX opens folders
    try:
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not (folder and error.errno in NOT_FOR_FOLDERS):
            raise


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
    if not target.name or "\0" in str(target):
        raise ArgumentError(f"{str(path)!r} names no file. Give the path of a file.")
    try:
        if not target.parent.is_dir():
            raise ArgumentError(f"{target}: the folder {target.parent} does not exist. Make it first.")
        if target.is_dir():
            raise ArgumentError(f"{target} is a folder. Give the path of a file, such as {target / 'model'}.")
    except OSError as error:  # a name that is too long, for example
        raise _cannot_write(target, error) from error
    _forget_abandoned(target)
    return target


def _beside(target: Path) -> Path:
    """A free name in the same folder, short enough where the target's own is as long as a name may be."""
    return target.with_name(f".{_short(target)}.{secrets.token_hex(6)}.part")


def _short(target: Path) -> str:
    return os.fsdecode(os.fsencode(target.name)[:100])


def _forget_abandoned(target: Path) -> None:
    """Remove what processes left that were killed while they wrote this file."""
    ours = re.compile(rf"\.{re.escape(_short(target))}\.[0-9a-f]{{12}}\.part")
    with suppress(OSError):
        for one in os.scandir(target.parent):
            if not ours.fullmatch(one.name) or time.time() - one.stat(follow_symlinks=False).st_mtime < ABANDONED_S:
                continue
            if one.is_dir(follow_symlinks=False):
                shutil.rmtree(one.path)
            else:
                os.unlink(one.path)


@contextmanager
def _said(target: Path) -> Iterator[None]:
    """What the system refuses, as an error of ours that names the file."""
    try:
        yield
    except DropConnectError:
        raise
    except OSError as error:
        raise FileWriteError(
            f"{target}: cannot be written ({error.strerror or error}). Nothing half-written is left. Make room or "
            "choose another folder, and try again."
        ) from error


def _data_of(path: Path) -> Path:
    return path.with_name(path.name + ".data")


def _cannot_write(target: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"{target}: cannot write into the folder {target.parent} ({error.strerror or error}). "
        "Choose another folder, or change its permissions."
    )
