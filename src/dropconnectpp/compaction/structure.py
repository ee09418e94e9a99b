"""The structure of a compact or sparse model as plain data, and a plain model turned into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dropconnectpp.compaction.attention import SelectedAttention
from dropconnectpp.compaction.selected import SELECTED
from dropconnectpp.errors import ArgumentError
from dropconnectpp.layers.affine import ConvOperation, Operation
from dropconnectpp.layers.sparse import SparseLinear

_CONVOLUTION = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "groups",
    "padding_mode",
)
_NORM = ("num_features", "eps", "momentum", "affine", "track_running_stats")


@dataclass(frozen=True)
class Kind:
    """A type of module that a description may name, and what it is constructed with."""

    module: type[nn.Module]
    arguments: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    """Arguments that compaction makes smaller, never larger."""
    base: type[nn.Module] | None = None
    """The plain type whose place it takes."""
    biased: bool = False


def _kinds() -> dict[str, Kind]:
    found = [Kind(nn.Linear, ("in_features", "out_features"), ("in_features", "out_features"), nn.Linear, True)]
    for plain in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        found.append(Kind(plain, _CONVOLUTION, ("in_channels", "out_channels", "groups"), plain, True))
    found += [
        Kind(SELECTED[kind.module], (*kind.arguments, "total"), (*kind.sizes, "total"), kind.module, True)
        for kind in list(found)
    ]
    sparse = ("in_features", "out_features", "count")
    found.append(Kind(SparseLinear, sparse, sparse, nn.Linear, True))
    attention = ("dropout", "batch_first")
    found.append(
        Kind(
            SelectedAttention,
            ("embed_dim", "head_dim", "num_heads", "total", "with_bias", *attention),
            ("num_heads", "total"),
            nn.MultiheadAttention,
        )
    )
    found.append(Kind(nn.MultiheadAttention, ("embed_dim", "num_heads", *attention), base=nn.MultiheadAttention))
    for norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        found.append(Kind(norm, _NORM, ("num_features",), norm))
    found.append(Kind(nn.PReLU, ("num_parameters",), ("num_parameters",), nn.PReLU))
    activations: dict[type[nn.Module], tuple[str, ...]] = {
        nn.ReLU: (),
        nn.ReLU6: (),
        nn.LeakyReLU: ("negative_slope",),
        nn.ELU: ("alpha",),
        nn.CELU: ("alpha",),
        nn.SELU: (),
        nn.GELU: ("approximate",),
        nn.SiLU: (),
        nn.Mish: (),
        nn.Tanh: (),
        nn.Sigmoid: (),
        nn.LogSigmoid: (),
        nn.Softplus: ("beta", "threshold"),
        nn.Softsign: (),
        nn.Tanhshrink: (),
        nn.Hardtanh: ("min_val", "max_val"),
        nn.Hardsigmoid: (),
        nn.Hardswish: (),
        nn.Identity: (),
    }
    found += [Kind(activation, arguments, base=activation) for activation, arguments in activations.items()]
    return {kind.module.__name__: kind for kind in found}


KINDS = _kinds()
"""All that a description may name, apart from `Sequential`, for a layer and the activation that was inside it."""
_BY_TYPE = {kind.module: kind for kind in KINDS.values()}


# ------------------------------------------------------------------------------------------- describing


def describe(model: nn.Module) -> dict[str, Any] | None:
    """What `compact` and `to_sparse` made of a model's layers, as JSON takes it; None where they did nothing."""
    if not any(changed(module) for module in model.modules()):
        return None
    modules: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = _BY_TYPE.get(type(module))
        if kind is None and type(module) is not nn.Sequential:
            continue
        if id(module) in first:
            modules[name] = {"type": "same", "arguments": {"as": first[id(module)]}}
            continue
        first[id(module)] = name
        if kind is not None:
            modules[name] = {"type": kind.module.__name__, "arguments": arguments_of(module, kind)}
        else:
            modules[name] = {"type": "Sequential", "arguments": {"names": list(module._modules)}}
    return {"modules": modules}


def changed(module: nn.Module) -> bool:
    """Whether a module is the result of `compact`, or a layer that only such models have."""
    kind = _BY_TYPE.get(type(module))
    return "compaction" in vars(module) or (kind is not None and kind.module is not kind.base)


def arguments_of(module: nn.Module, kind: Kind) -> dict[str, Any]:
    """What a module was constructed with, as JSON gives it back."""
    found = {name: getattr(module, name) for name in kind.arguments}
    if kind.biased:
        found["bias"] = module._parameters.get("bias") is not None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


# ------------------------------------------------------------------------------------------- rebuilding


def rebuild(model: nn.Module, description: Mapping[str, Any]) -> nn.Module:
    """Turn a plain or converted model, in place, into the structure that `describe` described.

    Weights that do not keep their module are arbitrary: load a state afterwards. Everything is checked
    before anything is changed.
    """
    described = _entries(description)
    present = dict(model.named_modules(remove_duplicate=False))
    built: dict[str, nn.Module] = {}
    for name in sorted(described, key=_depth):
        entry = described[name]
        here = built.get(name, present.get(name))
        if entry["type"] == "same":
            source = entry["arguments"]["as"]
            built[name] = built[source]
        elif entry["type"] == "Sequential":
            built[name] = _sequence(name, entry["arguments"]["names"], here, described, present)
        else:
            built[name] = _module(name, entry, here, present, built)
    return _put(model, built)


