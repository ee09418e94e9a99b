"""What a data set is: a training and a test split of uint8 images with labels, and where the files came from.

Shapes: N images, C channels, H height, W width; of regression N examples, D inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.data.verification import Verification
from dropconnectpp.lab.machine.terminal_text import printable


class DataError(DropConnectError, ValueError):
    """A data file is missing, damaged, dangerous or not what it should be; the message names it."""


@dataclass(frozen=True, eq=False)
class Split:
    """The training images or the test images, with their labels."""

    images: NDArray[np.uint8]  # (N, C, H, W)
    labels: NDArray[np.int64]  # (N,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Provenance:
    """Where a data set's files came from, and whether they are the official ones."""

    source: str
    verified: bool
    """Whether every file has the official checksum. Where it has not, the tables say so."""
    content: str = ""
    """A digest of images and labels as they are used: the same name may come to stand for other images."""
    files: dict[str, str] = field(default_factory=dict)
    """md5 sums of the files that were read, by name."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set ready for use. Arrays that come from the cache are memory-mapped and read-only."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    licence: str
    citation: str
    provenance: Provenance
    verification: Verification | None = field(default=None, repr=False)
    """The check of every byte, where the arrays come from the cache."""

    def begin_check(self) -> None:
        """Let every byte be compared with its checksum in the background."""
        if self.verification is not None:
            self.verification.begin()

    def require_whole(self) -> None:
        """Wait for that check; raise `DataError` if the files are not what was prepared."""
        if self.verification is not None:
            self.verification.require()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def describe(self) -> str:
        """A few lines for a person to read."""
        counts = f"{len(self.train):,} training and {len(self.test):,} test images"
        verified = "official checksums" if self.provenance.verified else "UNVERIFIED: not the official checksums"
        lines = [
            f"{self.name}: {counts}, {'x'.join(map(str, self.shape))}, {len(self.classes)} classes",
            f"  source    {self.provenance.source} ({verified})",
            f"  licence   {self.licence}",
            f"  citation  {self.citation}",
        ]
        # Names of folders are in it: none of them may be taken for a line, nor for an order to the terminal.
        return "\n".join(printable(line.replace("\n", "\\n")) for line in lines)


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a reader returns: both splits and the names of the classes."""

    train: Split
    test: Split
    classes: tuple[str, ...]


def check_arrays(arrays: Arrays, source: object) -> Arrays:
    """Return the arrays if images and labels belong together, else raise `DataError`."""
    for name, split in (("training", arrays.train), ("test", arrays.test)):
        images, labels = split.images, split.labels
        if images.ndim != 4 or images.dtype != np.uint8 or labels.shape != images.shape[:1]:
            raise DataError(
                f"{source}: the {name} split has {len(labels)} labels for images of shape {images.shape} and type "
                f"{images.dtype}; expected one label for each uint8 image (C, H, W)."
            )
        if len(labels) == 0:
            raise DataError(f"{source}: the {name} split is empty. Get the files again.")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(arrays.classes):
            raise DataError(
                f"{source}: the {name} labels run from {low} to {high}, expected 0 to {len(arrays.classes) - 1}. "
                "The file is damaged or of another data set; get it again."
            )
    return arrays


@dataclass(frozen=True, eq=False)
class RegressionSet:
    """Real inputs and targets in their own units, with published splits of one size."""

    name: str
    x: NDArray[np.float64]  # (N, D)
    y: NDArray[np.float64]  # (N,)
    splits: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]
    """Rows to train on and rows to test on."""
    source: str = ""
    content: str = ""
    """A digest of values and splits."""

    def describe(self) -> str:
        """A line for a person to read."""
        train, test = self.splits[0]
        return (
            f"{self.name}: {len(self.y):,} examples of {self.x.shape[1]} inputs, {len(self.splits)} splits into "
            f"{len(train):,} to train on and {len(test):,} to test on"
        )
