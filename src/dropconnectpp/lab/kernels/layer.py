"""The weights of a stack's dense layer in one training step: gated product, its gradients and Adagrad, fused.

On a GPU with Triton masks are drawn inside the kernels and no gradient of a weight goes to memory. Elsewhere, and for
what a kernel does not cover, the twin runs, with the same result: masks bit for bit, the rest to rounding.
Shapes: L samples, that is masks of one step, R replicas, B batch, I inputs, O units.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.kernels import gates, launch_config
from dropconnectpp.lab.kernels.adagrad import adagrad_all_
from dropconnectpp.lab.kernels.compiled import compiled
from dropconnectpp.lab.kernels.gates import (
    Adagrad,
    FixedGate,
    Gate,
    LearnedGate,
    OpenGate,
    address,
    check_update,
    draw,
    gate_number,
    keep_of,
    loss_terms,
    row,
    samples_of,
    slope_polynomial,
    step_gate_,
)

FEW_UNITS = 64
"""As many as one tile has by default: layers with more are launched in ways of their own."""
MOST_SPLITS = 16
"""Parts of the inputs that the forward pass adds up apart."""


def usable(x: Tensor, weight: Tensor, gate: Gate, update: Adagrad | None = None) -> bool:
    """Whether the kernels can run."""
    parameters: list[Tensor | None] = [weight]
    if update is not None:
        parameters += [update.weight, update.logit, update.alpha, update.beta]
    if isinstance(gate, LearnedGate):
        parameters += [gate.logit, gate.alpha, gate.beta]
        if not gates.known(gate):
            return False
    return x.is_cuda and x.dtype == torch.bfloat16 and gates.ready(*parameters)


# --------------------------------------------------------------------------------------------- forward


@torch.no_grad()
def gated_product(x: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor | int) -> Tensor:
    """x (W z)^T in the weight's precision, (L, R, B, O), from operands rounded to that of x (R, B, I)."""
    if usable(x, weight, gate):
        return _product_by_kernel(x, weight, gate, replicas, step)
    return torch.stack([_product(x, weight, mask) for mask in draw(gate, weight, replicas, step)])


