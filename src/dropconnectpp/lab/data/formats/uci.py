"""Read the UCI regression sets in their benchmark form: a table, which columns to use, and published splits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import DataError, RegressionSet
from dropconnectpp.lab.data.safe_reading import read_file

TABLE, FEATURES, TARGET = "data.txt", "index_features.txt", "index_target.txt"
LIMIT = 100_000_000
"""Bytes of the largest file that is read."""


def _number_of(name: str) -> int | None:
    stem = name.removesuffix(".txt").removeprefix("index_train_").removeprefix("index_test_")
    return int(stem) if stem.isascii() and stem.isdigit() else None


def read(folder: Path, name: str, progress: Callable[[int, int], None] | None = None) -> RegressionSet:
    """Read one set's folder: a table, its columns' roles, and `index_train_K.txt` and `index_test_K.txt` of each split.

    Raises:
        DataError: a file is missing or damaged, or a split is none: each row of the table is in exactly one half.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder.")
    table = _numbers(folder / TABLE, 2)
    features, target = (_rows(folder / name, table.shape[1], "column") for name in (FEATURES, TARGET))
    if len(target) != 1 or target[0] in features or not len(features):
        raise DataError(f"{folder}: expected one target column that is no feature, got {target.tolist()}.")
    if not np.isfinite(table).all():
        raise DataError(f"{folder / TABLE}: holds values that are not finite.")
    numbers = sorted({n for path in folder.glob("index_train_*.txt") if (n := _number_of(path.name)) is not None})
    if numbers != list(range(len(numbers))) or not numbers:
        raise DataError(f"{folder}: expected splits index_train_0.txt, index_train_1.txt and so on, found {numbers}.")
    splits: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for number in numbers:
        halves = [_rows(folder / f"index_{half}_{number}.txt", len(table), "row") for half in ("train", "test")]
        together = np.sort(np.concatenate(halves))
        if not np.array_equal(together, np.arange(len(table))) or not all(map(len, halves)):
            raise DataError(f"{folder}: split {number} does not have each of the {len(table)} rows exactly once.")
        if splits and len(splits[0][1]) != len(halves[1]):
            raise DataError(f"{folder}: split {number} has a test half of another length than split 0.")
        splits.append((halves[0], halves[1]))
        if progress is not None:
            progress(number + 1, len(numbers))
    x, y = np.ascontiguousarray(table[:, features]), table[:, target[0]].copy()
    return RegressionSet(name, x, y, tuple(splits), f"folder {folder.name} given by the user")


def _numbers(path: Path, axes: Literal[1, 2]) -> NDArray[np.float64]:
    """The numbers of a text file in rows."""
    text = read_file(path, LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an empty file only warns
            found: NDArray[np.float64] = np.loadtxt(text.decode("ascii").splitlines(), ndmin=axes, comments=None)
    except (ValueError, UserWarning) as error:
        raise DataError(f"{path}: is no table of numbers ({error}).") from error
    return found


def _rows(path: Path, count: int, what: str) -> NDArray[np.int64]:
    """Indices below ``count``, each once."""
    found = _numbers(path, 1).ravel()
    whole = found.astype(np.int64) if np.isfinite(found).all() else np.full(1, -1)
    if len(whole) != len(found) or (whole != found).any() or (whole < 0).any() or (whole >= count).any():
        raise DataError(f"{path}: expected numbers of {what}s from 0 to {count - 1}.")
    if len(np.unique(whole)) != len(whole):
        raise DataError(f"{path}: names a {what} twice.")
    return whole
