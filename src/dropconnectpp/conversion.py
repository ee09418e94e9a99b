"""Into DropConnect++ and out again: `convert` a model's layers, `to_dense` for an ordinary model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, ConversionError, check_choice
from dropconnectpp.layers import public as kinds
from dropconnectpp.layers.affine import construction_arguments
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.dropconnect import DropConnectLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.seeds import fresh_draws
from dropconnectpp.layers.sparse import SparseLinear
from dropconnectpp.ops.drawn import Draw
from dropconnectpp.presets import preset_options

ModelT = TypeVar("ModelT", bound=nn.Module)
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
    inplace: bool = False,
    **options: Any,
) -> nn.Module:
    """Turn a model's linear and convolutional layers into DropConnect++ layers, weights kept.

    ``include`` and ``exclude`` are module names with wildcards ("fc*", "features.0") or types
    (nn.Linear); by default every layer that can be converted is. ``options`` go to each layer
    (estimator, hyper, mask, alpha, ...); ``preset`` names a set of them, see `PRESETS`, and what
    ``options`` say goes before it. Parameters stay the same objects, so ties, devices,
    dtypes, requires_grad and optimiser states hold; layers that share a weight share its logits.
    ``kind="dropconnect"`` gives layers with one fixed rate instead.

    A layer whose owner reads its `weight` instead of calling it, such as the output projection of
    nn.MultiheadAttention, would silently ignore its masks: it is left plain with a warning, and
    refused if named. nn.TransformerEncoderLayer's fast path does so too and is switched off.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> convert(model, include=["0"])[0]
    DropConnectPPLinear(in_features=8, out_features=4, bias=True, hyper='marginal', mask='batch', estimator='bbvi')
    """
    table = CONVERTED[check_choice("kind", kind, CONVERTED)]
    if preset is not None:
        if kind != "dropconnect++":
            raise ArgumentError(f"preset={preset!r} needs kind='dropconnect++', got {kind!r}, which learns no rate.")
        options = preset_options(preset) | options
    model = model if inplace else copy.deepcopy(model)
    wanted, unwanted = _patterns(include), _patterns(exclude) or []
    owners = {id(child): (owner, name) for name, owner in model.named_modules() for child in owner.children()}
    replacements: dict[nn.Module, MaskedLayer] = {}
    shared: dict[int, MaskedLayer] = {}
    left: list[str] = []
    plain_types: tuple[type[nn.Module], ...] = tuple(table)
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
        names = [n or "(the model itself)" for n, m in model.named_modules() if isinstance(m, plain_types)]
        warnings.warn(
            f"convert: nothing matched include={include!r}. Layers that could be converted: "
            f"{', '.join(names) or 'none'}.",
            UserWarning,
            stacklevel=2,
        )
    return swap(model, dict(replacements))


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


def _matches(name: str, module: nn.Module, patterns: Iterable[Pattern]) -> bool:
    return any(
        fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern) for pattern in patterns
    )


def _obstacle(module: nn.Module, owner: nn.Module | None, table: dict[type[nn.Module], type[Any]]) -> str | None:
    """Why a layer must stay plain; None if it need not."""
    if isinstance(owner, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weight instead of calling it, so masks would do nothing"
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


def swap(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put each new module wherever its old one stands, and set the transformers' fast paths right."""
    if model in replacements:
        return replacements[model]
    for owner in list(model.modules()):
        for name, child in list(owner._modules.items()):
            if child is not None and child in replacements:
                owner._modules[name] = replacements[child]
    for owner in model.modules():
        _set_fast_path(owner)
    return model


UNREADABLE: tuple[type[nn.Module], ...] = (MaskedLayer, SparseLinear)
"""Layers whose `weight` is not what they multiply with."""
_FAST_PATHS: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}


def _set_fast_path(owner: nn.Module) -> None:
    """Off while a layer is inside whose weights it must not read: W is not pi~ W, and sparse rows are no matrix."""
    for kind, switch in _FAST_PATHS.items():
        if not isinstance(owner, kind):
            continue
        memory = f"_{switch}_before_masking"
        masked = any(isinstance(module, UNREADABLE) for module in owner.modules())
        if masked and not hasattr(owner, memory):
            setattr(owner, memory, getattr(owner, switch))
            setattr(owner, switch, 0)
        elif not masked and hasattr(owner, memory):
            setattr(owner, switch, getattr(owner, memory))
            delattr(owner, memory)


