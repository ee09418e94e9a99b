"""Checkpoints of unfinished stacks: written whole or not at all, checked before use, found by the work they hold.

A file is what torch saves, and after it one line with the sha256 of all before: torch does not check the sums it keeps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.machine.whole_files import write_whole
from dropconnectpp.lab.runs.storage import Place

Keys = tuple[tuple[str, int], ...]
FORMAT = 2
"""Stands in each file. Those of format 1 say nothing, and have no digest."""
SEAL = re.compile(rb"\ndropconnectpp sha256 ([0-9a-f]{64})\n")
SEAL_LENGTH = 87
LATE = frozenset({"batch", "loss_sum"})
"""Parts of a state that version 0.1 did not write."""
ABANDONED_S = 3600.0
"""A file that was being written that long ago belongs to a process that was killed."""


class CheckpointError(DropConnectError, OSError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a stack's training stands."""

    keys: Keys
    state: dict[str, Any]
    losses: list[list[float]]
    """Mean training loss of each epoch, for each replica."""
    curves: list[list[dict[str, Any]]]
    """Points of Figure 1(a), for each replica."""
    seconds: float
    """Spent so far, over all sessions."""
    epoch_s: float = 0.0
    evaluation_s: float = 0.0
    """How long an epoch and an evaluation took, to know what fits a time limit."""
    content: str = ""
    """Digest of the data set: other images under the same name are other work."""


def stack_name(keys: Sequence[tuple[str, int]]) -> str:
    """What the files of a stack are called: a digest of the work they hold."""
    return hashlib.sha256(repr([(str(d), int(r)) for d, r in keys]).encode()).hexdigest()[:24]


class Checkpoints:
    """A folder of checkpoints: for each stack the last two states, and beside them the small list of what they hold."""

    def __init__(self, folder: Path | Place, tell: Callable[[str], None] | None = None) -> None:
        self._place = Place(folder) if isinstance(folder, Path) else folder
        self.folder = self._place.folder
        self._tell = tell
        """Hears of every file that is not what was written."""

    def path(self, keys: Sequence[tuple[str, int]]) -> Path:
        """The file of a stack: its name is a digest of the work it holds."""
        return self.folder / f"{stack_name(keys)}.pt"

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the stack's state and keep the one before it; a process killed meanwhile leaves the last."""
        path = self.path(checkpoint.keys)
        listed = json.dumps(checkpoint.keys).encode()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not _holds(_keys_file(path), listed):
                write_whole(_keys_file(path), listed)
                self._place.publish(_keys_file(path).name)
            write_whole(path, lambda file: _save(checkpoint, file), keep=_before(path))
            self._place.publish(path.name, keep=_before(path).name)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise CheckpointError(f"{path}: cannot be written ({error}). The last checkpoint is as it was.") from error

    def read(self, path: Path) -> Checkpoint:
        """What a file holds, once all of it is checked.

        Raises:
            FileNotFoundError: it is gone.
            DamagedCheckpointError: it is not what was written.
            CheckpointError: it must not be read.
        """
        sealed = _check(path)
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            version = found.pop("format", 1)
            keys = tuple((str(d), int(r)) for d, r in found.pop("keys"))
            checkpoint = Checkpoint(keys, **found)
        except (MemoryError, FileNotFoundError):  # neither is damage
            raise
        except Exception as error:  # torch raises many kinds of error for a damaged file
            raise DamagedCheckpointError(f"it cannot be read ({type(error).__name__})") from error
        if type(version) is not int:
            raise DamagedCheckpointError("its format is no number")
        if version != (FORMAT if sealed else 1):
            raise DamagedCheckpointError("its digest is missing" if version == FORMAT else f"its format is {version!r}")
        if self.path(keys).stem != path.name.partition(".")[0]:
            raise DamagedCheckpointError("it holds other replicas than its name stands for")
        if not _is_content(checkpoint):
            raise DamagedCheckpointError("its content is not what a run writes")
        return checkpoint

    def restore(self, keys: Sequence[tuple[str, int]]) -> Checkpoint | None:
        """The stack's last state that is what was written, or None; damaged files are set aside and told of."""
        path = self.path(keys)
        self._place.fetch([path.name, _before(path).name])
        for place, instead in ((path, "the checkpoint before it"), (_before(path), "the start")):
            try:
                return self.read(place)
            except FileNotFoundError:
                continue
            except DamagedCheckpointError as error:
                self._set_aside(place, f"{error}. Training goes on from {instead}.")
        return None

    def refuse(self, keys: Sequence[tuple[str, int]], why: str) -> None:
        """Set a stack's checkpoints aside that cannot be gone on with."""
        path = self.path(keys)
        for place in (path, _before(path)):
            if place.exists():
                self._set_aside(place, f"{why}. Training starts afresh.")
        _keys_file(path).unlink(missing_ok=True)

    def all(self) -> Iterator[tuple[Path, Keys]]:
        """Every checkpoint with the work it holds, but without its state, which may be large."""
        names = self._place.names()
        self._place.fetch(name for name in names if name.endswith(".json"))
        found = {self.folder / name.removesuffix(".before") for name in names if name.endswith((".pt", ".pt.before"))}
        for path in sorted(found):
            keys = self._keys(path)
            if keys is not None:
                yield path, keys
        alone = {path for path in self.folder.glob("*.json") if path.with_suffix(".pt") not in found}
        for left in (*self.folder.glob("*.new"), *alone):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    left.unlink()

    def forget(self, keys: Sequence[tuple[str, int]]) -> None:
        """Remove a stack's checkpoints."""
        path = self.path(keys)
        self._place.remove(one.name for one in (path, _before(path), _keys_file(path)))

    def exists(self, keys: Sequence[tuple[str, int]]) -> bool:
        """Whether there is one of a stack."""
        return self.path(keys).name in self._place.names()

    def _keys(self, path: Path) -> Keys | None:
        """The work that a file's list names or, where the list is damaged, the file itself."""
        try:
            listed = tuple((str(d), int(r)) for d, r in json.loads(_keys_file(path).read_text()))
            if self.path(listed) == path:
                return listed
        except FileNotFoundError:
            self._place.fetch([path.name, _before(path).name])
            if not path.exists() and not _before(path).exists():
                return None  # another process has just finished it
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            pass
        for place in (path, _before(path)):
            try:
                keys = self.read(place).keys
            except FileNotFoundError:
                continue
            except DamagedCheckpointError as error:
                self._set_aside(place, f"{error}, and so is the list of what it holds.")
                continue
            self._say(f"{_keys_file(path)}: damaged. What it should list was read from the checkpoint.")
            with suppress(OSError):
                write_whole(_keys_file(path), json.dumps(keys).encode())
            return keys
        return None

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(f"{path.name}.damaged")
        with suppress(OSError):
            self._place.rename(path.name, aside.name)
        self._say(f"{path}: not used, as {why} It is kept as {aside.name}; nothing needs it.")

    def _say(self, text: str) -> None:
        if self._tell is not None:
            self._tell(text)


