"""What constant units contribute goes into the next bias, and what nobody reads becomes zero: same outputs, more zeros.

Shapes: O out, I in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.compaction.wiring import Wiring


def reading(layer: Any) -> Tensor:
    """For each of a layer's inputs, whether any of its weights is on."""
    weight: Tensor = layer.weight.detach() != 0
    if isinstance(layer, nn.Linear):
        return weight.any(0)
    groups = weight.view(layer.groups, -1, *weight.shape[1:])  # (G, O/G, I/G, *)
    return groups.flatten(3).any(3).any(1).flatten() if groups.ndim > 3 else groups.any(1).flatten()


def writing(layer: Any) -> Tensor:
    """For each of a layer's outputs, whether any of its weights is on."""
    weight: Tensor = layer.weight.detach() != 0
    return weight.flatten(1).any(1)


@torch.no_grad()
def settle(model: nn.Module, wiring: Wiring) -> dict[str, int]:
    """Fold constants and clear what nobody reads, until nothing changes; how many inputs each layer lost by folding."""
    folded: dict[str, int] = {}
    while True:
        moved = _fold_constants(model, wiring, folded)
        cleared = _clear_unread(model, wiring)
        if not (moved or cleared):
            return folded


def unread(model: nn.Module, wiring: Wiring) -> Tensor:
    """For each channel, whether no layer reads it and nothing else needs it."""
    found = ~wiring.staying()
    for name, channels in wiring.reads.items():
        used = channels[reading(model.get_submodule(name)).cpu()]
        found[used[used >= 0]] = False
    return found


def _still(model: nn.Module, wiring: Wiring) -> Tensor:
    """For each channel, whether all that makes it has no weight left."""
    made = torch.zeros(wiring.count, dtype=torch.bool)
    moving = torch.zeros(wiring.count, dtype=torch.bool)
    for name, channels in wiring.writes.items():
        known = channels >= 0
        made[channels[known]] = True
        moving[channels[known & writing(model.get_submodule(name)).cpu()]] = True
    return made & ~moving


def _fold_constants(model: nn.Module, wiring: Wiring, folded: dict[str, int]) -> bool:
    still = _still(model, wiring)
    if not bool(still.any()):
        return False
    moved = False
    for name, values in wiring.values(model, still).items():
        layer: Any = model.get_submodule(name)
        values = values.to(layer.weight.device)
        constant = torch.isfinite(values) & reading(layer)
        if _zeros_at_the_border(layer):
            beyond = constant & (values != 0.0)
            if bool(beyond.any()):
                wiring.left.setdefault(
                    name,
                    f"{int(beyond.sum())} of the channels it reads are constant, and its zero padding is not: "
                    "they stay",
                )
            constant &= ~beyond
        if bool(constant.any()):
            _fold(layer, values, constant)
            folded[name] = folded.get(name, 0) + int(constant.sum())
            moved = True
    return moved


def _zeros_at_the_border(layer: Any) -> bool:
    """Whether a constant input is not constant to a layer, since it pads with zeros."""
    if isinstance(layer, nn.Linear) or layer.padding_mode != "zeros":
        return False
    if isinstance(layer.padding, str):
        return bool(layer.padding == "same" and any(size > 1 for size in layer.kernel_size))
    return any(layer.padding)


def _fold(layer: Any, values: Tensor, constant: Tensor) -> None:
    """W x + b where some x are known: W without their columns, and b with what they give."""
    weight = layer.weight.detach().double()
    known = torch.where(constant, values, 0.0)
    if isinstance(layer, nn.Linear):
        given = weight @ known
        layer.weight[:, constant] = 0.0
    else:
        groups, size = layer.groups, weight.shape[1]
        summed = weight.flatten(2).sum(2).view(groups, -1, size)  # (G, O/G, I/G)
        given = (summed @ known.view(groups, size, 1)).flatten()
        off = constant.view(groups, 1, size).expand(groups, summed.shape[1], size).reshape(-1, size)
        layer.weight[off] = 0.0
    if not bool((given != 0.0).any()):
        return
    bias = given if layer.bias is None else layer.bias.detach().double() + given
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.to(weight.device, layer.weight.dtype), layer.weight.requires_grad)
    else:
        layer.bias.copy_(bias)


def _clear_unread(model: nn.Module, wiring: Wiring) -> bool:
    """Zero the weights and biases of channels that nobody reads, so that what they read may be unread in turn."""
    dead = unread(model, wiring)
    cleared = False
    for name, channels in wiring.writes.items():
        layer: Any = model.get_submodule(name)
        off = ((channels >= 0) & dead[channels.clamp_min(0)]).to(layer.weight.device)
        for parameter in (layer.weight, layer.bias):
            if parameter is not None and bool((parameter[off] != 0).any()):
                parameter[off] = 0.0
                cleared = True
    return cleared
