"""The Triton kernel behind `adagrad`: imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def adagrad_kernel(  # type: ignore[no-untyped-def]
    values,
    gradients,
    sums,
    sizes,
    rows,
    counts,
    epsilon,
    NUMBER: tl.constexpr,
    INSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sum += g^2; value -= step g / sqrt(sum + epsilon), or with epsilon outside the root; a block of one tensor's row.

    Tensors, their rows and the elements of a row come as tuples. Along the grid's first axis lie the blocks of the
    first tensor, then those of the second, and so on; along the second axis the rows of the one that has most.
    """
    program, row = tl.program_id(0), tl.program_id(1)
    first = 0
    for k in tl.static_range(NUMBER):
        after = first + tl.cdiv(counts[k], BLOCK)
        if program >= first and program < after and row < rows[k]:
            _step(values[k], gradients[k], sums[k], sizes[k], program - first, row, counts[k], epsilon, INSIDE, BLOCK)
        first = after


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    value_ptr,
    gradient_ptr,
    sum_ptr,
    size_ptr,
    block,
    row,
    count,
    epsilon,
    INSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one tensor's row."""
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    offsets = row.to(tl.int64) * count + places
    gradient = tl.load(gradient_ptr + offsets, mask=inside, other=0.0)
    total = tl.load(sum_ptr + offsets, mask=inside, other=1.0) + gradient * gradient
    root = tl.sqrt_rn(total + epsilon) if INSIDE else tl.sqrt_rn(total) + epsilon
    value = tl.load(value_ptr + offsets, mask=inside, other=0.0)
    value -= tl.load(size_ptr + row) * tl.div_rn(gradient, root)
    tl.store(sum_ptr + offsets, total, mask=inside)
    tl.store(value_ptr + offsets, value, mask=inside)
