"""Fused GPU kernels, where Triton and CUDA are there; else never used.

Each computes what a function of `functional` defines, in one launch over the synapses: the pass of
`fused.posterior_pass` instead of some thirty launches, the mask instead of two, the straight-through
gradients instead of six.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials

if TYPE_CHECKING:
    from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer

BLOCK = 1024


@cache
def _compiled() -> Any:
    """The kernels, or None where Triton is not installed."""
    try:
        from dropconnectpp.ops import gpu_triton
    except ImportError:
        return None
    return gpu_triton


def usable(*tensors: Tensor) -> bool:
    """Whether tensors of one shape can go through a kernel that walks over them side by side."""
    return (
        all(t.is_cuda and t.is_contiguous() and t.dtype in (torch.float32, torch.bool) for t in tensors)
        and _compiled() is not None
    )


def covers(
    layer: DropConnectPPLayer,
    gate: Tensor,
    kept: Tensor | None,
    masks: Sequence[Tensor],
    mirrored: Sequence[Tensor],
    likelihood: Tensor | None,
) -> bool:
    """Whether a kernel computes this pass: the common case, one mask and a known q(pi).

    Under torch.compile none does: the compiler fuses the plain pass, and cannot trace all that a launch needs.
    """
    return (
        usable(gate)
        and not torch.compiler.is_compiling()
        and kept is None
        and likelihood is None
        and not mirrored
        and len(masks) <= 1
        and layer.hyper == "optimal"
        and layer.parameterisation == "logit"
        and _knows(layer.alpha, layer.beta)
    )


def _knows(alpha: float, beta: float) -> bool:
    return alpha == beta == 1.0 or polynomials.prior_value_polynomial(alpha, beta) is not None


def posterior_pass(
    logit: Tensor,
    mask: Tensor | None,
    coefficients: Tensor | None,
    kl_scale: Tensor | float,
    gradients: bool,
    prior: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """KL sum, sum of squared scores, and gradient of kl_scale * KL - c * (z - pi~)."""
    count = logit.numel()
    programs = -(-count // BLOCK)
    partial = torch.empty((2, programs), device=logit.device, dtype=torch.float32)
    gradient = torch.empty_like(logit) if gradients else None
    scored = mask is not None and coefficients is not None
    kernel, polynomial = _kernel_for(*prior)
    kernel[(programs,)](
        logit,
        mask.contiguous().view(torch.uint8) if mask is not None and scored else logit,
        coefficients.float() if coefficients is not None and scored else logit,
        kl_scale.float() if isinstance(kl_scale, Tensor) else kl_scale,
        logit if gradient is None else gradient,
        partial,
        count,
        programs,
        *polynomial,
        SCALE_IS_POINTER=isinstance(kl_scale, Tensor),
        SCORED=scored,
        GRADIENT=gradients,
        BLOCK=BLOCK,
    )
    totals = partial.sum(1)
    return totals[0], totals[1], gradient


def _kernel_for(alpha: float, beta: float) -> tuple[Any, tuple[Any, ...]]:
    """The kernel for a prior, and its polynomials as the kernel takes them.

    The uniform prior's has shorter ones: half of its terms are zero.
    """
    if alpha == beta == 1.0:
        uniform = polynomials.VALUE_POLYNOMIAL[torch.float32], polynomials.SLOPE_POLYNOMIAL[torch.float32]
        return _compiled().posterior_kernel, (*uniform[0], *uniform[1])
    value, slope = polynomials.prior_value_polynomial(alpha, beta), polynomials.prior_polynomial(alpha, beta)
    assert value is not None
    assert slope is not None
    return _compiled().prior_kernel, (*value, *slope)


def draw_mask(logit: Tensor, noise: Tensor) -> Tensor:
    """`functional.draw_mask`."""
    mask = torch.empty(logit.shape, device=logit.device, dtype=torch.bool)
    count = logit.numel()
    _compiled().mask_kernel[(-(-count // BLOCK),)](noise, logit, mask.view(torch.uint8), count, BLOCK=BLOCK)
    return mask


def straight_through(logit: Tensor, weight: Tensor, mask: Tensor, gradient: Tensor) -> Tensor:
    """`functional.straight_through_gradient`; ``gradient`` becomes the weight's own, mask * gradient."""
    result = torch.empty_like(logit)
    count = logit.numel()
    grid = (-(-count // BLOCK),)
    _compiled().straight_through_kernel[grid](
        logit, weight, mask.view(torch.uint8), gradient, result, count, BLOCK=BLOCK
    )
    return result


def multiply(tensor: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    """tensor * mask into ``out``, which may be ``tensor`` itself."""
    count = tensor.numel()
    _compiled().masking_kernel[(-(-count // BLOCK),)](tensor, mask.view(torch.uint8), out, count, BLOCK=BLOCK)
    return out
