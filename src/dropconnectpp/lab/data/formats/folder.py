"""Read your own images: one folder per class of PNG, JPEG or WebP files, resized to 32 x 32."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dropconnectpp.lab.data.dataset import Arrays, DataError, Split, check_arrays

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
SIDE = 32
PIXEL_LIMIT = 50_000_000
"""Pixels of the largest image that is decoded; a small file can claim far more than memory holds."""
SIDE_LIMIT = 20_000
"""Pixels of its longer side: resizing needs memory for each column, however low the image is."""
FILE_LIMIT = 200_000_000


def read(
    path: Path, *, test_share: float = 0.2, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> Arrays:
    """Read `train/CLASS/*.png` and `test/CLASS/*.png`, or split `CLASS/*.png` by a seed.

    Without `train` and `test`, each file's name decides its split, so adding images moves none.
    ``progress`` is called with the number of images read and the number of all.
    """
    if not path.is_dir():
        raise DataError(f"{path}: there is no such folder.")
    given = [(path / split).is_dir() for split in ("train", "test")]
    if any(given) and not all(given):
        missing = "test" if given[0] else "train"
        raise DataError(
            f"{path}: has no folder {missing!r} beside the other split. Add it, or put the classes side by side."
        )
    roots = [path / "train", path / "test"] if all(given) else [path]
    classes = sorted({child.name for root in roots for child in root.iterdir() if _is_class(child)})
    if len(classes) < 2:
        raise DataError(
            f"{path}: expected a folder per class with {', '.join(sorted(SUFFIXES))} files, found {len(classes)}."
        )
    if odd := [name for name in classes if not name.isprintable()]:
        raise DataError(f"{path}: the folder {odd[0]!a} has a name that cannot be printed. Rename it.")
    files = [
        [(file, label) for label, name in enumerate(classes) for file in _image_files(root / name)] for root in roots
    ]
    if len(roots) == 1:
        chosen = [_in_test(file.relative_to(path), test_share, seed) for file, _ in files[0]]
        files = [
            [entry for entry, test in zip(files[0], chosen, strict=True) if test is side] for side in (False, True)
        ]
    for name, side in zip(("training", "test"), files, strict=True):
        if not side:
            raise DataError(f"{path}: there is no {name} image. Add images, or put them in folders 'train' and 'test'.")
    trained = {label for _, label in files[0]}
    if untrained := [name for label, name in enumerate(classes) if label not in trained]:
        raise DataError(
            f"{path}: the {'class' if len(untrained) == 1 else 'classes'} {', '.join(untrained)} "
            f"{'has' if len(untrained) == 1 else 'have'} no training image, so no network can learn "
            f"{'it' if len(untrained) == 1 else 'them'}. Add images, or remove the folder."
        )
    total, done = sum(map(len, files)), 0
    splits = []
    for side in files:
        images = np.empty((len(side), 3, SIDE, SIDE), dtype=np.uint8)
        for index, (file, _) in enumerate(side):
            images[index] = _decode(file)
            done += 1
            if progress is not None:
                progress(done, total)
        splits.append(Split(images, np.array([label for _, label in side], dtype=np.int64)))
    return check_arrays(Arrays(splits[0], splits[1], tuple(classes)), path)


def fingerprint(path: Path) -> str:
    """A digest that changes when an image is added, removed or altered."""
    digest = hashlib.sha256(os.fsencode(path.resolve()))
    for file in sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()):
        state = file.stat()
        digest.update(os.fsencode(f"{file.relative_to(path)}\0{state.st_size}\0{state.st_mtime_ns}\0"))
    return digest.hexdigest()[:16]


def _is_class(child: Path) -> bool:
    return child.is_dir() and not child.name.startswith(".") and any(_image_files(child))


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def _in_test(name: Path, share: float, seed: int) -> bool:
    digest = hashlib.sha256(os.fsencode(f"{seed}\0{name.as_posix()}")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _decode(file: Path) -> Any:  # (3, 32, 32) of uint8
    from PIL import Image

    try:
        if file.stat().st_size > FILE_LIMIT:
            raise DataError(f"{file}: has more than {FILE_LIMIT:,} bytes. Shrink it first.")
        with warnings.catch_warnings():
            # Pillow warns about images that it reads well, and about sizes that are checked here.
            warnings.simplefilter("ignore")
            with Image.open(file, formats=("PNG", "JPEG", "WEBP")) as image:
                width, height = image.size
                if width * height > PIXEL_LIMIT:
                    raise DataError(
                        f"{file}: claims {width} x {height} pixels, more than {PIXEL_LIMIT:,}. Shrink it first."
                    )
                if max(width, height) > SIDE_LIMIT:
                    raise DataError(
                        f"{file}: claims {width} x {height} pixels, and neither side may exceed {SIDE_LIMIT:,}. "
                        "Shrink it first."
                    )
                whole: Image.Image = image
                if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip to white
                    whole = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                rule = Image.Resampling.BOX if min(image.size) >= SIDE else Image.Resampling.BICUBIC
                return np.asarray(whole.convert("RGB").resize((SIDE, SIDE), rule)).transpose(2, 0, 1)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds of error for a damaged image
        raise DataError(
            f"{file}: cannot be read as an image ({type(error).__name__}: {error}). Remove or repair it."
        ) from error
