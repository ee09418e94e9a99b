"""The Triton kernels behind `gpu_examples`: a linear layer with one mask for each example, drawn in registers.

An example's gate is Philox of (seed, block of four synapses along the inputs, stream, example): each row of a weight
starts a block of its own. Shapes: B examples, O out, I in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.ops.gpu_triton import unit_interval


@triton.jit  # type: ignore[untyped-decorator]
def example_noise(seed_ptr, stream, example, rows, first, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Uniform noise of one example for some rows of a weight and WIDTH columns from ``first`` on."""
    blocks = rows[:, None] * tl.cdiv(columns, 4) + (first // 4 + tl.arange(0, WIDTH // 4))[None, :]
    zero = blocks * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), blocks, zero + stream, zero + example, zero + 1)
    return unit_interval(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit  # type: ignore[untyped-decorator]
def switch(u, pi, MIRRORED: tl.constexpr):  # type: ignore[no-untyped-def]
    """z = [u < pi~] as a number, or the antithetic [1 - u < pi~]."""
    if MIRRORED:
        return ((1.0 - u) < pi).to(tl.float32)
    return (u < pi).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def keep_of(logit_ptr, kept_ptr, offsets, inside, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """pi~ of a tile, and 0 where a synapse was pruned or lies outside; elsewhere 1."""
    pi = 1.0 / (1.0 + tl.exp(-tl.load(logit_ptr + offsets, mask=inside, other=0.0).to(tl.float32)))
    if KEPT:
        return pi, tl.load(kept_ptr + offsets, mask=inside, other=0).to(tl.float32)
    return pi, inside.to(tl.float32)


@triton.jit(do_not_specialize=["stream", "first"])  # type: ignore[untyped-decorator]
def example_uniform_kernel(  # type: ignore[no-untyped-def]
    out_ptr, seed_ptr, stream, first, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """The noise behind the masks of examples from ``first`` on, (examples, rows, columns)."""
    example, row, column = tl.program_id(0), tl.program_id(1) * HEIGHT, tl.program_id(2) * WIDTH
    r, c = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    u = example_noise(seed_ptr, stream, first + example, r, column, columns, WIDTH)
    offsets = (example.to(tl.int64) * rows + r)[:, None] * columns + c[None, :]
    tl.store(out_ptr + offsets, u, mask=(r < rows)[:, None] & (c < columns)[None, :])


@triton.jit(do_not_specialize=["stream"])  # type: ignore[untyped-decorator]
def example_product_kernel(  # type: ignore[no-untyped-def]
    input_ptr,
    weight_ptr,
    logit_ptr,
    kept_ptr,
    out_ptr,
    seed_ptr,
    stream,
    outs,
    ins,
    KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """y = (Z_b * W) x_b for one example and HEIGHT outputs."""
    example, rows = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first in range(0, ins, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        inside = (rows < outs)[:, None] & (columns < ins)[None, :]
        offsets = rows[:, None] * ins + columns[None, :]
        pi, kept = keep_of(logit_ptr, kept_ptr, offsets, inside, KEPT)
        u = example_noise(seed_ptr, stream, tl.program_id(0), rows, first, ins, WIDTH)
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(input_ptr + example * ins + columns, mask=columns < ins, other=0.0).to(tl.float32)
        total += switch(u, pi, MIRRORED) * kept * weight * x[None, :]
    tl.store(out_ptr + example * outs + rows, tl.sum(total, axis=1), mask=rows < outs)


@triton.jit(do_not_specialize=["stream"])  # type: ignore[untyped-decorator]
def example_input_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    weight_ptr,
    logit_ptr,
    kept_ptr,
    out_ptr,
    seed_ptr,
    stream,
    outs,
    ins,
    KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(Z_b * W)' g_b for one example and WIDTH inputs."""
    example, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH
    columns = first + tl.arange(0, WIDTH)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for row in range(0, outs, HEIGHT):
        rows = row + tl.arange(0, HEIGHT)
        inside = (rows < outs)[:, None] & (columns < ins)[None, :]
        offsets = rows[:, None] * ins + columns[None, :]
        pi, kept = keep_of(logit_ptr, kept_ptr, offsets, inside, KEPT)
        u = example_noise(seed_ptr, stream, tl.program_id(0), rows, first, ins, WIDTH)
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + example * outs + rows, mask=rows < outs, other=0.0).to(tl.float32)
        total += switch(u, pi, MIRRORED) * kept * weight * grad[:, None]
    tl.store(out_ptr + example * ins + columns, tl.sum(total, axis=0), mask=columns < ins)


@triton.jit(do_not_specialize=["stream"])  # type: ignore[untyped-decorator]
def example_weight_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    input_ptr,
    weight_ptr,
    logit_ptr,
    kept_ptr,
    grad_weight_ptr,
    grad_logit_ptr,
    seed_ptr,
    stream,
    examples,
    outs,
    ins,
    THROUGH: tl.constexpr,
    KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """sum_b Z_b g_b x_b' of a tile of the weight and, straight through, W pi~ (1 - pi~) sum_b g_b x_b'."""
    rows, first = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT), tl.program_id(1) * WIDTH
    columns = first + tl.arange(0, WIDTH)
    inside = (rows < outs)[:, None] & (columns < ins)[None, :]
    offsets = rows[:, None] * ins + columns[None, :]
    pi, kept = keep_of(logit_ptr, kept_ptr, offsets, inside, KEPT)
    by_weight = tl.zeros([HEIGHT, WIDTH], tl.float32)
    plain = tl.zeros([HEIGHT, WIDTH], tl.float32)
    grads, inputs = grad_ptr + rows, input_ptr + columns
    for example in range(examples):
        u = example_noise(seed_ptr, stream, example, rows, first, ins, WIDTH)
        grad = tl.load(grads, mask=rows < outs, other=0.0).to(tl.float32)
        x = tl.load(inputs, mask=columns < ins, other=0.0).to(tl.float32)
        grads += outs
        inputs += ins
        product = grad[:, None] * x[None, :]
        by_weight += switch(u, pi, MIRRORED) * product
        if THROUGH:
            plain += product
    tl.store(grad_weight_ptr + offsets, by_weight * kept, mask=inside)
    if THROUGH:
        weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        decay = tl.exp(-tl.abs(tl.load(logit_ptr + offsets, mask=inside, other=0.0).to(tl.float32)))
        spread = decay / ((1.0 + decay) * (1.0 + decay))
        tl.store(grad_logit_ptr + offsets, plain * weight * spread * kept, mask=inside)


@triton.jit(do_not_specialize=["stream"])  # type: ignore[untyped-decorator]
def example_sum_kernel(  # type: ignore[no-untyped-def]
    weights_ptr,
    logit_ptr,
    kept_ptr,
    out_ptr,
    seed_ptr,
    stream,
    examples,
    outs,
    ins,
    SUMS: tl.constexpr,
    ROOM: tl.constexpr,
    KEPT: tl.constexpr,
    MIRRORED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """sum_b c_kb Z_b of a tile for each weighting k, (SUMS, O, I); ROOM is a power of two with room for them."""
    rows, first = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT), tl.program_id(1) * WIDTH
    columns = first + tl.arange(0, WIDTH)
    inside = (rows < outs)[:, None] & (columns < ins)[None, :]
    offsets = rows[:, None] * ins + columns[None, :]
    pi, kept = keep_of(logit_ptr, kept_ptr, offsets, inside, KEPT)
    sums = tl.arange(0, ROOM)
    total = tl.zeros([ROOM, HEIGHT, WIDTH], tl.float32)
    for example in range(examples):
        u = example_noise(seed_ptr, stream, example, rows, first, ins, WIDTH)
        weights = tl.load(weights_ptr + sums * examples + example, mask=sums < SUMS, other=0.0)
        total += weights[:, None, None] * switch(u, pi, MIRRORED)[None, :, :]
    places = (sums * outs * ins)[:, None, None] + offsets[None, :, :]
    tl.store(out_ptr + places, total * kept[None, :, :], mask=(sums < SUMS)[:, None, None] & inside[None, :, :])
