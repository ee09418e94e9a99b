"""What a disk may hold after the power failed, for each moment of a log that `injection` wrote.

A disk keeps what was synced, and nothing else for sure: not bytes that were written, nor names that were made, renamed
or removed, until the file or its folder was synced. What was not synced may be there, or a part of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SECTOR = 512
"""Disks write such pieces whole; which of several pieces come first is up to them."""
Loss = Literal["dropped", "empty", "torn"]
LOSSES: tuple[Loss, ...] = ("dropped", "empty", "torn")
"""Of what was not synced: all lost; names kept and bytes lost; any part of either kept."""


@dataclass(frozen=True)
class Call:
    """One line of a log."""

    name: str
    inode: int
    offset: int
    data: bytes
    path: str
    other: str


def calls_in(log: Path, root: Path) -> list[Call]:
    """The calls of a log, with paths from the root on."""
    text, found, at, length = log.read_bytes(), [], 0, len(str(root.resolve()))
    while at < len(text):
        end = text.index(b"\n", at)
        name, inode, offset, size, path, other = text[at:end].decode().split("\t")
        data = text[end + 1 : end + 1 + int(size)]
        at = end + 1 + int(size)
        other = other if name == "mark" else other[length:]
        found.append(Call(name, int(inode), int(offset), data, path[length:], other))
    return found


@dataclass
class File:
    """Bytes as a process sees them, as the disk has them, and the pieces in which they differ."""

    seen: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        if len(self.seen) < offset + len(data):
            self.seen.extend(bytes(offset + len(data) - len(self.seen)))
        self.seen[offset : offset + len(data)] = data
        self.pending += [(offset + i, data[i : i + SECTOR]) for i in range(0, len(data), SECTOR)]

    def cut(self, size: int) -> None:
        del self.seen[size:]
        self.seen.extend(bytes(size - len(self.seen)))
        self.pending.append((size, b""))  # an empty piece stands for the new length

    def sync(self) -> None:
        self.synced, self.pending = bytes(self.seen), []

    def torn(self, draw: random.Random) -> bytes:
        """What was synced, and after it any of the pieces that were not."""
        left = File(bytearray(self.synced))
        for offset, piece in self.pending:
            if draw.random() < 0.5:
                left.write(offset, piece) if piece else left.cut(offset)
        return bytes(left.seen)


@dataclass
class Folder:
    """Names as a process sees them, and as the disk has them."""

    seen: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """A folder whose calls are followed one by one."""

    def __init__(self, root: Path) -> None:
        """Begin with what lies in a folder now, all of it synced."""
        self._inodes: dict[int, File] = {}
        self.root = self._copied(root)

    def _copied(self, place: Path) -> Folder:
        folder = Folder()
        for path in place.iterdir():
            if path.is_dir():
                folder.seen[path.name] = self._copied(path)
            else:
                content = path.read_bytes()
                folder.seen[path.name] = self._inodes[path.stat().st_ino] = File(bytearray(content), content)
        folder.synced = dict(folder.seen)
        return folder

    def follow(self, call: Call) -> None:
        """Do what a process did."""
        if call.name in ("create", "mkdir"):
            folder, name = self._parent(call.path)
            folder.seen[name] = new = File() if call.name == "create" else Folder()
            if isinstance(new, File):
                self._inodes[call.inode] = new
        elif call.name == "write":
            self._inodes[call.inode].write(call.offset, call.data)
        elif call.name == "truncate":
            self._inodes[call.inode].cut(call.offset)
        elif call.name == "rename":
            folder, name = self._parent(call.path)
            to, new_name = self._parent(call.other)
            to.seen[new_name] = folder.seen.pop(name)
        elif call.name == "unlink":
            folder, name = self._parent(call.path)
            del folder.seen[name]
        elif call.name == "fsync":
            found = self._find(call.path)
            if isinstance(found, Folder):
                found.synced = dict(found.seen)
            else:  # by its number: its name may be gone
                self._inodes[call.inode].sync()
        elif call.name != "mark":
            raise ValueError(call.name)

    def _find(self, path: str) -> File | Folder | None:
        found: File | Folder | None = self.root
        for part in filter(None, path.split("/")):
            found = found.seen.get(part) if isinstance(found, Folder) else None
        return found

    def _parent(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._find(above)
        assert isinstance(folder, Folder), above
        return folder, name

    def after(self, loss: Loss, place: Path, draw: random.Random) -> None:
        """Write what may be left after the power failed into a folder, which is made."""
        self._leave(self.root, loss, place, draw)

    def _leave(self, folder: Folder, loss: Loss, place: Path, draw: random.Random) -> None:
        place.mkdir()
        for name, one in _left(folder, loss, draw).items():
            if isinstance(one, Folder):
                self._leave(one, loss, place / name, draw)
            else:
                (place / name).write_bytes(one.torn(draw) if loss == "torn" else one.synced)


def _left(folder: Folder, loss: Loss, draw: random.Random) -> dict[str, File | Folder]:
    if loss == "empty" or (loss == "torn" and draw.random() < 0.5):
        return folder.seen
    return folder.synced


def losses(before: Disk, calls: list[Call], place: Path, seed: int = 0) -> Iterator[tuple[int, Loss, Path]]:
    """For each moment of a log and each kind of loss, a folder with what may be left; the next takes its place."""
    count = 0
    for at in range(len(calls) + 1):
        if at:
            before.follow(calls[at - 1])
            if calls[at - 1].name == "mark":
                continue
        for loss in LOSSES:
            count += 1
            left = place / f"left{count}"
            before.after(loss, left, random.Random(f"{seed} {at} {loss}"))
            yield at, loss, left
            _remove(left)


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _remove(path)
        else:
            path.unlink()
    os.rmdir(folder)
