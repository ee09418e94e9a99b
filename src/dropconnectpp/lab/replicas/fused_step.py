"""The training step of a stack through kernels that draw masks, send gradients back and update weights in one pass.

`stack` defines what a step is and takes all steps that this one does not support; both give the same networks, to
rounding. Here the gradient of the dense layer's weights never goes to memory.
Shapes: L samples, R replicas, B batch, I inputs, O units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from dropconnectpp.lab.kernels.dense import beside
from dropconnectpp.lab.kernels.gates import Adagrad, Gate, LearnedGate, step_gate_, update_gate_
from dropconnectpp.lab.kernels.head import Head, forward_backward
from dropconnectpp.lab.kernels.layer import gated_product, gated_product_backward_
from dropconnectpp.lab.kernels.local import LocalGate, gate_moments, gate_moments_backward_
from dropconnectpp.lab.replicas.convolutions import features
from dropconnectpp.lab.replicas.dropconnectpp import DropConnectPP
from dropconnectpp.lab.replicas.network import Networks, Segment, log_likelihoods
from dropconnectpp.lab.replicas.regularisers import SYNAPSES


def supported(networks: Networks) -> bool:
    """Whether the kernels can take a stack's steps: on a GPU, with Adagrad, bf16 inputs and gates for every segment."""
    mixed = networks.device.type == "cuda" and networks.input_dtype == torch.bfloat16
    return (
        mixed
        and networks.protocol.training.optimiser == "adagrad"
        and all(s.regulariser.gate() is not None for s in networks.segments)
    )


def take(networks: Networks, images: Tensor, labels: Tensor) -> Tensor:
    """One step on a batch: (R, B, C, H, W) and (R, B). Updates all that is trained; mean log-likelihoods (R,)."""
    with torch.enable_grad():
        filters = {n: v.requires_grad_() for n, v in networks.parameters.items() if n.startswith("conv")}
        inputs = features(images, networks.parameters, networks.shape.architecture)
    found: dict[str, list[Tensor]] = {}
    rewards, grad_inputs = [], []
    for number, segment in enumerate(networks.segments):
        reward, grad_input, own = _segment_step(networks, number, segment, inputs.detach(), labels[segment.rows])
        rewards.append(reward)
        grad_inputs.append(grad_input)
        for name, value in own.items():
            found.setdefault(name, []).append(value)
    gradients = {name: _joined(values) for name, values in found.items()}
    back = torch.autograd.grad(inputs, list(filters.values()), _joined(grad_inputs))
    networks.update({**gradients, **dict(zip(filters, back, strict=True))})
    return _joined(rewards)


def _joined(pieces: list[Tensor]) -> Tensor:
    """The segments' pieces, one after the other."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _segment_step(
    networks: Networks, number: int, segment: Segment, inputs: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Rewards, the gradient of the inputs, and the gradients of bias and output layer by name.

    Steps the weights and all gates.
    """
    regulariser, rows, step = segment.regulariser, segment.rows, networks.step
    x, replicas = inputs[rows], regulariser.replicas
    weight, bias, output_weight, output_bias = networks.segment_parameters(segment)
    gate, bias_gate = regulariser.gate(), regulariser.gate("bias")
    assert gate is not None
    assert bias_gate is not None
    scale = regulariser.training_scale
    if scale is not None:  # (W / p) x = W (x / p)
        x = (x * beside(scale, x)).to(x.dtype)
    sums = forward(x, weight, gate, replicas, step)
    scaled_bias = bias if scale is None else bias * beside(scale, bias)
    head = Head(scaled_bias, bias_gate, regulariser.unit_gate(), output_weight, output_bias, labels)
    found = forward_backward(sums, head, replicas, step)
    mean_reward = None
    if regulariser.needs_mean_network:
        mean_reward = log_likelihoods(networks.predict_segment(segment, x.to(networks.dtype)), labels).mean(1)
    update, unmoved = _adagrad(networks, number, segment, "weight"), _kept(gate, weight)
    grad_input = backward_(x, found.grad_sums, weight, gate, replicas, step, update)
    if by_score(gate):
        _learn_by_score(networks, number, segment, found.rewards, mean_reward, {"weight": unmoved, "bias": bias})
    elif isinstance(bias_gate, LearnedGate):
        assert found.grad_logit is not None
        step_gate_(bias_gate, found.grad_logit, bias, _adagrad(networks, number, segment, "bias"))
    grad_bias = found.grad_bias
    if scale is not None:
        grad_input = (grad_input * beside(scale, grad_input)).to(grad_input.dtype)
        grad_bias = grad_bias * beside(scale, grad_bias)
    rewards = found.rewards[0] if len(found.rewards) == 1 else found.rewards.mean(0)
    named = {"output.weight": found.grad_weight, "output.bias": found.grad_output_bias, "dense.bias": grad_bias}
    return rewards, grad_input, named


def by_score(gate: Gate) -> TypeGuard[LearnedGate]:
    """Whether a gate learns by the score, in its own pass."""
    return isinstance(gate, LearnedGate) and gate.kind == "score"


def forward(x: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor) -> Tensor:
    """The layer's sums without the bias: of each sample (L, R, B, O), or their moments (2, R, B, O)."""
    if isinstance(gate, LocalGate):
        return gate_moments(x, weight, gate)
    return gated_product(x, weight, gate, replicas, step)


def backward_(
    x: Tensor, grad_sums: Tensor, weight: Tensor, gate: Gate, replicas: Tensor, step: Tensor, update: Adagrad
) -> Tensor:
    """The gradient of the inputs from that of the sums; steps the weights, and the gates that need it."""
    if isinstance(gate, LocalGate):
        return gate_moments_backward_(x, grad_sums, weight, gate, update)
    return gated_product_backward_(x, grad_sums, weight, gate, replicas, step, update)


def _kept(gate: Gate, weight: Tensor) -> Tensor | None:
    """A copy of the weight before its step, where gates that step after it have a slab."""
    return weight.clone() if by_score(gate) and gate.slab_scale else None


def _learn_by_score(
    networks: Networks,
    number: int,
    segment: Segment,
    rewards: Tensor,
    mean_reward: Tensor | None,
    before: dict[str, Tensor | None],
) -> None:
    """Step the gates of weights and biases, and the moments; ``before`` holds the gated values before their step."""
    regulariser, squared = segment.regulariser, []
    assert isinstance(regulariser, DropConnectPP)
    coefficient = regulariser.coefficient(rewards, mean_reward, networks.step)
    for name in SYNAPSES:
        gate = regulariser.gate(name)
        assert isinstance(gate, LearnedGate)
        gate, update = replace(gate, coefficient=coefficient), _adagrad(networks, number, segment, name)
        squared.append(update_gate_(gate, regulariser.replicas, networks.step, update, before[name]))
    regulariser.fold_in(rewards, squared)


def _adagrad(networks: Networks, number: int, segment: Segment, name: str) -> Adagrad:
    settings, prefix = networks.protocol.training, f"segment{number}.{name}_"
    own = {n.removeprefix(prefix): v for n, v in networks.accumulators.items() if n.startswith(prefix)}
    sizes = networks.step_sizes[segment.rows]
    total = networks.accumulators[f"dense.{name}"][segment.rows]
    gate_sizes = segment.gate_sizes if own else None
    return Adagrad(total, sizes, settings.epsilon, settings.epsilon_inside, gate_sizes=gate_sizes, **own)
