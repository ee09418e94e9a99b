"""What trained networks predict, kept on disk until ensembles of them are judged."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.machine.whole_files import write_whole

Images = tuple[str, int]
"""Which images, with the severity of a corruption or 0."""
Logs = NDArray[np.float32]
"""Log-probabilities, (images, classes)."""
NAME = re.compile(r"(\w+)-(\d+)")


class Predictions:
    """A folder with a file for each network; about 13 MB each where CIFAR-10 has all corruptions and SVHN beside it."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self._tell = tell
        """Hears of every file that is not what was written."""

    def _path(self, key: tuple[str, int]) -> Path:
        return self.folder / f"{key[0]}-{key[1]}.npz"

    def write(self, key: tuple[str, int], logs: Mapping[Images, Logs]) -> None:
        """Keep what a network predicts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"{name}-{severity}": values for (name, severity), values in logs.items()}
        write_whole(self._path(key), lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]

    def read(self, key: tuple[str, int]) -> dict[Images, Logs] | None:
        """What was kept; None where there is nothing, or where it is damaged."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            # The zip has a sum for each array. numpy leaves files open that it opened itself and cannot read.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
                return {_images(name): content[name] for name in content.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
            self._tell(f"{path}: damaged ({error!s:.60}). It is left out.")
            return None

    def forget(self, keys: Iterable[tuple[str, int]]) -> None:
        """Remove what is no longer needed."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        with suppress(OSError):  # others are still there
            self.folder.rmdir()


def _images(name: str) -> Images:
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"it holds {name!r:.40}")
    return found[1], int(found[2])
