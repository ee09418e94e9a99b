"""`convert`: a model's layers become DropConnect++ layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import Parameter, signature
from typing import Any

from torch import nn

from dropconnectpp.conversion.agreement import disagreement
from dropconnectpp.conversion.swapping import copied, swap
from dropconnectpp.errors import ArgumentError, ConversionError, check_choice
from dropconnectpp.layers import public as kinds
from dropconnectpp.layers.affine import construction_arguments
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer, PosteriorOptions
from dropconnectpp.presets import preset_options

Pattern = str | type[nn.Module]

CONVERTED: dict[str, dict[type[nn.Module], type[Any]]] = {
    "dropconnect++": {
        nn.Linear: kinds.DropConnectPPLinear,
        nn.Conv1d: kinds.DropConnectPPConv1d,
        nn.Conv2d: kinds.DropConnectPPConv2d,
        nn.Conv3d: kinds.DropConnectPPConv3d,
    },
    "dropconnect": {
        nn.Linear: kinds.DropConnectLinear,
        nn.Conv1d: kinds.DropConnectConv1d,
        nn.Conv2d: kinds.DropConnectConv2d,
        nn.Conv3d: kinds.DropConnectConv3d,
    },
}
"""Which layer each plain one becomes."""


def convert(
    model: nn.Module,
    include: Pattern | Sequence[Pattern] | None = None,
    exclude: Pattern | Sequence[Pattern] = (),
    *,
    kind: str = "dropconnect++",
    preset: str | None = None,
    example_input: Any = None,
    inplace: bool = False,
    **options: Any,
) -> nn.Module:
    """Turn a model's linear and convolutional layers into DropConnect++ layers, weights kept.

    ``include`` and ``exclude`` are module names with wildcards ("fc*", "features.0") or types
    (nn.Linear); by default every layer that can be converted is. A pattern of ``include`` that
    matches no such layer is an error. ``options`` go to each layer
    (estimator, hyper, mask, alpha, ...); ``preset`` names a set of them, see `PRESETS`, and what
    ``options`` say goes before it. Parameters stay the same objects, so ties, devices,
    dtypes, requires_grad and optimiser states hold; layers that share a weight share its logits.
    ``kind="dropconnect"`` gives layers with one fixed rate instead.

    A layer whose owner reads its `weight` instead of calling it, such as the output projection of
    nn.MultiheadAttention, would silently ignore its masks: it is left plain with a warning, and
    refused if named. nn.TransformerEncoderLayer's fast path does so too and is switched off. For owners that nobody
    knows in advance give ``example_input``, what the model is called with (a tensor, a tuple of arguments or a
    dictionary of keywords): one pass under random masks is compared with `to_dense`, and layers whose gates it did not
    ask for, or whose weights were read as they are, are an error that names them.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> [type(layer).__name__ for layer in convert(model, include=["0"])]
    ['DropConnectPPLinear', 'ReLU', 'Linear']
    """
    table = CONVERTED[check_choice("kind", kind, CONVERTED)]
    if preset is not None:
        if kind != "dropconnect++":
            raise ArgumentError(f"preset={preset!r} needs kind='dropconnect++', got {kind!r}, which learns no rate.")
        options = preset_options(preset) | options
    _check_options(kind, options)
    model = model if inplace else copied(model)
    wanted, unwanted = _patterns(include), _patterns(exclude) or []
    owners = {id(child): (owner, name) for name, owner in model.named_modules() for child in owner.children()}
    replacements: dict[nn.Module, MaskedLayer] = {}
    shared: dict[int, MaskedLayer] = {}
    left: list[str] = []
    plain_types: tuple[type[nn.Module], ...] = tuple(table)
    _require_matches(model, wanted or [], plain_types)
    for name, module in model.named_modules():
        if not isinstance(module, plain_types) or _matches(name, module, unwanted):
            continue
        if wanted is not None and not _matches(name, module, wanted):
            continue
        obstacle = _obstacle(module, owners.get(id(module), (None, ""))[0], table)
        if obstacle is None:
            replacements[module] = _converted(module, table, shared, options)
        elif wanted is not None and name in wanted:
            raise ConversionError(f"convert: {name or 'the model'} cannot be converted: {obstacle}.")
        else:
            left.append(f"{name} ({obstacle})")
    if left:
        warnings.warn(f"convert left plain: {'; '.join(left)}.", UserWarning, stacklevel=2)
    if not replacements:
        warnings.warn(
            f"convert: nothing was converted. Layers that could be: {_names(model, plain_types)}.",
            UserWarning,
            stacklevel=2,
        )
    converted = swap(model, dict(replacements))
    if example_input is not None:
        fault = disagreement(converted, example_input)
        if fault is not None:
            swap(converted, {layer: plain for plain, layer in replacements.items()})
            raise ConversionError(f"convert: {fault}")
    return converted


def _patterns(given: Pattern | Sequence[Pattern] | None) -> list[Pattern] | None:
    if given is None:
        return None
    found = [given] if isinstance(given, str | type) else list(given)
    for pattern in found:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            raise ArgumentError(
                f"include and exclude take module names or module types, got {pattern!r}. "
                "For example include=['fc*', nn.Conv2d]."
            )
    return found


def _check_options(kind: str, options: Iterable[str]) -> None:
    """An option that neither `convert` nor its layers have is an error that names the nearest."""
    if kind == "dropconnect++":
        known = [*(field.name for field in fields(PosteriorOptions)), "mask", "activation"]
    else:
        parameters = signature(kinds.DropConnectLinear).parameters.values()
        known = [one.name for one in parameters if one.kind is Parameter.KEYWORD_ONLY]
        known = [name for name in known if name not in ("device", "dtype")]
    own = [name for name in signature(convert).parameters if name not in ("model", "options")]
    for name in options:
        if name not in known:
            near = get_close_matches(name, [*known, *own], 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join([*own, *known])}."
            raise ArgumentError(f"convert has no option {name!r}, and neither have layers of kind {kind!r}. {hint}")


def _require_matches(model: nn.Module, patterns: Iterable[Pattern], plain_types: tuple[type[nn.Module], ...]) -> None:
    """Raise unless each pattern matches a layer that could be converted: a typing error would leave it plain."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, plain_types)]
    missed = [one for one in patterns if not any(_matches(name, module, [one]) for name, module in layers)]
    if missed:
        shown = ", ".join(repr(one) if isinstance(one, str) else one.__name__ for one in missed)
        raise ConversionError(
            f"convert: nothing matches include={shown}. A pattern is a layer's full name, with wildcards, or a type. "
            f"Layers that could be converted: {_names(model, plain_types)}."
        )


