"""The Triton kernels behind `layer`: imported only where Triton is installed.

GATE is 0 for open, 1 for a fixed rate, 2 for learned gates by the score, 3 for learned gates straight through. Other
switches are those of `gates_triton`. Sizes are constants: with them a kernel needs a third fewer registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.lab.kernels.gates_triton import adagrad_step, gate_step, keep_of, noise_of


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def multiply(a, b, total, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + a b of bfloat16 operands, added up in float32."""
    return tl.dot(a, b, total) if COMPILED else tl.dot(a.to(tl.float32), b.to(tl.float32), total)


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(ptr, base, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows and columns of a HEIGHT by WIDTH matrix, 0 outside it."""
    inside = (rows[:, None] < HEIGHT) & (columns[None, :] < WIDTH)
    return tl.load(ptr + base + (rows[:, None] * WIDTH + columns[None, :]), mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    logit_ptr,
    keep_ptr,
    replica_ptr,
    step_ptr,
    result_ptr,
    seed,
    stack,
    BATCH: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    SAMPLES: tl.constexpr,
    GATE: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """x (W z)^T over LENGTH inputs: a partial sum, result is (splits, L, R, B, O).

    The grid's first axis is samples, which share all they load, then tiles of units, then of the batch; the second is
    splits, the third replicas.
    """
    tile, sample = tl.program_id(0), 0
    if SAMPLES > 1:
        sample, tile = tile % SAMPLES, tile // SAMPLES
    tiles = tl.cdiv(UNITS, BLOCK_O)
    first_o = (tile % tiles) * BLOCK_O
    split, row = tl.program_id(1), tl.program_id(2)
    rows = first_o + tl.arange(0, BLOCK_O)
    examples = (tile // tiles) * BLOCK_B + tl.arange(0, BLOCK_B)
    base = row.to(tl.int64) * UNITS * WIDTH
    x_base = row.to(tl.int64) * BATCH * WIDTH
    if GATE > 0:
        replica = tl.load(replica_ptr + row).to(tl.int32)
        step = tl.load(step_ptr).to(tl.int32)
    if GATE == 1:
        rate = tl.load(keep_ptr + row)
    total = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
    first = split * LENGTH
    for first_i in range(first, tl.minimum(first + LENGTH, WIDTH), BLOCK_I):
        columns = first_i + tl.arange(0, BLOCK_I)
        inside = (rows[:, None] < UNITS) & (columns[None, :] < WIDTH)
        places = rows[:, None] * WIDTH + columns[None, :]
        x = tl.load(
            x_ptr + x_base + (examples[:, None] * WIDTH + columns[None, :]),
            mask=(examples[:, None] < BATCH) & (columns[None, :] < WIDTH),
            other=0.0,
        )
        weight = tl.load(weight_ptr + base + places, mask=inside, other=0.0)
        if GATE > 1:
            logit = tl.load(logit_ptr + base + places, mask=inside, other=0.0)
        if GATE > 0:
            keep = rate if GATE == 1 else keep_of(logit, COMPILED)
            noise = noise_of(seed, sample, step, replica, first_o, first_i, WIDTH, BLOCK_O, BLOCK_I)
            weight = tl.where(noise < keep, weight, 0.0)
        total = multiply(x, tl.trans(weight.to(tl.bfloat16)), total, COMPILED)
    result_base = ((split.to(tl.int64) * SAMPLES + sample) * stack + row) * BATCH * UNITS
    tl.store(
        result_ptr + result_base + (examples[:, None] * UNITS + rows[None, :]),
        total,
        mask=(examples[:, None] < BATCH) & (rows[None, :] < UNITS),
    )


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    by_output_ptr,
    by_x_ptr,
    weight_ptr,
    weight_sum_ptr,
    logit_ptr,
    logit_sum_ptr,
    alpha_ptr,
    alpha_sum_ptr,
    beta_ptr,
    beta_sum_ptr,
    keep_ptr,
    size_ptr,
    gate_size_ptr,
    kl_scale_ptr,
    replica_ptr,
    step_ptr,
    seed,
    slab_scale,
    prior_alpha,
    prior_beta,
    epsilon,
    even,
    odd,
    BATCH: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SAMPLES: tl.constexpr,
    GATE: tl.constexpr,
    HYPER: tl.constexpr,
    SKEWED: tl.constexpr,
    SLAB: tl.constexpr,
    INSIDE: tl.constexpr,
    BY_X: tl.constexpr,
    UPDATE: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """by_x = G (W z) where BY_X, and where UPDATE a step of Adagrad on all that the product G^T x gives a gradient.

    Both sum over samples: by_output is (L, R, B, O). The grid is tiles of inputs, replicas, and tiles of the batch for
    BY_X alone. Both at once need one tile of the batch; UPDATE alone loops over tiles of the batch. Gates that learn by
    the score take their step in `gate_kernel`: they need no product, and one pass for both is slower.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    examples = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    first_i = tile * BLOCK_I
    columns = first_i + tl.arange(0, BLOCK_I)
    base = row.to(tl.int64) * UNITS * WIDTH
    x_base = row.to(tl.int64) * BATCH * WIDTH
    output_base = row.to(tl.int64) * BATCH * UNITS
    next_sample = tl.num_programs(1).to(tl.int64) * BATCH * UNITS
    x_places = examples[:, None] * WIDTH + columns[None, :]
    x_inside = (examples[:, None] < BATCH) & (columns[None, :] < WIDTH)
    if GATE > 0:
        replica = tl.load(replica_ptr + row).to(tl.int32)
        step = tl.load(step_ptr).to(tl.int32)
    if GATE == 1:
        rate = tl.load(keep_ptr + row)
    if UPDATE:
        size = tl.load(size_ptr + row)
        if GATE == 3:
            gate_size = tl.load(gate_size_ptr + row)
            kl_scale = tl.load(kl_scale_ptr + row)
    if BY_X:
        by_x = tl.zeros((BLOCK_B, BLOCK_I), tl.float32)
        if UPDATE:
            x = tl.load(x_ptr + x_base + x_places, mask=x_inside, other=0.0)
    for first_o in range(0, UNITS, BLOCK_O):
        rows = first_o + tl.arange(0, BLOCK_O)
        inside = (rows[:, None] < UNITS) & (columns[None, :] < WIDTH)
        places = rows[:, None] * WIDTH + columns[None, :]
        # All loads come first: what follows hides their latency. With several samples there are no registers for it.
        weight = tl.load(weight_ptr + base + places, mask=inside, other=0.0)
        if GATE > 1:
            logit = tl.load(logit_ptr + base + places, mask=inside, other=0.0)
        if BY_X and SAMPLES == 1:
            by_output = load_tile(by_output_ptr, output_base, examples, rows, BATCH, UNITS)
        if UPDATE and SAMPLES == 1:
            weight_sum = tl.load(weight_sum_ptr + base + places, mask=inside, other=1.0)
            if GATE == 3:
                logit_sum = tl.load(logit_sum_ptr + base + places, mask=inside, other=1.0)
        if GATE > 0:
            keep = rate if GATE == 1 else keep_of(logit, COMPILED)
        by_weight = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        by_gate = by_weight
        for sample in range(SAMPLES):
            place = output_base + sample * next_sample
            if BY_X and SAMPLES > 1:
                by_output = load_tile(by_output_ptr, place, examples, rows, BATCH, UNITS)
            if GATE > 0:
                on = noise_of(seed, sample, step, replica, first_o, first_i, WIDTH, BLOCK_O, BLOCK_I) < keep
                gated = tl.where(on, weight, 0.0).to(tl.bfloat16)
            else:
                gated = weight.to(tl.bfloat16)
            if BY_X:
                by_x = multiply(by_output, gated, by_x, COMPILED)
            if UPDATE:
                product = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
                if BY_X:
                    product = multiply(tl.trans(by_output), x, product, COMPILED)
                else:
                    for first_b in range(0, BATCH, BLOCK_B):
                        several = first_b + tl.arange(0, BLOCK_B)
                        some_x = load_tile(x_ptr, x_base, several, columns, BATCH, WIDTH)
                        some_output = load_tile(by_output_ptr, place, several, rows, BATCH, UNITS)
                        product = multiply(tl.trans(some_output), some_x, product, COMPILED)
                by_gate = product if SAMPLES == 1 else by_gate + product
                if GATE > 0:
                    product = tl.where(on, product, 0.0)
                by_weight = product if SAMPLES == 1 else by_weight + product
        if UPDATE:
            if SAMPLES > 1:
                weight_sum = tl.load(weight_sum_ptr + base + places, mask=inside, other=1.0)
                if GATE == 3:
                    logit_sum = tl.load(logit_sum_ptr + base + places, mask=inside, other=1.0)
            if SLAB:
                by_weight += slab_scale * keep * weight
            adagrad_step(
                weight_ptr, weight_sum_ptr, base, places, inside, weight, weight_sum, by_weight, size, epsilon, INSIDE
            )
            if GATE == 3:
                gate_step(
                    logit_ptr,
                    logit_sum_ptr,
                    alpha_ptr,
                    alpha_sum_ptr,
                    beta_ptr,
                    beta_sum_ptr,
                    base,
                    places,
                    inside,
                    logit,
                    logit_sum,
                    keep,
                    by_gate * weight,
                    weight,
                    kl_scale,
                    slab_scale,
                    prior_alpha,
                    prior_beta,
                    gate_size,
                    epsilon,
                    even,
                    odd,
                    GATE,
                    HYPER,
                    SKEWED,
                    SLAB,
                    INSIDE,
                )
    if BY_X:
        tl.store(by_x_ptr + x_base + x_places, by_x.to(tl.bfloat16), mask=x_inside)
