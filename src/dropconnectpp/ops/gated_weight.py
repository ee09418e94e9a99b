"""Drawing a mask and applying it, in chunks that stay in a core's cache.

On the CPU fresh memory costs more than the arithmetic (a product of two tensors of 8 MB: 0.2 ms, the
page faults of its result: 2 ms and more), and torch turns a whole mask into floats before it
multiplies. So nothing of the weight's size is made here but what is returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.ops import gpu

CHUNK = 2**19
"""Elements worked on at a time: few enough to stay in the cache, and enough that starting the threads, once
for each operation on a chunk, costs little. Even, since one 64-bit draw serves two of them."""

_RESOLUTION = 2**24
_WORTH_SEEDING = 2**13
"""Fewer elements are drawn by torch's own generator before another one is even seeded."""


def chunks(count: int) -> Iterator[slice]:
    """Slices that cover ``count`` elements."""
    for start in range(0, count, CHUNK):
        yield slice(start, min(start + CHUNK, count))


def _chunked(*tensors: Tensor) -> bool:
    return all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)


# ---------------------------------------------------------------------------------- noise and masks


class _Noise:
    """Uniform noise on the CPU, a chunk at a time: multiples of 2^-24 in [0, 1), as `torch.rand` gives.

    The generator given, or torch's own, seeds NumPy's SFC64, which takes 1.8 ms for two million
    elements; torch's Mersenne twister is as serial and takes 6.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        device = generator.device if generator is not None else torch.device("cpu")
        seed = torch.randint(2**62, (), device=device, generator=generator)
        self.bits = np.random.SFC64(int(seed.item()))

    def fill(self, noise: Tensor) -> Tensor:
        count = noise.numel()
        words = self.bits.random_raw((count + 1) // 2)  # 64 bits serve two elements
        low = torch.from_numpy(words.view(np.int32)[:count]).bitwise_and_(_RESOLUTION - 1)
        return noise.copy_(low).mul_(1.0 / _RESOLUTION)


def uniform(shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Uniform noise in [0, 1), to 24 bits in float32 and 53 in float64."""
    if device.type != "cpu" or dtype != torch.float32 or shape.numel() < _WORTH_SEEDING:
        return torch.rand(shape, dtype=dtype, device=device, generator=generator)
    noise = torch.empty(shape, device=device)
    flat, source = noise.view(-1), _Noise(generator)
    for part in chunks(flat.numel()):
        source.fill(flat[part])
    return noise


def draw_mask(logit: Tensor, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """`functional.draw_mask` of the noise that `uniform` would give, without that noise in memory."""
    chunked = logit.shape == shape and logit.dtype == torch.float32 and _chunked(logit)
    if not chunked or logit.numel() < _WORTH_SEEDING:
        dtype = torch.float64 if logit.dtype == torch.float64 else torch.float32
        noise = uniform(shape, dtype, logit.device, generator)
        if logit.shape == shape and gpu.usable(logit, noise):
            return gpu.draw_mask(logit, noise)
        return functional.draw_mask(logit, noise)
    mask = torch.empty(shape, dtype=torch.bool, device=logit.device)
    flat_mask, flat_logit, source = mask.view(-1), logit.view(-1), _Noise(generator)
    noise, pi = torch.empty((2, min(logit.numel(), CHUNK)), device=logit.device)
    for part in chunks(logit.numel()):
        u = source.fill(noise[: part.stop - part.start])
        torch.lt(u, torch.sigmoid(flat_logit[part], out=pi[: u.numel()]), out=flat_mask[part])
    return mask


# --------------------------------------------------------------------------------------- the product


def multiply(tensor: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    """tensor * mask into ``out``, which may be ``tensor`` itself."""
    if gpu.usable(tensor, mask, out):
        return gpu.multiply(tensor, mask, out)
    if not _chunked(tensor, mask, out):
        return torch.mul(tensor, mask, out=out)
    flat, flat_mask, flat_out = tensor.view(-1), mask.view(torch.uint8).view(-1), out.view(-1)
    gate = torch.empty(min(flat.numel(), CHUNK), dtype=tensor.dtype, device=tensor.device)
    for part in chunks(flat.numel()):
        torch.mul(flat[part], gate[: part.stop - part.start].copy_(flat_mask[part]), out=flat_out[part])
    return out


def _room_for(gradient: Tensor) -> Tensor:
    """Where a masked parameter's gradient may go: over a weight's, which a product has just made.

    A bias's may be the output's own gradient, which the weight still needs.
    """
    return gradient if gradient.ndim > 1 and gradient.is_contiguous() else torch.empty_like(gradient)


class _Masked(torch.autograd.Function):
    """W z forward, z G backward; a weight's G is overwritten, since nobody else sees it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)
        return multiply(weight, mask, torch.empty_like(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradient * mask, None
        return multiply(gradient, mask, _room_for(gradient)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        product: Tensor = tangent * ctx.saved_tensors[0]
        return product


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """The masked weight of Eq. (1), differentiable by the weight."""
    product: Tensor = _Masked.apply(weight, mask)  # type: ignore[no-untyped-call]
    return product


class _StraightThrough(torch.autograd.Function):
    """W z forward; backward z G to the weight and G W pi~ (1 - pi~) to the logit, nothing kept twice."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, logit: Tensor, mask: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, logit, mask, kept)
        return multiply(weight, mask, torch.empty_like(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, logit, mask, kept = ctx.saved_tensors
        grad_weight = grad_logit = None
        both = ctx.needs_input_grad[0] and ctx.needs_input_grad[1] and kept is None and gradient.ndim > 1
        if both and gpu.usable(weight, logit, mask, gradient):
            grad_logit = gpu.straight_through(logit, weight, mask, gradient)
            return gradient, grad_logit, None, None
        if ctx.needs_input_grad[1]:
            grad_logit = straight_through_gradient(logit, weight, gradient)
            if kept is not None:
                grad_logit.mul_(kept)
        if ctx.needs_input_grad[0]:
            grad_weight = multiply(gradient, mask, _room_for(gradient))
        return grad_weight, grad_logit, None, None


def straight_through(weight: Tensor, logit: Tensor, mask: Tensor, kept: Tensor | None) -> Tensor:
    """The masked weight, differentiable by the logit too, as though z were pi~."""
    product: Tensor = _StraightThrough.apply(weight, logit, mask, kept)  # type: ignore[no-untyped-call]
    return product


def straight_through_gradient(logit: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """`functional.straight_through_gradient`, in chunks."""
    if not _chunked(logit, weight, gradient) or not logit.dtype == weight.dtype == gradient.dtype:
        return functional.straight_through_gradient(logit, weight, gradient).to(logit.dtype)
    result = torch.empty_like(logit)
    flat, sources = result.view(-1), [t.view(-1) for t in (logit, weight, gradient)]
    pi = torch.empty(min(flat.numel(), CHUNK), dtype=logit.dtype, device=logit.device)
    for part in chunks(flat.numel()):
        chunk, (x, w, g) = flat[part], [source[part] for source in sources]
        torch.sigmoid(x, out=pi[: chunk.numel()])
        torch.neg(x, out=chunk).sigmoid_().mul_(pi[: chunk.numel()]).mul_(w).mul_(g)
    return result
