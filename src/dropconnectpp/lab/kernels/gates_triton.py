"""The Triton kernels behind `gates`, and what other kernels need of them: imported only where Triton is installed.

COMPILED is off in the interpreter, which has no libdevice and no products of bfloat16. SAMPLES is the number of masks
of a step: sample l draws with draw l of the stream. SKEWED is for a prior whose `polynomials.prior_polynomial`, the
coefficients ``even`` and ``odd``, has an even part; SLAB for a Gaussian prior on the weights that are on, whose term of
the loss is slab_scale pi~ W^2 / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from dropconnectpp.ops.gpu_triton import prior_slope, tanh_of_half, uniform_slope


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def keep_of(logit, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """pi~ as torch's own sigmoid has it on this device: masks need it to the last bit."""
    if COMPILED:
        return libdevice.rcp_rn(1.0 + libdevice.exp(-logit))  # rounded as a division is, by fewer instructions
    return tl.div_rn(1.0, 1.0 + tl.exp(-logit))


@triton.jit
def top_bits(words):  # type: ignore[no-untyped-def]
    """Numbers in [0, 1) from the words' top 24 bits; the first must not be taken for a sign."""
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def unit_interval(seed, blocks, draw, step, replica):  # type: ignore[no-untyped-def]
    """The stream's numbers of whole blocks: four neighbours for each along the last axis."""
    zero = blocks * 0
    w0, w1, w2, w3 = tl.philox(seed, blocks, zero + draw, zero + step, zero + replica)
    return top_bits(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit  # type: ignore[untyped-decorator]
def noise_of(  # type: ignore[no-untyped-def]
    seed,
    draw,
    step,
    replica,
    first_o,
    first_i,
    WIDTH: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The stream's uniform numbers of a tile of synapses."""
    rows = first_o + tl.arange(0, BLOCK_O)
    if WIDTH % 4 == 0:  # one block of words serves four neighbours
        blocks = rows[:, None] * (WIDTH // 4) + (first_i // 4 + tl.arange(0, BLOCK_I // 4))[None, :]
        noise = unit_interval(seed, blocks, draw, step, replica)
    else:
        elements = rows[:, None] * WIDTH + (first_i + tl.arange(0, BLOCK_I))[None, :]
        zero = elements * 0
        w0, w1, w2, w3 = tl.philox(seed, elements // 4, zero + draw, zero + step, zero + replica)
        place = elements % 4
        noise = top_bits(tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3)))
    return noise


# -------------------------------------------------------------------------------------- slopes of the KL


@triton.jit
def softplus(raw):  # type: ignore[no-untyped-def]
    """log(1 + e^raw), to full relative precision, and its slope: log(1 + d) = 2 artanh(d / (2 + d)) by its series."""
    decay = tl.exp(-tl.abs(raw))
    whole = 1.0 / ((1.0 + decay) * (2.0 + decay))
    t = decay * (1.0 + decay) * whole
    s = t * t
    series = 1.0 / 11.0 + s * (1.0 / 13.0 + s * (1.0 / 15.0))
    series = 1.0 + s * (1.0 / 3.0 + s * (1.0 / 5.0 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s * series))))
    slope = tl.where(raw < 0, decay, 1.0) * (2.0 + decay) * whole
    return tl.maximum(raw, 0.0) + 2.0 * t * series, slope


@triton.jit
def polygammas(x):  # type: ignore[no-untyped-def]
    """psi(x) and psi'(x) for x > 0, up to ten millions: four steps of the recurrence, then the asymptotic series."""
    # With outer = x (x + 3) and inner = (x + 1) (x + 2) the recurrence's sums are 2 x + 3 over each, those of squares
    # have no cancellation either, and one division gives all reciprocals.
    outer, last = x * (x + 3.0), x + 4.0
    inner = outer + 2.0
    product = outer * inner
    whole = 1.0 / (product * last)
    r, both = product * whole, last * whole
    u, v, s = inner * both, outer * both, r * r
    digamma = s * (1.0 / 12.0 - s * (1.0 / 120.0 - s * (1.0 / 252.0 - s * (1.0 / 240.0 - s * (1.0 / 132.0)))))
    digamma = tl.log(last) - 0.5 * r - digamma - (2.0 * x + 3.0) * (u + v)
    trigamma = 1.0 / 6.0 - s * (1.0 / 30.0 - s * (1.0 / 42.0 - s * (1.0 / 30.0 - s * (5.0 / 66.0))))
    squares = (2.0 * outer + 9.0) * u * u + (2.0 * outer + 5.0) * v * v
    trigamma = r + 0.5 * s + r * s * trigamma + squares
    return digamma, trigamma


# ------------------------------------------------------------------------------------------------- steps


