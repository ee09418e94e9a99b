"""Read SVHN: `train_32x32.mat` and `test_32x32.mat`, MATLAB 5 files with X (32, 32, 3, N) and y (N, 1).

The reader knows only the part of the format that these files use: uint8 and double matrices, plain or
zlib-compressed. It refuses everything else.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import Arrays, DataError, Split, check_arrays
from dropconnectpp.lab.data.safe_reading import read_file

FILE_LIMIT = 400_000_000
"""Most bytes of a file, and of everything that unpacks from it."""
ELEMENT_LIMIT = 16
"""Most elements of a file; the official ones have two, X and y."""
HEADER, VERSION = 128, b"\x00\x01IM"
NAMES = ("train_32x32.mat", "test_32x32.mat")
NAME_LIMIT = 63
MATRIX, COMPRESSED = 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8"}
"""The types of numbers as MATLAB and as numpy names them."""
CLASSES = range(6, 14)
"""MATLAB's numeric classes; the others are text, structures and the like."""


def find(folder: Path) -> dict[str, Path]:
    """The two files that `read` would read, by name."""
    if missing := [name for name in NAMES if not (folder / name).is_file()]:
        raise DataError(f"{folder}: {' and '.join(missing)} missing. Give the folder that holds {' and '.join(NAMES)}.")
    return {name: folder / name for name in NAMES}


def read(folder: Path, classes: tuple[str, ...]) -> Arrays:
    """Read both files from a folder."""
    train, test = (_split(file) for file in find(folder).values())
    return check_arrays(Arrays(train, test, classes), folder)


def _split(path: Path) -> Split:
    data = read_file(path, FILE_LIMIT)
    if len(data) < HEADER or data[124:HEADER] != VERSION:
        raise DataError(f"{path}: not a little-endian MATLAB 5 file. Get it again.")
    variables: dict[str, NDArray[np.generic]] = {}
    for name, matrix in _matrices(memoryview(data)[HEADER:], path):
        if name in variables:
            raise DataError(f"{path}: holds {name!a} twice. Get the file again.")
        variables[name] = matrix
    if "X" not in variables or "y" not in variables:
        found = ", ".join(map(ascii, variables)) or "nothing"
        raise DataError(f"{path}: holds {found}, expected X and y. Get the file again.")
    pixels, digits = variables["X"], variables["y"].reshape(-1)
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
        raise DataError(f"{path}: X has shape {pixels.shape} of {pixels.dtype}, expected (32, 32, 3, N) of uint8.")
    if len(digits) != pixels.shape[3]:
        raise DataError(f"{path}: {len(digits)} labels for {pixels.shape[3]} images. Get the file again.")
    if not np.isin(digits, np.arange(1, 11)).all():  # before the cast, which NaN and infinity do not survive
        raise DataError(
            f"{path}: y must hold the whole numbers 1 to 10, 10 standing for the digit 0. Get the file again."
        )
    # In MATLAB the last axis varies slowest: in C order the file is (N, 3, W, H) already.
    images = np.ascontiguousarray(pixels.transpose(3, 2, 0, 1))
    return Split(images, digits.astype(np.int64) % 10)


def _elements(data: memoryview, path: Path) -> Iterator[tuple[int, memoryview]]:
    """Type and content of each tagged element; each length is checked against the bytes that are there."""
    position = 0
    while position + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, position)
        if kind >> 16:  # the small form: length and type share a word, the content the next
            kind, size, start, stop = kind & 0xFFFF, kind >> 16, position + 4, position + 8
            if size > 4:
                raise DataError(f"{path}: an element's tag is damaged. Get the file again.")
        else:
            start = position + 8
            stop = start + size if kind == COMPRESSED else start + size + (-size) % 8
        if start + size > len(data):
            raise DataError(
                f"{path}: an element promises {size:,} bytes and {len(data) - start:,} follow. Get the file again."
            )
        yield kind, data[start : start + size]
        position = stop


def _matrices(data: memoryview, path: Path) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Name and numbers of each variable; all elements share one limit on what they unpack to."""
    left = FILE_LIMIT
    for count, (kind, content) in enumerate(_elements(data, path)):
        if count >= ELEMENT_LIMIT:
            raise DataError(f"{path}: holds more than {ELEMENT_LIMIT} elements, expected X and y. Get the file again.")
        if kind == COMPRESSED:
            unpacked = _inflate(content, left, path)
            left -= len(unpacked)
            kind, content = next(_elements(memoryview(unpacked), path), (0, content))
        if kind != MATRIX:  # compression within compression would have no end
            raise DataError(f"{path}: an element has type {kind}, expected {MATRIX}, a matrix. Get the file again.")
        yield _matrix(content, path)


def _inflate(content: memoryview, limit: int, path: Path) -> bytes:
    engine = zlib.decompressobj()
    try:
        unpacked = engine.decompress(content, limit + 1)
    except zlib.error as error:
        raise DataError(f"{path}: damaged compression ({error}). Get the file again.") from error
    if len(unpacked) > limit:
        raise DataError(f"{path}: unpacks to more than {FILE_LIMIT:,} bytes. Get the file again.")
    if not engine.eof:
        raise DataError(f"{path}: a compressed element is cut short. Get the file again.")
    return unpacked


def _matrix(content: memoryview, path: Path) -> tuple[str, NDArray[np.generic]]:
    parts = list(islice(_elements(content, path), 5))
    if len(parts) != 4:
        raise DataError(
            f"{path}: a matrix does not have the 4 parts flags, shape, name and numbers. Get the file again."
        )
    (_, flags), (shape_kind, shape_bytes), (_, name_bytes), (kind, numbers) = parts
    known = len(flags) == 8 and flags[0] in CLASSES and not flags[1] & 0x08 and kind in NUMBERS  # 0x08: complex
    if not known or shape_kind != 5 or len(shape_bytes) not in (8, 12, 16) or len(name_bytes) > NAME_LIMIT:
        raise DataError(f"{path}: holds a kind of matrix that no SVHN file has. Get the file again.")
    shape = struct.unpack(f"<{len(shape_bytes) // 4}i", shape_bytes)
    dtype: np.dtype[Any] = np.dtype(NUMBERS[kind])
    promised = dtype.itemsize
    for side in shape:
        promised *= side
    # An empty axis would let the others be as long as they like.
    if min(shape) < 1 or promised != len(numbers):
        raise DataError(
            f"{path}: a matrix of {' x '.join(map(str, shape))} {dtype} needs {promised:,} bytes, and "
            f"{len(numbers):,} are there. The file is empty or damaged; get it again."
        )
    name = bytes(name_bytes).decode("ascii", "replace")
    return name, np.frombuffer(numbers, dtype=dtype).reshape(shape, order="F")