def _entries(description: Mapping[str, Any]) -> dict[str, Any]:
    modules = description.get("modules") if isinstance(description, Mapping) else None
    if not isinstance(modules, Mapping):
        raise _damaged("it has no 'modules'")
    for name, entry in modules.items():
        well_formed = isinstance(entry, Mapping) and isinstance(entry.get("arguments"), Mapping)
        if not (isinstance(name, str) and well_formed and entry.get("type") in {*KINDS, "Sequential", "same"}):
            raise _damaged(f"{name!r} is {entry!r}")
        arguments = entry["arguments"]
        if entry["type"] == "same":
            source = modules.get(arguments.get("as"))
            if not isinstance(source, Mapping) or source.get("type") == "same" or set(arguments) != {"as"}:
                raise _damaged(f"{name!r} is the same as {arguments.get('as')!r}, which is not there")
        elif entry["type"] == "Sequential":
            names = arguments.get("names")
            if not isinstance(names, list) or not all(isinstance(n, str) and n and "." not in n for n in names):
                raise _damaged(f"{name!r} is a Sequential of {names!r}")
        else:
            kind = KINDS[entry["type"]]
            expected = {*kind.arguments, *(("bias",) if kind.biased else ())}
            if set(arguments) != expected:
                raise _damaged(f"{name!r} has the arguments {sorted(arguments)}, not {sorted(expected)}")
    return dict(modules)


def _damaged(reason: str) -> ArgumentError:
    return ArgumentError(f"rebuild: the description of the structure is damaged: {reason}. Save the model again.")


def _depth(name: str) -> tuple[bool, int]:
    return bool(name), name.count(".")


def _sequence(
    name: str, names: list[str], here: nn.Module | None, described: Mapping[str, Any], present: dict[str, nn.Module]
) -> nn.Module:
    """The Sequential that is there, or one in the place of a layer whose activation was inside it."""
    if type(here) is nn.Sequential and list(here._modules) == names:
        return here
    if here is None or _plain_type(here) is None or len(names) != 2:
        found = "no module" if here is None else f"a {type(here).__name__}"
        raise ArgumentError(f"rebuild: {name or 'the model'} was a Sequential of {names}, and the model has {found}.")
    first, second = (f"{name}.{child}" if name else child for child in names)
    if first not in described or second not in described:
        raise _damaged(f"{name!r} is a Sequential whose modules are missing")
    present[first] = here  # the layer moves inwards
    return nn.Sequential().train(here.training)


def _module(
    name: str,
    entry: Mapping[str, Any],
    here: nn.Module | None,
    present: Mapping[str, nn.Module],
    built: Mapping[str, nn.Module],
) -> nn.Module:
    kind, arguments = KINDS[entry["type"]], dict(entry["arguments"])
    parent = name.rpartition(".")[0]
    if here is None and built.get(parent) is not present.get(parent) and not kind.sizes:
        return _construct(name, kind, arguments, None)  # an activation that was inside its layer
    own = _plain_type(here)
    if here is None or own is not kind.base:
        found = "no module" if here is None else f"a {type(here).__name__}"
        raise ArgumentError(f"rebuild: {name or 'the model'} was a {entry['type']}, and the model has {found} there.")
    if type(here) is kind.module and arguments_of(here, kind) == arguments:
        return here
    _check_sizes(name, kind, arguments, here)
    return _construct(name, kind, arguments, here)


def _plain_type(module: nn.Module | None) -> type[nn.Module] | None:
    """The plain type of a layer, masked or not."""
    if isinstance(module, Operation):
        return module.plain_type
    kind = _BY_TYPE.get(type(module)) if module is not None else None
    return None if kind is None else kind.base


def _check_sizes(name: str, kind: Kind, arguments: Mapping[str, Any], here: Any) -> None:
    """Sizes are whole numbers up to the plain layer's; the rest of a convolution's geometry is the same."""
    for size in kind.sizes:
        value = arguments[size]
        if size == "count":
            most = here.in_features * here.out_features
        else:
            most = getattr(here, _inputs(here) if size == "total" else size)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise ArgumentError(
                f"rebuild: {name or 'the model'} was saved with {size}={value!r}, the model has {most}."
            )
    if isinstance(here, ConvOperation | nn.modules.conv._ConvNd):
        for geometry in ("kernel_size", "stride", "padding", "dilation", "padding_mode"):
            value, own = arguments[geometry], getattr(here, geometry)
            if value != (list(own) if isinstance(own, tuple) else own):
                raise ArgumentError(
                    f"rebuild: {name or 'the model'} was saved with {geometry}={value!r}, the model's has {own!r}. "
                    "Build the architecture that was made compact."
                )


def _inputs(here: Any) -> str:
    """What a layer selects from."""
    if isinstance(here, nn.MultiheadAttention):
        return "num_heads"
    return "in_features" if hasattr(here, "in_features") else "in_channels"


def _construct(name: str, kind: Kind, arguments: dict[str, Any], here: nn.Module | None) -> nn.Module:
    """The module, on the device and with the dtype of the one whose place it takes."""
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    sample = None if here is None else next(here.parameters(), None)
    factory = {} if sample is None else {"device": sample.device, "dtype": sample.dtype}
    try:
        with torch.random.fork_rng(devices=[]):  # the user's random numbers stay his own
            module = kind.module(**arguments, **factory)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _damaged(f"{name!r} cannot be a {kind.module.__name__} of {arguments} ({error})") from error
    return module.train(here is not None and here.training)


def replace_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put each new module wherever its old one stands."""
    if model in replacements:
        return replacements[model]
    for owner in list(model.modules()):
        for name, child in list(owner._modules.items()):
            if child is not None and child in replacements:
                owner._modules[name] = replacements[child]
    return model


def _put(model: nn.Module, built: Mapping[str, nn.Module]) -> nn.Module:
    root = built.get("", model)
    for name in sorted(built, key=_depth):
        if name:
            parent, _, child = name.rpartition(".")
            owner = root if not parent else built.get(parent) or root.get_submodule(parent)
            owner._modules[child] = built[name]
    return root
