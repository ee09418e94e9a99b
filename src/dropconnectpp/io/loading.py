"""`load`: what `save` wrote, into a model, all of it or nothing."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.compaction.structure import rebuild
from dropconnectpp.conversion import host_replacement_of, replacement_of, swap
from dropconnectpp.conversion.hosting import CONNECTIONS, gates_of
from dropconnectpp.errors import ArgumentError, FileFormatError
from dropconnectpp.io.container import check_digest, read
from dropconnectpp.io.naming import (
    first_few,
    join,
    masked_by_name,
    modules_by_name,
    plain_name,
    shown,
    stored_state,
    unwrapped,
)
from dropconnectpp.io.packing import DTYPES, unpack
from dropconnectpp.io.schema import (
    FORMAT,
    MISSING_IN_OLD_FILES,
    Description,
    SavedLayer,
    check_options,
    construct,
    describe_layer,
    dtype_name,
    from_metadata,
    option_defaults,
)
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.parameter import ParameterGates
from dropconnectpp.likelihoods import remember

OF_THE_MODEL = {"activation", "estimator", "evaluation", "keep_probability", "kl_weight", "logit_step", "mask"}
"""Options that a layer which is converted already may have otherwise than the file says."""


@dataclass(frozen=True)
class Kind:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def load(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Read what `save` wrote into ``model``, in place, and return it.

    Everything is checked before anything is changed: the file's digest, all that it says of the layers, every name,
    shape and dtype. Files of version 0.1.0 have no digest; damage that leaves them well-formed goes unseen.

    Args:
        path: The file.
        model: The architecture: layers that were masked when saved are converted with the saved options where they
            are still plain; masked ones must agree on kind, hyper-prior, hyper, sharing and parameterisation, and keep
            their other options (estimator, mask, kl_weight, logit_step, ...).

    Returns:
        The model that was given; a converted one in its place where it was itself a plain layer.

    Raises:
        FileFormatError: The file is damaged, is not one of ours, or does not fit the model, which is left as it was.
        ArgumentError: Nothing can be written into the model: it is on the meta device, scripted, or of inference mode.
        MissingPackageError: safetensors is not installed.
    """
    path = Path(path)
    _check_target(model)
    tensors, metadata = read(path)
    if metadata.get("dropconnectpp_format") == FORMAT:
        check_digest(path, tensors, metadata)
    described = from_metadata(path, metadata)
    target, trial = unwrapped(model), None
    if described.structure is not None:
        trial = _rebuilt(path, copy.deepcopy(target), described.structure)
    replacements = _replacements(path, described, trial or target)
    kinds = _kinds_in_file(path, described, tensors)
    _check_fit(path, kinds, _kinds_in_model(trial or target, replacements))
    state = _unpacked(path, described, tensors)
    _check_ties(path, state, trial or target)
    if target is not model and (target in replacements or type(trial or target) is not type(target)):
        raise ArgumentError("load: a compiled or parallel layer cannot be converted in place. Give the layer itself.")
    if trial is not None:
        try:
            _fill(trial, state, replacements)
        except RuntimeError as error:
            raise FileFormatError(f"{path}: does not fit the model: {shown(str(error), 300)}") from error
        rebuilt = _rebuilt(path, target, described.structure or {})
        filled = _fill(rebuilt, state, _replacements(path, described, rebuilt))
        filled.compaction = None  # type: ignore[assignment]  # so that `save` knows it as a compact model
    else:
        filled = _fill(target, state, replacements)
    if described.likelihood is not None:
        remember(filled, described.likelihood)
    return model if filled is target else filled