def _names(model: nn.Module, plain_types: tuple[type[nn.Module], ...]) -> str:
    names = [name or "(the model itself)" for name, one in model.named_modules() if isinstance(one, plain_types)]
    return ", ".join(names) or "none"


def _matches(name: str, module: nn.Module, patterns: Iterable[Pattern]) -> bool:
    return any(
        fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern) for pattern in patterns
    )


def _obstacle(module: nn.Module, owner: nn.Module | None, table: dict[type[nn.Module], type[Any]]) -> str | None:
    """Why a layer must stay plain; None if it need not."""
    if isinstance(owner, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight instead of calling it, so masks would do nothing"
    if hasattr(module, "_hf_hook") or "forward" in vars(module):
        return "its forward was replaced, by accelerate for example; convert the model first, and dispatch it then"
    weight = module._parameters.get("weight")
    if weight is not None and nn.parameter.is_lazy(weight):
        return "its shape is not known yet; run the model once on a batch first"
    if type(module) not in table:
        return f"it is a {type(module).__name__}, whose own forward would be lost"
    if weight is None:
        return "its weight is computed by a hook, such as weight_norm; remove that first"
    return None


def replacement_of(module: nn.Module, owner: nn.Module | None, kind: str, options: dict[str, Any]) -> MaskedLayer | str:
    """The masked layer that a plain one would become, with a posterior of its own, or why there is none.

    Nothing is changed: `swap` puts new layers in.
    """
    table = CONVERTED[kind]
    if not isinstance(module, tuple(table)):
        return f"it is a {type(module).__name__}"
    obstacle = _obstacle(module, owner, table)
    return _converted(module, table, {}, options) if obstacle is None else obstacle


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _converted(
    module: nn.Module, table: dict[type[nn.Module], type[Any]], shared: dict[int, MaskedLayer], options: dict[str, Any]
) -> MaskedLayer:
    target = table[type(module)]
    weight: nn.Parameter = module._parameters["weight"]  # type: ignore[assignment]
    arguments = construction_arguments(module, target.argument_names)
    # skip_init: the weights are there already, and the user's random numbers stay his own.
    layer: MaskedLayer = nn.utils.skip_init(target, **arguments, **options, device=weight.device, dtype=weight.dtype)
    layer.register_parameter("weight", weight)
    layer.register_parameter("bias", module._parameters["bias"])
    if isinstance(layer, DropConnectPPLayer):
        layer.reset_posterior()
        for name in layer.synapse_names:
            twin = shared.get(id(getattr(layer, name)))
            if twin is None:
                shared[id(getattr(layer, name))] = layer
            else:
                for key in layer.posterior_names_of(name):
                    layer.register_parameter(key, getattr(twin, key))
    for hooks in _HOOKS:
        setattr(layer, hooks, getattr(module, hooks))
    return layer.train(module.training)
