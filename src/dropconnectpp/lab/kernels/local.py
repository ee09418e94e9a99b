"""The weights of a stack's dense layer under gates that act as Gaussian noise on its sums, in one training step, fused.

On a GPU with Triton mean and variance of the sums take one pass over the weights, and no gradient by a weight goes to
memory. Elsewhere, and for what a kernel does not support, the twin runs, with the same result to rounding.
Shapes: R replicas, B batch, I inputs, O units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.kernels import launch_config
from dropconnectpp.lab.kernels.adagrad import adagrad_all_
from dropconnectpp.lab.kernels.arguments import Sizes, Trained, constants
from dropconnectpp.lab.kernels.gates import (
    Adagrad,
    Kind,
    LearnedGate,
    check_update,
    gate_state,
    row,
    step_gate_,
    terms,
)
from dropconnectpp.lab.kernels.layer import FEW_UNITS, MOST_SPLITS, passes, rounded, supported, tile, whole

MARGIN = 1e-12
"""Added to a variance of sums: keeps the gradient of its root finite where every input is zero."""


@dataclass(frozen=True)
class LocalGate(LearnedGate):
    """pi~ = sigmoid(logit), of which no mask is drawn: `gate_moments` takes its mean and variance alone.

    The stream is that of the noise on the sums. There is one kind, since the loss's gradient goes through the moments
    to the logit; the rest is as for `LearnedGate`.
    """

    kind: Kind = "straight-through"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != "straight-through":
            raise ArgumentError(f"kind must be 'straight-through' for gates as noise, got {self.kind!r}.")


# --------------------------------------------------------------------------------------------- forward


@torch.no_grad()
def gate_moments(x: Tensor, weight: Tensor, gate: LocalGate) -> Tensor:
    """Mean x (pi~ W)^T and variance x^2 (pi~ (1 - pi~) W^2)^T of the layer's sums, (2, R, B, O).

    In the weight's precision, of operands rounded to that of x (R, B, I).
    """
    if supported(x, weight, gate):
        return _moments_by_kernel(x, weight, gate)
    pairs = zip(_inputs(x, weight), _synapses(x, weight, gate), strict=True)
    return torch.stack([torch.bmm(inputs, synapses.mT) for inputs, synapses in pairs])


def _inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x and x^2 as operands, in the weight's precision."""
    inputs = x.to(weight.dtype)
    return inputs, rounded(inputs.square(), x, weight.dtype)


def _synapses(x: Tensor, weight: Tensor, gate: LocalGate) -> tuple[Tensor, Tensor]:
    """Mean and variance of the gated weights as operands."""
    mean, variance = functional.gaussian_gate_moments(gate.logit, weight)
    return rounded(mean, x, weight.dtype), rounded(variance, x, weight.dtype)


def _moments_by_kernel(x: Tensor, weight: Tensor, gate: LocalGate) -> Tensor:
    from dropconnectpp.lab.kernels.local_triton import moments_kernel

    (stack, batch, width), units = x.shape, weight.shape[1]
    launch = launch_config.of(x.device).local_forward
    length = whole(-(-width // MOST_SPLITS), launch.split)
    splits = -(-width // length)
    block_b, block_o = tile(batch, launch.block_b), tile(units, launch.block_o)
    parts = torch.empty((splits, 2, stack, batch, units), device=x.device, dtype=torch.float32)
    moments_kernel[(-(-units // block_o) * -(-batch // block_b), splits, stack)](
        x.contiguous(),
        weight,
        gate.logit,
        parts,
        constants(Sizes(batch, units, width)),
        constants(Sizes(block_b, block_o, launch.block_i)),
        LENGTH=length,
        COMPILED=x.is_cuda,
        **launch.options,
    )
    return parts.sum(0)


# -------------------------------------------------------------------------------------------- backward


@torch.no_grad()
def gate_moments_backward_(x: Tensor, grad_moments: Tensor, weight: Tensor, gate: LocalGate, update: Adagrad) -> Tensor:
    """The gradient by x, in its precision; steps weight and gate in place.

    ``grad_moments`` (2, R, B, O) is the loss's gradient by the result of `gate_moments`, summed over the samples.
    Nothing may have been trained since the forward pass.
    """
    check_update(gate, update)
    if supported(x, weight, gate, update):
        return _backward_by_kernel_(x, grad_moments, weight, gate, update)
    grad_mean, grad_variance = rounded(grad_moments, x, weight.dtype)
    (inputs, squares), (mean, variance) = _inputs(x, weight), _synapses(x, weight, gate)
    grad_x = torch.bmm(grad_mean, mean) + 2.0 * inputs * torch.bmm(grad_variance, variance)
    through_mean, through_variance = torch.bmm(grad_mean.mT, inputs), torch.bmm(grad_variance.mT, squares)  # (R, O, I)
    keep = torch.sigmoid(gate.logit)
    grad_weight = keep * through_mean + 2.0 * keep * torch.sigmoid(-gate.logit) * weight * through_variance
    if gate.slab_scale:
        grad_weight += gate.slab_scale * keep * weight
    grad_gate = through_mean - torch.tanh(0.5 * gate.logit) * weight * through_variance  # 1 - 2 pi~ to full precision
    step_gate_(gate, functional.straight_through_gradient(gate.logit, weight, grad_gate), weight, update)
    adagrad_all_([weight], [grad_weight], [update.weight], [update.sizes], update.epsilon, update.inside)
    return grad_x.to(x.dtype)


def _backward_by_kernel_(x: Tensor, grad_moments: Tensor, weight: Tensor, gate: LocalGate, update: Adagrad) -> Tensor:
    from dropconnectpp.lab.kernels.local_triton import moments_backward_kernel

    (stack, batch, width), units = x.shape, weight.shape[1]
    # A free q(pi), a slab and many units need more registers.
    crowded = gate.alpha is not None or gate.slab_scale > 0 or units > FEW_UNITS
    chosen = launch_config.of(x.device)
    launch = chosen.local_crowded if crowded else chosen.local_backward
    block_b, block_i = tile(batch, launch.block_b), launch.block_i
    grad_x = torch.empty((stack, batch, width), device=x.device, dtype=x.dtype)
    arguments = (
        x.contiguous(),
        grad_moments.to(x.dtype).contiguous(),
        grad_x,
        Trained(weight, update.weight),
        row(update.sizes),
        gate_state(gate, update),
        constants(Sizes(batch, units, width)),
        constants(Sizes(block_b, tile(units, launch.block_o), block_i)),
        constants(terms(gate, update)),
    )
    for needs_x, needs_update, depth in passes(batch, block_b):
        moments_backward_kernel[(-(-width // block_i), stack, depth)](
            *arguments,
            GRAD_X=needs_x,
            UPDATE=needs_update,
            COMPILED=x.is_cuda,
            **launch.options,
        )
    return grad_x
