"""The weights of a stack's dense layer in one training step: gated product, its gradients and Adagrad, fused.

On a GPU with Triton masks are drawn inside the kernels and no gradient by a weight goes to memory. Elsewhere, and for
what a kernel does not support, the twin runs, with the same result: masks bit for bit, the rest to rounding.
Shapes: L samples, that is masks of one step, R replicas, B batch, I inputs, O units.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.kernels import launch_config, support
from dropconnectpp.lab.kernels.adagrad import adagrad_all_
from dropconnectpp.lab.kernels.arguments import Sizes, Trained, constants
from dropconnectpp.lab.kernels.gates import (
    Adagrad,
    FixedGate,
    Gate,
    LearnedGate,
    OpenGate,
    check_update,
    draw,
    draws,
    gate_number,
    gate_state,
    keep_of,
    prior_supported,
    row,
    samples_of,
    step_gate_,
    terms,
)

FEW_UNITS = 64
"""The units of one tile by default; layers with more have launches of their own."""
MOST_SPLITS = 16
"""The most parts of the inputs that the forward pass adds up apart."""


def supported(x: Tensor, weight: Tensor, gate: Gate, update: Adagrad | None = None) -> bool:
    """Whether the kernels can take a layer: inputs in bfloat16, all that is trained in float32."""
    parameters: list[Tensor | None] = [weight]
    if update is not None:
        parameters += [update.weight, update.logit, update.alpha, update.beta]
    if isinstance(gate, LearnedGate):
        parameters += [gate.logit, gate.alpha, gate.beta]
        if not prior_supported(gate):
            return False
    return x.is_cuda and x.dtype == torch.bfloat16 and support.supported(*parameters)


# --------------------------------------------------------------------------------------------- forward


@torch.no_grad()
def gated_product(x: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor | int) -> Tensor:
    """x (W z)^T in the weight's precision, (L, R, B, O), of operands rounded to that of x (R, B, I)."""
    if supported(x, weight, gate):
        return _product_by_kernel(x, weight, gate, replicas, step)
    return torch.stack([_product(x, weight, mask) for mask in draw(gate, weight, replicas, step)])