# ------------------------------------------------------------------------------------- and back


@torch.no_grad()
def to_dense(
    model: nn.Module, mode: str = "mean", *, generator: torch.Generator | None = None, inplace: bool = False
) -> nn.Module:
    """An ordinary model of plain `nn` layers, for deployment: as fast as any.

    ``mode`` says what becomes of the gates: "mean" folds pi~ W, Eq. (19); "map" keeps the synapses
    with pi~ >= 1/2 as they are and drops the others; "sample" folds one draw of the masks. Pruned
    synapses become zeros. A layer with an activation becomes nn.Sequential(layer, activation); what `to_sparse`
    made becomes an ordinary layer again.

    >>> to_dense(torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(8, 2)))
    Sequential(
      (0): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    check_choice("mode", mode, ("mean", "map", "sample"))
    model = model if inplace else copy.deepcopy(model)
    draw: Draw | None = None
    streams: dict[Any, int] = {}
    folded: dict[Any, nn.Parameter] = {}
    replacements: dict[nn.Module, nn.Module] = {}
    for name, layer in masked_layers(model).items():
        if mode == "mean" and isinstance(layer, DropConnectLayer) and layer.evaluation == "gaussian":
            raise ConversionError(
                f"to_dense: {name or 'the model'} evaluates by Gaussian moment matching, which no plain layer does. "
                "Set its evaluation to 'mean' first, or keep the layer."
            )
        plain = nn.utils.skip_init(layer.plain_type, **layer.arguments(), device=layer.weight.device)
        for parameter in layer.synapse_names:
            key = (layer.tie(parameter), id(getattr(layer, parameter)))
            if key not in folded:
                if draw is None and mode == "sample":
                    draw = fresh_draws(1, layer.weight.device, generator)[0]
                stream = streams.setdefault(layer.tie(parameter), len(streams))
                folded[key] = nn.Parameter(
                    _fold(layer, parameter, mode, draw, stream), requires_grad=getattr(layer, parameter).requires_grad
                )
            plain.register_parameter(parameter, folded[key])
        plain.train(layer.training)
        activation = as_module(layer.activation)
        replacements[layer] = plain if activation is None else nn.Sequential(plain, activation).train(layer.training)
    replacements |= {layer: layer.dense() for layer in model.modules() if isinstance(layer, SparseLinear)}
    return swap(model, replacements)


def _fold(layer: MaskedLayer, name: str, mode: str, draw: Draw | None, stream: int) -> Tensor:
    value: Tensor = getattr(layer, name).detach()
    # + 0.0 makes zeros of -0.0, which a negative weight that is off would be: one value packs better than two.
    if mode == "mean":
        return (layer.keep_probability(name) * value).to(value.dtype) + 0.0
    if mode == "map":
        return value * (layer.keep_probability(name) >= 0.5) + 0.0
    assert draw is not None
    return value * layer.mask_of(name, draw, stream) + 0.0


_ACTIVATION_MODULES: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    torch.tanh: nn.Tanh,
    F.tanh: nn.Tanh,
    torch.sigmoid: nn.Sigmoid,
    F.sigmoid: nn.Sigmoid,
    F.gelu: nn.GELU,
    F.silu: nn.SiLU,
    F.elu: nn.ELU,
}


def as_module(activation: Any, missing_ok: bool = False) -> nn.Module | None:
    """An activation as an `nn` module: a module itself, or the one that stands for a known function."""
    if activation is None or isinstance(activation, nn.Module):
        return activation
    if activation in _ACTIVATION_MODULES:
        return _ACTIVATION_MODULES[activation]()
    if missing_ok:
        return None
    raise ConversionError(
        f"to_dense: no nn module is known for the activation {activation!r}. "
        "Give the layer a module, such as nn.ReLU()."
    )


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the plain model underneath: weights W as they are, without posterior and pruning.

    It loads with strict=True into the model that was converted.
    """
    ours = {
        f"{name}.{key}" if name else key for name, layer in masked_layers(model).items() for key in _own_keys(layer)
    }
    return {key: value for key, value in model.state_dict().items() if key not in ours}


def _own_keys(layer: MaskedLayer) -> list[str]:
    posterior = layer.posterior_names if isinstance(layer, DropConnectPPLayer) else []
    return [*posterior, "weight_kept", "bias_kept"]
