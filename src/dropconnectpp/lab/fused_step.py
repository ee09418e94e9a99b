"""The training step of a stack through kernels that draw masks, send gradients back and update weights in one pass.

`training` defines what a step is and takes all steps that this one does not cover; both give the same networks, to
rounding. Here no gradient of the dense layer's weights goes to memory.
Shapes: L samples, R replicas, B batch, I inputs, O units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropconnectpp.lab.convolutions import features
from dropconnectpp.lab.kernels.layer import (
    Adagrad,
    Gate,
    LearnedGate,
    gated_product,
    gated_product_backward_,
    update_gate_,
)
from dropconnectpp.lab.kernels.local import LocalGate, gate_moments, gate_moments_backward_
from dropconnectpp.lab.network import linear, log_likelihoods
from dropconnectpp.lab.regularisers import SYNAPSES, Regulariser

if TYPE_CHECKING:
    from dropconnectpp.lab.training import Segment, Stack


def covers(stack: Stack) -> bool:
    """Whether the kernels, which take bf16 inputs, can gate every segment."""
    mixed = stack.device.type == "cuda" and stack.input_dtype == torch.bfloat16
    return mixed and all(s.regulariser.gate() is not None for s in stack.segments)


def take(stack: Stack, images: Tensor, labels: Tensor) -> Tensor:
    """One step on a batch: (R, B, C, H, W) and (R, B). Updates all that is trained; mean log-likelihoods (R,)."""
    with torch.enable_grad():
        filters = {n: v.requires_grad_() for n, v in stack.parameters.items() if n.startswith("conv")}
        inputs = features(images, stack.parameters, stack.shape.architecture)
    found: dict[str, list[Tensor]] = {}
    rewards, by_inputs = [], []
    for number, segment in enumerate(stack.segments):
        reward, by_input, own = _segment_step(stack, number, segment, inputs.detach(), labels[segment.rows])
        rewards.append(reward)
        by_inputs.append(by_input)
        for name, value in own.items():
            found.setdefault(name, []).append(value)
    gradients = {name: _joined(values) for name, values in found.items()}
    back = torch.autograd.grad(inputs, list(filters.values()), _joined(by_inputs))
    stack.update({**gradients, **dict(zip(filters, back, strict=True))})
    return _joined(rewards)


def _joined(pieces: list[Tensor]) -> Tensor:
    """What the segments have, one after the other."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _segment_step(
    stack: Stack, number: int, segment: Segment, inputs: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Rewards, the gradient of the inputs, and the gradients of bias, output layer and the bias's gate, by name.

    Steps the weights and their gates, and the bias's gates too where they learn by the score.
    """
    regulariser, rows = segment.regulariser, segment.rows
    x, weight = inputs[rows], stack.parameters["dense.weight"].detach()[rows]
    gate = regulariser.gate()
    assert gate is not None
    by_score = isinstance(gate, LearnedGate) and gate.kind == "score"
    sums = forward(x, weight, gate, regulariser.replicas, stack.step)
    learned = {} if by_score else regulariser.parameters
    own = {f"segment{number}.{n}": v for n, v in learned.items() if n.startswith("bias")}
    names = ("output.weight", "output.bias", "dense.bias")
    shared = {n: stack.parameters[n].detach()[rows] for n in names}
    leaves = {n: v.requires_grad_() for n, v in {**shared, **own}.items()}
    with torch.enable_grad():
        bias = regulariser.gated_bias(leaves["dense.bias"], stack.step)  # (L, R, O), or (2, R, O)
        # A graph of its own: with one example the gate would overwrite the gradient that the weights need.
        sums = (sums + bias.detach().unsqueeze(2)).requires_grad_()
        rewards = _rewards(regulariser, sums, stack.step, leaves["output.weight"], leaves["output.bias"], labels)
        head = [sums, leaves["output.weight"], leaves["output.bias"]]
        by_sums, *values = torch.autograd.grad(rewards, head, torch.full_like(rewards, -1.0 / len(rewards)))
        slab = regulariser.slab_loss("bias", leaves["dense.bias"])
        below = [leaves[n] for n in ("dense.bias", *own)]
        values += _by_bias(below, bias, by_sums.sum(2), slab)
    found = {n: v for n, v in zip(leaves, values, strict=True) if v is not None}
    rewards, mean_reward = rewards.detach(), None
    if regulariser.needs_mean_network:
        mean_reward = log_likelihoods(stack.predict_segment(segment, x.to(stack.dtype)), labels).mean(1)
    update, unmoved = _adagrad(stack, number, segment, "weight"), _kept(gate, weight)
    by_input = backward_(x, by_sums, weight, gate, regulariser.replicas, stack.step, update)
    if isinstance(gate, LearnedGate) and gate.kind == "score":
        _learn_by_score(stack, number, segment, rewards, mean_reward, unmoved)
    elif isinstance(gate, LearnedGate):
        for name, value in regulariser.gradients(rewards, None, ("bias",)).items():
            key = f"segment{number}.{name}"
            found[key] = found[key] + value if key in found else value
    return rewards.mean(0), by_input, found


def forward(x: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor) -> Tensor:
    """The layer's sums without the bias: of each sample (L, R, B, O), or their moments (2, R, B, O)."""
    if isinstance(gate, LocalGate):
        return gate_moments(x, weight, gate)
    return gated_product(x, weight, gate, replicas, step)


