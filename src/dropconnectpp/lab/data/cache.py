"""Prepared data sets on disk: plain `.npy` files, with their checksums, that processes map into memory.

Opening compares a sample of every file with a digest, in no time; `Dataset.verification` compares all bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import Arrays, DataError, Dataset, Provenance, Split
from dropconnectpp.lab.data.download import ProgressCallback, silent
from dropconnectpp.lab.data.placing import DESCRIPTION, NEW, install
from dropconnectpp.lab.data.verification import Verification
from dropconnectpp.lab.machine.cache_dir import cache_directory
from dropconnectpp.lab.machine.user_paths import expanded

FORMAT = 2
"""Format 1, of dropconnectpp 0.1, has neither samples nor a digest of its description."""
DESCRIPTION_LIMIT = 1_000_000
SAMPLES, SAMPLE = 64, 4096
"""How many pieces of a file are compared when it is opened, and how long each is."""
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
AGAIN = "Fetch the data set again with --force."


def data_directory(given: Path | str | None = None) -> Path:
    """Where prepared data sets are stored: the argument, else `DCPP_DATA`, else the user's cache folder."""
    if given is not None:
        return expanded(given)
    if value := os.environ.get("DCPP_DATA"):
        return expanded(value)
    return cache_directory() / "data"


def write(place: Path, work: Path, dataset: Dataset, fingerprint: str = "") -> None:
    """Store a data set at ``place``; what was there is replaced only once everything is on disk."""
    new = work / NEW
    new.mkdir()
    sums = {}
    for name, array in _arrays(dataset).items():
        path = new / f"{name}.npy"
        np.save(path, np.ascontiguousarray(array), allow_pickle=False)
        sums[name] = {
            "sha256": _sha256(path),
            "sample": _sampled(path),
            "shape": array.shape,
            "dtype": str(array.dtype),
        }
    description: dict[str, Any] = {
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
    description["digest"] = _digest(description)
    install(place, work, json.dumps(description, indent=1, ensure_ascii=False).encode())


def describe(place: Path) -> dict[str, Any]:
    """The description of a prepared data set, if it is what was written."""
    path = place / DESCRIPTION
    try:
        if path.stat().st_size > DESCRIPTION_LIMIT:
            raise ValueError("too large")
        description = json.loads(path.read_text(encoding="utf-8"))
        found = description["format"]
        if found in (1, FORMAT) and (found == 1 or description["digest"] == _digest(description)):
            return dict(description)
        if found == FORMAT:
            raise ValueError("it does not have the digest that was written with it")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}: damaged ({error}). {AGAIN}") from error
    raise DataError(f"{path}: has format {found!r:.20}; this version reads formats 1 and {FORMAT}. {AGAIN}")


def read(place: Path) -> Dataset:
    """Open a prepared data set; its arrays are mapped into memory read-only, and a sample of each is checked."""
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
            verification=Verification(lambda: _require_whole(place, description)),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{place}: damaged ({error}). {AGAIN}") from error


def verify(place: Path, progress: ProgressCallback = silent) -> Dataset:
    """Open a prepared data set after comparing every file with the checksum recorded when it was prepared."""
    dataset = read(place)
    _require_whole(place, describe(place), progress)
    return dataset


def _require_whole(place: Path, description: dict[str, Any], progress: ProgressCallback = silent) -> None:
    for done, name in enumerate(ARRAYS):
        progress("verifying", done, len(ARRAYS))
        path = place / f"{name}.npy"
        try:
            found, expected = _sha256(path), description["arrays"][name].get("sha256")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}). {AGAIN}") from error
        if found != expected:
            raise DataError(
                f"{path}: its sha256 is {found}, expected {expected}. The file has changed since it was prepared. "
                f"{AGAIN}"
            )
    progress("verifying", len(ARRAYS), len(ARRAYS))


def from_arrays(arrays: Arrays, name: str, licence: str, citation: str, provenance: Provenance) -> Dataset:
    """A data set from the arrays that a reader returned."""
    return Dataset(name, arrays.train, arrays.test, arrays.classes, licence, citation, provenance)


def _arrays(dataset: Dataset) -> dict[str, NDArray[Any]]:
    splits = (dataset.train.images, dataset.train.labels, dataset.test.images, dataset.test.labels)
    return dict(zip(ARRAYS, splits, strict=True))


def _map(path: Path, expected: dict[str, Any]) -> NDArray[Any]:
    if "sample" in expected and _sampled(path) != expected["sample"]:
        raise ValueError(f"{path.name} has changed since it was prepared")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        shape, dtype = list(array.shape), str(array.dtype)
    except OSError:
        raise
    except Exception as error:  # NumPy raises many kinds of error for a damaged header
        raise ValueError(f"{path.name} has a damaged header") from error
    if shape != list(expected["shape"]) or dtype != expected["dtype"]:
        raise ValueError(f"{path.name} holds {array.shape} of {array.dtype}, expected {expected['shape']}")
    return np.asarray(array)  # a plain read-only view of the map


def _sampled(path: Path) -> str:
    """A digest of a file's length and of pieces of it, from its beginning to its end."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(str(size).encode())
        for piece in range(SAMPLES):
            file.seek(max(size - SAMPLE, 0) * piece // (SAMPLES - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _digest(description: dict[str, Any]) -> str:
    """The digest of a description without its own."""
    rest = {name: value for name, value in description.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _content(sums: dict[str, Any]) -> str:
    return hashlib.sha256("".join(sums[name]["sha256"] for name in ARRAYS).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