def _check_target(model: nn.Module) -> None:
    """Raise unless values can be written into all of the model: some of it changed and some not would be worse."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError(f"load: the model must be an nn.Module that is not scripted; got a {type(model).__name__}.")
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor):
            continue  # has no shape to compare: refused where the file is
        why = _unwritable(tensor)
        if why is not None:
            raise ArgumentError(f"load: the model's {name} {why}")


def _unwritable(tensor: Tensor) -> str | None:
    """What keeps values from being copied into a tensor, and what to do about it."""
    if tensor.is_meta:
        return "is on the meta device. Give it memory first, for example by model.to_empty(device='cpu')."
    if tensor.is_inference():
        return "was made in inference mode, where nothing can be written. Build the model outside of it."
    if tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return "has elements that share memory. Give it memory of its own, by clone()."
    return None


def _rebuilt(path: Path, model: nn.Module, structure: Mapping[str, Any]) -> nn.Module:
    """The model in the compact structure; `rebuild` checks all before it changes anything."""
    try:
        return rebuild(model, structure)
    except (ArgumentError, TypeError, LookupError, AttributeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: {shown(str(error), 300)}") from error


def _fill(model: nn.Module, state: dict[str, Tensor], replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """What has been checked, into the model."""
    swapped = swap(model, dict(replacements))
    for name, layer in masked_by_name(swapped).items():
        for parameter in layer.synapse_names:
            if join(name, f"{parameter}_kept") not in state:
                layer.keep_only(parameter, None)
    names = {plain_name(key): key for key in swapped.state_dict()}
    missing = {key: key for key in state if key not in names}  # pruning that the model does not have yet
    prefixes = {plain_name(name): name for name, _ in swapped.named_modules()}
    for key in missing:
        owner, _, own = key.rpartition(".")
        names[key] = join(prefixes[owner], own)
    swapped.load_state_dict({names[key]: value for key, value in state.items()})
    return swapped


# -------------------------------------------------------------------------------------------- layers


def _replacements(path: Path, described: Description, model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The modules that will stand where plain ones do now; the model is not touched."""
    modules = modules_by_name(model)
    owners = {child: owner for owner in model.modules() for child in owner.children()}
    found: dict[nn.Module, nn.Module] = {}
    names: dict[str, MaskedLayer] = {}
    hosts: dict[str, dict[str, SavedLayer]] = {}
    for name, layer in described.layers.items():  # all of them before any is looked at: there may be very many
        if name not in modules:
            host, _, parameter = name.rpartition(".")
            host = host.removesuffix(CONNECTIONS).removesuffix(".") if host.endswith(CONNECTIONS) else name
            if host not in modules:
                raise FileFormatError(
                    f"{path}: holds a layer {shown(repr(name))}, and the model has no module of that name."
                )
            hosts.setdefault(host, {})[parameter] = layer
    for name, layer in described.layers.items():
        if name not in modules:
            continue
        module = modules[name]
        if isinstance(module, MaskedLayer):
            check_options(path, name, layer)
            _check_same(path, name, layer, module)
            continue
        options = {**layer.options, "activation": construct(path, name, layer)}
        weight = module._parameters.get("weight")
        if weight is not None and not weight.is_floating_point():
            raise FileFormatError(
                f"{path}: layer {name!r} was saved as {layer.kind}, and the model's weight is "
                f"{dtype_name(weight.dtype)}. Give the model floating-point weights first."
            )
        made = replacement_of(module, owners.get(module), layer.kind, options)
        if isinstance(made, str):
            raise FileFormatError(
                f"{path}: layer {name!r} was saved as {layer.kind}, and the model's cannot be converted: {made}."
            )
        found[module] = names[name] = made
    for host, gates in hosts.items():
        found[modules[host]] = _host(path, host, gates, modules[host])
        names |= {join(host, f"{CONNECTIONS}.{own}"): one for own, one in gates_of(found[modules[host]]).items()}
    _tie_posteriors(names, described.aliases)
    return found


def _host(path: Path, name: str, gates: Mapping[str, SavedLayer], module: nn.Module) -> nn.Module:
    """The module with gates on the parameters that had them when saved."""
    own: dict[str, dict[str, Any]] = {}
    kinds = {layer.kind for layer in gates.values()}
    for parameter, layer in gates.items():
        own[parameter] = {**layer.options, "activation": construct(path, f"{name}.{parameter}", layer)}
    made = host_replacement_of(module, kinds.pop(), own) if len(kinds) == 1 else "its gates are of two kinds"
    if isinstance(made, str):
        raise FileFormatError(
            f"{path}: parameters of {shown(repr(name))} were saved with gates, which the model's cannot have: {made}."
        )
    return made


def _tie_posteriors(made: Mapping[str, MaskedLayer], aliases: Mapping[str, str]) -> None:
    """Layers that shared a posterior when saved share one again, unless the model unties their weights."""
    for name, layer in made.items():
        if not isinstance(layer, DropConnectPPLayer):
            continue
        for parameter in layer.synapse_names:
            own = _parameter_name(name, layer, parameter)
            for key in layer.posterior_names_of(parameter):
                first, _, other = aliases.get(join(name, key), "").rpartition(".")
                twin = made.get(first)
                if twin is None or not isinstance(getattr(twin, other, None), nn.Parameter):
                    continue
                another = other.removesuffix(key.removeprefix(parameter))
                theirs = _parameter_name(first, twin, another)
                tied_here = getattr(twin, another, None) is getattr(layer, parameter)
                tied_there = aliases.get(own, own) == aliases.get(theirs, theirs)
                if tied_here == tied_there and getattr(twin, other).shape == getattr(layer, key).shape:
                    layer.register_parameter(key, getattr(twin, other))


def _parameter_name(name: str, layer: MaskedLayer, parameter: str) -> str:
    """What a masked parameter is called in the model's state."""
    if not isinstance(layer, ParameterGates):
        return join(name, parameter)
    return join(name.rpartition(".")[0].removesuffix(CONNECTIONS).removesuffix("."), layer.parameter_name)


