"""The sparsity plan with one gate for all weights of an input or of a unit; a group is a map for a convolution.

The gates are few, so that they are drawn and stepped in plain torch; weights take the same kernel as others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.layers import WeightLayer
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.noise import draw_uniform
from dropconnectpp.lab.kernels.synapses import Synapses
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.pruning.plan import PlannedGates


class PlannedGroups(PlannedGates):
    """One gate a group: drawn once, so that its weights are on and off together; its KL counts once."""

    def prepare(self) -> None:
        super().prepare()
        self.groups: list[Synapses] = []
        for layer, synapses in zip(self.layers, self.synapses, strict=True):
            gate = synapses.gates()[0]
            shape = group_shape(layer, self.settings[0].granularity)
            start = gate.flatten(1)[:, :1].view(-1, 1, 1, 1).expand(-1, *shape).contiguous()
            group = Synapses(
                "bernoulli",
                synapses.rule,
                Stream(self.root_seed, f"groups:{layer.name}"),
                weight=torch.zeros_like(start),  # none of its own
                first=torch.zeros_like(start),
                second=torch.zeros_like(start),
                gate=start,
                gate_first=torch.zeros_like(start),
                gate_second=torch.zeros_like(start),
                gate_epsilon=synapses.gate_epsilon,
            )
            self.groups.append(group)
            synapses.kind = "plain"
            synapses.gate = synapses.gate_first = synapses.gate_second = None
        self._drawn: list[Tensor] = [torch.empty(0)] * len(self.layers)

    def _view(self, number: int, weights: Tensor) -> Tensor:
        """Weights (R, I, O) as (R, places of a filter, inputs, units)."""
        one = self.layers[number]
        return weights.view(len(weights), -1, one.inputs, one.units)

    def draw(self, number: int, now: Tensor, step: Tensor, out: Tensor) -> None:
        group = self.groups[number]
        gate = group.gates()[0]
        noise = draw_uniform(group.stream, gate, self.replicas, step)
        self._drawn[number] = (noise < kernels.bernoulli_keep(gate, now)).to(gate.dtype)
        torch.mul(self._view(number, self.synapses[number].weight), self._drawn[number], out=self._view(number, out))

    def update(self, number: int, now: Tensor, step: Tensor, grad: Tensor, grad_variance: Tensor | None = None) -> None:
        synapses, group, grad = self.synapses[number], self.groups[number], grad.contiguous()
        gate, ratio = group.gates()[0], self._drawn[number]
        axes = [axis for axis in (1, 2, 3) if gate.shape[axis] == 1]
        earned = (self._view(number, grad) * self._view(number, synapses.weight)).sum(axes, keepdim=True)
        p = torch.sigmoid(gate)
        rise = kernels.kl_rise(gate, p, now) * kernels.beside(now, kernels.KL, gate)
        grad_gate = p * torch.sigmoid(-gate) * (earned * kernels.beside(now, kernels.KEEP, gate) + rise)
        kernels.step_gates(group, now, grad_gate)
        kernels.update(synapses, now, self.replicas, step, (self._view(number, grad) * ratio).view_as(grad))

    def _logit(self, number: int) -> Tensor:
        weight, gate = self.synapses[number].weight, self.groups[number].gates()[0]
        return gate.expand_as(self._view(number, weight)).reshape(weight.shape)

    def _all_gates(self) -> list[Tensor]:
        return [group.gates()[0] for group in self.groups]

    def state(self) -> dict[str, Any]:
        groups = [[one.cpu().clone() for one in group.gates()] for group in self.groups]
        return super().state() | {"groups": groups}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        for group, known in zip(self.groups, state["groups"], strict=True):
            for value, stored in zip(group.gates(), known, strict=True):
                value.copy_(stored)


def group_shape(layer: WeightLayer, granularity: str) -> tuple[int, int, int]:
    """A layer's gates as (places of a filter, inputs, units), 1 where they share one."""
    return (1, layer.inputs, 1) if granularity == "input" else (1, 1, layer.units)
