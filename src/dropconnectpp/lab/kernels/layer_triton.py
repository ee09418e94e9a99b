"""The Triton kernels behind `layer`: imported only where Triton is installed.

GATE is 0 for open, 1 for a fixed rate, 2 for learned gates by the score, 3 for learned gates straight through.
COMPILED, SAMPLES and TERMS are those of `gates_triton`. With constant SIZES a kernel needs a third fewer registers.
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
    draws,
    result_ptr,
    stack,
    SIZES,
    TILE,
    LENGTH: tl.constexpr,
    SAMPLES: tl.constexpr,
    GATE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """x (W z)^T over LENGTH inputs: a partial sum, result is (splits, L, R, B, O).

    The grid's first axis is samples, which share all they load, then tiles of units, then of the batch; the second is
    splits, the third replicas.
    """
    tile, sample = tl.program_id(0), 0
    if SAMPLES > 1:
        sample, tile = tile % SAMPLES, tile // SAMPLES
    tiles = tl.cdiv(SIZES.units, TILE.units)
    first_o = (tile % tiles) * TILE.units
    split, row = tl.program_id(1), tl.program_id(2)
    rows = first_o + tl.arange(0, TILE.units)
    examples = (tile // tiles) * TILE.batch + tl.arange(0, TILE.batch)
    base = row.to(tl.int64) * SIZES.units * SIZES.inputs
    x_base = row.to(tl.int64) * SIZES.batch * SIZES.inputs
    if GATE > 0:
        replica = tl.load(draws.replica + row).to(tl.int32)
        step = tl.load(draws.step).to(tl.int32)
    if GATE == 1:
        rate = tl.load(keep_ptr + row)
    total = tl.zeros((TILE.batch, TILE.units), tl.float32)
    first = split * LENGTH
    for first_i in range(first, tl.minimum(first + LENGTH, SIZES.inputs), TILE.inputs):
        columns = first_i + tl.arange(0, TILE.inputs)
        inside = (rows[:, None] < SIZES.units) & (columns[None, :] < SIZES.inputs)
        places = rows[:, None] * SIZES.inputs + columns[None, :]
        x = tl.load(
            x_ptr + x_base + (examples[:, None] * SIZES.inputs + columns[None, :]),
            mask=(examples[:, None] < SIZES.batch) & (columns[None, :] < SIZES.inputs),
            other=0.0,
        )
        weight = tl.load(weight_ptr + base + places, mask=inside, other=0.0)
        if GATE > 1:
            logit = tl.load(logit_ptr + base + places, mask=inside, other=0.0)
        if GATE > 0:
            keep = rate if GATE == 1 else keep_of(logit, COMPILED)
            noise = noise_of(draws.seed, sample, step, replica, first_o, first_i, SIZES.inputs, TILE.units, TILE.inputs)
            weight = tl.where(noise < keep, weight, 0.0)
        total = multiply(x, tl.trans(weight.to(tl.bfloat16)), total, COMPILED)
    result_base = ((split.to(tl.int64) * SAMPLES + sample) * stack + row) * SIZES.batch * SIZES.units
    tl.store(
        result_ptr + result_base + (examples[:, None] * SIZES.units + rows[None, :]),
        total,
        mask=(examples[:, None] < SIZES.batch) & (rows[None, :] < SIZES.units),
    )


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    grad_output_ptr,
    grad_x_ptr,
    weights,
    size_ptr,
    gate,
    keep_ptr,
    draws,
    SIZES,
    TILE,
    TERMS,
    GRAD_X: tl.constexpr,
    UPDATE: tl.constexpr,
    SAMPLES: tl.constexpr,
    GATE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Where GRAD_X, G (W z); where UPDATE, a step of Adagrad on all whose gradient comes of the product G^T x.

    Both sum over samples: G is grad_output, (L, R, B, O). The grid is tiles of inputs, replicas, and tiles of the batch
    for GRAD_X alone. Both at once need one tile of the batch; UPDATE alone loops over tiles of the batch. Gates that
    learn by the score take their step in `gate_kernel`: they need no product, and one pass for both is slower.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    examples = tl.program_id(2) * TILE.batch + tl.arange(0, TILE.batch)
    first_i = tile * TILE.inputs
    columns = first_i + tl.arange(0, TILE.inputs)
    base = row.to(tl.int64) * SIZES.units * SIZES.inputs
    x_base = row.to(tl.int64) * SIZES.batch * SIZES.inputs
    output_base = row.to(tl.int64) * SIZES.batch * SIZES.units
    next_sample = tl.num_programs(1).to(tl.int64) * SIZES.batch * SIZES.units
    x_places = examples[:, None] * SIZES.inputs + columns[None, :]
    x_inside = (examples[:, None] < SIZES.batch) & (columns[None, :] < SIZES.inputs)
    if GATE > 0:
        replica = tl.load(draws.replica + row).to(tl.int32)
        step = tl.load(draws.step).to(tl.int32)
    if GATE == 1:
        rate = tl.load(keep_ptr + row)
    if UPDATE:
        size = tl.load(size_ptr + row)
        if GATE == 3:
            gate_size = tl.load(gate.size + row)
            kl_scale = tl.load(gate.kl_scale + row)
    if GRAD_X:
        grad_x = tl.zeros((TILE.batch, TILE.inputs), tl.float32)
        if UPDATE:
            x = tl.load(x_ptr + x_base + x_places, mask=x_inside, other=0.0)
    for first_o in range(0, SIZES.units, TILE.units):
        rows = first_o + tl.arange(0, TILE.units)
        inside = (rows[:, None] < SIZES.units) & (columns[None, :] < SIZES.inputs)
        places = rows[:, None] * SIZES.inputs + columns[None, :]
        # All loads come first: what follows hides their latency. With several samples there are no registers for it.
        weight = tl.load(weights.value + base + places, mask=inside, other=0.0)
        if GATE > 1:
            logit = tl.load(gate.logit.value + base + places, mask=inside, other=0.0)
        if GRAD_X and SAMPLES == 1:
            grad_output = load_tile(grad_output_ptr, output_base, examples, rows, SIZES.batch, SIZES.units)
        if UPDATE and SAMPLES == 1:
            weight_squares = tl.load(weights.squares + base + places, mask=inside, other=1.0)
            if GATE == 3:
                logit_squares = tl.load(gate.logit.squares + base + places, mask=inside, other=1.0)
        if GATE > 0:
            keep = rate if GATE == 1 else keep_of(logit, COMPILED)
        grad_weight = tl.zeros((TILE.units, TILE.inputs), tl.float32)
        grad_gate = grad_weight
        for sample in range(SAMPLES):
            place = output_base + sample * next_sample
            if GRAD_X and SAMPLES > 1:
                grad_output = load_tile(grad_output_ptr, place, examples, rows, SIZES.batch, SIZES.units)
            if GATE > 0:
                noise = noise_of(
                    draws.seed, sample, step, replica, first_o, first_i, SIZES.inputs, TILE.units, TILE.inputs
                )
                on = noise < keep
                gated = tl.where(on, weight, 0.0).to(tl.bfloat16)
            else:
                gated = weight.to(tl.bfloat16)
            if GRAD_X:
                grad_x = multiply(grad_output, gated, grad_x, COMPILED)
            if UPDATE:
                product = tl.zeros((TILE.units, TILE.inputs), tl.float32)
                if GRAD_X:
                    product = multiply(tl.trans(grad_output), x, product, COMPILED)
                else:
                    for first_b in range(0, SIZES.batch, TILE.batch):
                        several = first_b + tl.arange(0, TILE.batch)
                        some_x = load_tile(x_ptr, x_base, several, columns, SIZES.batch, SIZES.inputs)
                        some_output = load_tile(grad_output_ptr, place, several, rows, SIZES.batch, SIZES.units)
                        product = multiply(tl.trans(some_output), some_x, product, COMPILED)
                grad_gate = product if SAMPLES == 1 else grad_gate + product
                if GATE > 0:
                    product = tl.where(on, product, 0.0)
                grad_weight = product if SAMPLES == 1 else grad_weight + product
        if UPDATE:
            if SAMPLES > 1:
                weight_squares = tl.load(weights.squares + base + places, mask=inside, other=1.0)
                if GATE == 3:
                    logit_squares = tl.load(gate.logit.squares + base + places, mask=inside, other=1.0)
            if TERMS.slab:
                grad_weight += gate.slab_scale * keep * weight
            adagrad_step(
                weights, base, places, inside, weight, weight_squares, grad_weight, size, gate.epsilon, TERMS.inside
            )
            if GATE == 3:
                gate_step(
                    gate, base, places, inside, logit, logit_squares, keep, grad_gate * weight, weight, kl_scale,
                    gate_size, TERMS, GATE,
                )  # fmt: skip
    if GRAD_X:
        tl.store(grad_x_ptr + x_base + x_places, grad_x.to(tl.bfloat16), mask=x_inside)
