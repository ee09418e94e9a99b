"""Read `fashion-mini`: 6,000 training and 1,500 test images of Fashion-MNIST that come with this package.

Fashion-MNIST is under the MIT licence, (c) 2017 Zalando SE; its notice is in `fashion_mini.LICENSE`.
"""

from __future__ import annotations

import io
import lzma
from pathlib import Path

import numpy as np

from dropconnectpp.lab.data.dataset import Arrays, DataError, Split, check_arrays
from dropconnectpp.lab.data.formats.idx import pad
from dropconnectpp.lab.data.safe_reading import read_limited

FILE = Path(__file__).with_name("fashion_mini.npz.xz")
COUNTS = (600, 150)
"""Images of each class: training, test."""
LIMIT = 8_000_000


def read(classes: tuple[str, ...]) -> Arrays:
    """Unpack the embedded set; this takes about a quarter of a second."""
    try:
        with lzma.open(FILE) as stream:
            data = read_limited(stream, LIMIT, FILE)
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"{FILE}: damaged or missing ({error}). Install dropconnectpp again.") from error
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        train, test = (
            Split(pad(arrays[f"{split}_images"], FILE), arrays[f"{split}_labels"].astype(np.int64))
            for split in ("train", "test")
        )
    return check_arrays(Arrays(train, test, classes), FILE)


def build(full: Arrays) -> bytes:
    """The embedded file's bytes, made from all of Fashion-MNIST: the first images of each class, in their order."""
    arrays = {}
    for name, split, count in (("train", full.train, COUNTS[0]), ("test", full.test, COUNTS[1])):
        firsts = [np.flatnonzero(split.labels == label)[:count] for label in range(len(full.classes))]
        chosen = np.sort(np.concatenate(firsts))
        arrays[f"{name}_images"] = split.images[chosen, 0, 2:-2, 2:-2]
        arrays[f"{name}_labels"] = split.labels[chosen].astype(np.uint8)
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    return lzma.compress(stream.getvalue(), preset=9 | lzma.PRESET_EXTREME)
