"""Checkpoints of unfinished stacks: written whole or not at all, and found by the work they hold."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dropconnectpp.errors import DropConnectError

Keys = tuple[tuple[str, int], ...]
ABANDONED_S = 3600.0
"""A file that was being written that long ago belongs to a process that was killed."""


class CheckpointError(DropConnectError, OSError):
    """A checkpoint could not be written."""


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


class Checkpoints:
    """A folder of checkpoints: for each stack its state, and beside it the small list of what it holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, keys: Sequence[tuple[str, int]]) -> Path:
        """The file of a stack: its name is a digest of the work it holds."""
        name = hashlib.sha256(repr([(str(d), int(r)) for d, r in keys]).encode()).hexdigest()[:24]
        return self.folder / f"{name}.pt"

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the stack's last checkpoint; a process killed meanwhile leaves the last one."""
        path = self.path(checkpoint.keys)
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _keys_file(path).write_text(json.dumps(checkpoint.keys))
            with new.open("wb") as file:
                torch.save(vars(checkpoint), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            with suppress(OSError):
                new.unlink()
            raise CheckpointError(f"{path}: cannot be written ({error}). The last checkpoint is as it was.") from error

    def read(self, path: Path) -> Checkpoint | None:
        """What a file holds, or None if it is damaged or gone: its work then starts afresh."""
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            return Checkpoint(**{**found, "keys": tuple((str(d), int(r)) for d, r in found["keys"])})
        except Exception:  # torch raises many kinds of error for a damaged file
            return None

    def all(self) -> Iterator[tuple[Path, Keys]]:
        """Every checkpoint with the work it holds, but without its state, which may be large."""
        for path in sorted(self.folder.glob("*.pt")):
            try:
                yield path, tuple((str(d), int(r)) for d, r in json.loads(_keys_file(path).read_text()))
            except (OSError, ValueError, TypeError):  # damaged, or another process has just finished it
                continue
        for new in self.folder.glob("*.new"):
            with suppress(OSError):
                if time.time() - new.stat().st_mtime > ABANDONED_S:
                    new.unlink()

    def forget(self, keys: Sequence[tuple[str, int]]) -> None:
        """Remove a stack's checkpoint."""
        path = self.path(keys)
        path.unlink(missing_ok=True)
        _keys_file(path).unlink(missing_ok=True)


def _keys_file(path: Path) -> Path:
    return path.with_suffix(".json")
