"""The Triton kernels behind `gpu`: imported only where Triton is installed.

A gate's number is Philox of (seed, block of four synapses, stream): every kernel that needs a mask draws it again.
WORDS is the number of Philox blocks of a program, which handles four times as many synapses.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit
def tanh_of_half(size, decay, large):  # type: ignore[no-untyped-def]
    """tanh(size / 2) for decay = e^-size and large = 1 / (1 + decay): by its series where 1 - decay loses digits."""
    half = 0.5 * size
    square = half * half
    series = half * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(size < 0.25, series, (1.0 - decay) * large)


@triton.jit
def uniform_gradient(logit, small, large, t, s5, s4, s3, s2, s1, s0):  # type: ignore[no-untyped-def]
    """dKL/dlogit for alpha = beta = 1 at the best q(pi), t = tanh(|logit| / 2), by `GRADIENT_POLYNOMIAL`."""
    s = t * t
    grad = tl.abs(logit) - t * (((((s5 * s + s4) * s + s3) * s + s2) * s + s1) * s + s0)
    return tl.where(logit < 0, -grad, grad) * small * large


@triton.jit
def prior_term(logit, t, even, odd):  # type: ignore[no-untyped-def]
    """A polynomial of `polynomials`, even(t^2) + t odd(t^2), at t with the sign of the logit."""
    s = t * t
    level = ((((even[0] * s + even[1]) * s + even[2]) * s + even[3]) * s + even[4]) * s + even[5]
    slant = t * (((((odd[0] * s + odd[1]) * s + odd[2]) * s + odd[3]) * s + odd[4]) * s + odd[5])
    return level + tl.where(logit < 0, -slant, slant)


@triton.jit
def prior_gradient(logit, small, large, t, even, odd):  # type: ignore[no-untyped-def]
    """dKL/dlogit for any prior at the best q(pi), t = tanh(|logit| / 2), by `polynomials.prior_polynomial`."""
    return (logit - prior_term(logit, t, even, odd)) * small * large


@triton.jit
def halves(logit):  # type: ignore[no-untyped-def]
    """|logit|, the smaller and the larger of pi~ and 1 - pi~, and t, by how much they differ."""
    size = tl.abs(logit)
    decay = tl.exp(-size)
    large = 1.0 / (1.0 + decay)
    return size, decay * large, large, tanh_of_half(size, decay, large)


# ------------------------------------------------------------------------------------------ random numbers


@triton.jit  # type: ignore[untyped-decorator]
def words_of(program, seed_ptr, stream, row, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four words for each of a program's blocks."""
    blocks = program * WORDS + tl.arange(0, WORDS)
    zero = blocks * 0
    return tl.philox(tl.load(seed_ptr), blocks, zero + stream, zero + row, zero)