@triton.jit  # type: ignore[untyped-decorator]
def adagrad_step(  # type: ignore[no-untyped-def]
    value_ptr, sum_ptr, base, places, inside, value, total, gradient, size, epsilon, INSIDE: tl.constexpr
):
    """sum += g^2; value -= step g / sqrt(sum + epsilon), or with epsilon outside the root; stores both."""
    total += gradient * gradient
    # The card's own root, good to two units in the last place, takes a tenth of the exact one's time.
    scaled = gradient * tl.rsqrt(total + epsilon) if INSIDE else gradient / (tl.sqrt(total) + epsilon)
    tl.store(sum_ptr + base + places, total, mask=inside)
    tl.store(value_ptr + base + places, value - size * scaled, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gate_step(  # type: ignore[no-untyped-def]
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
    likelihood,
    weight,
    kl_scale,
    slab_scale,
    prior_alpha,
    prior_beta,
    size,
    epsilon,
    even,
    odd,
    GATE: tl.constexpr,
    HYPER: tl.constexpr,
    SKEWED: tl.constexpr,
    SLAB: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Adagrad on the logit and, for HYPER, on raw alpha and beta: the KL's slopes, the likelihood's and the slab's.

    ``likelihood`` is the gradient by the logit for the score, by the gate for straight through; ``weight`` is the one
    before the step, for SLAB alone.
    """
    decay = tl.exp(-tl.abs(logit))
    large = tl.where(logit < 0, 1.0 - keep, keep)
    small = decay * large
    if HYPER:
        raw_alpha = tl.load(alpha_ptr + base + places, mask=inside, other=0.0)
        raw_beta = tl.load(beta_ptr + base + places, mask=inside, other=0.0)
        alpha_sum = tl.load(alpha_sum_ptr + base + places, mask=inside, other=1.0)
        beta_sum = tl.load(beta_sum_ptr + base + places, mask=inside, other=1.0)
        alpha, slope_alpha = softplus(raw_alpha)
        beta, slope_beta = softplus(raw_beta)
        psi_alpha, curve_alpha = polygammas(alpha)
        psi_beta, curve_beta = polygammas(beta)
        _, curve_total = polygammas(alpha + beta)
        excess_alpha = alpha - prior_alpha - keep
        excess_beta = beta - prior_beta - tl.where(logit < 0, large, small)
        shared = (excess_alpha + excess_beta) * curve_total
        slope = small * large * (logit - (psi_alpha - psi_beta))
        by_alpha = kl_scale * (excess_alpha * curve_alpha - shared) * slope_alpha
        by_beta = kl_scale * (excess_beta * curve_beta - shared) * slope_beta
        adagrad_step(
            alpha_ptr, alpha_sum_ptr, base, places, inside, raw_alpha, alpha_sum, by_alpha, size, epsilon, INSIDE
        )
        adagrad_step(beta_ptr, beta_sum_ptr, base, places, inside, raw_beta, beta_sum, by_beta, size, epsilon, INSIDE)
    else:
        t = tanh_of_half(tl.abs(logit), decay, large)
        if SKEWED:
            slope = prior_slope(logit, small, large, t, even, odd)
        else:
            slope = uniform_slope(logit, small, large, t, odd[0], odd[1], odd[2], odd[3], odd[4], odd[5])
    if GATE == 3:
        likelihood *= small * large
    if SLAB:
        likelihood += 0.5 * slab_scale * weight * weight * small * large
    by_logit = kl_scale * slope + likelihood
    adagrad_step(logit_ptr, logit_sum_ptr, base, places, inside, logit, logit_sum, by_logit, size, epsilon, INSIDE)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    logit_sum_ptr,
    alpha_ptr,
    alpha_sum_ptr,
    beta_ptr,
    beta_sum_ptr,
    weight_ptr,
    by_logit_ptr,
    coefficient_ptr,
    gate_size_ptr,
    kl_scale_ptr,
    partial_ptr,
    replica_ptr,
    step_ptr,
    seed,
    slab_scale,
    prior_alpha,
    prior_beta,
    epsilon,
    even,
    odd,
    count,
    SAMPLES: tl.constexpr,
    SCORED: tl.constexpr,
    HYPER: tl.constexpr,
    SKEWED: tl.constexpr,
    SLAB: tl.constexpr,
    INSIDE: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`gate_step` on a block of one replica's gates: with a gradient by the logit that is known, or SCORED.

    By the score it also leaves partial sums of (z - pi~)^2, (L, R, programs).
    """
    program, row, stack = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    places = program * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    base = row.to(tl.int64) * count
    logit = tl.load(logit_ptr + base + places, mask=inside, other=0.0)
    logit_sum = tl.load(logit_sum_ptr + base + places, mask=inside, other=1.0)
    keep = keep_of(logit, COMPILED)
    if SCORED:
        replica = tl.load(replica_ptr + row).to(tl.int32)
        step = tl.load(step_ptr).to(tl.int32)
        blocks = program * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        likelihood = tl.zeros((BLOCK,), tl.float32)
        for sample in range(SAMPLES):
            score = tl.where(unit_interval(seed, blocks, sample, step, replica) < keep, 1.0, 0.0) - keep
            likelihood -= tl.load(coefficient_ptr + sample * stack + row) * score
            squared = tl.sum(tl.where(inside, score * score, 0.0), axis=0)
            tl.store(partial_ptr + (sample * stack + row) * tl.num_programs(0) + program, squared)
    else:
        likelihood = tl.load(by_logit_ptr + base + places, mask=inside, other=0.0)
    weight = None
    if SLAB:
        weight = tl.load(weight_ptr + base + places, mask=inside, other=0.0)
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
        likelihood,
        weight,
        tl.load(kl_scale_ptr + row),
        slab_scale,
        prior_alpha,
        prior_beta,
        tl.load(gate_size_ptr + row),
        epsilon,
        even,
        odd,
        2,
        HYPER,
        SKEWED,
        SLAB,
        INSIDE,
    )
