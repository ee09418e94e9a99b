"""The Triton kernels behind `head`: imported only where Triton is installed.

``inputs`` are `HeadInputs`. GATE says how the bias is gated: 0 for open, 1 for a fixed rate, 2 for learned gates by the
score, 3 for learned gates straight through, 4 for gates that act as noise, whose sums are two moments. DROPPED is for
units that are dropped.
Products of float32 go through tensor cores in three parts, which keeps the digits that one part would lose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.lab.kernels.gates_triton import keep_of, noise_of
from dropconnectpp.lab.kernels.layer_triton import load_tile


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def bias_tile(  # type: ignore[no-untyped-def]
    inputs, row, first_o, UNITS: tl.constexpr, BLOCK_O: tl.constexpr, GATE: tl.constexpr, COMPILED: tl.constexpr
):
    """A tile of one replica's bias and, where it is learned, of pi~ and 1 - pi~, both to all digits: (1, BLOCK_O)."""
    units = first_o + tl.arange(0, BLOCK_O)[None, :]
    bias = tl.load(inputs.bias + row * UNITS + units, mask=units < UNITS, other=0.0)
    keep, drop = bias, bias
    if GATE > 1:
        logit = tl.load(inputs.logit + row * UNITS + units, mask=units < UNITS, other=0.0)
        keep = keep_of(logit, COMPILED)
        drop = tl.where(logit < 0, 1.0 - keep, tl.exp(-tl.abs(logit)) * keep)
    return bias, keep, drop


@triton.jit  # type: ignore[untyped-decorator]
def sums_with_bias(  # type: ignore[no-untyped-def]
    inputs,
    line,
    rate,
    sample,
    row,
    step,
    replica,
    stack,
    examples,
    first_o,
    SIZES,
    BLOCK_O: tl.constexpr,
    GATE: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """A tile of one sample's sums with their bias, the bias's gates, and for noise the gradient by the variance.

    ``line`` is what `bias_tile` gives.
    """
    bias, keep, drop = line
    units = first_o + tl.arange(0, BLOCK_O)
    block = row.to(tl.int64) * SIZES.batch * SIZES.units
    next_one = stack.to(tl.int64) * SIZES.batch * SIZES.units
    on, chain = bias, bias
    if GATE == 4:
        mean = load_tile(inputs.sums, block, examples, units, SIZES.batch, SIZES.units) + keep * bias
        variance = load_tile(inputs.sums, next_one + block, examples, units, SIZES.batch, SIZES.units)
        variance += keep * drop * bias * bias
        noise = load_tile(inputs.noise, sample * next_one + block, examples, units, SIZES.batch, SIZES.units)
        root = tl.sqrt(tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL) + MARGIN)
        chain = tl.where(variance < 0.0, 0.0, 0.5 * noise / root)
        before = mean + root * noise
    else:
        before = load_tile(inputs.sums, sample * next_one + block, examples, units, SIZES.batch, SIZES.units)
        if GATE == 0:
            before += bias
        else:
            chance = rate if GATE == 1 else keep
            on = tl.where(
                noise_of(inputs.draws.seed, sample, step, replica, 0, first_o, SIZES.units, 1, BLOCK_O) < chance,
                1.0,
                0.0,
            )
            before += on * bias
    return before, on, chain


@triton.jit  # type: ignore[untyped-decorator]
def unit_factor(  # type: ignore[no-untyped-def]
    seed, sample, step, replica, keep, first_b, first_o, UNITS: tl.constexpr, TILE
):
    """What Dropout multiplies a tile of units by: 0, or 1 over the share that is kept."""
    noise = noise_of(seed, sample, step, replica, first_b, first_o, UNITS, TILE.batch, TILE.units)
    return tl.where(noise < keep, 1.0 / keep, 0.0)