@triton.jit
def unit_interval(words):  # type: ignore[no-untyped-def]
    """Numbers in [0, 1) from the words' top 24 bits; the first must not be taken for a sign."""
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit  # type: ignore[untyped-decorator]
def noise_of(program, seed_ptr, stream, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Uniform noise for a program's synapses, in their order."""
    w0, w1, w2, w3 = words_of(program, seed_ptr, stream, 0, WORDS)
    return unit_interval(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit  # type: ignore[untyped-decorator]
def places(program, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a program's synapses lie, and which of them there are."""
    offsets = program.to(tl.int64) * (4 * WORDS) + tl.arange(0, 4 * WORDS)
    return offsets, offsets < count


@triton.jit  # type: ignore[untyped-decorator]
def load_logit(logit_ptr, offsets, inside, SCALAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """The log-odds: one for each synapse, or one for all."""
    if SCALAR:
        return tl.load(logit_ptr).to(tl.float32) + tl.zeros(offsets.shape, tl.float32)
    return tl.load(logit_ptr + offsets, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def gate_of(u, logit, MIRRORED: tl.constexpr):  # type: ignore[no-untyped-def]
    """z = [u < pi~], or the antithetic [1 - u < pi~]."""
    pi = 1.0 / (1.0 + tl.exp(-logit))
    if MIRRORED:
        return (1.0 - u) < pi
    return u < pi


@triton.jit  # type: ignore[untyped-decorator]
def uniform_kernel(out_ptr, seed_ptr, stream, row, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The noise behind the masks."""
    offsets, inside = places(tl.program_id(0), count, WORDS)
    w0, w1, w2, w3 = words_of(tl.program_id(0), seed_ptr, stream, row, WORDS)
    noise = unit_interval(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
    tl.store(out_ptr + offsets, noise, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def normal_kernel(out_ptr, seed_ptr, stream, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Standard normal numbers: a pair of words gives a pair of them."""
    offsets, inside = places(tl.program_id(0), count, WORDS)
    w0, w1, w2, w3 = words_of(tl.program_id(0), seed_ptr, stream, 0, WORDS)
    near, far = tl.sqrt(-2.0 * tl.log(1.0 - unit_interval(w0))), tl.sqrt(-2.0 * tl.log(1.0 - unit_interval(w2)))
    one, other = unit_interval(w1) * 6.283185307179586, unit_interval(w3) * 6.283185307179586
    cosines = tl.interleave(near * tl.cos(one), far * tl.cos(other))
    sines = tl.interleave(near * tl.sin(one), far * tl.sin(other))
    tl.store(out_ptr + offsets, tl.interleave(cosines, sines), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def binary_kernel(  # type: ignore[no-untyped-def]
    logit_ptr, out_ptr, seed_ptr, stream, count, SCALAR: tl.constexpr, MIRRORED: tl.constexpr, WORDS: tl.constexpr
):
    """The masks themselves, for those who must have them."""
    offsets, inside = places(tl.program_id(0), count, WORDS)
    logit = load_logit(logit_ptr, offsets, inside, SCALAR)
    gate = gate_of(noise_of(tl.program_id(0), seed_ptr, stream, WORDS), logit, MIRRORED)
    tl.store(out_ptr + offsets, gate.to(tl.uint8), mask=inside)


# ------------------------------------------------------------------------------------------ masks that are given


@triton.jit  # type: ignore[untyped-decorator]
def masking_kernel(tensor_ptr, mask_ptr, out_ptr, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """tensor * mask; torch's own product of floats and booleans takes twice as long."""
    offsets, inside = places(tl.program_id(0), count, WORDS)
    gate = tl.load(mask_ptr + offsets, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + offsets, gate * tl.load(tensor_ptr + offsets, mask=inside, other=0.0), mask=inside)


# ------------------------------------------------------------------------------------------ the posterior


@triton.jit  # type: ignore[untyped-decorator]
def divergence(logit, numbers, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """KL of each synapse, its gradient by the logit, and pi~; ``numbers`` are what `gpu.kl_numbers` gives."""
    size, small, large, t = halves(logit)
    entropy = size * small - tl.log(large)
    pi = tl.where(logit < 0, small, large)
    if KIND == "uniform":
        s = t * t
        value = (((numbers[0] * s + numbers[1]) * s + numbers[2]) * s + numbers[3]) * s + numbers[4]
        kl = 0.6931471805599453 + (1.0 - s) * value - entropy
        grad = uniform_gradient(
            logit, small, large, t, numbers[5], numbers[6], numbers[7], numbers[8], numbers[9], numbers[10]
        )
    elif KIND == "marginal":
        kl = pi * numbers[0] + tl.where(logit < 0, large, small) * numbers[1] - entropy
        grad = (logit - numbers[2]) * small * large
    else:
        kl = prior_term(logit, t, numbers[0:6], numbers[6:12]) - entropy
        grad = prior_gradient(logit, small, large, t, numbers[12:18], numbers[18:24])
    return kl, grad, pi


@triton.jit  # type: ignore[untyped-decorator]
def posterior_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    kept_ptr,
    seeds_ptr,
    stream,
    partial_ptr,
    count,
    numbers,
    KIND: tl.constexpr,
    KEPT: tl.constexpr,
    SAMPLES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Partial sums of the KL and of each sample's squared scores, (1 + SAMPLES, programs)."""
    offsets, inside = places(tl.program_id(0), count, WORDS)
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    kl, _, pi = divergence(logit, numbers, KIND)
    here = inside.to(tl.float32)
    if KEPT:
        here *= tl.load(kept_ptr + offsets, mask=inside, other=0).to(tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(partial_ptr + program, tl.sum(kl * here, axis=0))
    for sample in tl.static_range(SAMPLES):
        gate = gate_of(noise_of(tl.program_id(0), seeds_ptr + sample, stream, WORDS), logit, False).to(tl.float32)
        score = (gate - pi) * here
        tl.store(partial_ptr + (1 + sample) * programs + program, tl.sum(score * score, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def posterior_backward_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    kept_ptr,
    upstream_ptr,
    seeds_ptr,
    coefficients_ptr,
    stream,
    out_ptr,
    kl_scale,
    count,
    numbers,
    KIND: tl.constexpr,
    SCALE_IS_POINTER: tl.constexpr,
    KEPT: tl.constexpr,
    SAMPLES: tl.constexpr,
    PAIRED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """upstream * (kl_scale dKL - sum_l c_l h_l); h is the score, or DisARM's."""
    offsets, inside = places(tl.program_id(0), count, WORDS)
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    _, gradient, pi = divergence(logit, numbers, KIND)
    gradient *= tl.load(kl_scale) if SCALE_IS_POINTER else kl_scale
    for sample in tl.static_range(SAMPLES):
        u = noise_of(tl.program_id(0), seeds_ptr + sample, stream, WORDS)
        score = gate_of(u, logit, False).to(tl.float32)
        if PAIRED:
            score -= gate_of(u, logit, True).to(tl.float32)
            score *= tl.maximum(pi, 1.0 - pi)
        else:
            score -= pi
        gradient -= tl.load(coefficients_ptr + sample) * score
    gradient *= tl.load(upstream_ptr).to(tl.float32)
    if KEPT:
        gradient *= tl.load(kept_ptr + offsets, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + offsets, gradient, mask=inside)
