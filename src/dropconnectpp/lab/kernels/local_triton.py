"""The Triton kernels behind `local`: imported only where Triton is installed.

COMPILED and TERMS are as in `gates_triton`.
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
    SIZES,
    TILE,
    LENGTH: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """x (pi~ W)^T and x^2 (pi~ (1 - pi~) W^2)^T over LENGTH inputs: partial sums, result is (splits, 2, R, B, O).

    The grid's first axis is tiles of units, then of the batch; the second is splits, the third replicas.
    """
    tile, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(SIZES.units, TILE.units)
    rows = (tile % tiles) * TILE.units + tl.arange(0, TILE.units)
    examples = (tile // tiles) * TILE.batch + tl.arange(0, TILE.batch)
    base = row.to(tl.int64) * SIZES.units * SIZES.inputs
    x_base = row.to(tl.int64) * SIZES.batch * SIZES.inputs
    mean = tl.zeros((TILE.batch, TILE.units), tl.float32)
    variance = tl.zeros((TILE.batch, TILE.units), tl.float32)
    first = split * LENGTH
    for first_i in range(first, tl.minimum(first + LENGTH, SIZES.inputs), TILE.inputs):
        columns = first_i + tl.arange(0, TILE.inputs)
        x = load_tile(x_ptr, x_base, examples, columns, SIZES.batch, SIZES.inputs)
        weight = load_tile(weight_ptr, base, rows, columns, SIZES.units, SIZES.inputs)
        logit = load_tile(logit_ptr, base, rows, columns, SIZES.units, SIZES.inputs)
        _, small, large, _ = halves(logit)
        gated = weight * tl.where(logit < 0, small, large)
        spread = weight * weight * (small * large)
        mean = multiply(x, tl.trans(gated.to(tl.bfloat16)), mean, COMPILED)
        variance = multiply(squared(x), tl.trans(spread.to(tl.bfloat16)), variance, COMPILED)
    inside = (examples[:, None] < SIZES.batch) & (rows[None, :] < SIZES.units)
    places = examples[:, None] * SIZES.units + rows[None, :]
    number = split.to(tl.int64) * 2 * tl.num_programs(2) + row  # among the results' (B, O)
    tl.store(result_ptr + number * SIZES.batch * SIZES.units + places, mean, mask=inside)
    tl.store(result_ptr + (number + tl.num_programs(2)) * SIZES.batch * SIZES.units + places, variance, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def moments_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    grad_moments_ptr,
    grad_x_ptr,
    weights,
    size_ptr,
    gate,
    SIZES,
    TILE,
    TERMS,
    GRAD_X: tl.constexpr,
    UPDATE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Where GRAD_X, G (pi~ W) + 2 x H (pi~ (1 - pi~) W^2); where UPDATE, a step of Adagrad on weight and gate.

    grad_moments, (2, R, B, O), is G by the mean and H by the variance. The step's gradients come of G^T x and H^T x^2,
    which stay here. The grid is tiles of inputs, replicas, and tiles of the batch for GRAD_X alone. Both at once need
    one tile of the batch; UPDATE alone loops over tiles of the batch.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    examples = tl.program_id(2) * TILE.batch + tl.arange(0, TILE.batch)
    columns = tile * TILE.inputs + tl.arange(0, TILE.inputs)
    base = row.to(tl.int64) * SIZES.units * SIZES.inputs
    x_base = row.to(tl.int64) * SIZES.batch * SIZES.inputs
    mean_base = row.to(tl.int64) * SIZES.batch * SIZES.units
    variance_base = mean_base + tl.num_programs(1).to(tl.int64) * SIZES.batch * SIZES.units
    if UPDATE:
        size = tl.load(size_ptr + row)
        gate_size = tl.load(gate.size + row)
        kl_scale = tl.load(gate.kl_scale + row)
    if GRAD_X:
        if UPDATE:
            x = load_tile(x_ptr, x_base, examples, columns, SIZES.batch, SIZES.inputs)
        grad_x = tl.zeros((TILE.batch, TILE.inputs), tl.float32)
        grad_square = tl.zeros((TILE.batch, TILE.inputs), tl.float32)
    for first_o in range(0, SIZES.units, TILE.units):
        rows = first_o + tl.arange(0, TILE.units)
        inside = (rows[:, None] < SIZES.units) & (columns[None, :] < SIZES.inputs)
        places = rows[:, None] * SIZES.inputs + columns[None, :]
        weight = tl.load(weights.value + base + places, mask=inside, other=0.0)
        logit = tl.load(gate.logit.value + base + places, mask=inside, other=0.0)
        if GRAD_X:
            grad_mean = load_tile(grad_moments_ptr, mean_base, examples, rows, SIZES.batch, SIZES.units)
            grad_variance = load_tile(grad_moments_ptr, variance_base, examples, rows, SIZES.batch, SIZES.units)
        _, small, large, t = halves(logit)
        keep = tl.where(logit < 0, small, large)
        spread = small * large * weight
        mean, variance = (keep * weight).to(tl.bfloat16), (spread * weight).to(tl.bfloat16)
        if UPDATE:
            through_mean = tl.zeros((TILE.units, TILE.inputs), tl.float32)
            through_variance = tl.zeros((TILE.units, TILE.inputs), tl.float32)
            if GRAD_X:
                through_mean = multiply(tl.trans(grad_mean), x, through_mean, COMPILED)
                through_variance = multiply(tl.trans(grad_variance), squared(x), through_variance, COMPILED)
            else:
                for first_b in range(0, SIZES.batch, TILE.batch):
                    several = first_b + tl.arange(0, TILE.batch)
                    some_x = load_tile(x_ptr, x_base, several, columns, SIZES.batch, SIZES.inputs)
                    some = load_tile(grad_moments_ptr, mean_base, several, rows, SIZES.batch, SIZES.units)
                    through_mean = multiply(tl.trans(some), some_x, through_mean, COMPILED)
                    some = load_tile(grad_moments_ptr, variance_base, several, rows, SIZES.batch, SIZES.units)
                    through_variance = multiply(tl.trans(some), squared(some_x), through_variance, COMPILED)
            grad_weight = keep * through_mean + 2.0 * spread * through_variance
            if TERMS.slab:
                grad_weight += gate.slab_scale * keep * weight
            # 1 - 2 pi~ is minus the tangent, which loses no digits near 1/2.
            grad_gate = weight * (through_mean + tl.where(logit < 0, t, -t) * weight * through_variance)
            # Registers are short: sums of squares come late, the gate steps first, and products for grad_x come last.
            logit_squares = tl.load(gate.logit.squares + base + places, mask=inside, other=1.0)
            # 3: the likelihood's gradient is by the gate.
            gate_step(
                gate, base, places, inside, logit, logit_squares, keep, grad_gate, weight, kl_scale, gate_size, TERMS, 3
            )
            weight_squares = tl.load(weights.squares + base + places, mask=inside, other=1.0)
            adagrad_step(
                weights, base, places, inside, weight, weight_squares, grad_weight, size, gate.epsilon, TERMS.inside
            )
        if GRAD_X:
            grad_x = multiply(grad_mean, mean, grad_x, COMPILED)
            grad_square = multiply(grad_variance, variance, grad_square, COMPILED)
    if GRAD_X:
        x = load_tile(x_ptr, x_base, examples, columns, SIZES.batch, SIZES.inputs)
        grad_x += 2.0 * x.to(tl.float32) * grad_square
        x_places = examples[:, None] * SIZES.inputs + columns[None, :]
        x_inside = (examples[:, None] < SIZES.batch) & (columns[None, :] < SIZES.inputs)
        tl.store(grad_x_ptr + x_base + x_places, grad_x.to(tl.bfloat16), mask=x_inside)
