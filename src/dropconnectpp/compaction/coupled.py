"""Models that call their layers in their own way: residual sums, concatenations, branches.

Torch-Pruning's graph says what follows what. Here each operation is asked what it does to channels. One that is not
known to treat each channel alone stops them: they stay, and it is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp import _compat
from dropconnectpp.compaction.chains import ACTIVATIONS, CONVOLUTIONS, LAYERS, NORMS, tied_layers
from dropconnectpp.compaction.tracing import Inputs, Trace, count_positions, probes, trace
from dropconnectpp.compaction.wiring import NOBODY, Wiring

EACH_VALUE = {
    *("Relu", "LeakyRelu", "Elu", "Celu", "Selu", "Gelu", "Silu", "Mish", "Tanh", "Sigmoid", "LogSigmoid", "Softplus"),
    *("Hardtanh", "Hardsigmoid", "Hardswish", "Threshold", "Softshrink", "Hardshrink", "Abs", "Exp", "Neg"),
    *("Clone", "Alias", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool2D", "AvgPool3D"),
    *("AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"),
    *("UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D", "UpsampleBilinear2D"),
}
"""Operations of autograd that act on each value, or each channel, alone."""
PAIRS = {"Add", "Sub", "Mul", "Maximum", "Minimum"}
SPATIAL, LAST = 1, -1
"""The axis of channels: a convolution's, a dense layer's."""


@dataclass(frozen=True)
class Stream:
    """The channels that come out of an operation, and the axis on which they lie."""

    channels: Tensor
    axis: int


@dataclass
class Coupled(Wiring):
    """The wiring of a model of any shape; constants are measured on example inputs."""

    inputs: tuple[Inputs, ...] = ()
    axes: dict[str, int] = field(default_factory=dict)
    """On which axis of its input a layer finds its channels."""

    def values(self, model: nn.Module, still: Tensor) -> dict[str, Tensor]:
        wanted = {name: ids for name, ids in self.reads.items() if bool((still[ids.clamp_min(0)] & (ids >= 0)).any())}
        seen: dict[str, list[Tensor]] = {name: [] for name in wanted}

        def note(name: str) -> Any:
            return lambda _, given: seen[name].append(given[0].detach().movedim(self.axes[name], -1).flatten(0, -2))

        hooks = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in wanted]
        try:
            for positional, keywords in self.inputs:
                model(*positional, **keywords)
        finally:
            for hook in hooks:
                hook.remove()
        found: dict[str, Tensor] = {}
        for name, ids in wanted.items():
            rows = torch.cat(seen[name]).double()
            low, high = rows.aminmax(dim=0)
            known = (still[ids.clamp_min(0)] & (ids >= 0)).to(rows.device) & (low == high)
            found[name] = low.masked_fill(~known, torch.nan)
        return found


def read_coupled(model: nn.Module, inputs: Inputs, reshapes: bool = True) -> Coupled:
    """The wiring of a model in eval mode; without ``reshapes`` channels are not followed through view and reshape."""
    traced = trace(model, inputs, (*LAYERS, *NORMS, nn.PReLU, *ACTIVATIONS, nn.Flatten))
    wiring = Reader(model, traced, inputs, reshapes).read()
    wiring.outputs.update(count_positions(model, inputs, (nn.MultiheadAttention,)))
    return wiring


class Reader:
    """Asks each operation of a graph which channels come out of it."""

    def __init__(self, model: nn.Module, traced: Trace, inputs: Inputs, reshapes: bool) -> None:
        self.traced, self.reshapes = traced, reshapes
        self.wiring = Coupled(inputs=probes(inputs))
        self.names = {module: name for name, module in model.named_modules()}
        self.modules = {call.made_by: module for module, calls in traced.calls.items() for call in calls}
        self.tied = tied_layers(list(model.modules()))
        self.streams: dict[Any, Stream | None] = {}
        self.same: dict[int, int] = {}
        """Channels that are one, since they are added to each other: from each to the one that stands for it."""

    def read(self) -> Coupled:
        """Every operation once, those before it first."""
        wiring = self.wiring
        for operation in self._ordered():
            self.streams[operation] = self._stream(operation)
        for operation in self.traced.results:
            self._stop(self.streams.get(operation))
        for table in (wiring.reads, wiring.writes, wiring.carries):
            for name, channels in table.items():
                table[name] = torch.tensor([self._one(int(c)) for c in channels], dtype=torch.long)
        wiring.stays = {self._one(channel) for channel in wiring.stays}
        read = {int(c) for channels in wiring.reads.values() for c in channels}
        wiring.stays |= {int(c) for channels in wiring.writes.values() for c in channels} - read
        return wiring

    def _ordered(self) -> list[Any]:
        """The operations, inputs first, without those inside a module."""
        done: dict[Any, None] = {}
        for result in self.traced.results:
            waiting = [(result, False)]
            while waiting:
                operation, ready = waiting.pop()
                if ready:
                    done[operation] = None
                elif operation not in done:
                    waiting.append((operation, True))
                    waiting += [(source, False) for source in self._sources(operation) if source is not None]
        return list(done)

    def _sources(self, operation: Any) -> list[Any]:
        """What an operation reads; None for what no parameter went into."""
        module = self.modules.get(operation)
        if module is not None:
            return [call.source for call in self.traced.calls[module] if call.made_by is operation]
        return [source for source, _ in operation.next_functions]

    def _stream(self, operation: Any) -> Stream | None:
        module = self.modules.get(operation)
        if module is not None:
            return self._through_module(operation, module)
        node = self.traced.nodes.get(operation)
        if node is None:  # a parameter or a buffer
            return None
        name = operation.name().rstrip("0123456789").removesuffix("Backward")
        streams = [None if source is None else self.streams.get(source) for source in self._sources(operation)]
        if not any(streams):
            return None
        found = self._known(operation, node.type.name, name, streams)
        if found is None:
            for stream in streams:
                self._stop(stream)
            self._name(operation, streams, name)
        return found

    def _known(self, operation: Any, kind: str, name: str, streams: list[Stream | None]) -> Stream | None:
        """What comes out of an operation that is known; None for any other."""
        first = streams[0]
        if kind == "CONCAT":
            return _concatenated(operation, streams)
        if kind == "RESHAPE" and len(streams) == 1 and first is not None and self.reshapes:
            return _flattened(operation, first)
        if kind != "ELEMENTWISE":  # Torch-Pruning's type for all else, whatever it does: the name must be known too
            return None
        if name in EACH_VALUE and len(streams) == 1:
            return first
        if name in PAIRS and len(streams) == 2 and first is not None and streams[1] is not None:
            return self._merge(first, streams[1])
        if name in ("Mean", "Squeeze", "Unsqueeze") and first is not None and _leaves_axis(operation, first):
            return first
        return None

    # ------------------------------------------------------------------------------------------ modules

    def _through_module(self, operation: Any, module: nn.Module) -> Stream | None:
        calls = self.traced.calls[module]
        incoming = [None if call.source is None else self.streams.get(call.source) for call in calls]
        name = self.names[module]
        if isinstance(module, (*LAYERS, *NORMS, nn.PReLU)) and (len(calls) > 1 or id(module) in self.tied):
            where = "it is called twice" if len(calls) > 1 else "its weight is used in two places"
            for stream in incoming:
                self._stop(stream)
            self.wiring.left.setdefault(name, where)
            return None
        if type(module) in LAYERS:
            return self._layer(name, module, calls[0], incoming[0])
        stream = incoming[[call.made_by for call in calls].index(operation)]
        if stream is None or type(module) in ACTIVATIONS:
            return stream
        if isinstance(module, nn.Flatten):
            found = _flattened(operation, stream) if self.reshapes else None
        else:
            found = self._carry(name, module, stream, calls[0].input_axes)
        if found is None:
            self._stop(stream)
            self.wiring.left.setdefault(name, f"{type(module).__name__} is not known to treat each channel alone here")
        return found

    def _layer(self, name: str, module: Any, call: Any, stream: Stream | None) -> Stream | None:
        wiring, convolution = self.wiring, isinstance(module, CONVOLUTIONS)
        size, units = (
            (module.in_channels, module.out_channels) if convolution else (module.in_features, module.out_features)
        )
        axis = SPATIAL if convolution else LAST
        wiring.reads[name] = torch.full((size,), NOBODY)
        wiring.outputs[name] = call.positions
        self.wiring.axes[name] = axis
        if stream is not None:
            on_axis = stream.axis == axis or call.input_axes == 2
            if on_axis and len(stream.channels) == size:
                wiring.reads[name] = stream.channels
            else:
                self._stop(stream)
                wiring.left.setdefault(name, f"it has {size} inputs, and {len(stream.channels)} channels come to it")
        if convolution and call.output_axes != len(module.kernel_size) + 2:
            wiring.left.setdefault(name, "its input has no batch axis")
            self._stop(stream)
            return None
        wiring.writes[name] = wiring.fresh(units)
        return Stream(wiring.writes[name], axis)

    def _carry(self, name: str, module: Any, stream: Stream, axes: int) -> Stream | None:
        """BatchNorm and PReLU: they have a number for each channel on axis 1."""
        if isinstance(module, nn.PReLU) and module.num_parameters == 1:
            return stream
        size = module.num_parameters if isinstance(module, nn.PReLU) else module.num_features
        if type(module) not in (*NORMS, nn.PReLU) or size != len(stream.channels):
            return None
        if stream.axis != SPATIAL and axes != 2:
            return None
        self.wiring.carries[name] = stream.channels
        return stream

    # ------------------------------------------------------------------------------------------- merging

    def _one(self, channel: int) -> int:
        while channel in self.same:
            channel = self.same[channel]
        return channel

    def _merge(self, one: Stream, other: Stream) -> Stream | None:
        if one.axis != other.axis or len(one.channels) != len(other.channels):
            return None
        for a, b in zip(one.channels.tolist(), other.channels.tolist(), strict=True):
            first, second = self._one(a), self._one(b)
            if first != second:
                self.same[second] = first
        return one

    def _stop(self, stream: Stream | None) -> None:
        if stream is not None:
            self.wiring.keep(stream.channels)

    def _name(self, operation: Any, streams: list[Stream | None], name: str) -> None:
        """Say which layers' channels an operation stopped."""
        reason = f"{name} is not known to treat each channel alone"
        if name in PAIRS and None in streams:
            reason = f"{name} with something that no followed layer makes"
        channels = {int(c) for stream in streams if stream is not None for c in stream.channels[:1]}
        for layer, made in self.wiring.writes.items():
            if channels & set(made.tolist()):
                self.wiring.left.setdefault(layer, f"its units go into an operation that stops them: {reason}")


