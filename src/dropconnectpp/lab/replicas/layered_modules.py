"""A trained network given as layers as an ordinary model of plain torch layers: weights that were removed are 0."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn

from dropconnectpp.lab.config.layers import LayeredShape, WeightLayer
from dropconnectpp.lab.replicas.layered_evaluation import stacked_weights
from dropconnectpp.lab.replicas.layered_stack import LayeredStack


def build(shape: LayeredShape, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The network as a module with fresh parameters; images come as (B, C, H, W), standardised."""
    found: OrderedDict[str, nn.Module] = OrderedDict()
    sizes = iter(shape.weight_layers())
    flat = False
    for number, layer in enumerate(shape.layers):
        if layer.kind == "activation":
            found[f"activation{number}"] = nn.ReLU() if layer.function == "relu" else nn.Tanh()
        elif layer.kind == "pool":
            found[f"pool{number}"] = nn.MaxPool2d(layer.size or 1, layer.step, ceil_mode=layer.ceil_mode)
        elif layer.kind == "convolution":
            one = next(sizes)
            found[one.name] = nn.Conv2d(one.inputs, one.units, layer.size or 1, layer.step, layer.padding)
        else:
            one = next(sizes)
            if not flat:
                found["flatten"] = nn.Flatten()
            flat = True
            found[one.name] = nn.Linear(one.inputs, one.units)
    return nn.Sequential(found).to(dtype)


@torch.no_grad()
def to_module(stack: LayeredStack, replica_index: int, *, deployed: bool = True) -> nn.Sequential:
    """Replica ``replica_index`` of a stack as a module in eval mode, on the CPU; the whole network if not deployed."""
    module = build(stack.shape, stack.dtype)
    state: dict[str, Tensor] = {}
    weights = stacked_weights(stack, deployed)
    maps = [stack.shape.channels, *(one.units for one in stack.layers)]
    for (one, weight, bias), (before, _) in zip(
        zip(stack.layers, weights, stack.biases, strict=True), pairwise(maps), strict=True
    ):
        state[f"{one.name}.weight"] = as_torch(one, weight[replica_index], before).cpu()
        state[f"{one.name}.bias"] = bias[replica_index].cpu()
    module.load_state_dict(state)
    return module.eval()


def as_torch(one: WeightLayer, weight: Tensor, maps: int) -> Tensor:
    """A layer's weights (I, O) in torch's order: ``maps`` come into it, of some places each."""
    size = one.layer.size or 1
    if one.convolution:
        return weight.view(size, size, one.inputs, one.units).permute(3, 2, 0, 1).contiguous()
    places = one.inputs // maps
    return weight.view(places, maps, one.units).permute(2, 1, 0).reshape(one.units, one.inputs)
