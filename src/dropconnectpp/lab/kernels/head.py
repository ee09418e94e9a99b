"""What follows the products of a stack's dense layer in one training step, forward and backward, fused.

Bias and its gates, ReLU, dropped units, the output layer, the log-likelihood, and the loss's gradient by all of them:
two launches on a GPU with Triton. Elsewhere, and for what the kernels do not support, the twin runs, with the same
result to rounding. Shapes: L samples, R replicas, B batch, O units, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.kernels import support
from dropconnectpp.lab.kernels.arguments import HeadInputs, HeadSizes, constants
from dropconnectpp.lab.kernels.dense import beside, draw_masks, linear
from dropconnectpp.lab.kernels.gates import (
    FixedGate,
    Gate,
    LearnedGate,
    OpenGate,
    draws,
    gate_number,
    keep_of,
    row,
    samples_of,
)
from dropconnectpp.lab.kernels.layer import tile
from dropconnectpp.lab.kernels.local import MARGIN, LocalGate
from dropconnectpp.lab.kernels.noise import draw_normal

BLOCK = 32
"""The most examples and units of a tile: larger ones need more registers than there are."""
MOST_CLASSES = 128
"""The most classes: a tile holds all of them."""
FEW_CLASSES = 32
"""Up to so many classes a tile needs no more than four warps."""


@dataclass(frozen=True)
class Head:
    """The dense layer's bias (R, O) with its gate, the output layer's weight (R, K, O) and bias (R, K), labels (R, B).

    ``units`` keeps some units of every example, scaled up so that their mean stays; None keeps all.
    """

    bias: Tensor
    gate: Gate
    units: FixedGate | None
    weight: Tensor
    output_bias: Tensor
    labels: Tensor

    @property
    def samples(self) -> int:
        return samples_of(self.gate)


class HeadResult(NamedTuple):
    """Mean log-likelihoods (L, R), and the gradients of minus their mean over the samples, with the bias's slab.

    ``grad_sums`` has the shape of the sums; ``grad_logit`` (R, O) is None for gates that no gradient passes.
    """

    rewards: Tensor
    grad_sums: Tensor
    grad_bias: Tensor
    grad_logit: Tensor | None
    grad_weight: Tensor
    grad_output_bias: Tensor


@torch.no_grad()
def forward_backward(sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int) -> HeadResult:
    """From the layer's sums without their bias (L, R, B, O), or for a `LocalGate` from their moments (2, R, B, O)."""
    return (_by_kernel if supported(sums, head) else _twin)(sums, head, replicas, step)


def supported(sums: Tensor, head: Head) -> bool:
    """Whether the kernels can take a head: not too many classes, all tensors in float32."""
    logit = head.gate.logit if isinstance(head.gate, LearnedGate) else None
    given = sums, head.bias, head.weight, head.output_bias, logit
    return head.weight.shape[1] <= MOST_CLASSES and support.supported(*given)


# ---------------------------------------------------------------------------------------------- the twin


def _twin(sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int) -> HeadResult:
    bias, gate, labels, parts = head.bias, head.gate, head.labels.unsqueeze(-1), head.samples * sums.shape[2]
    grad_sums, grad_bias, grad_gate = torch.zeros_like(sums), torch.zeros_like(bias), torch.zeros_like(bias)
    grad_weight, grad_output_bias = torch.zeros_like(head.weight), torch.zeros_like(head.output_bias)
    rewards = []
    for sample in range(head.samples):
        before, on, chain = _with_bias(sums, head, replicas, step, sample)
        factor = _unit_factor(head.units, before, replicas, step, sample)
        hidden = torch.relu(before) * factor
        found = torch.log_softmax(linear(hidden, head.weight, head.output_bias), -1)  # (R, B, K)
        rewards.append(found.gather(-1, labels).squeeze(-1).mean(1))
        grad_scores = found.exp().scatter_add_(-1, labels, -torch.ones_like(labels, dtype=found.dtype)) / parts
        grad_weight += torch.bmm(grad_scores.mT, hidden)
        grad_output_bias += grad_scores.sum(1)
        grad_before = torch.where(before <= 0.0, 0.0, torch.bmm(grad_scores, head.weight) * factor)
        if chain is None:
            grad_sums[sample] = grad_before
            grad_gate += grad_before.sum(1)
            grad_bias += grad_before.sum(1) * on
        else:
            grad_sums[0] += grad_before
            grad_sums[1] += grad_before * chain
    if isinstance(gate, LocalGate):
        grad_mean, grad_variance = grad_sums.sum(2)
        keep, dropped = torch.sigmoid(gate.logit), torch.sigmoid(-gate.logit)
        grad_bias = keep * grad_mean + 2.0 * keep * dropped * bias * grad_variance
        grad_gate = grad_mean + (dropped - keep) * bias * grad_variance
    grad_logit = None
    if isinstance(gate, LearnedGate) and gate.kind == "straight-through":
        grad_logit = functional.straight_through_gradient(gate.logit, bias, grad_gate)
    if not isinstance(gate, OpenGate) and gate.slab_scale:
        grad_bias += gate.slab_scale * keep_of(gate, bias) * bias
    return HeadResult(torch.stack(rewards), grad_sums, grad_bias, grad_logit, grad_weight, grad_output_bias)


