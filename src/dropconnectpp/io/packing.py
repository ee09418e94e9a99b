"""Tensors with one value nearly everywhere, packed: that value, where others stand, and the others.

Values are compared and stored as bits, so that -0.0, NaN and every rounding come back as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropconnectpp.errors import FileFormatError
from dropconnectpp.io.positions import Positions, positions_from, read_positions, write_positions

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "complex64": torch.complex64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""What a file can hold."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OVERHEAD = 240
"""Bytes that packing adds to the header: a tensor is packed where it saves more."""

Bits = NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """How a tensor was packed. Its positions are in the file under "NAME:positions", its values under "NAME:values"."""

    dtype: str
    shape: tuple[int, ...]
    fill: str
    """The bits, in hexadecimal digits, of the value that stands wherever no other does."""
    positions: Positions | str | None = None
    """Where other values stand: written down, or where the boolean tensor of that name is True; None: nowhere."""
    value: str | None = None
    """The bits of all other values where they are the same; None: they are in the file."""

    @property
    def size(self) -> int:
        """How many elements the tensor has."""
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1

    def parts(self) -> tuple[str, ...]:
        """The names, behind the tensor's own, of what the file holds of it."""
        written = [":positions"] if isinstance(self.positions, Positions) else []
        return (*written, *([":values"] if self.positions is not None and self.value is None else []))

    def plain(self) -> dict[str, Any]:
        """As plain data, without what is at its default."""
        record: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "fill": self.fill}
        if isinstance(self.positions, Positions):
            record["positions"] = {k: v for k, v in vars(self.positions).items() if v != getattr(Positions, k, None)}
        elif self.positions is not None:
            record["positions"] = self.positions
        return record if self.value is None else record | {"value": self.value}


def pack(tensor: Tensor, kept: tuple[str, Tensor] | None = None) -> tuple[Packed, dict[str, Tensor]] | None:
    """How to pack a tensor on the CPU and what to store, by the end of the name; None where that saves nothing.

    ``kept`` names a boolean tensor of the same shape and gives it: where it is False, the tensor has one value.
    """
    bits = _bits(tensor)
    if bits.size == 0:
        return None
    shape, dtype = tuple(tensor.shape), NAMES[tensor.dtype]
    if (bits == bits[0]).all():
        return _if_smaller(bits, Packed(dtype, shape, _hex(bits[0])), {})
    if kept is not None:
        name, mask = kept
        taken = mask.flatten().numpy()
        if taken.all():
            kept = None
        else:
            packed, parts = _with_values(Packed(dtype, shape, _hex(bits[~taken][0]), name), bits[taken])
            return _if_smaller(bits, packed, parts)
    fill = bits.dtype.type(0)
    taken = bits != fill
    if 2 * np.count_nonzero(taken) > taken.size and tensor.dtype == torch.bool:
        fill, taken = bits.dtype.type(1), ~taken
    positions, data = write_positions(taken)
    packed, parts = _with_values(Packed(dtype, shape, _hex(fill), positions), bits[taken])
    return _if_smaller(bits, packed, {":positions": torch.from_numpy(data.copy()), **parts})


def unpack(packed: Packed, parts: Mapping[str, Tensor], kept: Tensor | None) -> Tensor:
    """What `pack` was given, from what it stored; ``kept`` is the boolean tensor that it names."""
    dtype, size = DTYPES[packed.dtype], packed.size
    width = np.dtype(f"u{dtype.itemsize}")
    bits = np.full(size, _from_hex(packed.fill, width), width)
    if packed.positions is not None:
        if isinstance(packed.positions, Positions):
            written = parts[":positions"]
            if written.dtype != torch.uint8 or written.ndim != 1:
                raise FileFormatError(f"its positions are {written.dtype} of {tuple(written.shape)}, not bytes")
            taken = read_positions(packed.positions, written.numpy(), size)
        else:
            assert kept is not None
            if kept.dtype != torch.bool or kept.numel() != size:
                raise FileFormatError(f"the tensor {packed.positions!r} does not say where its values stand")
            taken = kept.flatten().numpy()
        if packed.value is not None:
            bits[taken] = _from_hex(packed.value, width)
        else:
            values = parts[":values"]
            if values.dtype != dtype or tuple(values.shape) != (int(np.count_nonzero(taken)),):
                raise FileFormatError(
                    f"it has {values.dtype} values of shape {tuple(values.shape)} for {np.count_nonzero(taken)} places"
                )
            bits[taken] = _bits(values)
    if dtype == torch.bool and bits.max(initial=0) > 1:
        raise FileFormatError("it holds booleans that are neither False nor True")
    return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(packed.shape)


def packed_from(record: Any) -> Packed:
    """A record from plain data, checked by itself; `FileFormatError` says what is wrong with it."""
    if not isinstance(record, dict) or not {"dtype", "shape", "fill"} <= record.keys() <= set(Packed.__annotations__):
        raise FileFormatError("its record has other entries than dtype, shape, fill, positions and value")
    if not isinstance(record["dtype"], str) or record["dtype"] not in DTYPES:
        raise FileFormatError(f"its dtype is {record['dtype']!r}")
    shape = record["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and 0 < n < 2**48 for n in shape) or len(shape) > 64:
        raise FileFormatError(f"its shape is {shape!r}")
    positions = record.get("positions")
    packed = Packed(
        record["dtype"],
        tuple(shape),
        record["fill"],
        positions_from(positions) if isinstance(positions, dict) else positions,
        record.get("value"),
    )
    if not isinstance(packed.positions, Positions | str | None):
        raise FileFormatError(f"its positions are {positions!r}")
    if packed.value is not None and packed.positions is None:
        raise FileFormatError("it has another value, and no positions")
    width = np.dtype(f"u{DTYPES[packed.dtype].itemsize}")
    for value in (packed.fill, *([] if packed.value is None else [packed.value])):
        _from_hex(value, width)
    return packed


def _with_values(packed: Packed, values: Bits) -> tuple[Packed, dict[str, Tensor]]:
    """The record, and the other values unless they are all the same."""
    if values.size and (values == values[0]).all():
        return Packed(packed.dtype, packed.shape, packed.fill, packed.positions, _hex(values[0])), {}
    tensor = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(DTYPES[packed.dtype])
    return packed, {":values": tensor}


def _if_smaller(bits: Bits, packed: Packed, parts: dict[str, Tensor]) -> tuple[Packed, dict[str, Tensor]] | None:
    stored = sum(part.numel() * part.element_size() for part in parts.values())
    return (packed, parts) if stored + OVERHEAD < bits.nbytes else None


def _bits(tensor: Tensor) -> Bits:
    """A tensor on the CPU as (N,) unsigned integers of its width."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().view(f"u{tensor.element_size()}")


def _hex(value: np.unsignedinteger[Any]) -> str:
    return f"{int(value):0{2 * value.dtype.itemsize}x}"


def _from_hex(text: Any, width: np.dtype[Any]) -> np.unsignedinteger[Any]:
    if not isinstance(text, str) or len(text) != 2 * width.itemsize or not set(text) <= set("0123456789abcdef"):
        raise FileFormatError(f"its bits are {text!r}, not {2 * width.itemsize} hexadecimal digits")
    value: np.unsignedinteger[Any] = width.type(int(text, 16))
    return value
