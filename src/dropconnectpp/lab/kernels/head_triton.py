"""The Triton kernels behind `head`: imported only where Triton is installed.

GATE says how the bias is gated: 0 for open, 1 for a fixed rate, 2 for learned gates by the score, 3 for learned gates
straight through, 4 for gates that act as noise; then sums are two moments. DROPPED is for units that are dropped.
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
    bias_ptr,
    logit_ptr,
    row,
    first_o,
    UNITS: tl.constexpr,
    GATE: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """A tile of one replica's bias and, where it is learned, of pi~ and 1 - pi~, both to all digits: (1, BLOCK_O)."""
    units = first_o + tl.arange(0, BLOCK_O)[None, :]
    bias = tl.load(bias_ptr + row * UNITS + units, mask=units < UNITS, other=0.0)
    keep, drop = bias, bias
    if GATE > 1:
        logit = tl.load(logit_ptr + row * UNITS + units, mask=units < UNITS, other=0.0)
        keep = keep_of(logit, COMPILED)
        drop = tl.where(logit < 0, 1.0 - keep, tl.exp(-tl.abs(logit)) * keep)
    return bias, keep, drop


@triton.jit  # type: ignore[untyped-decorator]
def sums_with_bias(  # type: ignore[no-untyped-def]
    sums_ptr,
    noise_ptr,
    bias,
    keep,
    drop,
    rate,
    seed,
    sample,
    row,
    step,
    replica,
    stack,
    examples,
    first_o,
    BATCH: tl.constexpr,
    UNITS: tl.constexpr,
    GATE: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """A tile of one sample's sums with their bias, the bias's gates, and for noise the slope by the variance."""
    units = first_o + tl.arange(0, BLOCK_O)
    block = row.to(tl.int64) * BATCH * UNITS
    next_one = stack.to(tl.int64) * BATCH * UNITS
    on, slope = bias, bias
    if GATE == 4:
        mean = load_tile(sums_ptr, block, examples, units, BATCH, UNITS) + keep * bias
        variance = load_tile(sums_ptr, next_one + block, examples, units, BATCH, UNITS)
        variance += keep * drop * bias * bias
        noise = load_tile(noise_ptr, sample * next_one + block, examples, units, BATCH, UNITS)
        root = tl.sqrt(tl.maximum(variance, 0.0, propagate_nan=tl.PropagateNan.ALL) + MARGIN)
        slope = tl.where(variance < 0.0, 0.0, 0.5 * noise / root)
        before = mean + root * noise
    else:
        before = load_tile(sums_ptr, sample * next_one + block, examples, units, BATCH, UNITS)
        if GATE == 0:
            before += bias
        else:
            chance = rate if GATE == 1 else keep
            on = tl.where(noise_of(seed, sample, step, replica, 0, first_o, UNITS, 1, BLOCK_O) < chance, 1.0, 0.0)
            before += on * bias
    return before, on, slope


@triton.jit  # type: ignore[untyped-decorator]
def unit_factor(  # type: ignore[no-untyped-def]
    seed,
    sample,
    step,
    replica,
    keep,
    first_b,
    first_o,
    UNITS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """What Dropout multiplies a tile of units by: 0, or 1 over the share that is kept."""
    noise = noise_of(seed, sample, step, replica, first_b, first_o, UNITS, BLOCK_B, BLOCK_O)
    return tl.where(noise < keep, 1.0 / keep, 0.0)


@triton.jit
def rectified(before):  # type: ignore[no-untyped-def]
    """ReLU; what is not a number stays so, or a network that diverged would look well."""
    return tl.maximum(before, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def likelihood_kernel(  # type: ignore[no-untyped-def]
    sums_ptr,
    noise_ptr,
    bias_ptr,
    logit_ptr,
    keep_ptr,
    unit_keep_ptr,
    weight_ptr,
    output_bias_ptr,
    label_ptr,
    replica_ptr,
    step_ptr,
    by_class_ptr,
    partial_ptr,
    seed,
    unit_seed,
    BATCH: tl.constexpr,
    UNITS: tl.constexpr,
    CLASSES: tl.constexpr,
    SAMPLES: tl.constexpr,
    GATE: tl.constexpr,
    DROPPED: tl.constexpr,
    MARGIN: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The loss's gradient by what the output layer gives, (L, R, B, K), and sums of log-likelihoods, (tiles, L, R).

    The grid is tiles of the batch, replicas, samples.
    """
    tile, row, sample, stack = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    place = sample * stack + row
    first_b = tile * BLOCK_B
    examples, classes = first_b + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_K)
    replica, step = tl.load(replica_ptr + row).to(tl.int32), tl.load(step_ptr).to(tl.int32)
    rate, unit_keep = 1.0, 1.0
    if GATE == 1:
        rate = tl.load(keep_ptr + row)
    if DROPPED:
        unit_keep = tl.load(unit_keep_ptr + row)
    scores = tl.zeros((BLOCK_B, BLOCK_K), tl.float32)
    for first_o in range(0, UNITS, BLOCK_O):
        bias, keep, drop = bias_tile(bias_ptr, logit_ptr, row, first_o, UNITS, GATE, COMPILED, BLOCK_O)
        before, _, _ = sums_with_bias(
            sums_ptr, noise_ptr, bias, keep, drop, rate, seed, sample, row, step, replica, stack, examples, first_o,
            BATCH, UNITS, GATE, MARGIN, BLOCK_O,
        )  # fmt: skip
        hidden = rectified(before)
        if DROPPED:
            hidden *= unit_factor(
                unit_seed, sample, step, replica, unit_keep, first_b, first_o, UNITS, BLOCK_B, BLOCK_O
            )
        units = first_o + tl.arange(0, BLOCK_O)
        weight = load_tile(weight_ptr, row.to(tl.int64) * CLASSES * UNITS, classes, units, CLASSES, UNITS)
        scores = tl.dot(hidden, tl.trans(weight), scores, input_precision="tf32x3")
    scores += tl.load(output_bias_ptr + row * CLASSES + classes, mask=classes < CLASSES, other=0.0)[None, :]
    scores = tl.where(classes[None, :] < CLASSES, scores, -float("inf"))
    label = tl.load(label_ptr + row.to(tl.int64) * BATCH + examples, mask=examples < BATCH, other=0)
    chosen = classes[None, :] == label[:, None]
    top = tl.max(scores, axis=1)
    powers = tl.exp(scores - top[:, None])
    total = tl.sum(powers, axis=1)
    found = tl.sum(tl.where(chosen, scores, 0.0), axis=1) - top - tl.log(total)
    tl.store(partial_ptr + tile * SAMPLES * stack + place, tl.sum(tl.where(examples < BATCH, found, 0.0), axis=0))
    by_class = (powers / total[:, None] - tl.where(chosen, 1.0, 0.0)) * (1.0 / (SAMPLES * BATCH))
    tl.store(
        by_class_ptr + place.to(tl.int64) * BATCH * CLASSES + (examples[:, None] * CLASSES + classes[None, :]),
        by_class,
        mask=(examples[:, None] < BATCH) & (classes[None, :] < CLASSES),
    )


@triton.jit  # type: ignore[untyped-decorator]
def gradient_kernel(  # type: ignore[no-untyped-def]
    sums_ptr,
    noise_ptr,
    bias_ptr,
    logit_ptr,
    keep_ptr,
    unit_keep_ptr,
    weight_ptr,
    replica_ptr,
    step_ptr,
    by_class_ptr,
    partial_ptr,
    reward_ptr,
    by_sums_ptr,
    by_bias_ptr,
    by_logit_ptr,
    by_weight_ptr,
    by_output_bias_ptr,
    seed,
    unit_seed,
    slab_scale,
    BATCH: tl.constexpr,
    UNITS: tl.constexpr,
    CLASSES: tl.constexpr,
    SAMPLES: tl.constexpr,
    TILES: tl.constexpr,
    GATE: tl.constexpr,
    DROPPED: tl.constexpr,
    MARGIN: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All other gradients from `likelihood_kernel`'s, and mean log-likelihoods (L, R).

    The grid is tiles of units, replicas. By the sums they are (L, R, B, O), or by the moments (2, R, B, O).
    """
    tile, row, stack = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first_o = tile * BLOCK_O
    units, classes = first_o + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_K)
    replica, step = tl.load(replica_ptr + row).to(tl.int32), tl.load(step_ptr).to(tl.int32)
    rate, unit_keep = 1.0, 1.0
    if GATE == 1:
        rate = tl.load(keep_ptr + row)
    if DROPPED:
        unit_keep = tl.load(unit_keep_ptr + row)
    bias, keep, drop = bias_tile(bias_ptr, logit_ptr, row, first_o, UNITS, GATE, COMPILED, BLOCK_O)
    weight = load_tile(weight_ptr, row.to(tl.int64) * CLASSES * UNITS, classes, units, CLASSES, UNITS)
    by_weight = tl.zeros((BLOCK_K, BLOCK_O), tl.float32)
    by_output_bias = tl.zeros((BLOCK_K,), tl.float32)
    # By the gated bias, and with gates as noise by its mean and variance.
    by_bias = tl.zeros((1, BLOCK_O), tl.float32)
    by_gate, by_variance = by_bias, by_bias
    block = row.to(tl.int64) * BATCH * UNITS
    next_one = stack.to(tl.int64) * BATCH * UNITS
    for first_b in range(0, BATCH, BLOCK_B):
        examples = first_b + tl.arange(0, BLOCK_B)
        places = examples[:, None] * UNITS + units[None, :]
        inside = (examples[:, None] < BATCH) & (units[None, :] < UNITS)
        tile_by_mean = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
        tile_by_variance = tile_by_mean
        for sample in range(SAMPLES):
            before, on, slope = sums_with_bias(
                sums_ptr, noise_ptr, bias, keep, drop, rate, seed, sample, row, step, replica, stack, examples, first_o,
                BATCH, UNITS, GATE, MARGIN, BLOCK_O,
            )  # fmt: skip
            base = (sample * stack + row).to(tl.int64) * BATCH * CLASSES
            by_class = load_tile(by_class_ptr, base, examples, classes, BATCH, CLASSES)
            hidden = rectified(before)
            by_before = tl.dot(by_class, weight, input_precision="tf32x3")
            if DROPPED:
                factor = unit_factor(
                    unit_seed, sample, step, replica, unit_keep, first_b, first_o, UNITS, BLOCK_B, BLOCK_O
                )
                hidden *= factor
                by_before *= factor
            by_before = tl.where(before <= 0.0, 0.0, by_before)
            by_weight = tl.dot(tl.trans(by_class), hidden, by_weight, input_precision="tf32x3")
            by_output_bias += tl.sum(by_class, axis=0)
            if GATE == 4:
                tile_by_mean += by_before
                tile_by_variance += by_before * slope
            else:
                found = tl.sum(by_before, axis=0)[None, :]
                by_gate += found
                by_bias += found * on if GATE > 0 else found
                tl.store(by_sums_ptr + sample * next_one + block + places, by_before.to(tl.bfloat16), mask=inside)
        if GATE == 4:
            by_gate += tl.sum(tile_by_mean, axis=0)[None, :]
            by_variance += tl.sum(tile_by_variance, axis=0)[None, :]
            tl.store(by_sums_ptr + block + places, tile_by_mean.to(tl.bfloat16), mask=inside)
            tl.store(by_sums_ptr + next_one + block + places, tile_by_variance.to(tl.bfloat16), mask=inside)
    line = units[None, :] < UNITS
    if GATE == 4:
        by_bias = keep * by_gate + 2.0 * keep * drop * bias * by_variance
        by_gate += (drop - keep) * bias * by_variance
    if GATE > 2:
        by_logit = by_gate * bias * keep * drop
        tl.store(by_logit_ptr + row * UNITS + units[None, :], by_logit, mask=line)
    if GATE > 0:
        by_bias += slab_scale * (rate if GATE == 1 else keep) * bias
    tl.store(by_bias_ptr + row * UNITS + units[None, :], by_bias, mask=line)
    tl.store(
        by_weight_ptr + row.to(tl.int64) * CLASSES * UNITS + (classes[:, None] * UNITS + units[None, :]),
        by_weight,
        mask=(classes[:, None] < CLASSES) & (units[None, :] < UNITS),
    )
    if tile == 0:
        tl.store(by_output_bias_ptr + row * CLASSES + classes, by_output_bias, mask=classes < CLASSES)
        for sample in range(SAMPLES):
            total = 0.0
            for part in range(TILES):
                total += tl.load(partial_ptr + (part * SAMPLES + sample) * stack + row)
            tl.store(reward_ptr + sample * stack + row, total / BATCH)
