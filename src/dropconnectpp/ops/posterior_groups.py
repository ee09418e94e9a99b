"""Small parameters taken together in one pass over the posterior, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.ops import posterior_cpu
from dropconnectpp.ops.posterior import GatePosterior, supported

GROUPED = 2**15
"""On the CPU parameters up to this size are taken together: each operation on them costs more than its arithmetic."""


def groupable(posterior: GatePosterior) -> bool:
    """Whether a parameter is small enough, and common enough, to be taken together with others."""
    gate = posterior.gate
    return (
        gate.numel() <= GROUPED
        and posterior.kept is None
        and gate.requires_grad
        and supported(posterior)
        and posterior_cpu.supported(gate, posterior.prior)
    )


def in_parts(posteriors: Sequence[GatePosterior]) -> Iterator[list[GatePosterior]]:
    """Parameters in groups of up to `GROUPED` synapses: with more torch would start its threads."""
    part: list[GatePosterior] = []
    size = 0
    for posterior in posteriors:
        count = posterior.gate.numel()
        if part and size + count > GROUPED:
            yield part
            part, size = [], 0
        part.append(posterior)
        size += count
    if part:
        yield part


class _Together(torch.autograd.Function):
    """A value whose gradient by several parameters lies in one piece of memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradient: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.shapes = [parameter.shape for parameter in parameters]
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = gradient * upstream
        parts = scaled.split([shape.numel() for shape in ctx.shapes])
        return None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def group_pass(
    posteriors: Sequence[GatePosterior],
    kl_scale: float = 1.0,
    masks: Sequence[Tensor] = (),
    coefficients: Tensor | None = None,
    sizes: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """kl_scale * KL of parameters with one prior, taken together, with its gradient behind it, and the KL itself.

    With ``masks`` the gradient has the score too. Layers have a coefficient each and so many synapses as ``sizes`` say,
    one after the other; last come their squared scores.
    """
    gates = [posterior.gate for posterior in posteriors]
    flat = torch.cat([gate.detach().view(-1) for gate in gates])
    drawn = [torch.cat([mask.view(-1) for mask in masks])] if masks else []
    terms = posterior_cpu.Terms(kl_scale, drawn, (), coefficients, None, posteriors[0].prior, sizes=sizes)
    kl, squared, found = posterior_cpu.posterior_pass(flat, terms, torch.is_grad_enabled())
    value = kl if kl_scale == 1.0 else kl * kl_scale
    if found is None:
        return value, kl, squared
    carried: Tensor = _Together.apply(value, found, *gates)  # type: ignore[no-untyped-call]
    return carried, kl, squared
