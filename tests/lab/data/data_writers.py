"""Writers of the official data formats, made from the formats' descriptions and independent of the readers."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CIFAR10_TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
NORB_STEMS = ("smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing")
IDX_NAMES = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


# ------------------------------------------------------------------------------------------ images


def random_images(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# ------------------------------------------------------------------- pickles, opcode by opcode


class Cpickle2:
    """Writes what Python 2's cPickle wrote with protocol 2: byte strings, and a memo entry for each object."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo = 0

    def put(self) -> None:
        self.out += b"q" + bytes([self.memo]) if self.memo < 256 else b"r" + struct.pack("<I", self.memo)
        self.memo += 1

    def string(self, text: bytes, memo: bool = True) -> None:
        self.out += b"U" + bytes([len(text)]) if len(text) < 256 else b"T" + struct.pack("<I", len(text))
        self.out += text
        if memo:
            self.put()

    def integer(self, number: int) -> None:
        if 0 <= number < 2**8:
            self.out += b"K" + bytes([number])
        elif 0 <= number < 2**16:
            self.out += b"M" + struct.pack("<H", number)
        else:
            self.out += b"J" + struct.pack("<i", number)

    def list_of(self, items: Sequence[int | bytes]) -> None:
        self.out += b"]"
        self.put()
        for start in range(0, len(items), 1000):
            self.out += b"("
            for item in items[start : start + 1000]:
                self.string(item) if isinstance(item, bytes) else self.integer(item)
            self.out += b"e"

    def array(self, shape: Sequence[int], content: bytes, code: bytes = b"u1") -> None:
        self.out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self.put()
        self.out += b"cnumpy\nndarray\n"
        self.put()
        self.integer(0)
        self.out += b"\x85"
        self.put()
        self.string(b"b")
        self.out += b"\x87"
        self.put()
        self.out += b"R"
        self.put()
        self.out += b"("
        self.integer(1)
        self.out += b"("
        for side in shape:
            self.integer(side)
        self.out += b"t"
        self.put()
        self.out += b"cnumpy\ndtype\n"
        self.put()
        self.string(code)
        self.integer(0)
        self.integer(1)
        self.out += b"\x87"
        self.put()
        self.out += b"R"
        self.put()
        self.out += b"("
        self.integer(3)
        self.string(b"|")
        self.out += b"NNN"
        self.integer(-1)
        self.integer(-1)
        self.integer(0)
        self.out += b"t"
        self.put()
        self.out += b"b\x89"
        self.string(content)
        self.out += b"t"
        self.put()
        self.out += b"b"


def cifar_pickle(images: Any, labels: dict[str, Sequence[int]], title: bytes = b"training batch 1 of 5") -> bytes:
    """A batch as the python archives hold it; ``labels`` by key, as CIFAR-100 has two kinds."""
    pickle = Cpickle2()
    pickle.out += b"}"
    pickle.put()
    pickle.out += b"("
    pickle.string(b"batch_label")
    pickle.string(title)
    for key, values in labels.items():
        pickle.string(key.encode())
        pickle.list_of([int(value) for value in values])
    pickle.string(b"data")
    pickle.array((len(images), 3072), images.tobytes())
    pickle.string(b"filenames")
    pickle.list_of([b"image_s_%06d.png" % i for i in range(len(images))])
    return bytes(pickle.out) + b"u."


def cifar_binary(images: Any, *labels: Sequence[int]) -> bytes:
    """Records of label bytes and pixels."""
    records = b""
    for index, image in enumerate(images):
        records += bytes(int(one[index]) for one in labels) + image.tobytes()
    return records


def cifar10_batches(count: int = 2) -> dict[str, tuple[Any, list[int]]]:
    """Pictures and labels of the six files, without the ending of their names."""
    return {
        name: (random_images(count, 3, 32, 32, seed=seed), [(seed + 3 * i) % 10 for i in range(count)])
        for seed, name in enumerate([*CIFAR10_TRAIN, "test_batch"])
    }


def cifar10_files(kind: str = "python", count: int = 2) -> dict[str, bytes]:
    batches = cifar10_batches(count)
    if kind == "python":
        return {name: cifar_pickle(images, {"labels": labels}) for name, (images, labels) in batches.items()}
    return {f"{name}.bin": cifar_binary(images, labels) for name, (images, labels) in batches.items()}


# ---------------------------------------------------------------------------------------------- tar


def tar_member(
    name: bytes, content: bytes = b"", kind: bytes = b"0", link: bytes = b"", size: int | None = None
) -> bytes:
    """One member with its header; ``size`` may lie."""
    header = bytearray(512)
    header[: len(name)] = name
    header[100:108] = b"0000644\0"
    header[108:124] = b"0000000\0" * 2
    header[124:136] = b"%011o\0" % (len(content) if size is None else size)
    header[136:148] = b"%011o\0" % 1_234_567_890
    header[156:157] = kind
    header[157 : 157 + len(link)] = link
    header[257:265] = b"ustar\x0000"
    return with_checksum(header) + content + bytes(-len(content) % 512)


