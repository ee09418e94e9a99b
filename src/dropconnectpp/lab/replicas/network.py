"""The paper's network with a replica axis: its parameters, where they start, and what a training step changes.

Shapes: R replicas, B batch, I inputs and O units of the dense layer, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.device import tensor_cores
from dropconnectpp.lab.kernels.adagrad import adagrad_all_
from dropconnectpp.lab.kernels.adam import adam_all_
from dropconnectpp.lab.kernels.dense import linear
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.dropconnectpp import DropConnectPP
from dropconnectpp.lab.replicas.regularisers import DropConnect, Dropout, NoRegularisation, Regulariser


@dataclass(frozen=True)
class Shape:
    """An architecture for images of a size and a number of classes."""

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


@dataclass(frozen=True)
class Unit:
    """One network to train: a protocol and the replica's number."""

    protocol: Protocol
    replica: int

    @property
    def key(self) -> tuple[str, int]:
        """Its name in the store."""
        return self.protocol.digest, self.replica


@dataclass(frozen=True)
class Segment:
    """Neighbouring replicas of a stack whose methods differ in numbers alone."""

    rows: slice
    regulariser: Regulariser
    gate_sizes: Tensor
    """Step sizes of the posterior in this epoch, (R,)."""


KINDS: dict[str, type[Regulariser]] = {
    "none": NoRegularisation,
    "dropout": Dropout,
    "dropconnect": DropConnect,
    "dropconnect++": DropConnectPP,
}


class Networks:
    """R networks side by side that do not know of each other: all that training changes, and the optimiser's step."""

    def __init__(self, units: Sequence[Unit], shape: Shape, num_data: int, device: torch.device) -> None:
        self.units, self.device, self.protocol, self.shape = tuple(units), device, units[0].protocol, shape
        protocol = self.protocol
        self.dtype = torch.float64 if protocol.precision == "float64" else torch.float32
        mixed = protocol.precision == "mixed" and tensor_cores(device)
        self.input_dtype = torch.bfloat16 if mixed else self.dtype
        self.replicas = torch.tensor([unit.replica for unit in self.units], device=device)
        self.parameters = start(shape, protocol.root_seed, self.replicas, self.dtype)
        self.step_sizes = self._sizes([unit.protocol.in_epoch(0) for unit in self.units])
        self.segments = self._segments(num_data)
        self.accumulators = {name: torch.zeros_like(value) for name, value in self._trained()}
        self.averages: dict[str, Tensor] = {}
        """Adam's of the gradients; `accumulators` then holds those of their squares."""
        if protocol.training.optimiser == "adam":
            self.averages = {name: torch.zeros_like(value) for name, value in self._trained()}
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.epoch = 0
        self.batch = 0  # steps taken of the epoch, where it was interrupted

    def _sizes(self, protocols: Sequence[Protocol]) -> Tensor:
        """Step sizes, (R,); members of a population have none of their own yet."""
        sizes = [protocol.training.step_size or 0.0 for protocol in protocols]
        return torch.tensor(sizes, device=self.device, dtype=self.dtype)

    def _segments(self, num_data: int) -> list[Segment]:
        segments, first = [], 0
        methods = [unit.protocol.method for unit in self.units]
        for last in range(1, len(methods) + 1):
            if last < len(methods) and same_segment(methods[first], methods[last]):
                continue
            rows = slice(first, last)
            regulariser = KINDS[methods[first].kind](
                methods[rows],
                self.replicas[rows],
                self.shape.dense,
                num_data,
                self.protocol.root_seed,
                self.dtype,
            )
            segments.append(Segment(rows, regulariser, self.step_sizes[rows] * regulariser.gate_step))
            first = last
        return segments

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained tensor, with a name of its own."""
        yield from self.parameters.items()
        for number, segment in enumerate(self.segments):
            for name, value in segment.regulariser.parameters.items():
                yield f"segment{number}.{name}", value

    def split(self, name: str) -> Sequence[Tensor]:
        """A dense parameter by segments; its gradient comes back in one piece."""
        pieces: Sequence[Tensor] = self.parameters[name].split([s.rows.stop - s.rows.start for s in self.segments])
        return pieces

    def protocols_in(self, epoch: int) -> list[Protocol]:
        """Each replica's protocol with the settings of an epoch."""
        return [unit.protocol.in_epoch(epoch) for unit in self.units]

    def begin_epoch(self) -> None:
        """Set what depends on the epoch, in place: a CUDA graph reads the same memory."""
        protocols = self.protocols_in(self.epoch)
        self.step_sizes.copy_(self._sizes(protocols))
        for number, segment in enumerate(self.segments):
            regulariser = segment.regulariser
            regulariser.begin_epoch(self.epoch, [one.method for one in protocols[segment.rows]])
            segment.gate_sizes.copy_(self.step_sizes[segment.rows] * regulariser.gate_step)
            late = [row for row, m in enumerate(regulariser.methods) if m.learn_after and m.learn_after == self.epoch]
            late = [] if self.batch else late  # done when the epoch began
            for name in regulariser.parameters if late else ():
                self.accumulators[f"segment{number}.{name}"][late] = 0.0

    @torch.no_grad()
    def update(self, gradients: dict[str, Tensor]) -> None:
        """Take the optimiser's step on all that has a gradient, by name."""
        settings, trained = self.protocol.training, dict(self._trained())
        values, sums = ([named[name] for name in gradients] for named in (trained, self.accumulators))
        sizes = [self._step_sizes_for(name) for name in gradients]
        if settings.optimiser == "adam":
            averages = [self.averages[name] for name in gradients]
            adam_all_(values, list(gradients.values()), averages, sums, sizes, self.step)
            return
        adagrad_all_(values, list(gradients.values()), sums, sizes, settings.epsilon, settings.epsilon_inside)

    def _step_sizes_for(self, name: str) -> Tensor:  # (R,)
        if not name.startswith("segment"):
            return self.step_sizes
        return self.segments[int(name.partition(".")[0].removeprefix("segment"))].gate_sizes

    def segment_parameters(self, segment: Segment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Dense weight and bias, output weight and bias of a segment."""
        names = ("dense.weight", "dense.bias", "output.weight", "output.bias")
        weight, bias, out_weight, out_bias = (self.parameters[name].detach()[segment.rows] for name in names)
        return weight, bias, out_weight, out_bias

    @torch.no_grad()
    def predict_segment(self, segment: Segment, inputs: Tensor) -> Tensor:  # (R, b, I) -> (R, b, K)
        """Logits of the mean network, Eq. (19)."""
        weight, bias, *output = self.segment_parameters(segment)
        return linear(segment.regulariser.mean_pass(inputs, weight, bias), *output)


def same_segment(one: Method, other: Method) -> bool:
    """Whether replicas of both methods can share a segment: all agrees but what a regulariser holds per replica."""

    def shared(method: Method) -> Method:
        return replace(method, rate=None, logit_step=1.0, kl_weight=1.0, kl_warmup=0, learn_after=0, freeze_after=None)

    return shared(one) == shared(other)


def check_units(units: Sequence[Unit]) -> None:
    """Raise unless the units can train in one stack."""
    if not units:
        raise ProtocolError("a stack holds at least one replica, got none.")
    for unit in units:
        if not unit.protocol.complete:
            raise ProtocolError(
                f"{unit.protocol.label}: step size, rate or logit step is not chosen yet. Select it first."
            )
        if not units[0].protocol.stackable(unit.protocol):
            raise ProtocolError("replicas of one stack may differ in method and step size only.")
    if len({unit.key for unit in units}) < len(units):
        raise ProtocolError("a stack holds each replica of a protocol once.")
