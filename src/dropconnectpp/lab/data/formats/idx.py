"""Read MNIST and Fashion-MNIST: idx files, plain or gzipped, padded from 28 x 28 to 32 x 32."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import Arrays, DataError, Split, check_arrays
from dropconnectpp.lab.data.safe_reading import as_bytes, find_plain_or_gzip, read_file

FILE_LIMIT = 100_000_000
SPLITS = ("train", "t10k")
KINDS = {"images-idx3": 3, "labels-idx1": 1}
"""The middle of a file's name, and its number of axes."""
SIDE, BORDER = 28, 2


def find(folder: Path) -> dict[str, Path]:
    """The four files that `read` would read, each plain or ending in .gz, by their plain names."""
    return find_plain_or_gzip(folder, [f"{split}-{kind}-ubyte" for split in SPLITS for kind in KINDS])


def read(folder: Path, classes: tuple[str, ...]) -> Arrays:
    """Read the four files from a folder."""
    files = find(folder)
    splits = []
    for split in SPLITS:
        images, labels = (read_idx(files[f"{split}-{kind}-ubyte"], axes) for kind, axes in KINDS.items())
        splits.append(Split(pad(images, folder), labels.astype(np.int64)))
    return check_arrays(Arrays(splits[0], splits[1], classes), folder)


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """One idx file of unsigned bytes with ``axes`` axes."""
    data = read_file(path, FILE_LIMIT)
    start = 4 + 4 * axes
    if len(data) < start or data[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path}: begins with {data[:4].hex() or 'nothing'}, expected 000008{axes:02x}. Get it again.")
    shape = struct.unpack_from(f">{axes}I", data, 4)
    return as_bytes(data, shape, start, path)


def pad(images: NDArray[np.uint8], source: object) -> NDArray[np.uint8]:  # (N, H, W) -> (N, 1, 32, 32)
    """Images of 28 x 28, each in the middle of a black 32 x 32 square."""
    # Smaller images are refused too: padded, they could fill a thousand times the memory of the file.
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(
            f"{source}: images of {' x '.join(map(str, images.shape[1:]))}, expected {SIDE} x {SIDE}. "
            "Are they the files of another data set?"
        )
    return np.pad(images[:, None], [(0, 0), (0, 0), (BORDER, BORDER), (BORDER, BORDER)])
