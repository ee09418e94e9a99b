"""Tiling of a weight that share one gate: an input's, a unit's, a kernel's, or any that tile it.

Shapes: S a parameter's, K its block's, G = S / K its gates'; `*` are axes before them, of samples or examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError

Granularity = Literal["synapse", "input", "unit", "kernel"] | tuple[int, ...]
"""What has one gate: each synapse; all weights of an input, a unit or a kernel; each block of a shape."""
NAMED = ("synapse", "input", "unit", "kernel")


def check_granularity(granularity: Any) -> Granularity:
    """A granularity's name, or a block's shape as a tuple; what a file says of it too."""
    if isinstance(granularity, str) and granularity in NAMED:
        return granularity  # type: ignore[return-value]
    sizes = tuple(granularity) if isinstance(granularity, list | tuple) else ()
    if len(sizes) >= 2 and all(type(size) is int and size >= 1 for size in sizes):
        return sizes
    raise ArgumentError(
        f"granularity must be one of {', '.join(map(repr, NAMED))}, or the shape of a block, "
        f"(outputs, inputs) or one number for each axis of the weight, got {granularity!r}."
    )


@dataclass(frozen=True)
class Tiling:
    """How a parameter falls into blocks."""

    shape: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def gates(self) -> torch.Size:
        """The gates' shape, G."""
        return torch.Size(size // part for size, part in zip(self.shape, self.block, strict=True))

    @property
    def size(self) -> int:
        """How many weights a gate has."""
        return math.prod(self.block)

    def spread(self, gate: Tensor) -> Tensor:
        """From the gates to the weights: (*, *G) -> (*, *S). One number for all stays one number."""
        if gate.ndim == 0:
            return gate
        lead = gate.shape[: gate.ndim - len(self.shape)]
        pairs = [n for pair in zip(self.gates, self.block, strict=True) for n in pair]
        return self._apart(gate).expand(*lead, *pairs).reshape(*lead, *self.shape)

    def multiply(self, weight: Tensor, gate: Tensor) -> Tensor:
        """Each weight times its gate."""
        if gate.ndim == 0:
            return weight * gate
        return (self._split(weight) * self._apart(gate)).reshape(weight.shape)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over each block: (*, *S) -> (*, *G)."""
        return self._split(value).sum(self._inside())

    def any(self, mask: Tensor) -> Tensor:
        """Whether any of a block is on: (*, *S) -> (*, *G)."""
        return self._split(mask).to(torch.uint8).amax(self._inside()).bool()

    def _split(self, value: Tensor) -> Tensor:  # (*, *S) -> (*, G0, K0, G1, K1, ...)
        lead = value.shape[: value.ndim - len(self.shape)]
        return value.reshape(*lead, *(n for pair in zip(self.gates, self.block, strict=True) for n in pair))

    def _apart(self, gate: Tensor) -> Tensor:  # (*, *G) -> (*, G0, 1, G1, 1, ...)
        lead = gate.shape[: gate.ndim - len(self.shape)]
        return gate.reshape(*lead, *(n for size in self.gates for n in (size, 1)))

    def _inside(self) -> list[int]:
        """The axes within blocks, counted from the last."""
        return [-2 * axis - 1 for axis in range(len(self.shape))]


def tiling_of(shape: Sequence[int], granularity: Granularity, groups: int, owner: str) -> Tiling | None:
    """The blocks of a weight (O, I, *), which for a convolution in groups are within each; None for single synapses."""
    outputs, inputs, *kernel = shape
    if isinstance(granularity, str):
        if granularity == "synapse":
            return None
        named = {"input": (outputs // groups, 1), "unit": (1, inputs), "kernel": (1, 1)}
        return Tiling(tuple(shape), (*named[granularity], *kernel))
    if len(granularity) not in (2, len(shape)):
        raise ArgumentError(
            f"granularity={granularity!r} does not fit the weight of {owner}, {tuple(shape)}: a block has an output "
            f"and an input axis, and may have the {len(kernel)} of the kernel too."
        )
    block = granularity if len(granularity) == len(shape) else (*granularity, *kernel)
    if any(size % part for size, part in zip(shape, block, strict=True)):
        raise ArgumentError(
            f"granularity={granularity!r} does not tile the weight of {owner}, {tuple(shape)}: each axis must be a "
            "multiple of the block's. Use another block there, or leave the layer out of convert()."
        )
    return Tiling(tuple(shape), tuple(block))
