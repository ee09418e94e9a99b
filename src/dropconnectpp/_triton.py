"""The Triton kernel behind `kernels`: imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def posterior_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    mask_ptr,
    coefficient_ptr,
    kl_scale_ptr,
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
    SCORED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of synapses: partial sums of KL and squared score, and the logits' gradient.

    v and s are the polynomials of `functional._VALUE` and `functional._SLOPE`, highest power first.
    """
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    size = tl.abs(logit)
    decay = tl.exp(-size)
    large = 1.0 / (1.0 + decay)
    small = decay * large
    # tanh(size / 2): by its odd series where 1 - decay would lose digits.
    half = 0.5 * size
    square = half * half
    series = half * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    t = tl.where(size < 0.25, series, (1.0 - decay) * large)
    s = t * t
    value = (1.0 - s) * ((((v4 * s + v3) * s + v2) * s + v1) * s + v0)
    kl = 0.6931471805599453 + tl.log(large) - size * small + value
    tl.store(partial_ptr + program, tl.sum(tl.where(inside, kl, 0.0), axis=0))
    squared = 0.0
    if GRADIENT:
        slope = size - t * (((((s5 * s + s4) * s + s3) * s + s2) * s + s1) * s + s0)
        gradient = tl.load(kl_scale_ptr) * tl.where(logit < 0, -slope, slope) * small * large
        if SCORED:
            pi = tl.where(logit < 0, small, large)
            score = tl.load(mask_ptr + offsets, mask=inside, other=0).to(tl.float32) - pi
            gradient -= tl.load(coefficient_ptr) * score
            squared = tl.sum(tl.where(inside, score * score, 0.0), axis=0)
        tl.store(gradient_ptr + offsets, gradient, mask=inside)
    tl.store(partial_ptr + programs + program, squared)
