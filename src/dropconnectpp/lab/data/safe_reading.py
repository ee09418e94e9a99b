"""Read untrusted files: every size is checked before memory is allocated for it."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.lab.data.dataset import DataError

STEP = 2**20
BLOCK = 512
"""A tar archive is made of blocks of this size."""


def read_limited(stream: IO[bytes], limit: int, source: object) -> bytes:
    """The whole of a stream; raise as soon as it proves longer than ``limit`` bytes."""
    gathered = io.BytesIO()
    try:
        while part := stream.read(STEP):
            if gathered.tell() + len(part) > limit:
                raise DataError(
                    f"{source}: holds more than {limit:,} bytes, so it is not the expected file. Get the file again."
                )
            gathered.write(part)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source}: damaged or cut short ({error}). Get the file again.") from error
    return gathered.getvalue()


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain or gzip file, told apart by the first bytes; an error while reading becomes a `DataError`."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected a file.")
    if not path.is_file():  # a pipe or a device might never end
        raise DataError(f"{path}: there is no such file.")
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if zipped:
                with gzip.open(raw) as stream:
                    yield stream  # type: ignore[misc]
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged, cut short or not readable ({error}). Get the file again.") from error


def read_file(path: Path, limit: int) -> bytes:
    """The content of a plain or gzip file, at most ``limit`` bytes when unpacked."""
    with _unpacked(path) as stream:
        return read_limited(stream, limit, path)


def find_plain_or_gzip(folder: Path, names: list[str]) -> dict[str, Path]:
    """The path of each file, plain or ending in .gz, by its plain name; raise if one is missing."""
    found = {name: [p for p in (folder / name, folder / f"{name}.gz") if p.is_file()] for name in names}
    if missing := [name for name, files in found.items() if not files]:
        raise DataError(f"{folder}: {', '.join(missing)} missing, plain or .gz. All {len(names)} files are needed.")
    return {name: files[0] for name, files in found.items()}


def read_tar(
    path: Path, wanted: Callable[[str], bool], *, file_limit: int, total_limit: int
) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a tar archive, plain or gzipped, by base name; nothing is written to disk.

    Only plain files count, and a name never becomes a path. Python's `tarfile` also follows the format's
    extensions, which let a file demand any amount of memory or recursion; here they are skipped.
    """
    left = total_limit

    def spend(size: int) -> None:
        nonlocal left
        left -= size
        if left < 0:
            raise DataError(
                f"{path}: unpacks to more than {total_limit:,} bytes, so it is not the expected archive. "
                "Get the file again."
            )

    with _unpacked(path) as stream:
        while (header := stream.read(BLOCK)) != bytes(BLOCK):  # a block of zeros ends the archive
            if _octal(header[148:156]) != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
                raise DataError(f"{path}: damaged, cut short or not a tar archive. Get the file again.")
            name = header[:100].partition(b"\0")[0].rpartition(b"/")[2].decode("ascii", "replace")
            kind = header[156:157]
            # Links, devices, folders and pipes have no content, whatever their headers say.
            size = 0 if kind in b"123456" else _octal(header[124:136])
            spend(BLOCK + size)
            chosen = kind in (b"0", b"\0") and wanted(name)
            if chosen and size > file_limit:
                raise DataError(
                    f"{path}: {name} claims {size:,} bytes, expected at most {file_limit:,}. Get the file again."
                )
            gathered = io.BytesIO()
            for piece in _pieces(stream, size, path):
                if chosen:
                    gathered.write(piece)
            for _ in _pieces(stream, -size % BLOCK, path):
                pass
            if chosen:
                yield name, gathered.getvalue()
        while rest := stream.read(STEP):  # gzip's checksum stands at the very end
            spend(len(rest))


def _octal(field: bytes) -> int:
    """A number in a tar header. A field that is not a number becomes larger than any limit."""
    digits = field.partition(b"\0")[0].strip(b" ")
    return int(digits, 8) if digits and not digits.strip(b"01234567") else 2**63


def _pieces(stream: IO[bytes], size: int, path: Path) -> Iterator[bytes]:
    """The next ``size`` bytes in pieces, so that a false size costs no memory."""
    while size:
        piece = stream.read(min(size, STEP))
        if not piece:
            raise DataError(f"{path}: a file in it is cut short: {size:,} bytes are missing. Get the archive again.")
        size -= len(piece)
        yield piece


def as_bytes(data: bytes, shape: tuple[int, ...], offset: int, source: object) -> NDArray[np.uint8]:
    """The bytes from ``offset`` on as an array of ``shape``, if there are exactly as many as the header promises."""
    promised = 1
    for side in shape:
        promised *= side  # Python's own integers: a header cannot make this overflow
    # An empty axis would let the others be as long as they like.
    if min(shape) < 1 or promised != len(data) - offset:
        raise DataError(
            f"{source}: its header promises {' x '.join(map(str, shape))} = {promised:,} bytes, and "
            f"{len(data) - offset:,} follow. The file is empty or damaged; get it again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=offset).reshape(shape)
