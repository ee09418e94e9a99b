"""Where workers keep what must outlive them: a folder, or an address that fsspec knows and every machine reaches."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dropconnectpp.errors import DropConnectError, MissingPackageError
from dropconnectpp.lab.machine.user_paths import expanded

CHECKPOINTS, FINISHED, PREDICTIONS = "checkpoints", "finished", "predictions"
"""The parts of a storage: unfinished stacks, rows that the driver has not stored yet, and what networks predict."""


class StorageError(DropConnectError, OSError):
    """What workers keep cannot be written or read there."""


class Place:
    """Files of one folder. What is written here is published; what is read is fetched first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where the files are on this machine."""

    def names(self) -> list[str]:
        """The files that there are."""
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.folder))
        return []

    def fetch(self, names: Iterable[str]) -> None:
        """Bring files here that another machine may have written."""

    def publish(self, name: str, keep: str | None = None) -> None:
        """Let others see a file that was written; the one before it stays as ``keep``."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that may not exist."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def rename(self, name: str, other: str) -> None:
        """Give a file another name."""
        os.replace(self.folder / name, self.folder / other)


class RemotePlace(Place):
    """Files of an address, with a folder of this process for those in use."""

    def __init__(self, address: str) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="dropconnectpp-", ignore_cleanup_errors=True)
        weakref.finalize(self, self._made.cleanup)
        super().__init__(Path(self._made.name))
        self.address = address
        self._files, self._root = _file_system(address)

    def names(self) -> list[str]:
        with _told(self.address):
            try:
                found = self._files.ls(self._root, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        return sorted(PurePosixPath(str(one)).name for one in found)

    def fetch(self, names: Iterable[str]) -> None:
        for name in names:
            place = self.folder / name
            with _told(self.address):
                try:
                    self._files.get_file(self._at(name), str(place))
                except FileNotFoundError:
                    place.unlink(missing_ok=True)

    def publish(self, name: str, keep: str | None = None) -> None:
        new = self._at(f"{name}.{os.getpid()}.new")
        with _told(self.address):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.put_file(str(self.folder / name), new)
            if keep is not None:
                with suppress(FileNotFoundError):
                    self._files.mv(self._at(name), self._at(keep))
            self._files.mv(new, self._at(name))

    def remove(self, names: Iterable[str]) -> None:
        names = list(names)
        super().remove(names)
        for name in names:
            with _told(self.address), suppress(FileNotFoundError):
                self._files.rm_file(self._at(name))

    def rename(self, name: str, other: str) -> None:
        super().rename(name, other)
        with _told(self.address):
            self._files.mv(self._at(name), self._at(other))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _told(address: str) -> Iterator[None]:
    """Turns the errors of file systems, of which each has its own kinds, into one that names the address."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error!s:.200}"
        raise StorageError(f"{address}: cannot be used ({said}). Check the address and its rights.") from error


def _file_system(address: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingPackageError(
            f"--storage {address} needs fsspec. Install it with: pip install 'dropconnectpp[cluster]'"
        ) from error
    try:
        files, root = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        raise MissingPackageError(f"--storage {address}: {error}") from error
    except (ValueError, TypeError, OSError) as error:
        raise StorageError(f"--storage {address}: {error!s:.200}. Give a folder or an address of fsspec.") from error
    return files, str(root).rstrip("/")


@dataclass(frozen=True)
class Storage:
    """A root for what workers keep, as it can be sent to them."""

    root: str

    @classmethod
    def given(cls, text: str | None, out: Path) -> Storage:
        """What ``--storage`` names; without it the folder of results."""
        if text is None:
            return cls(str(out.absolute()))
        return cls(text.rstrip("/") if "://" in text else str(expanded(text).absolute()))

    @property
    def remote(self) -> bool:
        """Whether it is an address, and not a folder."""
        return "://" in self.root

    def predictions(self, out: Path) -> Path:
        """The folder of what networks predict: here, or beside the results where this is an address."""
        return (out.absolute() if self.remote else Path(self.root)) / PREDICTIONS

    def place(self, name: str) -> Place:
        """A part of it."""
        return RemotePlace(f"{self.root}/{name}") if self.remote else Place(Path(self.root) / name)
