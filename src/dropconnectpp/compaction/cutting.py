"""Takes units, channels and inputs out of layers: the tensors get smaller.

Shapes: O out, I in, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.compaction.folding import reading, unread
from dropconnectpp.compaction.selected import SELECTED
from dropconnectpp.compaction.wiring import Wiring
from dropconnectpp.layers.affine import construction_arguments

LEAST_SELECTION = 0.25
"""The share of a layer's inputs that must be off before it reads a part of them: gathering costs time."""


@torch.no_grad()
def cut(model: nn.Module, wiring: Wiring) -> None:
    """Take out all channels that nobody reads, and let layers read only the inputs that they are connected to."""
    gone = removable(model, wiring)
    for name, channels in wiring.carries.items():
        _cut_carrier(model.get_submodule(name), ~_of(gone, channels))
    for name in {**wiring.reads, **wiring.writes}:
        layer: Any = model.get_submodule(name)
        inputs = _stay(gone, wiring.reads.get(name), layer.weight.device, _sizes(layer)[0])
        units = _stay(gone, wiring.writes.get(name), layer.weight.device, _sizes(layer)[1])
        _cut_layer(layer, inputs, units)


def removable(model: nn.Module, wiring: Wiring) -> Tensor:
    """For each channel, whether it can be taken out of all that reads and writes it."""
    gone = unread(model, wiring)
    grouped = [name for name in wiring.writes if getattr(model.get_submodule(name), "groups", 1) > 1]
    while True:
        before = int(gone.sum())
        for channels in (*wiring.reads.values(), *wiring.writes.values(), *wiring.carries.values()):
            if len(channels) and bool(_of(gone, channels).all()):
                gone[channels[0]] = False  # a layer keeps one unit: tensors without elements are trouble elsewhere
        for name in grouped:
            _keep_groups_whole(model.get_submodule(name), wiring.reads.get(name), wiring.writes[name], gone)
        if int(gone.sum()) == before:
            return gone


def _of(mask: Tensor, channels: Tensor) -> Tensor:
    return (channels >= 0) & mask[channels.clamp_min(0)]


def _stay(gone: Tensor, channels: Tensor | None, device: torch.device, size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bool, device=device) if channels is None else ~_of(gone, channels).to(device)


def _sizes(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.in_channels, layer.out_channels


def _keep_groups_whole(layer: Any, reads: Tensor | None, writes: Tensor, gone: Tensor) -> None:
    """A group of a convolution goes with all its inputs and outputs, or not at all."""
    sides = [writes.view(layer.groups, -1), *([] if reads is None else [reads.view(layer.groups, -1)])]
    whole = torch.stack([_of(gone, side).all(1) for side in sides]).all(0)
    if reads is None:
        whole[:] = False
    for side in sides:
        kept = side[~whole].flatten()
        gone[kept[kept >= 0]] = False


def _cut_carrier(module: Any, stay: Tensor) -> None:
    """BatchNorm and PReLU: one number a channel."""
    stay = stay.to(next(t for t in (*module.parameters(), *module.buffers()) if t.ndim).device)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = _smaller(parameter, parameter[stay])
    for name in ("running_mean", "running_var"):
        buffer = module._buffers.get(name)
        if buffer is not None:
            module._buffers[name] = buffer[stay].clone()
    setattr(module, "num_parameters" if isinstance(module, nn.PReLU) else "num_features", int(stay.sum()))


def _smaller(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(), requires_grad=old.requires_grad)


def _cut_layer(layer: Any, inputs: Tensor, units: Tensor) -> None:
    if layer.bias is not None:
        layer.bias = _smaller(layer.bias, layer.bias[units])
    if isinstance(layer, nn.Linear):
        layer.weight = _smaller(layer.weight, layer.weight[units][:, inputs])
        layer.in_features, layer.out_features = int(inputs.sum()), int(units.sum())
        return
    if layer.groups == 1:
        layer.weight = _smaller(layer.weight, layer.weight[units][:, inputs])
    else:
        layer.weight = _smaller(layer.weight, layer.weight[units])
        layer.groups = int(units.view(layer.groups, -1).any(1).sum())
    layer.in_channels, layer.out_channels = int(inputs.sum()), int(units.sum())


@torch.no_grad()
def select_inputs(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """For layers with many inputs that are off and cannot be taken out: layers that read the others alone."""
    found: dict[str, nn.Module] = {}
    for name in names:
        layer: Any = model.get_submodule(name)
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerEncoderLayer):
            continue  # its fast path reads the weight instead of calling the layer
        on = reading(layer)
        if type(layer) not in SELECTED or getattr(layer, "groups", 1) != 1:
            continue
        if not bool(on.any()):
            on[0] = True
        if float((~on).double().mean()) >= LEAST_SELECTION:
            found[name] = _selected(layer, on)
    return found


def _selected(layer: Any, on: Tensor) -> nn.Module:
    names = (
        ("in_features", "out_features")
        if isinstance(layer, nn.Linear)
        else ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    )
    arguments = construction_arguments(layer, names)
    total = arguments[names[0]]
    arguments[names[0]] = int(on.sum())
    weight = layer.weight
    selected: Any = nn.utils.skip_init(
        SELECTED[type(layer)], **arguments, total=total, device=weight.device, dtype=weight.dtype
    )
    selected.weight = _smaller(weight, weight[:, on])
    if layer.bias is not None:
        selected.bias = layer.bias
    selected.columns = on.nonzero().flatten().to(torch.int32)
    selected.train(layer.training)
    found: nn.Module = selected
    return found
