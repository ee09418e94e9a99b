"""Uniform, normal and Gamma numbers of a stream for a stack of replicas: one launch each on a GPU with Triton.

Elsewhere the twin runs. Uniform numbers are the same bit for bit, the others to rounding. Shapes: R replicas.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropconnectpp.lab.kernels.support import step_tensor, supported
from dropconnectpp.lab.philox import Stream

BLOCK = 256
"""Blocks of four numbers that a program draws."""
ATTEMPTS = 8
"""Of the rejection method for Gamma numbers."""


def draw_uniform(stream: Stream, like: Tensor, replicas: Tensor, step: Tensor | int, draw: int = 0) -> Tensor:
    """`Stream.uniform` in the shape of ``like`` (R, ...): numbers in [0, 1), float64 for a float64."""
    if not supported(like):
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return stream.uniform(replicas, step, math.prod(like.shape[1:]), draw, dtype=dtype).view(like.shape)
    return _numbers_by_kernel(stream, like, replicas, step, draw, normal=False)


def draw_normal(stream: Stream, like: Tensor, replicas: Tensor, step: Tensor | int, draw: int = 0) -> Tensor:
    """`Stream.normal` in the shape and precision of ``like`` (R, ...)."""
    if supported(like):
        return _numbers_by_kernel(stream, like, replicas, step, draw, normal=True)
    return stream.normal(replicas, step, math.prod(like.shape[1:]), draw, dtype=like.dtype).view(like.shape)


def _numbers_by_kernel(
    stream: Stream, like: Tensor, replicas: Tensor, step: Tensor | int, draw: int, normal: bool
) -> Tensor:
    from dropconnectpp.lab.kernels.noise_triton import numbers_kernel

    count, noise = math.prod(like.shape[1:]), torch.empty_like(like)
    numbers_kernel[(-(-count // (4 * BLOCK)), len(like))](
        noise, replicas, step_tensor(step, like.device), draw, stream.seed, count, NORMAL=normal, BLOCK=BLOCK
    )
    return noise


def draw_gamma(shape: Tensor, stream: Stream, replicas: Tensor, step: Tensor | int) -> Tensor:
    """Gamma(shape, 1) numbers (R, ...): Marsaglia and Tsang's rejection with a fixed number of attempts.

    Fewer than 1 attempt in 20 fails. After eight the last is taken, which happens to one number in 10^10.
    """
    if supported(shape):
        return _gamma_by_kernel(shape, stream, replicas, step)
    boosted = shape + 1.0  # their method needs a shape of at least 1; the boost is undone below
    d = boosted - 1.0 / 3.0
    c = 1.0 / torch.sqrt(9.0 * d)
    result = torch.zeros_like(shape)
    missing = torch.ones_like(shape, dtype=torch.bool)
    for attempt in range(ATTEMPTS):
        x = draw_normal(stream, shape, replicas, step, 2 * attempt)
        u = draw_uniform(stream, shape, replicas, step, 2 * attempt + 1)
        v = (1.0 + c * x).clamp_min(1e-6) ** 3
        good = torch.log(u + 1e-12) < 0.5 * x.square() + d - d * v + d * torch.log(v)
        result = torch.where(missing & (good | (attempt == ATTEMPTS - 1)), d * v, result)
        missing = missing & ~good
    u = draw_uniform(stream, shape, replicas, step, 2 * ATTEMPTS)
    # Above zero, since heads / (heads + tails) follows.
    return (result * (u + 1e-12) ** (1.0 / shape)).clamp_min(torch.finfo(shape.dtype).tiny)


def _gamma_by_kernel(shape: Tensor, stream: Stream, replicas: Tensor, step: Tensor | int) -> Tensor:
    from dropconnectpp.lab.kernels.noise_triton import gamma_kernel

    count, result = math.prod(shape.shape[1:]), torch.empty_like(shape)
    gamma_kernel[(-(-count // (4 * BLOCK)), len(shape))](
        shape,
        result,
        replicas,
        step_tensor(step, shape.device),
        stream.seed,
        count,
        torch.finfo(shape.dtype).tiny,
        ATTEMPTS=ATTEMPTS,
        BLOCK=BLOCK,
    )
    return result