def with_checksum(header: bytearray) -> bytes:
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def tar_of(members: Iterable[bytes], zipped: bool = True) -> bytes:
    archive = b"".join(members) + bytes(1024)
    return gzip.compress(archive, mtime=0) if zipped else archive


def cifar_archive(files: dict[str, bytes], folder: str = "cifar-10-batches-py", zipped: bool = True) -> bytes:
    others = [tar_member(f"{folder}/".encode(), kind=b"5"), tar_member(f"{folder}/readme.html".encode(), b"<html>")]
    return tar_of(others + [tar_member(f"{folder}/{name}".encode(), data) for name, data in files.items()], zipped)


# ------------------------------------------------------------------------------------------- MATLAB 5

MATLAB_HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"


def mat_element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def mat_matrix(
    name: bytes, shape: Sequence[int], numbers: bytes, kind: int = 2, matlab_class: int = 9, flags: int = 0
) -> bytes:
    """A numeric matrix; ``kind`` is how its numbers are stored, 2 for uint8 and 9 for double."""
    content = mat_element(6, struct.pack("<BBHI", matlab_class, flags, 0, 0))
    content += mat_element(5, struct.pack(f"<{len(shape)}i", *shape))
    # Names of up to four letters take the small form, as MATLAB writes them.
    content += struct.pack("<HH4s", 1, len(name), name) if 0 < len(name) <= 4 else mat_element(1, name)
    return mat_element(14, content + mat_element(kind, numbers))


def mat_compressed(element: bytes) -> bytes:
    packed = zlib.compress(element)
    return struct.pack("<II", 15, len(packed)) + packed


def svhn_mat(count: int = 3, seed: int = 0, compressed: bool = True) -> bytes:
    """A file as MATLAB wrote SVHN's: y is of class double, stored in bytes."""
    digits = bytes(1 + (seed + 4 * i) % 10 for i in range(count))
    elements = [
        mat_matrix(b"X", (32, 32, 3, count), random_images(count, 3, 32, 32, seed=seed).tobytes()),
        mat_matrix(b"y", (count, 1), digits, matlab_class=6),
    ]
    return MATLAB_HEADER + b"".join(mat_compressed(one) if compressed else one for one in elements)


# ----------------------------------------------------------------------------------------- NORB, idx


def norb_matrix(array: Any, magic: int | None = None) -> bytes:
    """Little-endian: magic number, axes, at least three sides filled up with ones, numbers."""
    known = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}
    sides = [*array.shape, 1, 1, 1][: max(array.ndim, 3)]
    head = struct.pack(f"<Ii{len(sides)}i", known[array.dtype.name] if magic is None else magic, array.ndim, *sides)
    return bytes(head + array.astype(array.dtype.newbyteorder("<")).tobytes())


def norb_files(count: int = 2) -> dict[str, bytes]:
    files = {}
    for seed, stem in enumerate(NORB_STEMS):
        labels = np.array([(seed + 2 * i) % 5 for i in range(count)], dtype=np.int32)
        files[f"{stem}-dat.mat"] = norb_matrix(random_images(count, 2, 96, 96, seed=seed))
        files[f"{stem}-cat.mat"] = norb_matrix(labels)
        files[f"{stem}-info.mat"] = norb_matrix(np.arange(4 * count, dtype=np.int32).reshape(count, 4))
    return files


def idx(array: Any) -> bytes:
    """Big-endian: two zeros, 8 for bytes, axes, sides, numbers."""
    return bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes())


def idx_files(count: int = 2) -> dict[str, bytes]:
    arrays = []
    for seed in range(2):
        arrays += [
            random_images(count, 28, 28, seed=seed),
            np.array([(seed + i) % 10 for i in range(count)], dtype=np.uint8),
        ]
    return {name: idx(array) for name, array in zip(IDX_NAMES, arrays, strict=True)}


# ---------------------------------------------------------------------------------------------- PNG


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(image: Any, claim: tuple[int, int] | None = None) -> bytes:
    """An (H, W, 3) image; ``claim`` is a width and height to lie about."""
    height, width = image.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    head = struct.pack(">IIBBBBB", *(claim or (width, height)), 8, 2, 0, 0, 0)
    body = png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    """An image as Pillow writes it."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image).save(stream, kind, **options)
    return stream.getvalue()


# ---------------------------------------------------------------------------------------------- disk


def write_files(folder: Path, files: dict[str, bytes], zipped: bool = False) -> Path:
    for name, data in files.items():
        file = folder / (f"{name}.gz" if zipped else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(data, mtime=0) if zipped else data)
    return folder
