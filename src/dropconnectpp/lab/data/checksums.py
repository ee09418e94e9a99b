"""Is a file the official one? Its md5 or sha256, as it is or, if gzipped, unpacked."""

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
    """Hexadecimal digest of a stream, read in pieces."""
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

    A package of the operating system may have compressed the same bytes anew, so a gzip file that
    differs is compared once more by what is inside, unless ``unpack`` says that no such sum is known.
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
    """Digests of all files by name, and whether every one is official; else an error unless that is accepted."""
    found: dict[str, str] = {}
    verified = True
    for name, path in files.items():
        expected = official.get(name, ())
        found[name], matches = check_file(path, expected, unpack=unpack)
        if not (matches or accept_unverified):
            wanted = f"expected {' or '.join(expected)}" if expected else "and no official checksum is known for it"
            raise DataError(
                f"{path}: its checksum is {found[name]}, {wanted}. It was damaged on the way, or is not the official "
                "file. Get it again; or take it as it is with --accept-unverified, and each table made with it says so."
            )
        verified = verified and matches
    return found, verified
