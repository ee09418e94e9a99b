"""Work that writes, syncs, renames and removes in known numbers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def replace_file(folder: Path) -> str:
    """Six calls: create, write, fsync, rename, fsync of the folder, unlink."""
    new, old = folder / "new", folder / "file"
    with new.open("wb", buffering=0) as file:
        file.write(b"0123456789")
        os.fsync(file.fileno())
    os.replace(new, old)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    (folder / "other").unlink()
    return "written"


def write_array(folder: Path) -> None:
    """Write an array as numpy does: header by Python, numbers by C."""
    np.save(folder / "array.npy", np.arange(100))