def _concatenated(operation: Any, streams: list[Stream | None]) -> Stream | None:
    known = [stream for stream in streams if stream is not None]
    axis = known[0].axis
    if len(known) < len(streams) or any(stream.axis != axis for stream in known):
        return None
    axes = len(_compat.shape_of(operation))
    if _compat.saved_axes(operation)[0] % axes != axis % axes:
        return None
    return Stream(torch.cat([stream.channels for stream in known]), axis)


def _flattened(operation: Any, stream: Stream) -> Stream | None:
    """A view that puts all axes but the first into one."""
    before, after = _compat.saved_shape(operation), _compat.shape_of(operation)
    if len(before) < 2 or len(after) != 2 or after[0] != before[0] or before[stream.axis] != len(stream.channels):
        return None
    if stream.axis == SPATIAL:
        return Stream(stream.channels.repeat_interleave(math.prod(before[2:])), LAST)
    return Stream(stream.channels.repeat(math.prod(before[1:-1])), LAST)


def _leaves_axis(operation: Any, stream: Stream) -> bool:
    """Whether an operation on some axes leaves the channels' axis where it is."""
    axes, given = len(_compat.saved_shape(operation)), _compat.saved_axes(operation)
    if not axes or not given:
        return False
    dims = [dim % axes for dim in given]
    return all(dim > 1 for dim in dims) if stream.axis == SPATIAL else all(dim != axes - 1 for dim in dims)
