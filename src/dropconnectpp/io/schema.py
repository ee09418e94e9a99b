"""What a file says of a model: read as strangers' text, and checked before anything is made of it."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dropconnectpp.conversion import CONVERTED, as_module
from dropconnectpp.errors import ArgumentError, FileFormatError
from dropconnectpp.estimators import ESTIMATORS
from dropconnectpp.io.naming import shown
from dropconnectpp.io.packing import Packed, packed_from
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer, PosteriorOptions
from dropconnectpp.likelihoods import LogLikelihood, describe, from_description

FORMAT = "2"
FIRST_FORMAT = "1"
"""What version 0.1.0 wrote: nothing packed, no digest."""
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        nn.CELU,
        nn.ELU,
        nn.GELU,
        nn.Hardshrink,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.Identity,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.Mish,
        nn.ReLU,
        nn.ReLU6,
        nn.RReLU,
        nn.SELU,
        nn.SiLU,
        nn.Sigmoid,
        nn.Softplus,
        nn.Softshrink,
        nn.Softsign,
        nn.Tanh,
        nn.Tanhshrink,
    )
}
"""The activations that a file may name: without parameters, and made without arguments."""
MISSING_IN_OLD_FILES = {"sharing": "synapse"}
"""What files of version 0.1.0 do not say, since there was no choice."""


@dataclass(frozen=True)
class SavedLayer:
    """A masked layer: its kind, its options, and its activation by name."""

    kind: str
    options: dict[str, Any]
    activation: str | None

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return dict(vars(self))


@dataclass(frozen=True)
class Description:
    """All that a file says beside its tensors."""

    layers: dict[str, SavedLayer]
    aliases: dict[str, str]
    """Other names of stored tensors."""
    packed: dict[str, Packed] = field(default_factory=dict)
    structure: dict[str, Any] | None = None
    """How `compact` changed the architecture."""
    likelihood: LogLikelihood | None = None
    """What the model was trained with, where `describe` can say it."""


def describe_layer(layer: MaskedLayer) -> SavedLayer:
    """What a file will say of a layer."""
    options = dict(layer.options())
    activation = _activation_name(options.pop("activation"))
    return SavedLayer("dropconnect++" if isinstance(layer, DropConnectPPLayer) else "dropconnect", options, activation)


def to_metadata(description: Description) -> dict[str, str]:
    """A description as safetensors holds it: text."""
    said: dict[str, Any] = {
        "layers": {name: layer.plain() for name, layer in description.layers.items()},
        "aliases": description.aliases,
        "packed": {name: packed.plain() for name, packed in description.packed.items()},
    }
    if description.structure is not None:
        said["structure"] = description.structure
    likelihood = describe(description.likelihood)
    if likelihood is not None:
        said["likelihood"] = likelihood
    return {
        "dropconnectpp_format": FORMAT,
        "description": json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False),
    }


def from_metadata(path: Path, metadata: Mapping[str, str]) -> Description:
    """What `to_metadata` was given, checked; also of a file of the first format."""
    written = metadata.get("dropconnectpp_format")
    if written not in (FORMAT, FIRST_FORMAT):
        raise FileFormatError(
            f"{path}: not written by dropconnectpp.save (format {shown(repr(written))}, this "
            f"version reads {FORMAT!r}). Load plain weights with model.load_state_dict."
        )
    if written == FORMAT:
        said = _parse(path, metadata.get("description"))
    else:
        said = {key: _parse(path, metadata.get(key)) for key in ("layers", "aliases")}
    known = {"layers", "aliases", "packed", "structure", "likelihood"}
    if not {"layers", "aliases"} <= said.keys() <= known:
        raise _damaged(path, f"it has the entries {shown(sorted(said))}")
    for key, value in said.items():
        if not isinstance(value, dict):
            raise _damaged(path, f"{key} is {shown(repr(value))}")
    return Description(
        {name: _layer(path, name, value) for name, value in said["layers"].items()},
        _aliases(path, said["aliases"]),
        {name: _packed(path, name, value) for name, value in said.get("packed", {}).items()},
        said.get("structure"),
        _likelihood(path, said["likelihood"]) if "likelihood" in said else None,
    )


def check_options(path: Path, name: str, layer: SavedLayer) -> None:
    """Raise unless the layer's constructor takes the options that the file says, whatever its activation."""
    # Whether there is an activation decides what options go with it.
    _try_options(path, name, layer, nn.Identity() if layer.activation is not None else None)


