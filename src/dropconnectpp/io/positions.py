"""Where a tensor's few values stand, in few bits: a bitmap, or the gaps between them.

Shapes: N places, K of them taken, Q symbols.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dropconnectpp.errors import FileFormatError

Code = Literal["bitmap", "gaps"]
WIDEST = 16
"""The most bits that a gap's symbol has."""
CHUNK = 1 << 20
"""So many symbols at once become bits: a multiple of 8, so that chunks end with a byte."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Positions:
    """How K of N places were written down.

    With "gaps" each taken place is a symbol of ``bits`` bits, the number of free places before it; the largest symbol
    means that many free places and no taken one. 1% of random places cost 8.7 bits each; 8.1 is the least possible.
    """

    code: Code
    count: int
    """K."""
    bits: int = 1
    symbols: int = 0
    """Q."""
    deflated: bool = False

    def check(self, size: int) -> None:
        """Raise if these cannot be places among ``size``."""
        whole = (self.count, self.bits, self.symbols)
        if self.code not in get_args(Code) or type(self.deflated) is not bool or any(type(n) is not int for n in whole):
            raise FileFormatError(f"unknown positions {self!r}")
        if not (0 <= self.count <= size and 1 <= self.bits <= WIDEST and 0 <= self.symbols <= 2 * size):
            raise FileFormatError(f"{self.count} positions in {self.symbols} symbols do not fit {size} places")

    def raw_bytes(self, size: int) -> int:
        """How many bytes they take before zlib."""
        return (size + 7) // 8 if self.code == "bitmap" else (self.symbols * self.bits + 7) // 8


def write_positions(taken: NDArray[np.bool_]) -> tuple[Positions, Bytes]:
    """(N,) -> how the taken places are written down, and the bytes: the shortest of what there is.

    >>> positions, data = write_positions(np.arange(10_000) % 100 == 7)
    >>> positions.code, data.size < 100
    ('gaps', True)
    """
    places = np.flatnonzero(taken)
    gaps = np.diff(places, prepend=-1) - 1
    bits, symbols = _best_width(gaps)
    if (symbols * bits + 7) // 8 < (taken.size + 7) // 8:
        positions, data = Positions("gaps", places.size, bits, symbols), _write_gaps(gaps, bits)
    else:
        positions, data = Positions("bitmap", places.size), np.packbits(taken, bitorder="little")
    deflated = zlib.compress(data.tobytes(), 6)  # whole units that are off repeat themselves
    if len(deflated) < data.size:
        return (
            Positions(positions.code, positions.count, positions.bits, positions.symbols, True),
            np.frombuffer(deflated, np.uint8),
        )
    return positions, data


def read_positions(positions: Positions, data: Bytes, size: int) -> NDArray[np.bool_]:
    """What `write_positions` was given, or `FileFormatError`; never more memory than a few times ``size``."""
    positions.check(size)
    raw = positions.raw_bytes(size)
    if positions.deflated:
        data = _inflate(data, raw)
    if data.size != raw:
        raise FileFormatError(f"positions take {data.size} bytes instead of {raw}")
    taken = np.zeros(size, np.bool_)
    if positions.code == "bitmap":
        bits = np.unpackbits(data, bitorder="little")
        if bits[size:].any():
            raise FileFormatError("positions have a value behind the last place")
        taken[:] = bits[:size]
    else:
        at = -1
        for symbols in _symbols(data, positions):
            skips = symbols == (1 << positions.bits) - 1
            ends = at + np.cumsum(symbols + ~skips)
            at = int(ends[-1])
            if at >= size:
                raise FileFormatError("positions have a value behind the last place")
            taken[ends[~skips]] = True
    if np.count_nonzero(taken) != positions.count:
        raise FileFormatError(f"positions are {np.count_nonzero(taken)}, and should be {positions.count}")
    return taken


def _best_width(gaps: NDArray[np.int64]) -> tuple[int, int]:
    """The bits of a symbol that make the gaps shortest, and how many symbols there are then."""
    symbols = {bits: int(gaps.size + (gaps // ((1 << bits) - 1)).sum()) for bits in range(1, WIDEST + 1)}
    best = min(symbols, key=lambda bits: bits * symbols[bits])
    return best, symbols[best]


def _write_gaps(gaps: NDArray[np.int64], bits: int) -> Bytes:
    most = (1 << bits) - 1
    skips = gaps // most
    symbols = np.full(int(gaps.size + skips.sum()), most, np.uint16)
    symbols[np.cumsum(skips + 1) - 1] = gaps % most
    orders = np.arange(bits, dtype=np.uint16)
    parts = [
        np.packbits((symbols[start : start + CHUNK, None] >> orders & 1).astype(np.uint8), bitorder="little")
        for start in range(0, symbols.size, CHUNK)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _symbols(data: Bytes, positions: Positions) -> Iterator[NDArray[np.int64]]:
    """The symbols in chunks; bits behind the last one must be zero."""
    weights = 1 << np.arange(positions.bits, dtype=np.int64)
    step = CHUNK * positions.bits // 8
    left = positions.symbols
    for start in range(0, data.size, step):
        bits = np.unpackbits(data[start : start + step], bitorder="little")
        here = min(left, CHUNK)
        used = here * positions.bits
        if bits[used:].any():
            raise FileFormatError("positions have bits behind the last symbol")
        left -= here
        yield bits[:used].reshape(here, positions.bits) @ weights


def _inflate(data: Bytes, size: int) -> Bytes:
    """Bytes that zlib made, ``size`` of them and never more."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data.tobytes(), size + 1)
    except zlib.error as error:
        raise FileFormatError(f"positions do not inflate ({error})") from error
    if len(raw) != size or not stream.eof or stream.unused_data:
        raise FileFormatError(f"positions do not inflate to {size} bytes")
    return np.frombuffer(raw, np.uint8)


def positions_from(record: dict[str, Any]) -> Positions:
    """Positions from plain data."""
    try:
        return Positions(**record)
    except TypeError as error:
        raise FileFormatError(f"unknown positions {record!r}") from error
