"""Layers whose weights are computed: by `nn.utils.prune`, the old `weight_norm`, or parametrisations of torch."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from dropconnectpp.layers.base import MaskedLayer

SYNAPSES = ("weight", "bias")


def plain_type(module: nn.Module) -> type[nn.Module]:
    """A module's type without what a parametrisation makes of it."""
    return parametrize.type_before_parametrizations(module)


def hooks_of(module: nn.Module, name: str) -> list[Any]:
    """The hooks that compute a parameter before each forward."""
    return [
        hook
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod | WeightNorm) and _computes(hook, name)
    ]


def _computes(hook: Any, name: str) -> bool:
    return name == (hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name)


def source(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter behind a weight or bias, of its shape: itself, or what it is computed from."""
    if parametrize.is_parametrized(module, name):
        return nn.Parameter(getattr(module, name).detach())
    own = module._parameters.get(name)
    if own is not None:
        return own
    ends = ["_orig" if isinstance(hook, BasePruningMethod) else "_v" for hook in hooks_of(module, name)]
    return module._parameters.get(name + ends[0]) if len(ends) == 1 else None


def carry_over(module: nn.Module, layer: MaskedLayer) -> None:
    """Have a layer that has a module's sources compute its parameters as the module does."""
    plain: Any = module
    made: Any = layer
    for name in SYNAPSES:
        if parametrize.is_parametrized(module, name):
            for step in plain.parametrizations[name]:
                parametrize.register_parametrization(layer, name, copy.deepcopy(step), unsafe=True)
            made.parametrizations[name] = plain.parametrizations[name]
        for hook in hooks_of(module, name):
            if isinstance(hook, BasePruningMethod):
                layer.keep_only(name, getattr(module, f"{name}_mask").bool())
            else:
                parametrizations.weight_norm(layer, name, hook.dim)
                originals = made.parametrizations[name]
                originals.original0, originals.original1 = (module._parameters[name + end] for end in ("_g", "_v"))
    computing = {id(hook) for name in SYNAPSES for hook in hooks_of(module, name)}
    kept = [(key, hook) for key, hook in module._forward_pre_hooks.items() if id(hook) not in computing]
    layer._forward_pre_hooks = type(module._forward_pre_hooks)(kept)
