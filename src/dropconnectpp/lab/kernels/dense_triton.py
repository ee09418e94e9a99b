"""The Triton kernels behind `dense`: imported only where Triton is installed.

Each program works on a block of one replica's elements; replicas lie along the grid's second axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.lab.kernels.gates_triton import unit_interval
from dropconnectpp.ops.gpu_triton import tanh_of_half, uniform_gradient


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit  # type: ignore[untyped-decorator]
def mask_kernel(  # type: ignore[no-untyped-def]
    keep_ptr,
    mask_ptr,
    replica_ptr,
    step_ptr,
    draw,
    seed,
    count,
    row_stride,
    element_stride,
    BLOCK: tl.constexpr,
):
    """z = [u < pi~], u the top 24 bits of the stream's word: bit for bit `Stream.bernoulli` in float32."""
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    blocks = first + tl.arange(0, BLOCK)
    replica = tl.load(replica_ptr + row).to(tl.int32)
    step = tl.load(step_ptr).to(tl.int32)
    noise = unit_interval(seed, blocks, draw, step, replica)
    offsets = first * 4 + tl.arange(0, 4 * BLOCK)
    inside = offsets < count
    keep = tl.load(keep_ptr + row.to(tl.int64) * row_stride + offsets * element_stride, mask=inside, other=0.0)
    tl.store(mask_ptr + row.to(tl.int64) * count + offsets, (noise < keep).to(tl.uint8), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def score_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    mask_ptr,
    coefficient_ptr,
    kl_scale_ptr,
    gradient_ptr,
    partial_ptr,
    count,
    programs,
    polynomial,
    BLOCK: tl.constexpr,
):
    """kl_scale dKL/dlogit - c (z - pi~), and a partial sum of (z - pi~)^2, by `polynomials.GRADIENT_POLYNOMIAL`."""
    program, row = tl.program_id(0), tl.program_id(1)
    places = program * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    offsets = row.to(tl.int64) * count + places
    logit = tl.load(logit_ptr + offsets, mask=inside, other=0.0)
    size = tl.abs(logit)
    decay = tl.exp(-size)
    large = 1.0 / (1.0 + decay)
    small = decay * large
    t = tanh_of_half(size, decay, large)
    gradient = tl.load(kl_scale_ptr + row) * uniform_gradient(logit, small, large, t, *polynomial)
    score = tl.load(mask_ptr + offsets, mask=inside, other=0).to(tl.float32) - tl.where(logit < 0, small, large)
    gradient -= tl.load(coefficient_ptr + row) * score
    tl.store(gradient_ptr + offsets, gradient, mask=inside)
    tl.store(partial_ptr + row * programs + program, tl.sum(tl.where(inside, score * score, 0.0), axis=0))
