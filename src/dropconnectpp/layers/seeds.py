"""Where draws come from: seeds out of torch's generators, apart by rank, fit for compiled and captured steps."""

from __future__ import annotations

import torch

from dropconnectpp.ops.drawn import Draw, transformed

_SEEDS = 2**62
_BETWEEN_RANKS = 0x1F2E3D4C5B6A7989
"""Odd, so that its multiples keep apart the draws of ranks that are seeded alike."""


def fresh_draws(
    count: int,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> list[Draw]:
    """``count`` draws with seeds from a generator, or from torch's own.

    In a distributed run without a generator each rank mixes its number in, so that ranks seeded alike still draw
    different masks, and gradient checkpointing, which rewinds torch's generator, draws them again. On a GPU without a
    generator seeds are drawn there: nothing waits for the host, and a replayed CUDA graph draws new ones. Under
    `torch.func`, where a seed may differ along a batch axis, draws have none and take torch's own noise.
    """
    if transformed() and not torch.compiler.is_compiling():
        return [Draw(None) for _ in range(count)]
    if device.type == "meta":  # an offloaded layer, whose weights come when it is called
        device = torch.device("cpu")
    if generator is None:  # no generator argument at all: torch.compile cannot trace one
        seeds = torch.randint(_SEEDS, (count,), device=device)
        rank = _rank()
        if rank:
            seeds = (seeds + rank * _BETWEEN_RANKS % _SEEDS) % _SEEDS  # neither may leave 63 bits
    else:
        seeds = torch.randint(_SEEDS, (count,), device=generator.device, generator=generator).to(device)
    return [Draw(seed) for seed in seeds.unbind()]


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
