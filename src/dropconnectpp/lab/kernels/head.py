"""What follows the products of a stack's dense layer in one training step, there and back, fused.

Bias and its gates, ReLU, dropped units, the output layer, the log-likelihood, and the loss's gradient by all of them:
two launches on a GPU with Triton. Elsewhere, and for what the kernels do not cover, the twin runs, with the same result
to rounding. Shapes: L samples, R replicas, B batch, O units, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.kernels.compiled import as_kernels_take, compiled
from dropconnectpp.lab.kernels.dense import beside, draw_masks, linear
from dropconnectpp.lab.kernels.gates import (
    FixedGate,
    Gate,
    LearnedGate,
    OpenGate,
    address,
    gate_number,
    keep_of,
    row,
    samples_of,
)
from dropconnectpp.lab.kernels.layer import tile
from dropconnectpp.lab.kernels.local import MARGIN, LocalGate
from dropconnectpp.lab.kernels.noise import draw_normal

BLOCK = 32
"""Examples and units of a tile, at most: larger ones need more registers than there are."""
MOST_CLASSES = 128
"""A tile holds all of them."""
FEW_CLASSES = 32
"""Up to so many a tile needs no more than four warps."""


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


@dataclass(frozen=True)
class Found:
    """Mean log-likelihoods (L, R), and gradients of minus their mean over the samples, with the bias's slab.

    ``by_sums`` is in the shape of the sums; ``by_logit`` (R, O) is there for gates that it goes through.
    """

    rewards: Tensor
    by_sums: Tensor
    by_bias: Tensor
    by_logit: Tensor | None
    by_weight: Tensor
    by_output_bias: Tensor


@torch.no_grad()
def there_and_back(sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int) -> Found:
    """From the layer's sums without their bias (L, R, B, O), or for a `LocalGate` their moments (2, R, B, O)."""
    return (_by_kernel if usable(sums, head) else _twin)(sums, head, replicas, step)


def usable(sums: Tensor, head: Head) -> bool:
    """Whether the kernels can run."""
    logit = head.gate.logit if isinstance(head.gate, LearnedGate) else None
    given = sums, head.bias, head.weight, head.output_bias, logit
    return head.weight.shape[1] <= MOST_CLASSES and as_kernels_take("head", *given)


# ---------------------------------------------------------------------------------------------- the twin


def _twin(sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int) -> Found:
    bias, gate, labels, parts = head.bias, head.gate, head.labels.unsqueeze(-1), head.samples * sums.shape[2]
    by_sums, by_bias, by_gate = torch.zeros_like(sums), torch.zeros_like(bias), torch.zeros_like(bias)
    by_weight, by_output_bias = torch.zeros_like(head.weight), torch.zeros_like(head.output_bias)
    rewards = []
    for sample in range(head.samples):
        before, on, slope = _with_bias(sums, head, replicas, step, sample)
        factor = _unit_factor(head.units, before, replicas, step, sample)
        hidden = torch.relu(before) * factor
        found = torch.log_softmax(linear(hidden, head.weight, head.output_bias), -1)  # (R, B, K)
        rewards.append(found.gather(-1, labels).squeeze(-1).mean(1))
        by_class = found.exp().scatter_add_(-1, labels, -torch.ones_like(labels, dtype=found.dtype)) / parts
        by_weight += torch.bmm(by_class.mT, hidden)
        by_output_bias += by_class.sum(1)
        by_before = torch.where(before <= 0.0, 0.0, torch.bmm(by_class, head.weight) * factor)
        if slope is None:
            by_sums[sample] = by_before
            by_gate += by_before.sum(1)
            by_bias += by_before.sum(1) * on
        else:
            by_sums[0] += by_before
            by_sums[1] += by_before * slope
    if isinstance(gate, LocalGate):
        by_mean, by_variance = by_sums.sum(2)
        keep, dropped = torch.sigmoid(gate.logit), torch.sigmoid(-gate.logit)
        by_bias = keep * by_mean + 2.0 * keep * dropped * bias * by_variance
        by_gate = by_mean + (dropped - keep) * bias * by_variance
    by_logit = None
    if isinstance(gate, LearnedGate) and gate.kind == "straight-through":
        by_logit = functional.straight_through_gradient(gate.logit, bias, by_gate)
    if not isinstance(gate, OpenGate) and gate.slab_scale:
        by_bias += gate.slab_scale * keep_of(gate, bias) * bias
    return Found(torch.stack(rewards), by_sums, by_bias, by_logit, by_weight, by_output_bias)


def _with_bias(
    sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int, sample: int
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """A sample's sums with their bias (R, B, O), the bias's gates, and for noise the slope by the variance."""
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


def _by_kernel(sums: Tensor, head: Head, replicas: Tensor, step: Tensor | int) -> Found:
    (stack, batch, width), classes, samples = sums.shape[1:], head.weight.shape[1], head.samples
    block_b, block_o = tile(batch, BLOCK), tile(width, BLOCK)
    tiles, gate, units = -(-batch // block_b), head.gate, head.units

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=sums.device, dtype=dtype)

    by_class, partial = empty(samples, stack, batch, classes), empty(tiles, samples, stack)
    found = Found(
        rewards=empty(samples, stack),
        by_sums=empty(*sums.shape, dtype=torch.bfloat16),
        by_bias=empty(stack, width),
        by_logit=empty(stack, width) if gate_number(gate) == 3 else None,
        by_weight=empty(stack, classes, width),
        by_output_bias=empty(stack, classes),
    )
    inputs: list[Any] = [
        sums,
        _noise(sums, gate, replicas, step),
        head.bias,
        gate.logit if isinstance(gate, LearnedGate) else None,
        row(gate.keep) if isinstance(gate, FixedGate) else None,
        None if units is None else row(units.keep),
        head.weight,
    ]
    where = address(sums, replicas, step)
    seeds = 0 if isinstance(gate, OpenGate) else gate.stream.seed, 0 if units is None else units.stream.seed
    settings = {
        "BATCH": batch,
        "UNITS": width,
        "CLASSES": classes,
        "SAMPLES": samples,
        "GATE": 4 if isinstance(gate, LocalGate) else gate_number(gate),
        "DROPPED": units is not None,
        "MARGIN": MARGIN,
        "COMPILED": sums.is_cuda,
        "BLOCK_B": block_b,
        "BLOCK_O": block_o,
        "BLOCK_K": tile(classes, MOST_CLASSES),
        "num_warps": 4 if classes <= FEW_CLASSES else 8,
        "num_stages": 1,
    }
    kernels = compiled("head")
    kernels.likelihood_kernel[(tiles, stack, samples)](
        *inputs, head.output_bias, head.labels.contiguous(), *where, by_class, partial, *seeds, **settings
    )
    kernels.gradient_kernel[(-(-width // block_o), stack)](
        *inputs,
        *where,
        by_class,
        partial,
        found.rewards,
        found.by_sums,
        found.by_bias,
        found.by_logit,
        found.by_weight,
        found.by_output_bias,
        *seeds,
        0.0 if isinstance(gate, OpenGate) else gate.slab_scale,
        TILES=tiles,
        **settings,
    )
    return found


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
