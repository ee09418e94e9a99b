"""Saving, loading and deploying: safetensors with the layer options inside, and ONNX."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.conversion import as_module, convert, to_dense
from dropconnectpp.errors import ArgumentError, FileFormatError, MissingPackageError
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer

FORMAT = "1"


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's state and the options of its masked layers to one safetensors file.

    The file appears whole or not at all. `load` needs the architecture again, plain or converted.
    """
    safetensors = _require("safetensors.torch", "io")
    state = model.state_dict()
    stored, aliases = _without_aliases(state)
    layers = {name: _describe(layer) for name, layer in masked_layers(model).items()}
    metadata = {
        "dropconnectpp_format": FORMAT,
        "layers": json.dumps(layers, sort_keys=True),
        "aliases": json.dumps(aliases, sort_keys=True),
    }
    with _replacing(path) as temporary:
        safetensors.save_file(stored, str(temporary), metadata=metadata)


def load(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """Read what `save` wrote into ``model``, in place, and return it.

    ``model`` is the architecture: layers that were masked when saved are converted with the saved
    options first where they are still plain; masked ones must agree on kind, hyper-prior, hyper,
    sharing and parameterisation, and keep their other options (estimator, mask, kl_weight, logit_step, ...).
    Everything is checked before anything is changed.
    """
    state, layers = _read(Path(path))
    present = masked_layers(model)
    _check_layers(path, layers, dict(model.named_modules()))
    _check_state(path, state, _expected_shapes(model, layers))
    target = model
    for name, described in layers.items():
        if name not in present:
            options = {**described["options"], "activation": _activation(path, name, described["activation"])}
            target = convert(target, [name], kind=described["kind"], inplace=True, **options)
    for name, layer in masked_layers(target).items():
        for parameter in layer.synapse_names:
            if _join(name, f"{parameter}_kept") not in state:
                layer.keep_only(parameter, None)
    target.load_state_dict(state)
    return target


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | Sequence[Any],
    *,
    mode: str = "mean",
    dynamic_batch: bool = True,
) -> None:
    """Fold the model with `to_dense` and write it as ONNX; the file appears whole or not at all.

    ``example_inputs`` is one tensor or a tuple of the model's inputs. With ``dynamic_batch`` the
    first axis of each input may be of any length.
    """
    _require("onnx", "onnx")
    _require("onnxscript", "onnx")
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    dense = to_dense(model, mode).eval()
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} if isinstance(x, Tensor) and x.ndim else None for x in inputs)
    with warnings.catch_warnings():  # the exporter warns of what it uses inside itself
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.onnx.export(
            dense, inputs, dynamo=True, dynamic_shapes=shapes if dynamic_batch else None, verbose=False
        )
    assert program is not None
    with _replacing(path) as temporary:
        program.save(str(temporary))


# --------------------------------------------------------------------------------------- describing


def _describe(layer: MaskedLayer) -> dict[str, Any]:
    options = layer.options()
    activation = options.pop("activation")
    return {
        "kind": "dropconnect++" if isinstance(layer, DropConnectPPLayer) else "dropconnect",
        "options": options,
        "activation": _activation_name(activation),
    }


def _activation_name(activation: Any) -> str | None:
    """The name of a torch.nn class that gives the activation back by itself, else a repr in brackets."""
    if activation is None:
        return None
    known = as_module(activation, missing_ok=True)
    kind: type[nn.Module] = type(known) if known is not None else nn.Module
    if known is not None and getattr(nn, kind.__name__, None) is kind and repr(known) == repr(kind()):
        return str(kind.__name__)
    return f"<{activation!r}>"


def _activation(path: Any, name: str, described: str | None) -> nn.Module | None:
    if described is None:
        return None
    if described.startswith("<") or not hasattr(nn, described):
        raise FileFormatError(
            f"{path}: layer {name!r} was saved with the activation {described}, which cannot be rebuilt from its "
            "name. Convert the model with that activation first, then load."
        )
    module: nn.Module = getattr(nn, described)()
    return module


