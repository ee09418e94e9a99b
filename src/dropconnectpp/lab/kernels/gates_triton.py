"""The Triton kernels behind `gates`, and what other kernels need of them: imported only where Triton is installed.

Records of `arguments` are read by name. COMPILED is off in the interpreter, which has no libdevice and no products of
bfloat16. SAMPLES is the number of masks of a step: sample l draws with draw l of the stream. TERMS says what a step has
besides the likelihood: ``hyper`` for a free q(pi); ``skewed`` for a prior whose polynomial, ``even`` and ``odd``, has
an even part; ``slab`` for a Gaussian prior on the weights that are on, which adds slab_scale pi~ W^2 / 2 to the loss.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from dropconnectpp.ops.gpu_triton import prior_gradient, tanh_of_half, uniform_gradient


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
    """The stream's numbers of whole blocks: each gives four neighbours along the last axis."""
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


# ----------------------------------------------------------------------------------- gradients of the KL


@triton.jit
def softplus(raw):  # type: ignore[no-untyped-def]
    """log(1 + e^raw) to full relative precision, and its gradient: log(1 + d) = 2 artanh(d / (2 + d)) by its series."""
    decay = tl.exp(-tl.abs(raw))
    whole = 1.0 / ((1.0 + decay) * (2.0 + decay))
    t = decay * (1.0 + decay) * whole
    s = t * t
    series = 1.0 / 11.0 + s * (1.0 / 13.0 + s * (1.0 / 15.0))
    series = 1.0 + s * (1.0 / 3.0 + s * (1.0 / 5.0 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s * series))))
    gradient = tl.where(raw < 0, decay, 1.0) * (2.0 + decay) * whole
    return tl.maximum(raw, 0.0) + 2.0 * t * series, gradient


@triton.jit
def polygammas(x):  # type: ignore[no-untyped-def]
    """psi(x) and psi'(x) for x > 0, up to ten millions: four steps of the recurrence, then the asymptotic series."""
    # With outer = x (x + 3) and inner = (x + 1) (x + 2) the recurrence's sums are 2 x + 3 over each. Those of squares
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
    trained, base, places, inside, value, squares, gradient, size, epsilon, INSIDE: tl.constexpr
):
    """squares += g^2; value -= size g / sqrt(squares + epsilon), or with epsilon outside the root; stores both."""
    squares += gradient * gradient
    # The card's own root, good to two units in the last place, takes a tenth of the exact one's time.
    scaled = gradient * tl.rsqrt(squares + epsilon) if INSIDE else gradient / (tl.sqrt(squares) + epsilon)
    tl.store(trained.squares + base + places, squares, mask=inside)
    tl.store(trained.value + base + places, value - size * scaled, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gate_step(  # type: ignore[no-untyped-def]
    gate,
    base,
    places,
    inside,
    logit,
    squares,
    keep,
    likelihood,
    weight,
    kl_scale,
    size,
    TERMS,
    GATE: tl.constexpr,
):
    """Adagrad on the logit and, for a free q(pi), on raw alpha and beta: gradients of KL, likelihood and slab.

    ``likelihood`` is the gradient by the logit for the score, by the gate for straight through; ``weight`` is the one
    before the step, for the slab alone.
    """
    decay = tl.exp(-tl.abs(logit))
    large = tl.where(logit < 0, 1.0 - keep, keep)
    small = decay * large
    if TERMS.hyper:
        raw_alpha = tl.load(gate.alpha.value + base + places, mask=inside, other=0.0)
        raw_beta = tl.load(gate.beta.value + base + places, mask=inside, other=0.0)
        alpha_squares = tl.load(gate.alpha.squares + base + places, mask=inside, other=1.0)
        beta_squares = tl.load(gate.beta.squares + base + places, mask=inside, other=1.0)
        alpha, chain_alpha = softplus(raw_alpha)
        beta, chain_beta = softplus(raw_beta)
        psi_alpha, curve_alpha = polygammas(alpha)
        psi_beta, curve_beta = polygammas(beta)
        _, curve_total = polygammas(alpha + beta)
        excess_alpha = alpha - gate.prior_alpha - keep
        excess_beta = beta - gate.prior_beta - tl.where(logit < 0, large, small)
        shared = (excess_alpha + excess_beta) * curve_total
        grad_kl = small * large * (logit - (psi_alpha - psi_beta))
        grad_alpha = kl_scale * (excess_alpha * curve_alpha - shared) * chain_alpha
        grad_beta = kl_scale * (excess_beta * curve_beta - shared) * chain_beta
        adagrad_step(
            gate.alpha, base, places, inside, raw_alpha, alpha_squares, grad_alpha, size, gate.epsilon, TERMS.inside
        )
        adagrad_step(
            gate.beta, base, places, inside, raw_beta, beta_squares, grad_beta, size, gate.epsilon, TERMS.inside
        )
    else:
        t = tanh_of_half(tl.abs(logit), decay, large)
        if TERMS.skewed:
            grad_kl = prior_gradient(logit, small, large, t, gate.even, gate.odd)
        else:
            grad_kl = uniform_gradient(logit, small, large, t, *gate.odd)
    if GATE == 3:
        likelihood *= small * large
    if TERMS.slab:
        likelihood += 0.5 * gate.slab_scale * weight * weight * small * large
    grad_logit = kl_scale * grad_kl + likelihood
    adagrad_step(gate.logit, base, places, inside, logit, squares, grad_logit, size, gate.epsilon, TERMS.inside)


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(  # type: ignore[no-untyped-def]
    gate,
    weight_ptr,
    grad_logit_ptr,
    coefficient_ptr,
    partial_ptr,
    draws,
    count,
    TERMS,
    SAMPLES: tl.constexpr,
    SCORED: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`gate_step` on a block of one replica's gates: by the score where SCORED, else by a given gradient by the logit.

    By the score it also gives partial sums of (z - pi~)^2, (L, R, programs).
    """
    program, row, stack = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    places = program * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    base = row.to(tl.int64) * count
    logit = tl.load(gate.logit.value + base + places, mask=inside, other=0.0)
    squares = tl.load(gate.logit.squares + base + places, mask=inside, other=1.0)
    keep = keep_of(logit, COMPILED)
    if SCORED:
        replica = tl.load(draws.replica + row).to(tl.int32)
        step = tl.load(draws.step).to(tl.int32)
        blocks = program * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        likelihood = tl.zeros((BLOCK,), tl.float32)
        for sample in range(SAMPLES):
            score = tl.where(unit_interval(draws.seed, blocks, sample, step, replica) < keep, 1.0, 0.0) - keep
            likelihood -= tl.load(coefficient_ptr + sample * stack + row) * score
            squared = tl.sum(tl.where(inside, score * score, 0.0), axis=0)
            tl.store(partial_ptr + (sample * stack + row) * tl.num_programs(0) + program, squared)
    else:
        likelihood = tl.load(grad_logit_ptr + base + places, mask=inside, other=0.0)
    weight = None
    if TERMS.slab:
        weight = tl.load(weight_ptr + base + places, mask=inside, other=0.0)
    kl_scale, size = tl.load(gate.kl_scale + row), tl.load(gate.size + row)
    gate_step(gate, base, places, inside, logit, squares, keep, likelihood, weight, kl_scale, size, TERMS, 2)
