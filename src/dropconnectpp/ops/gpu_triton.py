"""The Triton kernels behind `kernels`: imported only where Triton is installed."""

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
def uniform_slope(logit, small, large, t, s5, s4, s3, s2, s1, s0):  # type: ignore[no-untyped-def]
    """dKL/dlogit for alpha = beta = 1 at the best q(pi), t = tanh(|logit| / 2); s is `polynomials.SLOPE_POLYNOMIAL`."""
    s = t * t
    slope = tl.abs(logit) - t * (((((s5 * s + s4) * s + s3) * s + s2) * s + s1) * s + s0)
    return tl.where(logit < 0, -slope, slope) * small * large


@triton.jit
def prior_term(logit, t, even, odd):  # type: ignore[no-untyped-def]
    """A polynomial of `polynomials`, even(t^2) + t odd(t^2), at t with the sign of the logit."""
    s = t * t
    level = ((((even[0] * s + even[1]) * s + even[2]) * s + even[3]) * s + even[4]) * s + even[5]
    slant = t * (((((odd[0] * s + odd[1]) * s + odd[2]) * s + odd[3]) * s + odd[4]) * s + odd[5])
    return level + tl.where(logit < 0, -slant, slant)


@triton.jit
def prior_slope(logit, small, large, t, even, odd):  # type: ignore[no-untyped-def]
    """dKL/dlogit for any prior at the best q(pi), t = tanh(|logit| / 2), by `polynomials.prior_polynomial`."""
    return (logit - prior_term(logit, t, even, odd)) * small * large


@triton.jit
def halves(logit):  # type: ignore[no-untyped-def]
    """|logit|, the smaller and the larger of pi~ and 1 - pi~, and t, by how much they differ."""
    size = tl.abs(logit)
    decay = tl.exp(-size)
    large = 1.0 / (1.0 + decay)
    return size, decay * large, large, tanh_of_half(size, decay, large)


@triton.jit  # type: ignore[untyped-decorator]
def store_pass(  # type: ignore[no-untyped-def]
    program,
    programs,
    offsets,
    inside,
    logit,
    small,
    large,
    kl,
    slope,
    mask_ptr,
    coefficient_ptr,
    kl_scale,
    gradient_ptr,
    partial_ptr,
    SCALE_IS_POINTER: tl.constexpr,
    SCORED: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """Of one block of synapses: partial sums of KL and squared score, and the logits' gradient."""
    tl.store(partial_ptr + program, tl.sum(tl.where(inside, kl, 0.0), axis=0))
    squared = 0.0
    if GRADIENT:
        scale = tl.load(kl_scale) if SCALE_IS_POINTER else kl_scale
        gradient = scale * slope
        if SCORED:
            pi = tl.where(logit < 0, small, large)
            score = tl.load(mask_ptr + offsets, mask=inside, other=0).to(tl.float32) - pi
            gradient -= tl.load(coefficient_ptr) * score
            squared = tl.sum(tl.where(inside, score * score, 0.0), axis=0)
        tl.store(gradient_ptr + offsets, gradient, mask=inside)
    tl.store(partial_ptr + programs + program, squared)


@triton.jit  # type: ignore[untyped-decorator]
def posterior_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    mask_ptr,
    coefficient_ptr,
    kl_scale,
    gradient_ptr,
    partial_ptr,
    count,
    programs,
    v4,
    v3,
    v2,
    v1,
    v0,
    s5,
    s4,
    s3,
    s2,
    s1,
    s0,
    SCALE_IS_POINTER: tl.constexpr,
    SCORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The pass for alpha = beta = 1.

    v and s are `polynomials.VALUE_POLYNOMIAL` and `polynomials.SLOPE_POLYNOMIAL`, highest power first.
    """
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    size, small, large, t = halves(logit)
    s = t * t
    value = (1.0 - s) * ((((v4 * s + v3) * s + v2) * s + v1) * s + v0)
    kl = 0.6931471805599453 + tl.log(large) - size * small + value
    slope = uniform_slope(logit, small, large, t, s5, s4, s3, s2, s1, s0)
    store_pass(
        program,
        programs,
        offsets,
        inside,
        logit,
        small,
        large,
        kl,
        slope,
        mask_ptr,
        coefficient_ptr,
        kl_scale,
        gradient_ptr,
        partial_ptr,
        SCALE_IS_POINTER,
        SCORED,
        GRADIENT,
    )


@triton.jit  # type: ignore[untyped-decorator]
def prior_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    mask_ptr,
    coefficient_ptr,
    kl_scale,
    gradient_ptr,
    partial_ptr,
    count,
    programs,
    value_even,
    value_odd,
    slope_even,
    slope_odd,
    SCALE_IS_POINTER: tl.constexpr,
    SCORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The pass for any other prior, by `polynomials.prior_value_polynomial` and `polynomials.prior_polynomial`."""
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    size, small, large, t = halves(logit)
    kl = tl.log(large) - size * small + prior_term(logit, t, value_even, value_odd)
    slope = prior_slope(logit, small, large, t, slope_even, slope_odd)
    store_pass(
        program,
        programs,
        offsets,
        inside,
        logit,
        small,
        large,
        kl,
        slope,
        mask_ptr,
        coefficient_ptr,
        kl_scale,
        gradient_ptr,
        partial_ptr,
        SCALE_IS_POINTER,
        SCORED,
        GRADIENT,
    )


@triton.jit  # type: ignore[untyped-decorator]
def mask_kernel(noise_ptr, logit_ptr, mask_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """z = [u < sigmoid(logit)]."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    noise = tl.load(noise_ptr + offsets, mask=inside, other=0.0)
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    tl.store(mask_ptr + offsets, (noise < 1.0 / (1.0 + tl.exp(-logit))).to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def straight_through_kernel(logit_ptr, weight_ptr, mask_ptr, gradient_ptr, result_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """G W pi~ (1 - pi~) for the logits, and z G in G's own place for the weights."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0)
    gradient = tl.load(gradient_ptr + offsets, mask=inside, other=0.0)
    gate = tl.load(mask_ptr + offsets, mask=inside, other=0).to(tl.float32)
    decay = tl.exp(-tl.abs(logit))
    slope = decay / ((1.0 + decay) * (1.0 + decay))
    tl.store(result_ptr + offsets, gradient * weight * slope, mask=inside)
    tl.store(gradient_ptr + offsets, gradient * gate, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def masking_kernel(tensor_ptr, mask_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """tensor * mask; torch's own product of floats and booleans takes twice as long."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    gate = tl.load(mask_ptr + offsets, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + offsets, gate * tl.load(tensor_ptr + offsets, mask=inside, other=0.0), mask=inside)
