"""The Triton kernels behind `local`: imported only where Triton is installed.

COMPILED, HYPER, SKEWED, SLAB and INSIDE are as in `gates_triton`, and so are ``even`` and ``odd``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.lab.kernels.gates_triton import adagrad_step, gate_step
from dropconnectpp.lab.kernels.layer_triton import load_tile, multiply
from dropconnectpp.ops.gpu_triton import halves


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit
def squared(x):  # type: ignore[no-untyped-def]
    """x^2 of bfloat16 numbers, in float32 and rounded again."""
    wide = x.to(tl.float32)
    return (wide * wide).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def moments_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    logit_ptr,
    result_ptr,
    BATCH: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """x (pi~ W)^T and x^2 (pi~ (1 - pi~) W^2)^T over LENGTH inputs: partial sums, result is (splits, 2, R, B, O).

    The grid's first axis is tiles of units, then of the batch; the second is splits, the third replicas.
    """
    tile, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(UNITS, BLOCK_O)
    rows = (tile % tiles) * BLOCK_O + tl.arange(0, BLOCK_O)
    examples = (tile // tiles) * BLOCK_B + tl.arange(0, BLOCK_B)
    base = row.to(tl.int64) * UNITS * WIDTH
    x_base = row.to(tl.int64) * BATCH * WIDTH
    mean = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
    variance = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
    first = split * LENGTH
    for first_i in range(first, tl.minimum(first + LENGTH, WIDTH), BLOCK_I):
        columns = first_i + tl.arange(0, BLOCK_I)
        x = load_tile(x_ptr, x_base, examples, columns, BATCH, WIDTH)
        weight = load_tile(weight_ptr, base, rows, columns, UNITS, WIDTH)
        logit = load_tile(logit_ptr, base, rows, columns, UNITS, WIDTH)
        _, small, large, _ = halves(logit)
        gated = weight * tl.where(logit < 0, small, large)
        spread = weight * weight * (small * large)
        mean = multiply(x, tl.trans(gated.to(tl.bfloat16)), mean, COMPILED)
        variance = multiply(squared(x), tl.trans(spread.to(tl.bfloat16)), variance, COMPILED)
    inside = (examples[:, None] < BATCH) & (rows[None, :] < UNITS)
    places = examples[:, None] * UNITS + rows[None, :]
    number = split.to(tl.int64) * 2 * tl.num_programs(2) + row  # among the results' (B, O)
    tl.store(result_ptr + number * BATCH * UNITS + places, mean, mask=inside)
    tl.store(result_ptr + (number + tl.num_programs(2)) * BATCH * UNITS + places, variance, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def moments_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    by_moments_ptr,
    by_x_ptr,
    weight_ptr,
    weight_sum_ptr,
    logit_ptr,
    logit_sum_ptr,
    alpha_ptr,
    alpha_sum_ptr,
    beta_ptr,
    beta_sum_ptr,
    size_ptr,
    gate_size_ptr,
    kl_scale_ptr,
    slab_scale,
    prior_alpha,
    prior_beta,
    epsilon,
    even,
    odd,
    BATCH: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
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
    """by_x = G (pi~ W) + 2 x H (pi~ (1 - pi~) W^2) where BY_X, and where UPDATE a step of Adagrad on weight and gate.

    by_moments, (2, R, B, O), is G by the mean and H by the variance. The gradients are of A = G^T x and C = H^T x^2,
    which stay here. The grid is tiles of inputs, replicas, and tiles of the batch for BY_X alone. Both at once need one
    tile of the batch; UPDATE alone loops over tiles of the batch.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    examples = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    columns = tile * BLOCK_I + tl.arange(0, BLOCK_I)
    base = row.to(tl.int64) * UNITS * WIDTH
    x_base = row.to(tl.int64) * BATCH * WIDTH
    mean_base = row.to(tl.int64) * BATCH * UNITS
    variance_base = mean_base + tl.num_programs(1).to(tl.int64) * BATCH * UNITS
    if UPDATE:
        size = tl.load(size_ptr + row)
        gate_size = tl.load(gate_size_ptr + row)
        kl_scale = tl.load(kl_scale_ptr + row)
    if BY_X:
        if UPDATE:
            x = load_tile(x_ptr, x_base, examples, columns, BATCH, WIDTH)
        by_x = tl.zeros((BLOCK_B, BLOCK_I), tl.float32)
        by_square = tl.zeros((BLOCK_B, BLOCK_I), tl.float32)
    for first_o in range(0, UNITS, BLOCK_O):
        rows = first_o + tl.arange(0, BLOCK_O)
        inside = (rows[:, None] < UNITS) & (columns[None, :] < WIDTH)
        places = rows[:, None] * WIDTH + columns[None, :]
        weight = tl.load(weight_ptr + base + places, mask=inside, other=0.0)
        logit = tl.load(logit_ptr + base + places, mask=inside, other=0.0)
        if BY_X:
            by_mean = load_tile(by_moments_ptr, mean_base, examples, rows, BATCH, UNITS)
            by_variance = load_tile(by_moments_ptr, variance_base, examples, rows, BATCH, UNITS)
        _, small, large, t = halves(logit)
        keep = tl.where(logit < 0, small, large)
        spread = small * large * weight
        mean, variance = (keep * weight).to(tl.bfloat16), (spread * weight).to(tl.bfloat16)
        if UPDATE:
            through_mean = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
            through_variance = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
            if BY_X:
                through_mean = multiply(tl.trans(by_mean), x, through_mean, COMPILED)
                through_variance = multiply(tl.trans(by_variance), squared(x), through_variance, COMPILED)
            else:
                for first_b in range(0, BATCH, BLOCK_B):
                    several = first_b + tl.arange(0, BLOCK_B)
                    some_x = load_tile(x_ptr, x_base, several, columns, BATCH, WIDTH)
                    some = load_tile(by_moments_ptr, mean_base, several, rows, BATCH, UNITS)
                    through_mean = multiply(tl.trans(some), some_x, through_mean, COMPILED)
                    some = load_tile(by_moments_ptr, variance_base, several, rows, BATCH, UNITS)
                    through_variance = multiply(tl.trans(some), squared(some_x), through_variance, COMPILED)
            by_weight = keep * through_mean + 2.0 * spread * through_variance
            if SLAB:
                by_weight += slab_scale * keep * weight
            # 1 - 2 pi~ is minus the tangent, which loses no digits near 1/2.
            by_gate = weight * (through_mean + tl.where(logit < 0, t, -t) * weight * through_variance)
            # Registers are short: sums of squares come late, the gate steps first, and products for by_x come last.
            logit_sum = tl.load(logit_sum_ptr + base + places, mask=inside, other=1.0)
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
                by_gate,
                weight,
                kl_scale,
                slab_scale,
                prior_alpha,
                prior_beta,
                gate_size,
                epsilon,
                even,
                odd,
                3,  # the likelihood's gradient is by the gate
                HYPER,
                SKEWED,
                SLAB,
                INSIDE,
            )
            weight_sum = tl.load(weight_sum_ptr + base + places, mask=inside, other=1.0)
            adagrad_step(
                weight_ptr, weight_sum_ptr, base, places, inside, weight, weight_sum, by_weight, size, epsilon, INSIDE
            )
        if BY_X:
            by_x = multiply(by_mean, mean, by_x, COMPILED)
            by_square = multiply(by_variance, variance, by_square, COMPILED)
    if BY_X:
        x = load_tile(x_ptr, x_base, examples, columns, BATCH, WIDTH)
        by_x += 2.0 * x.to(tl.float32) * by_square
        x_places = examples[:, None] * WIDTH + columns[None, :]
        x_inside = (examples[:, None] < BATCH) & (columns[None, :] < WIDTH)
        tl.store(by_x_ptr + x_base + x_places, by_x.to(tl.bfloat16), mask=x_inside)
