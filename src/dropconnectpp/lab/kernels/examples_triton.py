"""The Triton kernels behind `examples`: imported only where Triton is installed.

A program has one replica, the grid's last axis. Sums have one order, whatever the stack.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def on(seed, bound, example, step, replica, first_o, first_i, inputs, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """An example's mask of a tile: eight neighbours from one block, low halves of words before high ones."""
    rows = first_o + tl.arange(0, HEIGHT)
    blocks = rows[:, None] * tl.cdiv(inputs, 8) + (first_i // 8 + tl.arange(0, WIDTH // 8))[None, :]
    zero = blocks * 0
    w0, w1, w2, w3 = tl.philox(seed, blocks, zero + example, zero + step, zero + replica)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)).to(tl.uint32, bitcast=True)
    return tl.interleave(words & 0xFFFF, words >> 16).to(tl.int32) < bound


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, bound_ptr, replica_ptr, step_ptr, seed, batch, units, inputs,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y_b = (Z_b * W) x_b for one example and HEIGHT units."""
    first_o, example, row = tl.program_id(0) * HEIGHT, tl.program_id(1), tl.program_id(2)
    bound, replica = tl.load(bound_ptr + row), tl.load(replica_ptr + row).to(tl.int32)
    step = tl.load(step_ptr).to(tl.int32)
    rows = first_o + tl.arange(0, HEIGHT)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first_i in range(0, inputs, WIDTH):
        columns = first_i + tl.arange(0, WIDTH)
        inside = (rows < units)[:, None] & (columns < inputs)[None, :]
        offsets = (row.to(tl.int64) * units + rows)[:, None] * inputs + columns[None, :]
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        x = tl.load(x_ptr + (row.to(tl.int64) * batch + example) * inputs + columns, mask=columns < inputs, other=0.0)
        kept = on(seed, bound, example, step, replica, first_o, first_i, inputs, HEIGHT, WIDTH)
        total += tl.where(kept, weight * x[None, :], 0.0)
    out = out_ptr + (row.to(tl.int64) * batch + example) * units + rows
    tl.store(out, tl.sum(total, axis=1), mask=rows < units)


@triton.jit  # type: ignore[untyped-decorator]
def input_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, weight_ptr, out_ptr, bound_ptr, replica_ptr, step_ptr, seed, batch, units, inputs,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(Z_b * W)' g_b for one example and WIDTH inputs."""
    first_i, example, row = tl.program_id(0) * WIDTH, tl.program_id(1), tl.program_id(2)
    bound, replica = tl.load(bound_ptr + row), tl.load(replica_ptr + row).to(tl.int32)
    step = tl.load(step_ptr).to(tl.int32)
    columns = first_i + tl.arange(0, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first_o in range(0, units, HEIGHT):
        rows = first_o + tl.arange(0, HEIGHT)
        inside = (rows < units)[:, None] & (columns < inputs)[None, :]
        offsets = (row.to(tl.int64) * units + rows)[:, None] * inputs + columns[None, :]
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + (row.to(tl.int64) * batch + example) * units + rows, mask=rows < units, other=0.0)
        kept = on(seed, bound, example, step, replica, first_o, first_i, inputs, HEIGHT, WIDTH)
        total += tl.where(kept, weight * grad[:, None], 0.0)
    out = out_ptr + (row.to(tl.int64) * batch + example) * inputs + columns
    tl.store(out, tl.sum(total, axis=0), mask=columns < inputs)


@triton.jit  # type: ignore[untyped-decorator]
def weight_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, out_ptr, bound_ptr, replica_ptr, step_ptr, seed, batch, units, inputs,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum over the examples of Z_b * (g_b x_b') for a tile of the weight."""
    first_i, first_o, row = tl.program_id(0) * WIDTH, tl.program_id(1) * HEIGHT, tl.program_id(2)
    bound, replica = tl.load(bound_ptr + row), tl.load(replica_ptr + row).to(tl.int32)
    step = tl.load(step_ptr).to(tl.int32)
    rows, columns = first_o + tl.arange(0, HEIGHT), first_i + tl.arange(0, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for example in range(batch):
        place = row.to(tl.int64) * batch + example
        grad = tl.load(grad_ptr + place * units + rows, mask=rows < units, other=0.0)
        x = tl.load(x_ptr + place * inputs + columns, mask=columns < inputs, other=0.0)
        kept = on(seed, bound, example, step, replica, first_o, first_i, inputs, HEIGHT, WIDTH)
        total += tl.where(kept, grad[:, None] * x[None, :], 0.0)
    inside = (rows < units)[:, None] & (columns < inputs)[None, :]
    offsets = (row.to(tl.int64) * units + rows)[:, None] * inputs + columns[None, :]
    tl.store(out_ptr + offsets, total, mask=inside)