def _check_same(path: Path, name: str, layer: SavedLayer, module: MaskedLayer) -> None:
    own = describe_layer(module)
    faults: dict[str, tuple[Any, Any]] = {"kind": (layer.kind, own.kind)} if layer.kind != own.kind else {}
    usual = option_defaults(own.kind) | MISSING_IN_OLD_FILES
    for key in own.options.keys() - OF_THE_MODEL if not faults else ():
        saved = layer.options.get(key, usual.get(key))
        if saved != own.options[key]:
            faults[key] = (saved, own.options[key])
    for key, (saved, here) in sorted(faults.items()):
        raise FileFormatError(
            f"{path}: layer {name!r} was saved with {key}={saved!r}, and the model's has {here!r}. "
            "Build the model with the saved options, or load into the plain architecture."
        )


# ------------------------------------------------------------------------------------------- tensors


def _kinds_in_file(path: Path, described: Description, tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Every tensor of the saved state; all names that the description uses are there, and no others."""
    parts = {key + end for key, packed in described.packed.items() for end in packed.parts()}
    faults = [f"{shown(name)} is missing" for name in parts - tensors.keys()]
    stored = {key: Kind(tuple(value.shape), value.dtype) for key, value in tensors.items() if key not in parts}
    for key, packed in described.packed.items():
        faults += [f"{shown(key)} is there twice"] if key in stored else []
        stored[key] = Kind(packed.shape, DTYPES[packed.dtype])
    for key, packed in described.packed.items():
        if isinstance(packed.positions, str):
            mask, place = packed.positions, described.packed.get(packed.positions)
            if mask not in stored or (place is not None and isinstance(place.positions, str)):
                faults.append(f"{shown(key)} needs {shown(mask)}")
            elif stored[mask] != Kind(packed.shape, torch.bool):
                faults.append(f"{shown(mask)} does not say where {shown(key)} has values")
    for other, key in described.aliases.items():
        if key not in stored or other in stored:
            faults.append(f"{shown(other)} cannot be {shown(key)}")
    if faults:
        raise FileFormatError(f"{path}: its tensors are damaged: {first_few(faults)}. Save the model again.")
    return stored | {other: stored[key] for other, key in described.aliases.items()}


def _kinds_in_model(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> dict[str, Kind]:
    """The tensors that the model's state will have once its layers are converted."""
    kinds = {plain_name(key): _kind(value) for key, value in stored_state(model).items()}
    for name, module in modules_by_name(model).items():
        made = replacements.get(module)
        if made is not None:
            kinds |= {join(name, key): _kind(value) for key, value in stored_state(made).items()}
        for masked_name, masked in masked_by_name(made if made is not None else module).items():
            for parameter in masked.synapse_names:
                key = join(masked_name, f"{parameter}_kept")
                kinds[join(name, key)] = Kind(tuple(getattr(masked, parameter).shape), torch.bool)
    return kinds


def _kind(value: Any) -> Kind:
    return Kind(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else Kind((), torch.bool)


def _check_fit(path: Path, found: Mapping[str, Kind], expected: Mapping[str, Kind]) -> None:
    optional = {key for key in expected if key.endswith("_kept")}
    faults = [f"{key} is missing" for key in expected.keys() - found.keys() - optional]
    faults += [f"{shown(key)} is not in the model" for key in found.keys() - expected.keys()]
    for key in found.keys() & expected.keys():
        saved, here = found[key], expected[key]
        if saved.shape != here.shape:
            faults.append(f"{key} has shape {saved.shape}, the model's has {here.shape}")
        elif saved.dtype != here.dtype and not (saved.dtype.is_floating_point and here.dtype.is_floating_point):
            faults.append(f"{key} is {dtype_name(saved.dtype)}, the model's is {dtype_name(here.dtype)}")
    if faults:
        raise FileFormatError(f"{path}: does not fit the model: {first_few(faults)}. The model was left as it was.")


def _unpacked(path: Path, described: Description, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The saved state. Shapes fit the model by now, so its memory bounds what packed tensors can ask for."""
    parts = {key + end for key, packed in described.packed.items() for end in packed.parts()}
    state = {key: value for key, value in tensors.items() if key not in parts}
    masks_first = sorted(described.packed, key=lambda key: isinstance(described.packed[key].positions, str))
    for key in masks_first:
        packed = described.packed[key]
        mask = state[packed.positions] if isinstance(packed.positions, str) else None
        try:
            state[key] = unpack(packed, {end: tensors[key + end] for end in packed.parts()}, mask)
        except FileFormatError as error:
            raise FileFormatError(
                f"{path}: the tensor {key} is damaged: {shown(str(error), 200)}. Save the model again."
            ) from error
    return state | {other: state[key] for other, key in described.aliases.items()}


def _check_ties(path: Path, state: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise where the model has one tensor and the file two different ones: the last would win."""
    first: dict[int, str] = {}
    for key, tensor in model.named_parameters(remove_duplicate=False):
        name = plain_name(key)
        other = first.setdefault(id(tensor), name)
        if other in state and name in state and not torch.equal(state[other], state[name]):
            raise FileFormatError(
                f"{path}: {other} and {name} are one tensor in the model and two different ones in the file. "
                "The model was left as it was."
            )
