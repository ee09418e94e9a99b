"""Masks and the posterior's gradient for a stack of replicas: one launch each on a GPU with Triton.

Elsewhere, and for what a kernel does not support, the twin runs, with the same result: masks bit for bit, the rest
to rounding. Shapes: R replicas along the first axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials
from dropconnectpp import functional
from dropconnectpp.lab.kernels.support import has_triton, step_tensor, supported
from dropconnectpp.lab.philox import Stream
from dropconnectpp.ops.noise import in_chunks

BLOCK = 1024
CACHED = 2**17
"""Synapses worked on at a time on the CPU: a dozen temporaries of them fit a core's cache."""


def beside(values: Tensor, tensor: Tensor) -> Tensor:
    """One number for each replica, (R,), in a shape that multiplies (R, ...)."""
    return values.view(-1, *[1] * (tensor.ndim - 1))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each replica's own linear layer: x (R, B, I), weight (R, O, I), bias (R, O) -> (R, B, O)."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


# ----------------------------------------------------------------------------------------------- masks


def draw_masks(stream: Stream, keep: Tensor, replicas: Tensor, step: Tensor | int, draw: int = 0) -> Tensor:
    """`Stream.bernoulli`: on/off variables (R, ...), True with probability ``keep``."""
    one = keep[0]
    constant = one.ndim > 0 and all(stride == 0 for stride in one.stride())
    if not (keep.is_cuda and keep.dtype == torch.float32 and (one.is_contiguous() or constant) and has_triton()):
        return stream.bernoulli(keep, replicas, step, draw)
    from dropconnectpp.lab.kernels.dense_triton import mask_kernel

    count = one.numel()
    mask = torch.empty(keep.shape, device=keep.device, dtype=torch.bool)
    mask_kernel[(-(-count // (4 * BLOCK)), len(keep))](
        keep,
        mask.view(torch.uint8),
        replicas,
        step_tensor(step, keep.device),
        draw,
        stream.seed,
        count,
        keep.stride(0),
        0 if constant else 1,
        BLOCK=BLOCK,
    )
    return mask


# --------------------------------------------------------------------------- the posterior's gradient


def score_pass(logit: Tensor, mask: Tensor, coefficient: Tensor, kl_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient kl_scale dKL/dlogit - c (z - pi~), for alpha = beta = 1 at the best q(pi), and sum (z - pi~)^2.

    logit and mask are (R, ...), coefficient and kl_scale (R,); the sums are (R,).
    """
    if supported(logit) and mask.is_contiguous():
        return _score_pass_by_kernel(logit, mask, coefficient, kl_scale)
    if in_chunks(logit, mask) and logit.numel() > CACHED and not torch.compiler.is_compiling():
        return _score_pass_in_chunks(logit, mask, coefficient, kl_scale)
    gradient, squares = _score_gradient(logit, mask, beside(coefficient, logit), beside(kl_scale, logit))
    return gradient, squares.flatten(1).sum(1)


def _score_gradient(logit: Tensor, mask: Tensor, coefficient: Tensor, kl_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient, and the squared scores of all synapses."""
    _, grad_kl = functional.collapsed_kl(logit, 1.0, 1.0, value=False)
    assert grad_kl is not None
    score = functional.bernoulli_score(mask, logit)
    return grad_kl * kl_scale - coefficient * score, score.square()


def _score_pass_in_chunks(logit: Tensor, mask: Tensor, coefficient: Tensor, kl_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers, a cache's content at a time: fresh memory costs a CPU more than the arithmetic.

    The squares are summed whole, so that no digit of the sum depends on the chunks.
    """
    gradient, squares = torch.empty_like(logit), torch.empty_like(logit)
    rows = [tensor.flatten(1) for tensor in (logit, mask, gradient, squares)]
    for row in range(len(logit)):
        x, z, grad, square = (tensor[row] for tensor in rows)
        for start in range(0, x.numel(), CACHED):
            part = slice(start, start + CACHED)
            grad[part], square[part] = _score_gradient(x[part], z[part], coefficient[row], kl_scale[row])
    return gradient, squares.flatten(1).sum(1)


def _score_pass_by_kernel(logit: Tensor, mask: Tensor, coefficient: Tensor, kl_scale: Tensor) -> tuple[Tensor, Tensor]:
    from dropconnectpp.lab.kernels.dense_triton import score_kernel

    count = logit[0].numel()
    programs = -(-count // BLOCK)
    gradient = torch.empty_like(logit)
    partial = torch.empty((len(logit), programs), device=logit.device, dtype=torch.float32)
    score_kernel[(programs, len(logit))](
        logit,
        mask.view(torch.uint8),
        coefficient.float().contiguous(),
        kl_scale.float().contiguous(),
        gradient,
        partial,
        count,
        programs,
        polynomials.GRADIENT_POLYNOMIAL[torch.float32],
        BLOCK=BLOCK,
    )
    return gradient, partial.sum(1)
