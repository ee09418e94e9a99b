"""The masked weight W z, forward and backward, for masks that are given and for masks that a seed defines.

On the CPU fresh memory costs more than the arithmetic (a product of two tensors of 8 MB: 0.2 ms, the page faults of
its result: 2 ms and more), and torch turns a whole mask into floats before it multiplies. So nothing of the weight's
size is made here but what is returned. On a GPU a mask is never stored: the kernels draw it again in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.ops import gpu, gpu_gates, noise
from dropconnectpp.ops.noise import CHUNK, chunks, in_chunks

SMALL = 2**13
"""Below this many elements plain operations are faster than chunks."""

# --------------------------------------------------------------------------------------- the product


def multiply(tensor: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    """tensor * mask into ``out``, which may be ``tensor`` itself or have another dtype."""
    if gpu.supported(tensor, mask, out):
        return gpu.multiply(tensor, mask, out)
    if tensor.numel() < SMALL or not in_chunks(tensor, mask, out):
        return torch.mul(tensor, mask, out=out) if out.dtype == tensor.dtype else out.copy_(tensor * mask)
    flat, flat_mask, flat_out = tensor.view(-1), mask.view(torch.uint8).view(-1), out.view(-1)
    gate = torch.empty(min(flat.numel(), CHUNK), dtype=tensor.dtype)
    for part in chunks(flat.numel()):
        chunk = gate[: part.stop - part.start].copy_(flat_mask[part])
        if out.dtype == tensor.dtype:
            torch.mul(flat[part], chunk, out=flat_out[part])
        else:
            flat_out[part].copy_(chunk.mul_(flat[part]))
    return out


def _room_for(gradient: Tensor, like: Tensor) -> Tensor:
    """Where a masked parameter's gradient may go: over a weight's, which a product has just made.

    A bias's may be the output's own gradient, which the weight still needs.
    """
    free = gradient.ndim > 1 and gradient.is_contiguous() and gradient.dtype == like.dtype
    return gradient if free else torch.empty_like(like)


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
        return multiply(gradient, mask, _room_for(gradient, gradient)), None

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
        wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        return *through_mask(gradient, weight, logit, mask, kept, wanted), None, None


def straight_through(weight: Tensor, logit: Tensor, mask: Tensor, kept: Tensor | None) -> Tensor:
    """The masked weight, differentiable by the logit too, as though z were pi~."""
    product: Tensor = _StraightThrough.apply(weight, logit, mask, kept)  # type: ignore[no-untyped-call]
    return product


def through_mask(
    gradient: Tensor, weight: Tensor, logit: Tensor, mask: Tensor, kept: Tensor | None, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """z G and G W pi~ (1 - pi~), where wanted; G may be overwritten."""
    grad_weight = grad_logit = None
    if wanted[1]:
        grad_logit = straight_through_gradient(logit, weight, gradient)
        if kept is not None:
            grad_logit.mul_(kept)
    if wanted[0]:
        grad_weight = multiply(gradient, mask, _room_for(gradient, weight))
    return grad_weight, grad_logit


def straight_through_gradient(logit: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """`functional.straight_through_gradient`, in chunks."""
    one_dtype = logit.dtype == weight.dtype == gradient.dtype
    if logit.numel() < SMALL or not one_dtype or not in_chunks(logit, weight, gradient):
        return functional.straight_through_gradient(logit, weight, gradient).to(logit.dtype)
    result = torch.empty_like(logit)
    flat, sources = result.view(-1), [t.view(-1) for t in (logit, weight, gradient)]
    pi = torch.empty(min(flat.numel(), CHUNK), dtype=logit.dtype, device=logit.device)
    for part in chunks(flat.numel()):
        chunk, (x, w, g) = flat[part], [source[part] for source in sources]
        torch.sigmoid(x, out=pi[: chunk.numel()])
        torch.neg(x, out=chunk).sigmoid_().mul_(pi[: chunk.numel()]).mul_(w).mul_(g)
    return result


# ------------------------------------------------------------------------------ masks that a seed defines


def masked_by_draw(
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    """W z for the mask of a seed and a stream."""
    if gpu.supported(weight, logit):
        return gpu_gates.gated([(weight, logit, kept, stream)], seed, mirrored, dtype)[0]
    mask = _mask(weight, logit, kept, seed, stream, mirrored)
    return multiply(weight, mask, torch.empty_like(weight, dtype=dtype or weight.dtype))


def masked_by_draw_backward(
    grad: Tensor,
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """z G and, straight through, G W pi~ (1 - pi~), where wanted."""
    if gpu.supported(weight, logit):
        part = (weight, logit, kept, stream)
        by_weight, by_logit = gpu_gates.gated_backward([grad], [part], seed, mirrored, wanted)
        return by_weight[0], by_logit[0]
    mask = _mask(weight, logit, kept, seed, stream, mirrored)
    return through_mask(grad.clone(), weight, logit, mask, kept, wanted)


def _mask(weight: Tensor, logit: Tensor, kept: Tensor | None, seed: Tensor, stream: int, mirrored: bool) -> Tensor:
    mask = noise.binary(logit, weight.shape, seed, stream, mirrored)
    return mask if kept is None else mask & kept