def _without_aliases(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied tensors are stored once; ``aliases`` maps the other names to the stored one."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, value in state.items():
        identity = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else key
        if identity in first:
            aliases[key] = first[identity]
        else:
            first[identity] = key
            stored[key] = value.detach().contiguous().clone()  # a view of a larger tensor must not drag it along
    return stored, aliases


# ----------------------------------------------------------------------------------------- checking


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    safetensors = _require("safetensors", "io")
    if not path.is_file():
        raise FileFormatError(f"{path}: there is no such file.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise FileFormatError(f"{path}: damaged, or not a safetensors file ({error}). Save the model again.") from error
    if metadata.get("dropconnectpp_format") != FORMAT:
        raise FileFormatError(
            f"{path}: not written by dropconnectpp.save (format {metadata.get('dropconnectpp_format')!r}, this "
            f"version reads {FORMAT!r}). Load plain weights with model.load_state_dict."
        )
    try:
        layers, aliases = json.loads(metadata["layers"]), json.loads(metadata["aliases"])
        state.update({key: state[stored] for key, stored in aliases.items()})
    except (KeyError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path}: its description of the layers is damaged ({error}).") from error
    return state, layers


_MISSING_IN_OLD_FILES = {"sharing": "synapse"}
"""What files of version 0.1.0 do not say, since there was no choice."""


def _check_layers(path: Any, layers: dict[str, Any], modules: dict[str, nn.Module]) -> None:
    for name, described in layers.items():
        module = modules.get(name)
        if module is None:
            raise FileFormatError(f"{path}: holds a layer {name!r}, and the model has no module of that name.")
        if not isinstance(module, MaskedLayer):
            _activation(path, name, described["activation"])
            continue
        own = _describe(module)
        for key in ("kind", "alpha", "beta", "hyper", "sharing", "parameterisation"):
            usual = _MISSING_IN_OLD_FILES.get(key)
            saved = described.get(key, described["options"].get(key, usual))
            here = own.get(key, own["options"].get(key, usual))
            if saved != here:
                raise FileFormatError(
                    f"{path}: layer {name!r} was saved with {key}={saved!r}, and the model's has {here!r}. "
                    "Build the model with the saved options, or load into the plain architecture."
                )


def _expected_shapes(model: nn.Module, layers: dict[str, Any]) -> dict[str, torch.Size]:
    """The keys and shapes that the model's state will have once its layers are converted."""
    shapes = {key: value.shape for key, value in model.state_dict().items() if not key.endswith("_kept")}
    for name, described in layers.items():
        options = described["options"]
        suffixes = [options["parameterisation"]] if described["kind"] == "dropconnect++" else []
        suffixes += ["alpha", "beta"] if options.get("hyper") == "learned" else []
        for parameter in ("weight", "bias"):
            shape = shapes.get(_join(name, parameter))
            if shape is not None:
                shapes.update({_join(name, f"{parameter}_{suffix}"): shape for suffix in suffixes})
    return shapes


def _check_state(path: Any, state: dict[str, Tensor], expected: dict[str, torch.Size]) -> None:
    optional = {key for key in state if key.endswith("_kept") and key.removesuffix("_kept") in expected}
    faults = [f"{key} is missing" for key in expected.keys() - state.keys()]
    faults += [f"{key} is not in the model" for key in state.keys() - expected.keys() - optional]
    faults += [
        f"{key} has shape {tuple(state[key].shape)}, the model's has {tuple(shape)}"
        for key, shape in expected.items()
        if key in state and state[key].shape != shape
    ]
    if faults:
        shown = "; ".join(sorted(faults)[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise FileFormatError(f"{path}: does not fit the model: {shown}. The model was left as it was.")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


# ---------------------------------------------------------------------------------------- the disk


@contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place when the block ends well."""
    target = Path(path)
    if not target.parent.is_dir():
        raise ArgumentError(f"{target}: the folder {target.parent} does not exist. Make it first.")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _require(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{module.partition('.')[0]} is needed for this: pip install 'dropconnectpp[{extra}]'."
        ) from error
