"""What a plain module becomes: a layer of ours, or the module itself with gates on its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dropconnectpp.conversion import hosting
from dropconnectpp.conversion.computed import carry_over, plain_type, source
from dropconnectpp.conversion.hosting import floating_names, host_of, share
from dropconnectpp.conversion.kinds import CONVERTED, plain_layers
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.parameter import fault_of

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass
class Making:
    """What one call of `convert` makes."""

    kind: str
    options: dict[str, Any]
    replacements: dict[nn.Module, nn.Module] = field(default_factory=dict)
    shared: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """The layer and the name there of each parameter that has gates."""
    left: list[str] = field(default_factory=list)
    """What stays plain, and why."""

    def replace(self, module: nn.Module, owner: nn.Module | None, parameters: Sequence[str] | None) -> str | None:
        """Make a module's replacement, or say why there is none."""
        reads = parameters is not None or reads_itself(module, owner, self.kind)
        why = obstacle(module, reads, self.options) if parameters is None else host_obstacle(module, self.options)
        if why is not None:
            return why
        if not reads:
            self.replacements[module] = layer_of(module, self.kind, self.options, self.shared)
        else:
            names = floating_names(module) if parameters is None else parameters
            self.replacements[module] = host_of(module, names, self.kind, self._of_hosts(), self.shared)
        return None

    def host(self, model: nn.Module, names: Sequence[str]) -> dict[nn.Module, nn.Module]:
        """For layers that were made: the plain ones with gates where their weight is read, instead."""
        plain = {made: module for module, made in self.replacements.items()}
        found: dict[nn.Module, nn.Module] = {}
        for name in names if fault_of(self.options) is None else ():
            layer = model.get_submodule(name)
            if layer in plain and isinstance(layer, MaskedLayer):
                module = plain[layer]
                made = host_of(module, floating_names(module), self.kind, self._of_hosts(), self.shared)
                found[layer] = self.replacements[module] = made
        return found

    def _of_hosts(self) -> dict[str, Any]:
        return {key: value for key, value in self.options.items() if key not in ("mask", "activation")}


def reads_itself(module: nn.Module, owner: nn.Module | None, kind: str) -> bool:
    """Whether gates belong where a module's parameters are read: by its own forward, or by its owner."""
    return plain_type(module) not in CONVERTED[kind] or isinstance(owner, nn.MultiheadAttention)


def obstacle(module: nn.Module, reads: bool, options: Mapping[str, Any]) -> str | None:
    """Why a module must stay plain; None if it need not. ``reads`` is what `reads_itself` says."""
    if hasattr(module, "_hf_hook") or "forward" in vars(module):
        return "its forward was replaced, by accelerate for example; convert the model first, and dispatch it then"
    if quantised(module):
        return "its weight is quantised, and gates need ordinary numbers; convert first, and quantise to_dense(model)"
    if isinstance(module, plain_layers()):
        weight = module._parameters.get("weight")
        if weight is not None and nn.parameter.is_lazy(weight):
            return "its shape is not known yet; run the model once on a batch first"
        if source(module, "weight") is None:
            return "its weight is computed by a hook that is not known; remove that first"
        if reads and weight is None:
            return "its weight is computed, and read by a forward of its own or by its owner"
    return host_obstacle(module, options) if reads else None


def host_obstacle(module: nn.Module, options: Mapping[str, Any]) -> str | None:
    """Why a module's parameters cannot have gates where they are read; None if they can."""
    return hosting.check(module) or fault_of(dict(options))


def quantised(module: nn.Module) -> bool:
    """Whether a layer's weight is no tensor of ordinary numbers, as torchao and bitsandbytes leave it."""
    weight = module._parameters.get("weight", module._buffers.get("weight"))
    if weight is None or not isinstance(module, plain_layers()) or nn.parameter.is_lazy(weight):
        return False
    wrapped = hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "full_tensor")
    return wrapped or not weight.is_floating_point()


def layer_of(module: nn.Module, kind: str, options: dict[str, Any], shared: dict[int, tuple[Any, str]]) -> MaskedLayer:
    """The layer of ours in the place of a plain one, with its parameters and hooks."""
    target = CONVERTED[kind][plain_type(module)]
    weight, bias = source(module, "weight"), source(module, "bias")
    assert weight is not None
    arguments = {name: getattr(module, name) for name in target.argument_names} | {"bias": bias is not None}
    # skip_init: the weights are there already, and the user's random numbers stay his own.
    layer: MaskedLayer = nn.utils.skip_init(target, **arguments, **options, device=weight.device, dtype=weight.dtype)
    layer.register_parameter("weight", weight)
    layer.register_parameter("bias", bias)
    if isinstance(layer, DropConnectPPLayer):
        layer.reset_posterior()
        for name in layer.synapse_names:
            if name in module._parameters:  # what is computed is nobody else's
                share(layer, name, shared)
    for hooks in _HOOKS:
        setattr(layer, hooks, getattr(module, hooks))
    carry_over(module, layer)
    return layer.train(module.training)


def replacement_of(module: nn.Module, owner: nn.Module | None, kind: str, options: dict[str, Any]) -> MaskedLayer | str:
    """The masked layer that a plain one would become, with a posterior of its own, or why there is none.

    Nothing is changed: `swap` puts new layers in.
    """
    if plain_type(module) not in CONVERTED[kind]:
        return f"it is a {type(module).__name__}"
    if isinstance(owner, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight instead of calling it, so masks would do nothing"
    why = obstacle(module, False, options)
    return layer_of(module, kind, options, {}) if why is None else why


def host_replacement_of(module: nn.Module, kind: str, own: Mapping[str, Mapping[str, Any]]) -> nn.Module | str:
    """The module with gates on parameters, each with its own options, or why it cannot have them."""
    missing = [name for name in own if name not in floating_names(module)]
    if missing:
        return f"it has no parameter {', '.join(missing)}"
    for options in own.values():
        why = host_obstacle(module, options)
        if why is not None:
            return why
    return host_of(module, own, kind, {}, {}, own)