def backward_(
    x: Tensor, by_sums: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor, update: Adagrad
) -> Tensor:
    """The gradient of the inputs from that of what `forward` gave; steps the weights and gates that need it."""
    if isinstance(gate, LocalGate):
        return gate_moments_backward_(x, by_sums, weight, gate, update)
    return gated_product_backward_(x, by_sums, weight, gate, replicas, step, update)


def _by_bias(below: list[Tensor], gated: Tensor, by_gated: Tensor, slab: Tensor | None) -> tuple[Tensor, ...]:
    """The loss's gradients by what the gated bias and its slab come from."""
    if slab is None:
        return torch.autograd.grad(gated, below, by_gated, allow_unused=True)
    return torch.autograd.grad([gated, slab], below, [by_gated, torch.ones_like(slab)], allow_unused=True)


def _kept(gate: Gate, weight: Tensor) -> Tensor | None:
    """The weight as it is before its step, where gates that step after it have a slab."""
    if isinstance(gate, LearnedGate) and gate.kind == "score" and gate.slab_scale:
        return weight.clone()
    return None


def _rewards(
    regulariser: Regulariser, sums: Tensor, step: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
) -> Tensor:
    """Mean log-likelihoods (L, R) that the layer's sums or their moments lead to. Samples lie among the replicas."""
    before = regulariser.sampled_sums(sums, step)  # (L, R, B, O)
    weight, bias, labels = (v.expand(len(before), *v.shape).flatten(0, 1) for v in (weight, bias, labels))
    # Units are dropped where there is one sample alone, number 0; all else does not depend on the sample.
    hidden = regulariser.activation(before.flatten(0, 1), step, 0)
    return log_likelihoods(linear(hidden, weight, bias), labels).mean(1).view(len(before), -1)


@torch.no_grad()
def _learn_by_score(
    stack: Stack,
    number: int,
    segment: Segment,
    rewards: Tensor,
    mean_reward: Tensor | None,
    weight: Tensor | None,
) -> None:
    """A step of the gates of weights and biases, and of the moments; ``weight`` from before its step, for a slab."""
    regulariser, squared = segment.regulariser, []
    values = {"weight": weight, "bias": stack.parameters["dense.bias"].detach()[segment.rows]}
    coefficient = regulariser.coefficient(rewards, mean_reward)
    for name in SYNAPSES:
        gate = regulariser.gate(name)
        assert isinstance(gate, LearnedGate)
        gate, update = replace(gate, coefficient=coefficient), _adagrad(stack, number, segment, name)
        squared.append(update_gate_(gate, regulariser.replicas, stack.step, update, values[name]))
    regulariser.fold_in(rewards, squared[0] + squared[1])


def _adagrad(stack: Stack, number: int, segment: Segment, name: str) -> Adagrad:
    settings, prefix = stack.protocol.training, f"segment{number}.{name}_"
    own = {n.removeprefix(prefix): v for n, v in stack.accumulators.items() if n.startswith(prefix)}
    sizes = stack.step_sizes[segment.rows]
    gate_sizes = sizes * segment.regulariser.gate_step if own else None
    total = stack.accumulators[f"dense.{name}"][segment.rows]
    return Adagrad(total, sizes, settings.epsilon, settings.epsilon_inside, gate_sizes=gate_sizes, **own)