def rounded(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand: rounded to the precision of ``like``, in that of the sums."""
    return tensor.to(like.dtype).to(dtype)


def _product(x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    gated = weight if mask is None else weight * mask
    return torch.bmm(x.to(weight.dtype), rounded(gated, x, weight.dtype).mT)


def _product_by_kernel(x: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor | int) -> Tensor:
    (stack, batch, width), units, samples = x.shape, weight.shape[1], samples_of(gate)
    chosen = launch_config.of(x.device)
    launch = chosen.forward_many if units > FEW_UNITS else chosen.forward
    length = whole(-(-width // MOST_SPLITS), launch.split)
    splits = -(-width // length)
    block_b, block_o = tile(batch, launch.block_b), tile(units, launch.block_o)
    parts = torch.empty((splits, samples, stack, batch, units), device=x.device, dtype=torch.float32)
    compiled("layer").product_kernel[(samples * -(-units // block_o) * -(-batch // block_b), splits, stack)](
        x.contiguous(),
        weight,
        gate.logit if isinstance(gate, LearnedGate) else None,
        row(gate.keep) if isinstance(gate, FixedGate) else None,
        *address(x, replicas, step),
        parts,
        0 if isinstance(gate, OpenGate) else gate.stream.seed,
        stack,
        BATCH=batch,
        UNITS=units,
        WIDTH=width,
        LENGTH=length,
        SAMPLES=samples,
        **_switches(gate, x),
        BLOCK_B=block_b,
        BLOCK_O=block_o,
        BLOCK_I=launch.block_i,
        **launch.options,
    )
    return parts.sum(0)


# -------------------------------------------------------------------------------------------- backward


@torch.no_grad()
def gated_product_backward_(
    x: Tensor,
    by_output: Tensor,
    weight: Tensor,
    gate: Gate,
    replicas: Tensor,
    step: Tensor | int,
    update: Adagrad,
) -> Tensor:
    """The gradient by x, in its precision; steps the weight in place, and gates that learn straight through.

    ``by_output`` (L, R, B, O) is the loss's gradient by `gated_product`; what follows from it is summed over the
    samples. The masks are drawn anew, so ``gate``, ``replicas`` and ``step`` are those of the forward pass, and nothing
    has been trained in between. Gates that learn by the score need no product: `update_gate_` steps them, afterwards.
    """
    if isinstance(gate, LearnedGate) and gate.kind == "straight-through":
        check_update(gate, update)
    if usable(x, weight, gate, update):
        return _backward_by_kernel_(x, by_output, weight, gate, replicas, step, update)
    return _backward_(x, by_output, weight, gate, draw(gate, weight, replicas, step), update)


def _backward_(
    x: Tensor, by_output: Tensor, weight: Tensor, gate: Gate, masks: Iterable[Tensor | None], update: Adagrad
) -> Tensor:
    inputs = x.to(weight.dtype)
    by_x, by_weight, by_gate = torch.zeros_like(inputs), torch.zeros_like(weight), torch.zeros_like(weight)
    for by_sample, mask in zip(rounded(by_output, x, weight.dtype), masks, strict=True):
        gated = weight if mask is None else weight * mask
        by_x += torch.bmm(by_sample, rounded(gated, x, weight.dtype))
        product = torch.bmm(by_sample.mT, inputs)  # (R, O, I)
        by_gate += product
        by_weight += product if mask is None else product * mask
    if not isinstance(gate, OpenGate) and gate.slab_scale:
        by_weight += gate.slab_scale * keep_of(gate, weight) * weight
    if isinstance(gate, LearnedGate) and gate.kind == "straight-through":
        step_gate_(gate, functional.straight_through_gradient(gate.logit, weight, by_gate), weight, update)
    adagrad_all_([weight], [by_weight], [update.weight], [update.sizes], update.epsilon, update.inside)
    return by_x.to(x.dtype)


def _backward_by_kernel_(
    x: Tensor,
    by_output: Tensor,
    weight: Tensor,
    gate: Gate,
    replicas: Tensor,
    step: Tensor | int,
    update: Adagrad,
) -> Tensor:
    (stack, batch, width), units = x.shape, weight.shape[1]
    learned = gate if isinstance(gate, LearnedGate) else None
    # Several samples, and learned gates straight through, with a slab or many units, need more registers.
    crowded = samples_of(gate) > 1 or (
        learned is not None and (learned.kind != "score" or learned.slab_scale > 0 or units > FEW_UNITS)
    )
    chosen = launch_config.of(x.device)
    launch = chosen.backward_crowded if crowded else chosen.backward
    block_b, block_i = tile(batch, launch.block_b), launch.block_i
    by_x = torch.empty((stack, batch, width), device=x.device, dtype=x.dtype)
    arguments: list[Any] = [
        x.contiguous(),
        by_output.to(x.dtype).contiguous(),
        by_x,
        weight,
        update.weight,
        learned.logit if learned else None,
        update.logit,
        learned.alpha if learned else None,
        update.alpha,
        learned.beta if learned else None,
        update.beta,
        row(gate.keep) if isinstance(gate, FixedGate) else None,
        row(update.sizes),
        row(update.gate_sizes),
        row(learned.kl_scale) if learned else None,
        *address(x, replicas, step),
        0 if isinstance(gate, OpenGate) else gate.stream.seed,
        0.0 if isinstance(gate, OpenGate) else gate.slab_scale,
        learned.prior_alpha if learned else 1.0,
        learned.prior_beta if learned else 1.0,
        update.epsilon,
        *slope_polynomial(learned),
    ]
    batches = -(-batch // block_b)
    # A larger batch takes two launches: each of its tiles needs the weights as they were.
    passes = [(True, True, 1)] if batches == 1 else [(True, False, batches), (False, True, 1)]
    for needs_x, needs_update, depth in passes:
        compiled("layer").backward_kernel[(-(-width // block_i), stack, depth)](
            *arguments,
            **loss_terms(gate),
            INSIDE=update.inside,
            BY_X=needs_x,
            UPDATE=needs_update,
            BATCH=batch,
            UNITS=units,
            WIDTH=width,
            SAMPLES=samples_of(gate),
            **_switches(gate, x),
            BLOCK_B=block_b,
            BLOCK_O=tile(units, launch.block_o),
            BLOCK_I=block_i,
            **launch.options,
        )
    return by_x


# -------------------------------------------------------------------------------------------- launches


def whole(count: int, unit: int) -> int:
    """``count`` rounded up to a multiple of ``unit``."""
    return -(-count // unit) * unit


def tile(count: int, most: int) -> int:
    """The smallest tile that covers ``count``, from 16, which a product needs, to ``most``."""
    return min(max(16, 1 << (count - 1).bit_length()), most)


def _switches(gate: Gate, x: Tensor) -> dict[str, Any]:
    return {"GATE": gate_number(gate), "COMPILED": x.is_cuda}
