"""The paper's network with a replica axis: its parameters, where they start, and a pass through it.

Shapes: R replicas, B batch, I inputs and O units of the dense layer, K classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.philox import Stream


@dataclass(frozen=True)
class Shape:
    """What the pictures and the classes make of an architecture."""

    architecture: Architecture
    channels: int
    side: int
    classes: int

    @property
    def dense(self) -> tuple[int, int]:
        """(O, I) of the regularised layer."""
        return self.architecture.hidden, self.architecture.dense_inputs(self.side)

    @property
    def synapses(self) -> int:
        """Weights and biases of the regularised layer.

        >>> Shape(Architecture(), 3, 32, 10).synapses
        262208
        """
        units, inputs = self.dense
        return units * inputs + units

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one replica's parameters, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        channels = self.channels
        for layer, maps in enumerate(self.architecture.maps):
            shapes[f"conv{layer}.weight"] = (
                maps,
                channels,
                self.architecture.filter_size,
                self.architecture.filter_size,
            )
            shapes[f"conv{layer}.bias"] = (maps,)
            channels = maps
        shapes["dense.weight"] = self.dense
        shapes["dense.bias"] = self.dense[:1]
        shapes["output.weight"] = (self.classes, self.architecture.hidden)
        shapes["output.bias"] = (self.classes,)
        return shapes


def start(shape: Shape, root_seed: int, replicas: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fresh parameters (R, ...): "Glorot-style uniform initialization", gain 1, biases zero.

    They do not depend on the method, so that methods can be compared in pairs.
    """
    parameters = {}
    for name, size in shape.parameters().items():
        if name.endswith("bias"):
            parameters[name] = torch.zeros((len(replicas), *size), device=replicas.device, dtype=dtype)
            continue
        field = math.prod(size[2:])
        limit = math.sqrt(6.0 / ((size[0] + size[1]) * field))
        noise = Stream(root_seed, f"start:{name}").uniform(replicas, 0, math.prod(size), dtype=torch.float64)
        parameters[name] = ((2.0 * noise - 1.0) * limit).to(dtype).view(len(replicas), *size)
    return parameters


def log_likelihoods(logits: Tensor, labels: Tensor) -> Tensor:  # (R, B, K), (R, B) -> (R, B)
    """log p(label) of each example, in nats."""
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)
