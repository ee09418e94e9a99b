"""A trained replica as an ordinary model of plain torch layers and the library's own: to use, save and deploy."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

import dropconnectpp
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.replicas.network import Shape
from dropconnectpp.lab.replicas.stack import Stack


def build(shape: Shape, method: Method, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """The paper's network as a module, with fresh parameters and the method's options."""
    architecture = shape.architecture
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = shape.channels
    for number, (maps, pooled) in enumerate(zip(architecture.maps, architecture.pooled, strict=True)):
        layers[f"conv{number}"] = nn.Conv2d(channels, maps, architecture.filter_size, padding=architecture.padding)
        if pooled:
            layers[f"pool{number}"] = nn.MaxPool2d(
                architecture.pool_size, architecture.pool_stride, ceil_mode=architecture.ceil_mode
            )
        layers[f"relu{number}"] = nn.ReLU()
        channels = maps
    layers["flatten"] = nn.Flatten()
    units, inputs = shape.dense
    layers["dense"] = _dense(method, inputs, units)
    if not getattr(layers["dense"], "activation", None):
        layers["relu"] = nn.ReLU()
    if method.kind == "dropout":
        layers["dropout"] = nn.Dropout(method.rate or 0.0)
    layers["output"] = nn.Linear(units, shape.classes)
    return nn.Sequential(layers).to(dtype)


def _dense(method: Method, inputs: int, units: int) -> nn.Module:
    options = method.layer_options()
    if not options:
        return nn.Linear(inputs, units)
    activation = nn.ReLU()  # inside the layer: Eq. (18) averages the activation
    if method.kind == "dropconnect":
        return dropconnectpp.DropConnectLinear(inputs, units, activation=activation, **options)
    layer = dropconnectpp.DropConnectPPLinear(inputs, units, activation=activation, **options)
    layer.reset_posterior(posterior_alpha=method.posterior_alpha, posterior_beta=method.posterior_beta)
    return layer


@torch.no_grad()
def to_module(stack: Stack, replica_index: int) -> nn.Sequential:
    """Replica ``replica_index`` of a stack as a module in eval mode, on the CPU."""
    segment = next(s for s in stack.segments if s.rows.start <= replica_index < s.rows.stop)
    method = stack.units[replica_index].protocol.method
    module = build(stack.shape, method, stack.dtype)
    state = {name: value[replica_index].detach().cpu() for name, value in stack.parameters.items()}
    for name, value in segment.regulariser.parameters.items():
        state[f"dense.{name}"] = value[replica_index - segment.rows.start].detach().cpu()
    if method.scaling == "training" and method.rate:  # what masks multiply: W / p
        for name in ("dense.weight", "dense.bias"):
            state[name] = state[name] / (1.0 - method.rate)
    module.load_state_dict(state)
    return module.eval()