def construct(path: Path, name: str, layer: SavedLayer) -> nn.Module | None:
    """Raise unless the layer's constructor takes what the file says of it; return the activation."""
    activation = None
    if layer.activation is not None:
        if layer.activation not in ACTIVATIONS:
            raise FileFormatError(
                f"{path}: layer {name!r} was saved with the activation {shown(layer.activation)}, which cannot be "
                "rebuilt from its name. Convert the model with that activation first, then load."
            )
        activation = ACTIVATIONS[layer.activation]()
    _try_options(path, name, layer, activation)
    return activation


# ------------------------------------------------------------------------------------------ layers


def _layer(path: Path, name: str, said: Any) -> SavedLayer:
    where = f"{path}: layer {shown(repr(name))}"
    if not isinstance(said, dict) or said.keys() != {"kind", "options", "activation"}:
        raise FileFormatError(f"{where} is described by {shown(repr(said))}, not by kind, options and activation.")
    kind, options, activation = said["kind"], said["options"], said["activation"]
    if not isinstance(kind, str) or kind not in CONVERTED:
        raise FileFormatError(f"{where} has the kind {shown(repr(kind))}; known are {', '.join(CONVERTED)}.")
    if not isinstance(activation, str | None):
        raise FileFormatError(f"{where} has the activation {shown(repr(activation))}, which is no name.")
    if not isinstance(options, dict):
        raise FileFormatError(f"{where} has the options {shown(repr(options))}.")
    usual = option_defaults(kind)
    for key, value in options.items():
        if key not in usual:
            raise FileFormatError(f"{where} has an option {shown(repr(key))}; known are {', '.join(usual)}.")
        if not (_is_estimator(value) if key == "estimator" else _is_like(usual[key], value)):
            raise FileFormatError(f"{where} has {key}={shown(repr(value))}; it may be {usual[key]!r}, for example.")
    return SavedLayer(kind, options, activation)


def option_defaults(kind: str) -> dict[str, Any]:
    """The options that a kind of layer takes, the activation aside, and their defaults."""
    signature = inspect.signature(CONVERTED[kind][nn.Linear].__init__)
    found = {p.name: p.default for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if kind == "dropconnect++":
        found |= {option.name: option.default for option in fields(PosteriorOptions)}
    return {name: default for name, default in found.items() if name not in ("activation", "device", "dtype")}


def _try_options(path: Path, name: str, layer: SavedLayer, activation: nn.Module | None) -> None:
    """Give the options to the smallest layer there is, without memory and without a random number."""
    try:
        CONVERTED[layer.kind][nn.Linear](1, 1, activation=activation, **layer.options, device="meta")
    except (ArgumentError, TypeError, ValueError, OverflowError) as error:
        why = shown(str(error), 300)
        raise FileFormatError(f"{path}: layer {shown(repr(name))} has options that do not work: {why}") from error


def _is_like(usual: Any, value: Any) -> bool:
    """Whether a value is of an option's type: a finite number, a truth value, a string."""
    if type(usual) in (float, int):
        return type(value) in (float, int) and abs(value) < 2**63 and math.isfinite(value)
    return usual is None or type(value) is type(usual)


def _is_estimator(value: Any) -> bool:
    if isinstance(value, str):
        return value in ESTIMATORS
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in ESTIMATORS:
        return False
    usual = {option.name: option.default for option in fields(ESTIMATORS[value["name"]])}
    return all(key in usual and _is_like(usual[key], given) for key, given in value.items() if key != "name")


def _activation_name(activation: Any) -> str | None:
    """The name that gives the activation back by itself, else a repr in brackets."""
    if activation is None:
        return None
    known = as_module(activation, missing_ok=True)
    kind = type(known)
    if known is not None and ACTIVATIONS.get(kind.__name__) is kind and repr(known) == repr(kind()):
        return kind.__name__
    return f"<{activation!r}>"


# ------------------------------------------------------------------------------------------ the rest


def _aliases(path: Path, said: dict[str, Any]) -> dict[str, str]:
    for other, name in said.items():
        if not isinstance(name, str) or other == name:
            raise _damaged(path, f"{shown(other)} is said to be {shown(repr(name))}")
    return said


def _packed(path: Path, name: str, said: Any) -> Packed:
    try:
        return packed_from(said)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: the tensor {shown(name)} is damaged: {shown(str(error), 200)}.") from error


def _likelihood(path: Path, said: dict[str, Any]) -> LogLikelihood:
    try:
        return from_description(said)
    except (ArgumentError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _damaged(path, f"the likelihood: {shown(str(error), 200)}") from error


def _parse(path: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        raise _damaged(path, "it is missing")
    try:
        said = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twins)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, shown(str(error), 120)) from error
    if not isinstance(said, dict):
        raise _damaged(path, f"it is {shown(repr(said))}")
    return said


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _damaged(path: Path, why: str) -> FileFormatError:
    return FileFormatError(f"{path}: its description of the layers is damaged ({why}). Save the model again.")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as messages name it.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")
