"""Is a file the official one? Compare its md5 or sha256, of the file itself or of its gzipped content."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from dropconnectpp.lab.data.dataset import DataError

STEP = 2**20
UNPACKED_LIMIT = 2_000_000_000
ALGORITHMS = {32: "md5", 64: "sha256"}


def digest(stream: IO[bytes], algorithm: str) -> str:
    """Hexadecimal digest of a stream, which is read in pieces."""
    state = hashlib.new(algorithm, usedforsecurity=False)
    size = 0
    while part := stream.read(STEP):
        size += len(part)
        if size > UNPACKED_LIMIT:
            raise DataError(f"unpacks to more than {UNPACKED_LIMIT:,} bytes")
        state.update(part)
    return state.hexdigest()


def check_file(path: Path, official: tuple[str, ...], *, unpack: bool = True) -> tuple[str, bool]:
    """The file's digest as `md5:…` or `sha256:…`, and whether it is one of the official ones.

    An operating system's package may have compressed the same bytes again. A gzip file that differs is
    therefore compared by its content as well, unless ``unpack`` is false: no such checksum is known.
    """
    algorithm = ALGORITHMS[len(official[0])] if official else "sha256"
    try:
        with path.open("rb") as raw:
            found = digest(raw, algorithm)
            if found in official:
                return f"{algorithm}:{found}", True
            raw.seek(0)
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if zipped and unpack and len(official) > 1:
                with gzip.open(raw) as stream:
                    inside = digest(stream, algorithm)  # type: ignore[arg-type]
                if inside in official:
                    return f"{algorithm}:{inside} (unpacked)", True
    except (OSError, EOFError, zlib.error, DataError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Get the file again.") from error
    return f"{algorithm}:{found}", False


def check_files(
    files: Mapping[str, Path], official: Mapping[str, tuple[str, ...]], *, accept_unverified: bool, unpack: bool = True
) -> tuple[dict[str, str], bool]:
    """Digests of all files by name, and whether every one is official; raise where one is not, unless accepted."""
    found: dict[str, str] = {}
    verified = True
    for name, path in files.items():
        expected = official.get(name, ())
        found[name], matches = check_file(path, expected, unpack=unpack)
        if not (matches or accept_unverified):
            wanted = f"expected {' or '.join(expected)}" if expected else "and no official checksum is known for it"
            raise DataError(
                f"{path}: its checksum is {found[name]}, {wanted}. It was damaged on the way, or is not the official "
                "file. Get it again, or accept it with --accept-unverified: every table made with it then says so."
            )
        verified = verified and matches
    return found, verified