def _with_bias(
    sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int, sample: int
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """A sample's sums with their bias (R, B, O), the bias's gates, and for noise the gradient by the variance."""
    bias, gate = head.bias, head.gate
    if isinstance(gate, OpenGate):
        return sums[sample] + bias.unsqueeze(1), 1.0, None
    if not isinstance(gate, LocalGate):
        on = draw_masks(gate.stream, keep_of(gate, bias).expand_as(bias), replicas, step, sample).to(bias.dtype)
        return sums[sample] + (bias * on).unsqueeze(1), on, None
    moments = torch.stack(functional.gaussian_gate_moments(gate.logit, bias))
    mean, variance = sums + moments.unsqueeze(2)
    noise = draw_normal(gate.stream, mean, replicas, step, sample)
    root = torch.sqrt(variance.clamp_min(0.0) + MARGIN)
    return mean + root * noise, 1.0, torch.where(variance < 0.0, 0.0, 0.5 * noise / root)


def _unit_factor(
    units: FixedGate | None, before: Tensor, replicas: Tensor, step: Tensor | int, sample: int
) -> Tensor | float:
    """What Dropout multiplies units by (R, B, O): 0, or 1 over the share that is kept."""
    if units is None:
        return 1.0
    keep = beside(units.keep, before)
    return draw_masks(units.stream, keep.expand_as(before), replicas, step, sample) / keep


# ------------------------------------------------------------------------------------------- the kernels


def _by_kernel(sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int) -> HeadResult:
    from dropconnectpp.lab.kernels.head_triton import gradient_kernel, likelihood_kernel

    (stack, batch, width), classes, samples = sums.shape[1:], head.weight.shape[1], head.samples
    tile_sizes = HeadSizes(tile(batch, BLOCK), tile(width, BLOCK), tile(classes, MOST_CLASSES))
    tiles, gate, units = -(-batch // tile_sizes.batch), head.gate, head.units

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=sums.device, dtype=dtype)

    grad_scores, partial = empty(samples, stack, batch, classes), empty(tiles, samples, stack)
    result = HeadResult(
        rewards=empty(samples, stack),
        grad_sums=empty(*sums.shape, dtype=torch.bfloat16),
        grad_bias=empty(stack, width),
        grad_logit=empty(stack, width) if gate_number(gate) == 3 else None,
        grad_weight=empty(stack, classes, width),
        grad_output_bias=empty(stack, classes),
    )
    inputs = HeadInputs(
        sums=sums,
        noise=_noise(sums, gate, replicas, step),
        bias=head.bias,
        logit=gate.logit if isinstance(gate, LearnedGate) else None,
        keep=row(gate.keep) if isinstance(gate, FixedGate) else None,
        unit_keep=None if units is None else row(units.keep),
        weight=head.weight,
        draws=draws(gate, sums, replicas, step),
        unit_seed=0 if units is None else units.stream.seed,
    )
    sizes, blocks = constants(HeadSizes(batch, width, classes)), constants(tile_sizes)
    settings = {
        "SAMPLES": samples,
        "GATE": 4 if isinstance(gate, LocalGate) else gate_number(gate),
        "DROPPED": units is not None,
        "MARGIN": MARGIN,
        "COMPILED": sums.is_cuda,
        "num_warps": 4 if classes <= FEW_CLASSES else 8,
        "num_stages": 1,
    }
    likelihood_kernel[(tiles, stack, samples)](
        inputs, head.output_bias, head.labels.contiguous(), grad_scores, partial, sizes, blocks, **settings
    )
    slab_scale = 0.0 if isinstance(gate, OpenGate) else gate.slab_scale
    gradient_kernel[(-(-width // tile_sizes.units), stack)](
        inputs, grad_scores, partial, result, slab_scale, sizes, blocks, PARTS=tiles, **settings
    )
    return result


def _noise(sums: Tensor, gate: Gate, replicas: Tensor, step: Tensor | int) -> Tensor | None:
    """Normal numbers for gates that act as noise, (L, R, B, O)."""
    if not isinstance(gate, LocalGate):
        return None
    if gate.samples == 1:
        return draw_normal(gate.stream, sums[0], replicas, step).unsqueeze(0)
    noise = torch.empty((gate.samples, *sums.shape[1:]), device=sums.device, dtype=sums.dtype)
    for sample in range(gate.samples):
        noise[sample] = draw_normal(gate.stream, sums[0], replicas, step, sample)
    return noise
