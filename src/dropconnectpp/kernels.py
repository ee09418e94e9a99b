"""A fused GPU kernel for `fused.posterior_pass`, where Triton and CUDA are there; else never used.

It computes what `functional.collapsed_kl` and `functional.bernoulli_score` define, in one launch
over the synapses instead of some thirty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dropconnectpp import functional

if TYPE_CHECKING:
    from dropconnectpp.learned_rate import DropConnectPPLayer

BLOCK = 1024


@cache
def _compiled() -> Any:
    """The kernel, or None where Triton is not installed."""
    try:
        from dropconnectpp import _triton
    except ImportError:
        return None
    return _triton.posterior_kernel


def covers(
    layer: DropConnectPPLayer,
    gate: Tensor,
    kept: Tensor | None,
    masks: Sequence[Tensor],
    mirrored: Sequence[Tensor],
    likelihood: Tensor | None,
) -> bool:
    """Whether the kernel computes this pass: the common case, one mask and the uniform prior."""
    return (
        gate.is_cuda
        and gate.dtype == torch.float32
        and gate.is_contiguous()
        and kept is None
        and likelihood is None
        and not mirrored
        and len(masks) <= 1
        and layer.hyper == "optimal"
        and layer.alpha == layer.beta == 1.0
        and layer.parameterisation == "logit"
        and _compiled() is not None
    )


def posterior_pass(
    logit: Tensor, mask: Tensor | None, coefficients: Tensor | None, kl_scale: Tensor | float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """KL sum, sum of squared scores, and gradient of kl_scale * KL - c * (z - pi~)."""
    count = logit.numel()
    programs = -(-count // BLOCK)
    partial = torch.empty((2, programs), device=logit.device, dtype=torch.float32)
    gradient = torch.empty_like(logit) if gradients else None
    if not isinstance(kl_scale, Tensor):
        kl_scale = torch.full((), kl_scale, device=logit.device)
    scored = mask is not None and coefficients is not None
    _compiled()[(programs,)](
        logit,
        mask.contiguous().view(torch.uint8) if mask is not None and scored else logit,
        coefficients.float() if coefficients is not None and scored else logit,
        kl_scale.float(),
        logit if gradient is None else gradient,
        partial,
        count,
        programs,
        *functional._VALUE[torch.float32],
        *functional._SLOPE[torch.float32],
        SCORED=scored,
        GRADIENT=gradients,
        BLOCK=BLOCK,
    )
    totals = partial.sum(1)
    return totals[0], totals[1], gradient
