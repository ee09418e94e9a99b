"""The Triton kernels behind `baseline`: imported only where Triton is installed. A program has one replica."""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit
def weigh_kernel(reward_ptr, moment_ptr, coefficient_ptr):  # type: ignore[no-untyped-def]
    """(reward - varpi) / L of one sample; 0 where the moments hold nothing yet."""
    row, sample = tl.program_id(0), tl.program_id(1)
    stack, samples = tl.num_programs(0), tl.num_programs(1)
    product, square = tl.load(moment_ptr + row), tl.load(moment_ptr + stack + row)
    reward = tl.load(reward_ptr + sample * stack + row)
    tl.store(coefficient_ptr + sample * stack + row, tl.where(square > 0, reward - product / square, 0.0) / samples)


@triton.jit  # type: ignore[untyped-decorator]
def added_up(ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of so many numbers, in one order whatever the stack."""
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        total += tl.load(ptr + places, mask=places < count, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def fold_kernel(  # type: ignore[no-untyped-def]
    moment_ptr,
    reward_ptr,
    one_ptr,
    other_ptr,
    one_count,
    other_count,
    decay,
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """E[f h] and E[h^2] of Eq. (10) move towards this step's, with f = reward h, by 1 - decay."""
    row, stack = tl.program_id(0), tl.num_programs(0)
    product, square = 0.0, 0.0
    for sample in range(SAMPLES):
        place = sample * stack + row
        squared = added_up(one_ptr + place.to(tl.int64) * one_count, one_count, BLOCK)
        squared += added_up(other_ptr + place.to(tl.int64) * other_count, other_count, BLOCK)
        product += tl.load(reward_ptr + place) * squared
        square += squared
    first, second = moment_ptr + row, moment_ptr + stack + row
    tl.store(first, decay * tl.load(first) + (1.0 - decay) * product / SAMPLES)
    tl.store(second, decay * tl.load(second) + (1.0 - decay) * square / SAMPLES)
