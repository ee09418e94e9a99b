"""Models whose layers follow one another: the wiring of nn.Sequential, known without running anything."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropconnectpp.compaction.wiring import NOBODY, Wiring

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)
ACTIVATIONS = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Softshrink,
    nn.Hardshrink,
    nn.Tanhshrink,
    nn.Threshold,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
)
"""What acts on each value alone."""
SILENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""What does nothing in eval mode."""
EVEN_POOLS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
"""What gives a constant back from a constant."""
AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


@dataclass(frozen=True)
class Repeat:
    """Channels spread over the inputs of a dense layer: ``each`` times one after another, ``times`` times over."""

    each: int
    times: int

    def __call__(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.each, -1).repeat(*[1] * (values.ndim - 1), self.times)


@dataclass
class Chain(Wiring):
    """The wiring of modules that follow one another."""

    steps: dict[str, list[nn.Module | Repeat]] = field(default_factory=dict)
    """What stands between a layer and the next, by the first one's name."""
    followers: dict[str, str] = field(default_factory=dict)
    """The layer that reads a layer, by the first one's name."""
    blocks: list[str] = field(default_factory=list)
    """Modules with layers inside that were not looked into."""

    def values(self, model: nn.Module, still: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, follower in self.followers.items():
            layer: Any = model.get_submodule(name)
            channels = self.writes[name]
            constant = still[channels]
            if not bool(constant.any()):
                continue
            bias = layer.weight.new_zeros(len(channels)) if layer.bias is None else layer.bias.detach()
            values = bias.double().unsqueeze(0).clone()
            for step in self.steps[name]:
                values, constant = _through(step, values), step(constant) if isinstance(step, Repeat) else constant
            found[follower] = values[0].masked_fill(~constant.to(values.device), torch.nan)
        return found


def _through(step: nn.Module | Repeat, values: Tensor) -> Tensor:
    """Constants (1, C), one for each channel, through what stands between two layers, in eval mode."""
    if isinstance(step, NORMS):
        exact = copy.deepcopy(step).double()
        return F.batch_norm(
            values, exact.running_mean, exact.running_var, exact.weight, exact.bias, False, 0.0, exact.eps
        )
    if isinstance(step, AVERAGES):  # its padding counts as zeros
        return torch.where(values == 0.0, values, torch.nan)
    if isinstance(step, nn.PReLU):
        return torch.where(values > 0, values, values * step.weight.detach().double())
    if isinstance(step, (*ACTIVATIONS, Repeat)):
        return step(values.clone())
    return values


def is_chain(module: nn.Module) -> bool:
    """Whether a module calls its children one after another."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def flatten_chain(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of nested chains in the order in which they are called, by name."""
    if not is_chain(model):
        yield prefix, model
        return
    for name, child in model._modules.items():
        if child is not None:
            yield from flatten_chain(child, f"{prefix}.{name}" if prefix else name)


def read_chain(model: nn.Module) -> Chain:
    """The wiring of a chain. What is not known to treat each channel alone is left whole, and named."""
    return ChainReader().read(list(flatten_chain(model)))


class ChainReader:
    """Goes along a chain and notes which channels come by."""

    def __init__(self) -> None:
        self.chain = Chain()
        self.channels: Tensor | None = None
        """The channels that come by; None where nothing is known of them."""
        self.source = ""
        """The layer that made them."""
        self.spatial = False
        """Whether they lie on the axis of a convolution's channels, rather than on the last one."""
        self.flattened = False
        """Whether a Flatten is waiting for the next layer to say how many inputs there are for each channel."""

    def read(self, modules: list[tuple[str, nn.Module]]) -> Chain:
        """All modules of a chain, in order."""
        seen: dict[int, int] = {}
        for _, module in modules:
            seen[id(module)] = seen.get(id(module), 0) + 1
        tied = tied_layers([module for _, module in modules])
        for name, module in modules:
            if isinstance(module, LAYERS) and (seen[id(module)] > 1 or id(module) in tied):
                self._stop(
                    name, "it is used in two places" if seen[id(module)] > 1 else "its weight is used in two places"
                )
            elif type(module) in LAYERS:
                self._layer(name, module)
            else:
                self._between(name, module)
        if self.channels is not None:
            self.chain.keep(self.channels)
        return self.chain

    def _layer(self, name: str, module: Any) -> None:
        convolution = isinstance(module, CONVOLUTIONS)
        size = module.in_channels if convolution else module.in_features
        read = self._arriving(name, size, convolution)
        self.chain.reads[name] = torch.full((size,), NOBODY) if read is None else read
        if read is not None:
            self.chain.followers[self.source] = name
        self.channels = self.chain.fresh(module.out_channels if convolution else module.out_features)
        self.chain.writes[name] = self.channels
        self.chain.steps[name] = []
        self.source, self.spatial, self.flattened = name, convolution, False

    def _arriving(self, name: str, size: int, convolution: bool) -> Tensor | None:
        """The channels behind a layer's inputs; None if they are not known."""
        if self.channels is None:
            return None
        if self.spatial != convolution and not (self.flattened and not convolution):
            self._stop(name, "it does not act on the axis of the channels that come to it")
            return None
        return self._spread(name, size)

    def _spread(self, name: str, size: int) -> Tensor | None:
        """The channels that come by, as ``size`` inputs."""
        assert self.channels is not None
        each, rest = divmod(size, len(self.channels))
        if rest or (each > 1 and not self.flattened):
            self._stop(name, f"it has {size} inputs for {len(self.channels)} channels")
            return None
        repeat = Repeat(each, 1) if self.spatial else Repeat(1, each)
        if self.flattened:
            self.chain.steps[self.source].append(repeat)
            self.channels, self.spatial, self.flattened = repeat(self.channels), False, False
        return self.channels

    def _between(self, name: str, module: nn.Module) -> None:
        if self.channels is None or isinstance(module, SILENT):
            self._note_block(name, module)
            return
        kind = type(module)
        if isinstance(module, nn.Flatten):
            if (module.start_dim, module.end_dim) == (1, -1):
                self.flattened = True
            else:
                self._stop(name, "it flattens other axes than all but the first")
        elif kind in NORMS or (kind is nn.PReLU and module.num_parameters != 1):
            self._carry(name, module)
        elif kind in ACTIVATIONS or kind is nn.PReLU:
            self.chain.steps[self.source].append(module)
        elif self.spatial and (kind in EVEN_POOLS or kind in AVERAGES):
            if kind in AVERAGES and _pads_with_zeros(module):
                self.chain.steps[self.source].append(module)
        else:
            self._stop(name, f"{kind.__name__} is not known to treat each channel alone")
            self._note_block(name, module)

    def _carry(self, name: str, module: Any) -> None:
        """A module with numbers of its own for each channel."""
        if not self.spatial and not isinstance(module, nn.BatchNorm1d | nn.PReLU):
            self._stop(name, "it acts on another axis than the channels'")
            return
        channels = self._spread(name, module.num_parameters if isinstance(module, nn.PReLU) else module.num_features)
        if channels is not None:
            self.chain.carries[name] = channels
            self.chain.steps[self.source].append(module)

    def _note_block(self, name: str, module: nn.Module) -> None:
        if type(module) not in LAYERS and any(isinstance(inner, LAYERS) for inner in module.modules()):
            self.chain.blocks.append(name)
            self.chain.left.setdefault(
                name, f"{type(module).__name__} calls its layers in its own way; give example_input to follow them"
            )

    def _stop(self, name: str, reason: str) -> None:
        """From here on nothing is known of the channels: they stay."""
        self.chain.left.setdefault(name, reason)
        if self.channels is not None:
            self.chain.keep(self.channels)
        self.channels = None


def _pads_with_zeros(module: Any) -> bool:
    padding = module.padding if isinstance(module.padding, tuple) else (module.padding,)
    return bool(module.count_include_pad) and any(padding)


def tied_layers(modules: list[nn.Module]) -> set[int]:
    """Layers whose parameters other modules have too, by id."""
    owners: dict[int, set[int]] = {}
    for module in modules:
        for inner in module.modules():
            for parameter in inner._parameters.values():
                if parameter is not None:
                    owners.setdefault(id(parameter), set()).add(id(inner))
    return {owner for found in owners.values() if len(found) > 1 for owner in found}
