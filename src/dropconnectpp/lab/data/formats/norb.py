"""Read small NORB: stereo pairs in little-endian binary matrices, reduced from 96 x 96 to 32 x 32.

Shapes: N pairs, two cameras as channels.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import Arrays, DataError, Split, check_arrays
from dropconnectpp.lab.data.safe_reading import as_bytes, find_plain_or_gzip, read_file

STEMS = ("smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing")
BYTES, INTEGERS = 0x1E3D4C55, 0x1E3D4C54
PARTS = {"dat": 600_000_000, "cat": 10_000_000, "info": 10_000_000}
"""The files of a split, and the most bytes that each may have."""
SIDE, FACTOR = 96, 3


def find(folder: Path) -> dict[str, Path]:
    """The six files that `read` would read, each plain or ending in .gz, by their plain names."""
    return find_plain_or_gzip(folder, [f"{stem}-{part}.mat" for stem in STEMS for part in PARTS])


def read(folder: Path, classes: tuple[str, ...]) -> Arrays:
    """Read both splits from a folder."""
    files = find(folder)
    train, test = (_split(*(files[f"{stem}-{part}.mat"] for part in PARTS)) for stem in STEMS)
    return check_arrays(Arrays(train, test, classes), folder)


def _split(dat: Path, cat: Path, info: Path) -> Split:
    categories, details = read_matrix(cat, PARTS["cat"]), read_matrix(info, PARTS["info"])
    if categories.ndim != 1 or details.shape != (len(categories), 4):
        raise DataError(
            f"{info}: has shape {details.shape} for {cat.name} of shape {categories.shape}, expected (N, 4) for (N,). "
            "The files do not belong together; get them again."
        )
    images = read_matrix(dat, PARTS["dat"])
    if images.ndim != 4 or images.shape[1:] != (2, SIDE, SIDE) or images.dtype != np.uint8:
        raise DataError(
            f"{dat}: has shape {images.shape} of {images.dtype}, expected (N, 2, {SIDE}, {SIDE}) of uint8. "
            "Get the file again."
        )
    return Split(shrink(images), categories.astype(np.int64))


def read_matrix(path: Path, limit: int) -> NDArray[np.generic]:
    """One binary matrix: magic number, number of axes, at least three axis lengths, the numbers."""
    data = read_file(path, limit)
    if len(data) < 8:
        raise DataError(f"{path}: {len(data)} bytes are not a NORB matrix. Get the file again.")
    magic, axes = struct.unpack_from("<Ii", data)
    if magic not in (BYTES, INTEGERS) or not 1 <= axes <= 4:
        raise DataError(
            f"{path}: magic number {magic:#x} with {axes} axes, expected {BYTES:#x} or {INTEGERS:#x} with 1 to 4. "
            "Get the file again."
        )
    stored = max(axes, 3)  # shorter shapes are padded with ones
    if len(data) < 8 + 4 * stored:
        raise DataError(f"{path}: its header is cut short. Get the file again.")
    shape = struct.unpack_from(f"<{stored}i", data, 8)[:axes]
    start = 8 + 4 * stored
    if magic == BYTES:
        return as_bytes(data, shape, start, path)
    return as_bytes(data, (*shape, 4), start, path).view("<i4")[..., 0]


def shrink(images: NDArray[np.generic]) -> NDArray[np.uint8]:  # (N, 2, 96, 96) -> (N, 2, 32, 32)
    """Average over squares of 3 x 3 and round to the nearest grey level, a thousand pairs at a time."""
    small = np.empty((len(images), 2, SIDE // FACTOR, SIDE // FACTOR), dtype=np.uint8)
    for start in range(0, len(images), 1000):
        part = images[start : start + 1000].astype(np.uint16)
        blocks = part.reshape(len(part), 2, SIDE // FACTOR, FACTOR, SIDE // FACTOR, FACTOR)
        total = blocks.sum(axis=(3, 5), dtype=np.uint16)
        small[start : start + 1000] = (total + FACTOR**2 // 2) // FACTOR**2
    return small
