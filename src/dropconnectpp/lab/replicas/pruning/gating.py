"""What all methods share that make networks of a stack small: gates through a training step, and what is kept.

Shapes: R replicas of one segment of the stack, I inputs and O units of a gated layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropconnectpp.lab.config.layers import WeightLayer
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.pruning import Pruning
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.synapses import Kind, StepRule, Synapses
from dropconnectpp.lab.philox import Stream

Table = NDArray[np.float64]
"""(steps, R, columns): what `synapses.COLUMNS` hold in each step."""
Settings = Method | Pruning


def settings_of(protocol: Protocol) -> Settings:
    """What a protocol does to its gates."""
    return protocol.method if protocol.pruning is None else protocol.pruning


class Gating(ABC):
    """The gated layers of neighbouring replicas of a stack. Each replica has its own settings, of one family."""

    kind: ClassVar[Kind]

    def __init__(
        self,
        settings: Sequence[Any],
        rows: slice,
        replicas: Tensor,
        layers: Sequence[WeightLayer],
        weights: Sequence[Tensor],
        moments: Sequence[tuple[Tensor, Tensor]],
        rule: StepRule,
        root_seed: int,
        steps: int,
        num_data: int,
    ) -> None:
        self.settings, self.rows, self.replicas, self.layers = tuple(settings), rows, replicas, tuple(layers)
        self.root_seed, self.steps, self.num_data = root_seed, steps, num_data
        self.step = 0  # the next one: the stack counts
        self.kl_weights = torch.ones(len(replicas), device=replicas.device, dtype=weights[0].dtype)
        """What the table's column "kl" is multiplied by: it changes where a price is steered."""
        self.synapses = [
            Synapses(self.kind, rule, Stream(root_seed, f"gates:{one.name}"), weight, *moment)
            for one, weight, moment in zip(layers, weights, moments, strict=True)
        ]
        self.total = sum(one.weights for one in layers)
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 (some have nothing to prepare)
        """Make what is trained or kept beside the weights."""

    def follow(self, settings: Sequence[Any]) -> None:  # noqa: B027 (few have settings that change)
        """Take the settings of an epoch; what does not change from epoch to epoch stays as it is."""

    def take_over(self, here: Tensor, there: Tensor) -> None:
        """Copy all that is trained beside the weights from some rows to others, in place."""
        self.kl_weights[here] = self.kl_weights[there]
        for synapses in self.synapses:
            for value in _own(synapses).values():
                value[here] = value[there]

    def add_gates(self, starts: Sequence[float]) -> None:
        """A gate for each weight, at a start for each replica, with Adam's moments."""
        for synapses in self.synapses:
            weight = synapses.weight
            synapses.gate = self._per_replica(starts, weight).expand_as(weight).contiguous()
            synapses.gate_first, synapses.gate_second = torch.zeros_like(weight), torch.zeros_like(weight)

    def _per_replica(self, values: Sequence[float], like: Tensor) -> Tensor:
        """A number for each replica, in a shape that multiplies (R, ...)."""
        row = torch.tensor(values, device=like.device, dtype=like.dtype)
        return row.view(-1, *[1] * (like.ndim - 1))

    @property
    def dropout_rates(self) -> list[float]:
        """Shares of a gated layer's inputs that are dropped."""
        return [0.0] * len(self.settings)

    # -------------------------------------------------------------------------------------- a training step

    def columns(self, first: int, count: int, table: Table) -> None:
        """Fill the columns of steps ``first`` and after but the weights' step sizes and Adam's corrections."""
        table[:, :, kernels.KEEP] = 1.0

    def brake(self, now: Tensor) -> None:  # noqa: B027 (most have nothing to do)
        """Change a step's settings by what was last read; on the device, as part of the step."""

    def draw(self, number: int, now: Tensor, step: Tensor, out: Tensor) -> None:
        """The weights (or variances) of a layer that a step uses."""
        kernels.draw(self.synapses[number], now, self.replicas, step, out)

    def update(self, number: int, now: Tensor, step: Tensor, grad: Tensor, grad_variance: Tensor | None = None) -> None:
        """Steps on weights and gates of a layer."""
        kernels.update(self.synapses[number], now, self.replicas, step, grad, grad_variance)

    @property
    def event_steps(self) -> set[int]:
        """Before which steps `before_step` has something to do; the number of steps itself: after the last."""
        return set()

    def before_step(self, step: int) -> None:  # noqa: B027 (most have nothing to do)
        """Change what is kept, or what it costs. In place: a CUDA graph reads the same memory."""

    # -------------------------------------------------------------------------------------- what was learned

    @abstractmethod
    def support(self, number: int) -> Tensor:
        """Which weights of a layer are kept, bool (R, I, O)."""

    @abstractmethod
    def whole_weight(self, number: int) -> Tensor:
        """The weights of a layer in the posterior-mean network, none removed for being small."""

    def deployed_weight(self, number: int) -> Tensor:
        """The weights of a layer as they are deployed: exactly 0 outside the support."""
        return torch.where(self.support(number), self.whole_weight(number), 0.0)

    def kl(self) -> Tensor:
        """KL of the posterior in nats, (R,); 0 without one."""
        return torch.zeros(len(self.settings), device=self.replicas.device, dtype=torch.float64)

    def prices(self) -> list[float | None]:
        """Nats that a connection must earn, or the KL's weight, in the end."""
        return [None] * len(self.settings)

    def counts(self) -> list[list[int]]:
        """Weights kept of each replica, by layers."""
        found = torch.stack([self.support(n).flatten(1).sum(1) for n in range(len(self.layers))], 1)
        return [list(map(int, row)) for row in found.tolist()]

    # -------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """What training resumes from beside the weights, on the CPU."""
        return {
            "kl_weights": self.kl_weights.cpu().clone(),
            "tensors": [{name: t.cpu().clone() for name, t in _own(one).items()} for one in self.synapses],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from what `state` gave."""
        self.kl_weights.copy_(state["kl_weights"])
        for synapses, tensors in zip(self.synapses, state["tensors"], strict=True):
            for name, value in _own(synapses).items():
                value.copy_(tensors[name])


def _own(synapses: Synapses) -> dict[str, Tensor]:
    """What a layer's synapses hold beside weights and their moments."""
    names = ("gate", "gate_first", "gate_second", "mask")
    return {name: value for name in names if (value := getattr(synapses, name)) is not None}


def largest(scores: Tensor, counts: Tensor) -> Tensor:
    """Where the ``counts`` (R,) largest scores of (R, n) are; ties go to the earlier place, on every device."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[1], device=scores.device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, ranks < counts[:, None])


def sigmoid(values: Tensor) -> Tensor:
    """torch's, replica by replica on a CPU: there its last digit may depend on where in memory a vector begins."""
    if values.device.type != "cpu":
        return torch.sigmoid(values)
    return torch.stack([torch.sigmoid(own.clone()) for own in values])


def split_layers(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """(R, all weights) into layers' shapes."""
    pieces = flat.split([one[0].numel() for one in like], 1)
    return [piece.reshape(len(flat), *one.shape[1:]) for piece, one in zip(pieces, like, strict=True)]
