"""The KL of a model's posterior from its prior: of each layer, of the whole, and of what backpropagation moves."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.ops.posterior import GatePosterior, kl_sum
from dropconnectpp.ops.posterior_groups import group_pass, groupable, in_parts


def posteriors_of(layers: Mapping[str, MaskedLayer]) -> dict[str, DropConnectPPLayer]:
    """The layers that have a posterior."""
    return {name: layer for name, layer in layers.items() if isinstance(layer, DropConnectPPLayer)}


def _synapses(layers: Iterable[DropConnectPPLayer]) -> Iterator[tuple[DropConnectPPLayer, str]]:
    """Each learned parameter once, however many layers share it."""
    seen: set[Any] = set()
    for layer in layers:
        for name in layer.gate_names:
            if layer.tie(name) not in seen:
                seen.add(layer.tie(name))
                yield layer, name


def pathwise_kl(layers: Mapping[str, DropConnectPPLayer], without: Container[str] = ()) -> list[tuple[float, Tensor]]:
    """KL weight and KL of layers whose likelihood's gradient comes by backpropagation; small ones go together."""
    kl: list[tuple[float, Tensor]] = []
    groups: dict[tuple[Any, ...], list[GatePosterior]] = {}
    wanted = [layer for name, layer in layers.items() if name not in without and layer.pathwise]
    for layer, name in _synapses(wanted):
        posterior = layer.posterior_of(name)
        if torch.is_grad_enabled() and groupable(posterior):
            groups.setdefault((layer.kl_weight, posterior.prior, posterior.gate.dtype), []).append(posterior)
        else:
            kl.append((layer.kl_weight, kl_sum(posterior)))
    for key, group in groups.items():
        kl += [(key[0], group_pass(part)[0]) for part in in_parts(group)]
    return kl


def named_kl(model: nn.Module) -> dict[str, Tensor]:
    """The KL of each DropConnect++ layer in nats, differentiable; shared parameters count once.

    It is the divergence itself, whatever the layers' ``kl_weight``.
    """
    seen: set[Any] = set()
    result: dict[str, Tensor] = {}
    for layer_name, layer in masked_layers(model).items():
        if not isinstance(layer, DropConnectPPLayer):
            continue
        fresh = [name for name in layer.gate_names if layer.tie(name) not in seen]
        seen.update(layer.tie(name) for name in fresh)
        parts = [kl_sum(layer.posterior_of(name)) for name in fresh]
        result[layer_name] = torch.stack(parts).sum() if parts else layer.weight.new_zeros(())
    return result


def kl_divergence(model: nn.Module) -> Tensor:
    """KL of the whole model's posterior from its prior, Eq. (20) + Eq. (21), in nats, differentiable.

    It is the divergence itself, whatever the layers' ``kl_weight``.

    >>> kl_divergence(dropconnectpp.DropConnectPPLinear(10, 10, bias=False, keep_probability=0.9))
    tensor(36.8064, grad_fn=<SumBackward0>)
    """
    values = list(named_kl(model).values())
    if not values:
        return torch.zeros(())
    return torch.stack([value.to(values[0].device) for value in values]).sum()