@triton.jit
def rectified(before):  # type: ignore[no-untyped-def]
    """ReLU. NaN stays NaN, or a network that diverged would seem to be well."""
    return tl.maximum(before, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def likelihood_kernel(  # type: ignore[no-untyped-def]
    inputs,
    output_bias_ptr,
    label_ptr,
    grad_scores_ptr,
    partial_ptr,
    SIZES,
    TILE,
    SAMPLES: tl.constexpr,
    GATE: tl.constexpr,
    DROPPED: tl.constexpr,
    MARGIN: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """The loss's gradient by the output layer's scores, (L, R, B, K), and sums of log-likelihoods, (tiles, L, R).

    The grid is tiles of the batch, replicas, samples.
    """
    tile, row, sample, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    place = sample * stack + row
    first_b = tile * TILE.batch
    examples, classes = first_b + tl.arange(0, TILE.batch), tl.arange(0, TILE.classes)
    replica, step = tl.load(inputs.draws.replica + row).to(tl.int32), tl.load(inputs.draws.step).to(tl.int32)
    rate, unit_keep = 1.0, 1.0
    if GATE == 1:
        rate = tl.load(inputs.keep + row)
    if DROPPED:
        unit_keep = tl.load(inputs.unit_keep + row)
    scores = tl.zeros((TILE.batch, TILE.classes), tl.float32)
    for first_o in range(0, SIZES.units, TILE.units):
        line = bias_tile(inputs, row, first_o, SIZES.units, TILE.units, GATE, COMPILED)
        before, _, _ = sums_with_bias(
            inputs, line, rate, sample, row, step, replica, stack, examples, first_o, SIZES, TILE.units, GATE, MARGIN
        )
        hidden = rectified(before)
        if DROPPED:
            hidden *= unit_factor(
                inputs.unit_seed, sample, step, replica, unit_keep, first_b, first_o, SIZES.units, TILE
            )
        units = first_o + tl.arange(0, TILE.units)
        weight_base = row.to(tl.int64) * SIZES.classes * SIZES.units
        weight = load_tile(inputs.weight, weight_base, classes, units, SIZES.classes, SIZES.units)
        scores = tl.dot(hidden, tl.trans(weight), scores, input_precision="tf32x3")
    scores += tl.load(output_bias_ptr + row * SIZES.classes + classes, mask=classes < SIZES.classes, other=0.0)[None, :]
    scores = tl.where(classes[None, :] < SIZES.classes, scores, -float("inf"))
    label = tl.load(label_ptr + row.to(tl.int64) * SIZES.batch + examples, mask=examples < SIZES.batch, other=0)
    chosen = classes[None, :] == label[:, None]
    top = tl.max(scores, axis=1)
    powers = tl.exp(scores - top[:, None])
    total = tl.sum(powers, axis=1)
    found = tl.sum(tl.where(chosen, scores, 0.0), axis=1) - top - tl.log(total)
    tl.store(partial_ptr + tile * SAMPLES * stack + place, tl.sum(tl.where(examples < SIZES.batch, found, 0.0), axis=0))
    grad_scores = (powers / total[:, None] - tl.where(chosen, 1.0, 0.0)) * (1.0 / (SAMPLES * SIZES.batch))
    scores_base = place.to(tl.int64) * SIZES.batch * SIZES.classes
    tl.store(
        grad_scores_ptr + scores_base + (examples[:, None] * SIZES.classes + classes[None, :]),
        grad_scores,
        mask=(examples[:, None] < SIZES.batch) & (classes[None, :] < SIZES.classes),
    )


@triton.jit  # type: ignore[untyped-decorator]
def gradient_kernel(  # type: ignore[no-untyped-def]
    inputs,
    grad_scores_ptr,
    partial_ptr,
    result,
    slab_scale,
    SIZES,
    TILE,
    PARTS: tl.constexpr,
    SAMPLES: tl.constexpr,
    GATE: tl.constexpr,
    DROPPED: tl.constexpr,
    MARGIN: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """All other gradients, from that of `likelihood_kernel`, and mean log-likelihoods (L, R): a `HeadResult`.

    The grid is tiles of units, replicas. Gradients by the sums are (L, R, B, O), or by the moments (2, R, B, O).
    """
    tile, row, stack = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first_o = tile * TILE.units
    units, classes = first_o + tl.arange(0, TILE.units), tl.arange(0, TILE.classes)
    replica, step = tl.load(inputs.draws.replica + row).to(tl.int32), tl.load(inputs.draws.step).to(tl.int32)
    rate, unit_keep = 1.0, 1.0
    if GATE == 1:
        rate = tl.load(inputs.keep + row)
    if DROPPED:
        unit_keep = tl.load(inputs.unit_keep + row)
    line = bias_tile(inputs, row, first_o, SIZES.units, TILE.units, GATE, COMPILED)
    bias, keep, drop = line
    weight_base = row.to(tl.int64) * SIZES.classes * SIZES.units
    weight = load_tile(inputs.weight, weight_base, classes, units, SIZES.classes, SIZES.units)
    grad_weight = tl.zeros((TILE.classes, TILE.units), tl.float32)
    grad_output_bias = tl.zeros((TILE.classes,), tl.float32)
    # By the gated bias, and with gates as noise by its mean and variance.
    grad_bias = tl.zeros((1, TILE.units), tl.float32)
    grad_gate, grad_variance = grad_bias, grad_bias
    block = row.to(tl.int64) * SIZES.batch * SIZES.units
    next_one = stack.to(tl.int64) * SIZES.batch * SIZES.units
    for first_b in range(0, SIZES.batch, TILE.batch):
        examples = first_b + tl.arange(0, TILE.batch)
        places = examples[:, None] * SIZES.units + units[None, :]
        inside = (examples[:, None] < SIZES.batch) & (units[None, :] < SIZES.units)
        tile_grad_mean = tl.zeros((TILE.batch, TILE.units), tl.float32)
        tile_grad_variance = tile_grad_mean
        for sample in range(SAMPLES):
            before, on, chain = sums_with_bias(
                inputs,
                line,
                rate,
                sample,
                row,
                step,
                replica,
                stack,
                examples,
                first_o,
                SIZES,
                TILE.units,
                GATE,
                MARGIN,
            )
            base = (sample * stack + row).to(tl.int64) * SIZES.batch * SIZES.classes
            grad_scores = load_tile(grad_scores_ptr, base, examples, classes, SIZES.batch, SIZES.classes)
            hidden = rectified(before)
            grad_before = tl.dot(grad_scores, weight, input_precision="tf32x3")
            if DROPPED:
                factor = unit_factor(
                    inputs.unit_seed, sample, step, replica, unit_keep, first_b, first_o, SIZES.units, TILE
                )
                hidden *= factor
                grad_before *= factor
            grad_before = tl.where(before <= 0.0, 0.0, grad_before)
            grad_weight = tl.dot(tl.trans(grad_scores), hidden, grad_weight, input_precision="tf32x3")
            grad_output_bias += tl.sum(grad_scores, axis=0)
            if GATE == 4:
                tile_grad_mean += grad_before
                tile_grad_variance += grad_before * chain
            else:
                found = tl.sum(grad_before, axis=0)[None, :]
                grad_gate += found
                grad_bias += found * on if GATE > 0 else found
                own = result.grad_sums + sample * next_one + block
                tl.store(own + places, grad_before.to(tl.bfloat16), mask=inside)
        if GATE == 4:
            grad_gate += tl.sum(tile_grad_mean, axis=0)[None, :]
            grad_variance += tl.sum(tile_grad_variance, axis=0)[None, :]
            tl.store(result.grad_sums + block + places, tile_grad_mean.to(tl.bfloat16), mask=inside)
            tl.store(result.grad_sums + next_one + block + places, tile_grad_variance.to(tl.bfloat16), mask=inside)
    real = units[None, :] < SIZES.units
    if GATE == 4:
        grad_bias = keep * grad_gate + 2.0 * keep * drop * bias * grad_variance
        grad_gate += (drop - keep) * bias * grad_variance
    if GATE > 2:
        grad_logit = grad_gate * bias * keep * drop
        tl.store(result.grad_logit + row * SIZES.units + units[None, :], grad_logit, mask=real)
    if GATE > 0:
        grad_bias += slab_scale * (rate if GATE == 1 else keep) * bias
    tl.store(result.grad_bias + row * SIZES.units + units[None, :], grad_bias, mask=real)
    tl.store(
        result.grad_weight + weight_base + (classes[:, None] * SIZES.units + units[None, :]),
        grad_weight,
        mask=(classes[:, None] < SIZES.classes) & (units[None, :] < SIZES.units),
    )
    if tile == 0:
        tl.store(
            result.grad_output_bias + row * SIZES.classes + classes, grad_output_bias, mask=classes < SIZES.classes
        )
        for sample in range(SAMPLES):
            total = 0.0
            for part in range(PARTS):
                total += tl.load(partial_ptr + (part * SAMPLES + sample) * stack + row)
            tl.store(result.rewards + sample * stack + row, total / SIZES.batch)