class _Digested:
    """A file that is written to, with the digest of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def require_alike(found: object, expected: object, where: str = "state") -> None:
    """Raise unless a state has the names, types and shapes of another; what older versions did not write may lack.

    Raises:
        ValueError: it differs; the message says where.
    """
    if type(found) is not type(expected):
        raise ValueError(f"{where} is of type {type(found).__name__}, not {type(expected).__name__}")
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise ValueError(f"{where} is {found.dtype} of {tuple(found.shape)}")
    elif isinstance(found, dict) and isinstance(expected, dict):
        if other := (expected.keys() - LATE - found.keys()) | (found.keys() - expected.keys()):
            raise ValueError(f"{where} differs in {next(iter(other))!s:.60}")
        for name, value in found.items():
            require_alike(value, expected[name], f"{where}.{name}")
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        if len(found) != len(expected):
            raise ValueError(f"{where} has {len(found)} parts, not {len(expected)}")
        for i, (one, other_one) in enumerate(zip(found, expected, strict=True)):
            require_alike(one, other_one, f"{where}[{i}]")


def _is_content(checkpoint: Checkpoint) -> bool:
    """Whether all but the state, which only the stack can judge, is what a run writes."""
    count, seconds = len(checkpoint.keys), (checkpoint.seconds, checkpoint.epoch_s, checkpoint.evaluation_s)
    return (
        all(type(one) is float and 0.0 <= one < math.inf for one in seconds)
        and type(checkpoint.content) is str
        and type(checkpoint.state) is dict
        and _all_of(list, checkpoint.losses, count)
        and all(_all_of(float, losses) for losses in checkpoint.losses)
        and _all_of(list, checkpoint.curves, count)
        and all(_all_of(dict, points) for points in checkpoint.curves)
        and all(map(_is_point, itertools.chain.from_iterable(checkpoint.curves)))
    )


def _all_of(kind: type, values: object, count: int | None = None) -> bool:
    same = isinstance(values, list) and all(type(one) is kind for one in values)
    return same and (count is None or len(values) == count)  # type: ignore[arg-type]


def _is_point(point: dict[Any, Any]) -> bool:
    numbers = all(type(name) is str and type(value) in (int, float) for name, value in point.items())
    return numbers and type(point.get("epoch")) is int


def _save(checkpoint: Checkpoint, file: IO[bytes]) -> None:
    digested = _Digested(file)
    torch.save({"format": FORMAT, **vars(checkpoint)}, digested)  # type: ignore[arg-type]
    file.write(b"\ndropconnectpp sha256 %s\n" % digested.digest.hexdigest().encode())


def _check(path: Path) -> bool:
    """Whether a file has a digest, with which it agrees; one without must agree with the sums in it."""
    try:
        with path.open("rb") as file:
            rest = size = file.seek(0, os.SEEK_END)
            rest -= SEAL_LENGTH
            file.seek(max(rest, 0))
            seal = SEAL.fullmatch(file.read(SEAL_LENGTH))
            if seal is None:
                return _check_sums(path, size)
            file.seek(0)
            digest = hashlib.sha256()
            while rest and (part := file.read(min(rest, 2**20))):
                digest.update(part)
                rest -= len(part)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    except OSError as error:
        raise DamagedCheckpointError(f"it cannot be read ({error.strerror or error})") from error
    if digest.hexdigest().encode() != seal[1]:
        raise DamagedCheckpointError("its content does not have the digest that was written with it")
    return True


def _check_sums(path: Path, size: int) -> bool:
    """Raise unless every part of a file of format 1 has the CRC that torch wrote into it."""
    try:
        with zipfile.ZipFile(path) as parts:
            bad = parts.testzip() if size else "everything"
    except Exception as error:  # zipfile raises many kinds of error for a damaged file
        raise DamagedCheckpointError(f"it has no digest and is damaged ({error})") from error
    if bad is not None:
        raise DamagedCheckpointError(f"it has no digest, and {bad} in it is damaged")
    return False


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False


def _keys_file(path: Path) -> Path:
    return path.with_suffix(".json")


def _before(path: Path) -> Path:
    return path.with_name(f"{path.name}.before")
