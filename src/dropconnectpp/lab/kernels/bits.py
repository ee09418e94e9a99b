"""Masks in memory, a bit each: replica by replica, the first of eight places in the lowest bit.

Shapes: R replicas, then a layer's own axes, of n places in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack(mask: Tensor) -> Tensor:
    """bool (R, ...) as uint8 (R, n / 8), rounded up.

    >>> pack(torch.tensor([[True, True, False, False, False, False, False, False, True]])).tolist()
    [[3, 1]]
    """
    flat = mask.flatten(1)
    whole = pad(flat, [0, -flat.shape[1] % 8]).unflatten(1, (-1, 8))
    values = 1 << torch.arange(8, device=mask.device, dtype=torch.uint8)
    bits: Tensor = (whole * values).sum(2, dtype=torch.uint8)
    return bits


def unpack(bits: Tensor, shape: Sequence[int]) -> Tensor:
    """What `pack` made a bit of, bool (R, ...); ``shape`` is that of one replica.

    >>> unpack(torch.tensor([[3, 1]], dtype=torch.uint8), (3, 3)).int().tolist()
    [[[1, 1, 0], [0, 0, 0], [0, 0, 1]]]
    """
    values = 1 << torch.arange(8, device=bits.device, dtype=torch.uint8)
    flat: Tensor = (bits.unsqueeze(2) & values).flatten(1) != 0
    return flat[:, : math.prod(shape)].view(len(bits), *shape)