def rounded(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand: rounded to the precision of ``like``, held in that of the sums."""
    return tensor.to(like.dtype).to(dtype)


def _product(x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    gated = weight if mask is None else weight * mask
    return torch.bmm(x.to(weight.dtype), rounded(gated, x, weight.dtype).mT)


def _product_by_kernel(x: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor | int) -> Tensor:
    from dropconnectpp.lab.kernels.layer_triton import product_kernel

    (stack, batch, width), units, samples = x.shape, weight.shape[1], samples_of(gate)
    chosen = launch_config.of(x.device)
    launch = chosen.forward_many if units > FEW_UNITS else chosen.forward
    length = whole(-(-width // MOST_SPLITS), launch.split)
    splits = -(-width // length)
    block_b, block_o = tile(batch, launch.block_b), tile(units, launch.block_o)
    parts = torch.empty((splits, samples, stack, batch, units), device=x.device, dtype=torch.float32)
    product_kernel[(samples * -(-units // block_o) * -(-batch // block_b), splits, stack)](
        x.contiguous(),
        weight,
        gate.logit if isinstance(gate, LearnedGate) else None,
        row(gate.keep) if isinstance(gate, FixedGate) else None,
        draws(gate, x, replicas, step),
        parts,
        stack,
        constants(Sizes(batch, units, width)),
        constants(Sizes(block_b, block_o, launch.block_i)),
        LENGTH=length,
        SAMPLES=samples,
        GATE=gate_number(gate),
        COMPILED=x.is_cuda,
        **launch.options,
    )
    return parts.sum(0)


# -------------------------------------------------------------------------------------------- backward


@torch.no_grad()
def gated_product_backward_(
    x: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    gate: Gate,
    replicas: Tensor,
    step: Tensor | int,
    update: Adagrad,
) -> Tensor:
    """The gradient by x, in its precision; steps the weight in place, and gates that learn straight through.

    ``grad_output`` (L, R, B, O) is the loss's gradient by the result of `gated_product`; the gradients that follow are
    summed over the samples. Masks are drawn again, so ``gate``, ``replicas`` and ``step`` must be those of the forward
    pass, with nothing trained in between. Gates that learn by the score need no product: `update_gate_` steps them,
    afterwards.
    """
    if isinstance(gate, LearnedGate) and gate.kind == "straight-through":
        check_update(gate, update)
    if supported(x, weight, gate, update):
        return _backward_by_kernel_(x, grad_output, weight, gate, replicas, step, update)
    return _backward_(x, grad_output, weight, gate, draw(gate, weight, replicas, step), update)


def _backward_(
    x: Tensor, grad_output: Tensor, weight: Tensor, gate: Gate, masks: Iterable[Tensor | None], update: Adagrad
) -> Tensor:
    inputs = x.to(weight.dtype)
    grad_x, grad_weight, grad_gate = torch.zeros_like(inputs), torch.zeros_like(weight), torch.zeros_like(weight)
    for grad_sample, mask in zip(rounded(grad_output, x, weight.dtype), masks, strict=True):
        gated = weight if mask is None else weight * mask
        grad_x += torch.bmm(grad_sample, rounded(gated, x, weight.dtype))
        product = torch.bmm(grad_sample.mT, inputs)  # (R, O, I)
        grad_gate += product
        grad_weight += product if mask is None else product * mask
    if not isinstance(gate, OpenGate) and gate.slab_scale:
        grad_weight += gate.slab_scale * keep_of(gate, weight) * weight
    if isinstance(gate, LearnedGate) and gate.kind == "straight-through":
        step_gate_(gate, functional.straight_through_gradient(gate.logit, weight, grad_gate), weight, update)
    adagrad_all_([weight], [grad_weight], [update.weight], [update.sizes], update.epsilon, update.inside)
    return grad_x.to(x.dtype)


def _backward_by_kernel_(
    x: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    gate: Gate,
    replicas: Tensor,
    step: Tensor | int,
    update: Adagrad,
) -> Tensor:
    from dropconnectpp.lab.kernels.layer_triton import backward_kernel

    (stack, batch, width), units = x.shape, weight.shape[1]
    chosen = launch_config.of(x.device)
    launch = chosen.backward_crowded if _crowded(gate, units) else chosen.backward
    block_b, block_i = tile(batch, launch.block_b), launch.block_i
    grad_x = torch.empty((stack, batch, width), device=x.device, dtype=x.dtype)
    arguments = (
        x.contiguous(),
        grad_output.to(x.dtype).contiguous(),
        grad_x,
        Trained(weight, update.weight),
        row(update.sizes),
        gate_state(gate, update),
        row(gate.keep) if isinstance(gate, FixedGate) else None,
        draws(gate, x, replicas, step),
        constants(Sizes(batch, units, width)),
        constants(Sizes(block_b, tile(units, launch.block_o), block_i)),
        constants(terms(gate, update)),
    )
    for needs_x, needs_update, depth in passes(batch, block_b):
        backward_kernel[(-(-width // block_i), stack, depth)](
            *arguments,
            GRAD_X=needs_x,
            UPDATE=needs_update,
            SAMPLES=samples_of(gate),
            GATE=gate_number(gate),
            COMPILED=x.is_cuda,
            **launch.options,
        )
    return grad_x


def _crowded(gate: Gate, units: int) -> bool:
    """Whether a step needs more registers: several samples do, and learned gates with more than the score to follow."""
    learned = isinstance(gate, LearnedGate) and (gate.kind != "score" or gate.slab_scale > 0 or units > FEW_UNITS)
    return samples_of(gate) > 1 or learned


# -------------------------------------------------------------------------------------------- launches


def passes(batch: int, block: int) -> list[tuple[bool, bool, int]]:
    """The launches of a backward pass: whether each gives the gradient by x, whether it steps, and its grid's depth.

    A batch of several tiles takes two launches: each of its tiles needs the weights as they were.
    """
    tiles = -(-batch // block)
    return [(True, True, 1)] if tiles == 1 else [(True, False, tiles), (False, True, 1)]


def whole(count: int, unit: int) -> int:
    """``count`` rounded up to a multiple of ``unit``."""
    return -(-count // unit) * unit


def tile(count: int, most: int) -> int:
    """The smallest tile that holds ``count``, from 16, which a product needs, to ``most``."""
    return min(max(16, 1 << (count - 1).bit_length()), most)
