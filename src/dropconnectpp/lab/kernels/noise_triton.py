"""The Triton kernels behind `noise`: imported only where Triton is installed.

Each program draws some blocks of one replica's numbers, four to a block; replicas lie along the grid's second axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dropconnectpp.lab.kernels.gates_triton import unit_interval


# Without annotations: the compiler takes every one for a name that the kernel uses.
@triton.jit
def radius_of(words):  # type: ignore[no-untyped-def]
    """sqrt(-2 log u) for u = (word + 1/2) / 2^32: near 1 by the series in 1 - u, whose digits a float keeps."""
    words = words.to(tl.uint32, bitcast=True)
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * 0.25)))
    return tl.sqrt(2.0 * tl.where(rest < 0.01, near, -tl.log(u)))


@triton.jit
def angle_of(words):  # type: ignore[no-untyped-def]
    """The word's share of a whole turn."""
    return words.to(tl.uint32, bitcast=True).to(tl.float32) * (2.3283064365386963e-10 * 6.283185307179586)


@triton.jit
def normal_numbers(seed, blocks, draw, step, replica):  # type: ignore[no-untyped-def]
    """`Stream.normal` of whole blocks, to rounding: a pair of words gives a pair of numbers."""
    zero = blocks * 0
    w0, w1, w2, w3 = tl.philox(seed, blocks, zero + draw, zero + step, zero + replica)
    near, far = radius_of(w0), radius_of(w2)
    one, other = angle_of(w1), angle_of(w3)
    cosines = tl.interleave(near * tl.cos(one), far * tl.cos(other))
    sines = tl.interleave(near * tl.sin(one), far * tl.sin(other))
    return tl.interleave(cosines, sines)


@triton.jit  # type: ignore[untyped-decorator]
def numbers_kernel(  # type: ignore[no-untyped-def]
    noise_ptr, replica_ptr, step_ptr, draw, seed, count, NORMAL: tl.constexpr, BLOCK: tl.constexpr
):
    """`Stream.uniform` in float32, bit for bit, or `Stream.normal`, to rounding."""
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    blocks = first + tl.arange(0, BLOCK)
    replica = tl.load(replica_ptr + row).to(tl.int32)
    step = tl.load(step_ptr).to(tl.int32)
    if NORMAL:
        noise = normal_numbers(seed, blocks, draw, step, replica)
    else:
        noise = unit_interval(seed, blocks, draw, step, replica)
    offsets = first * 4 + tl.arange(0, 4 * BLOCK)
    tl.store(noise_ptr + row.to(tl.int64) * count + offsets, noise, mask=offsets < count)


@triton.jit  # type: ignore[untyped-decorator]
def gamma_kernel(  # type: ignore[no-untyped-def]
    shape_ptr,
    result_ptr,
    replica_ptr,
    step_ptr,
    seed,
    count,
    tiny,
    ATTEMPTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`noise.draw_gamma`, with no more attempts than some number of the program needs."""
    row = tl.program_id(1)
    first = tl.program_id(0) * BLOCK
    blocks = first + tl.arange(0, BLOCK)
    replica = tl.load(replica_ptr + row).to(tl.int32)
    step = tl.load(step_ptr).to(tl.int32)
    offsets = first * 4 + tl.arange(0, 4 * BLOCK)
    inside = offsets < count
    shape = tl.load(shape_ptr + row.to(tl.int64) * count + offsets, mask=inside, other=1.0)
    d = shape + 1.0 - 1.0 / 3.0
    c = 1.0 / tl.sqrt(9.0 * d)
    result = shape * 0.0
    missing = inside.to(tl.int32)
    attempt = 0
    while attempt < ATTEMPTS:
        x = normal_numbers(seed, blocks, 2 * attempt, step, replica)
        u = unit_interval(seed, blocks, 2 * attempt + 1, step, replica)
        root = tl.maximum(1.0 + c * x, 1e-6)
        v = root * root * root
        good = tl.log(u + 1e-12) < 0.5 * x * x + d - d * v + d * tl.log(v)
        result = tl.where((missing > 0) & (good | (attempt == ATTEMPTS - 1)), d * v, result)
        missing = tl.where(good, 0, missing)
        attempt = tl.where(tl.max(missing, axis=0) > 0, attempt + 1, ATTEMPTS)
    u = unit_interval(seed, blocks, 2 * ATTEMPTS, step, replica)
    result = tl.maximum(result * tl.exp(tl.log(u + 1e-12) / shape), tiny)
    tl.store(result_ptr + row.to(tl.int64) * count + offsets, result, mask=inside)
