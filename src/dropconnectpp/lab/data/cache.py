"""Prepared data sets on disk: plain `.npy` files, with their checksums, that processes map into memory.

A data set's folder appears complete or not at all: it is written under another name and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import Arrays, DataError, Dataset, Provenance, Split
from dropconnectpp.lab.data.download import ProgressCallback, silent
from dropconnectpp.lab.machine.cache_dir import cache_directory

FORMAT = 1
DESCRIPTION = "description.json"
DESCRIPTION_LIMIT = 1_000_000
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def data_directory(given: Path | str | None = None) -> Path:
    """Where prepared data sets are stored: the argument, else `DCPP_DATA`, else the user's cache folder."""
    if given is not None:
        return Path(given).expanduser()
    if value := os.environ.get("DCPP_DATA"):
        return Path(value).expanduser()
    return cache_directory() / "data"


@contextmanager
def locked(directory: Path, key: str, progress: ProgressCallback = silent) -> Iterator[Path]:
    """Let one process at a time prepare a data set; yield a fresh work folder, which is removed afterwards.

    The operating system releases the lock of a process that dies; the files it left behind are removed here.
    """
    from filelock import FileLock, Timeout

    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / f".{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another process that is preparing it", 0, None)
            lock.acquire()
    except OSError as error:
        raise DataError(
            f"{directory}: cannot be written ({error}). Choose another with --data-dir or DCPP_DATA."
        ) from error
    try:
        for stale in directory.glob(f".{key}.*.work"):
            shutil.rmtree(stale, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".work", dir=directory))
        try:
            yield work
        except OSError as error:
            raise DataError(f"{directory}: {error}. Nothing was changed. Free some space and try again.") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()


def write(place: Path, work: Path, dataset: Dataset, fingerprint: str = "") -> None:
    """Store a data set at ``place``; what was there is replaced only once everything is on disk."""
    new = work / "new"
    new.mkdir()
    sums = {}
    for name, array in _arrays(dataset).items():
        with (new / f"{name}.npy").open("wb") as file:
            np.save(file, np.ascontiguousarray(array), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        sums[name] = {"sha256": _sha256(new / f"{name}.npy"), "shape": array.shape, "dtype": str(array.dtype)}
    description = {
        "format": FORMAT,
        "name": dataset.name,
        "counts": {"train": len(dataset.train), "test": len(dataset.test)},
        "classes": dataset.classes,
        "licence": dataset.licence,
        "citation": dataset.citation,
        "provenance": asdict(dataset.provenance) | {"content": _content(sums)},
        "fingerprint": fingerprint,
        "arrays": sums,
    }
    (new / DESCRIPTION).write_text(json.dumps(description, indent=1, ensure_ascii=False), encoding="utf-8")
    if place.exists():
        place.rename(work / "old")  # a process that has it mapped keeps its pages
    new.rename(place)


def describe(place: Path) -> dict[str, Any]:
    """The description of a prepared data set."""
    path = place / DESCRIPTION
    try:
        if path.stat().st_size > DESCRIPTION_LIMIT:
            raise ValueError("too large")
        description = json.loads(path.read_text(encoding="utf-8"))
        found = description["format"]
        if found == FORMAT:
            return dict(description)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: damaged ({error}). Fetch the data set again with --force.") from error
    raise DataError(
        f"{path}: has format {found}; this version reads format {FORMAT}. Fetch the data set again with --force."
    )


def read(place: Path) -> Dataset:
    """Open a prepared data set; its arrays are mapped into memory read-only, not loaded."""
    description = describe(place)
    try:
        arrays = {name: _map(place / f"{name}.npy", description["arrays"][name]) for name in ARRAYS}
        return Dataset(
            name=str(description["name"]),
            train=Split(arrays["train_images"], arrays["train_labels"]),
            test=Split(arrays["test_images"], arrays["test_labels"]),
            classes=tuple(map(str, description["classes"])),
            licence=str(description["licence"]),
            citation=str(description["citation"]),
            provenance=Provenance(**description["provenance"]),
        )
    except (OSError, ValueError, TypeError, KeyError, EOFError) as error:
        raise DataError(f"{place}: damaged ({error}). Fetch the data set again with --force.") from error


def verify(place: Path, progress: ProgressCallback = silent) -> Dataset:
    """Open a prepared data set after comparing every file with the checksum recorded when it was prepared."""
    description = describe(place)
    dataset = read(place)
    for done, name in enumerate(ARRAYS):
        progress("verifying", done, len(ARRAYS))
        found, expected = _sha256(place / f"{name}.npy"), description["arrays"][name].get("sha256")
        if found != expected:
            raise DataError(
                f"{place / name}.npy: its sha256 is {found}, expected {expected}. The file has changed since it was "
                "prepared. Fetch the data set again with --force."
            )
    progress("verifying", len(ARRAYS), len(ARRAYS))
    return dataset


def from_arrays(arrays: Arrays, name: str, licence: str, citation: str, provenance: Provenance) -> Dataset:
    """A data set from the arrays that a reader returned."""
    return Dataset(name, arrays.train, arrays.test, arrays.classes, licence, citation, provenance)


def _arrays(dataset: Dataset) -> dict[str, NDArray[Any]]:
    splits = (dataset.train.images, dataset.train.labels, dataset.test.images, dataset.test.labels)
    return dict(zip(ARRAYS, splits, strict=True))


def _map(path: Path, expected: dict[str, Any]) -> NDArray[Any]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if list(array.shape) != list(expected["shape"]) or str(array.dtype) != expected["dtype"]:
        raise ValueError(f"{path.name} holds {array.shape} of {array.dtype}, expected {expected['shape']}")
    return np.asarray(array)  # a plain read-only view of the map


def _content(sums: dict[str, Any]) -> str:
    return hashlib.sha256("".join(sums[name]["sha256"] for name in ARRAYS).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
