"""Packed tensors: every bit comes back, in about as few bytes as possible, and what is damaged raises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dropconnectpp.errors import FileFormatError
from dropconnectpp.io.packing import DTYPES, OVERHEAD, Packed, pack, packed_from, unpack
from dropconnectpp.io.positions import CHUNK, Positions, read_positions, write_positions


def random_places(size: int, share: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(size) < share


def stored_bytes(parts: dict[str, Tensor]) -> int:
    return sum(part.numel() * part.element_size() for part in parts.values())


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 65_537])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.99, 1.0])
def test_positions_come_back(size: int, share: float) -> None:
    taken = random_places(size, share)
    positions, data = write_positions(taken)
    assert positions.count == taken.sum()
    assert np.array_equal(read_positions(positions, data, size), taken)


@pytest.mark.parametrize("place", [0, 1, 499_999, 999_999])
def test_one_place_among_many_comes_back(place: int) -> None:
    taken = np.zeros(1_000_000, np.bool_)
    taken[place] = True
    positions, data = write_positions(taken)
    assert data.size < 100
    assert np.array_equal(read_positions(positions, data, taken.size), taken)


def test_more_positions_than_one_chunk_come_back() -> None:
    taken = random_places(12_000_000, 0.1)
    positions, data = write_positions(taken)
    assert positions.code == "gaps"
    assert positions.symbols > CHUNK
    assert np.array_equal(read_positions(positions, data, taken.size), taken)


@pytest.mark.parametrize(("share", "above"), [(0.001, 1.1), (0.01, 1.1), (0.1, 1.15), (0.3, 1.15)])
def test_random_positions_cost_little_more_than_they_must(share: float, above: float) -> None:
    size = 1_000_000
    least = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) / 8
    _, data = write_positions(random_places(size, share))
    assert least * 0.99 < data.size < least * above


def test_whole_units_that_are_off_cost_next_to_nothing() -> None:
    taken = np.repeat(random_places(1000, 0.3), 1000)
    assert write_positions(taken)[1].size < 2000


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, share: float) -> None:
    count = 4000
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(20, 1, count // 20).clone()  # every pattern of bits, NaN among them
    mask = torch.from_numpy(random_places(count, share)).view(20, 1, count // 20)
    tensor.view(torch.uint8).view(20, 1, count // 20, dtype.itemsize)[~mask] = 0
    found = pack(tensor)
    assert (found is None) == (share == 1.0 and dtype != torch.bool)
    if found is not None:
        packed, parts = found
        assert stored_bytes(parts) + OVERHEAD < tensor.numel() * tensor.element_size()
        again = unpack(packed_from(packed.plain()), parts, None)
        assert again.dtype == dtype
        assert again.shape == tensor.shape
        assert bits(again) == bits(tensor)


def test_minus_zero_is_not_zero() -> None:
    tensor = torch.zeros(1000)
    tensor[::7] = -0.0
    packed, parts = pack(tensor)  # type: ignore[misc]
    assert bits(unpack(packed, parts, None)) == bits(tensor)


def test_one_value_everywhere_takes_no_bytes() -> None:
    packed, parts = pack(torch.full((300, 100), 4.25))  # type: ignore[misc]
    assert parts == {}
    assert torch.equal(unpack(packed, parts, None), torch.full((300, 100), 4.25))


def test_values_stand_where_a_mask_says() -> None:
    kept = torch.from_numpy(random_places(10_000, 0.01)).view(100, 100)
    weight = torch.where(kept, torch.randn(100, 100), 0.5)
    packed, parts = pack(weight, ("weight_kept", kept))  # type: ignore[misc]
    assert parts.keys() == {":values"}
    assert stored_bytes(parts) == 4 * int(kept.sum())
    assert torch.equal(unpack(packed, parts, kept), weight)
    logit = torch.where(kept, 30.0, 0.0)
    packed, parts = pack(logit, ("weight_kept", kept))  # type: ignore[misc]
    assert parts == {}
    assert torch.equal(unpack(packed, parts, kept), logit)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (50,)])
def test_what_would_not_get_smaller_is_left(shape: tuple[int, ...]) -> None:
    assert pack(torch.zeros(shape)) is None
    assert pack(torch.randn(1000)) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "other entries"),
        ({"dtype": "float32", "shape": [2]}, "other entries"),
        ({"dtype": "float32", "shape": [2], "fill": "00000000", "more": 1}, "other entries"),
        ({"dtype": "float33", "shape": [2], "fill": "00000000"}, "its dtype is 'float33'"),
        ({"dtype": ["float32"], "shape": [2], "fill": "00000000"}, "its dtype is"),
        ({"dtype": "float32", "shape": [-2], "fill": "00000000"}, "its shape is"),
        ({"dtype": "float32", "shape": [True], "fill": "00000000"}, "its shape is"),
        ({"dtype": "float32", "shape": [2.0], "fill": "00000000"}, "its shape is"),
        ({"dtype": "float32", "shape": [2] * 65, "fill": "00000000"}, "its shape is"),
        ({"dtype": "float32", "shape": [2], "fill": "0000"}, "its bits are '0000', not 8"),
        ({"dtype": "float32", "shape": [2], "fill": 0}, "its bits are 0, not 8"),
        ({"dtype": "float32", "shape": [2], "fill": "0x000000"}, "its bits are"),
        ({"dtype": "float32", "shape": [2], "fill": "00000000", "value": "00000000"}, "and no positions"),
        ({"dtype": "float32", "shape": [2], "fill": "00000000", "positions": 3}, "its positions are 3"),
        ({"dtype": "float32", "shape": [2], "fill": "00000000", "positions": {"code": "gaps"}}, "unknown positions"),
        ({"dtype": "float32", "shape": [2], "fill": "00000000", "positions": {"kode": "gaps"}}, "unknown positions"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(record: Any, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        packed_from(record)


GAPS = write_positions(random_places(1000, 0.01))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "morse"}, "unknown positions"),
        ({"count": 10.0}, "unknown positions"),
        ({"count": 2000}, "do not fit 1000 places"),
        ({"count": -1}, "do not fit"),
        ({"bits": 0}, "do not fit"),
        ({"bits": 64}, "do not fit"),
        ({"symbols": 10**12}, "do not fit"),
        ({"symbols": 1}, "positions take"),
        ({"code": "bitmap"}, "positions take"),
        ({"deflated": True}, "do not inflate"),
        ({"count": 1}, "and should be 1"),
    ],
)
def test_positions_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    positions, data = GAPS
    assert positions.code == "gaps"
    assert not positions.deflated
    with pytest.raises(FileFormatError, match=message):
        read_positions(replace(positions, **change), data, 1000)


def test_positions_behind_the_last_place_are_refused() -> None:
    positions, data = GAPS
    with pytest.raises(FileFormatError, match="behind the last place"):
        read_positions(positions, data, int(np.flatnonzero(random_places(1000, 0.01))[-1]))
    with pytest.raises(FileFormatError, match="behind the last place"):
        read_positions(Positions("bitmap", 1), np.array([0, 0x80], np.uint8), 15)


def test_bytes_that_inflate_to_more_than_they_say_are_refused() -> None:
    import zlib

    bomb = np.frombuffer(zlib.compress(bytes(50_000_000), 9), np.uint8)
    with pytest.raises(FileFormatError, match="do not inflate to 125 bytes"):
        read_positions(Positions("bitmap", 0, deflated=True), bomb, 1000)


def test_values_of_another_number_or_kind_are_refused() -> None:
    tensor = torch.zeros(1000)
    tensor[[3, 500]] = torch.tensor([1.0, 2.0])
    packed, parts = pack(tensor)  # type: ignore[misc]
    for values in (torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, 1), torch.ones(())):
        with pytest.raises(FileFormatError, match="for 2 places"):
            unpack(packed, parts | {":values": values}, None)
    with pytest.raises(FileFormatError, match="neither False nor True"):
        unpack(Packed("bool", (1000,), "02"), {}, None)
    with pytest.raises(FileFormatError, match="not bytes"):
        unpack(packed, parts | {":positions": torch.ones(2)}, None)
    with pytest.raises(FileFormatError, match="does not say where"):
        unpack(replace(packed, positions="other"), parts, torch.ones(999, dtype=torch.bool))
