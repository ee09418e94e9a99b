"""`save`: a model's state and the options of its masked layers, small where the model is."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.compaction.structure import describe
from dropconnectpp.errors import ArgumentError
from dropconnectpp.io.container import write
from dropconnectpp.io.disk import replacing, require
from dropconnectpp.io.naming import join, masked_by_name, plain_name, stored_state, unwrapped
from dropconnectpp.io.packing import NAMES, Packed, pack
from dropconnectpp.io.schema import Description, describe_layer, dtype_name, to_metadata
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.likelihoods import remembered

ROUNDED = (torch.float32, torch.float16, torch.bfloat16)
"""What parameters can be rounded to."""


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    keep_pruned: bool = False,
) -> None:
    """Write the model's state, its layers' options and the likelihood it was trained with to one safetensors file.

    `load` needs the architecture again, plain or converted; of a compact model, the one that was made compact.
    The file appears whole or not at all, is on the disk when this returns, and has a digest that `load` checks.
    A tensor with one value nearly everywhere is stored as the others and their places. What comes back is the same
    bit for bit, but for what was pruned: a synapse that is switched off for good has neither weight nor log-odds in
    the file, and comes back with weight 0 and as a new layer would start it, still switched off.

    Args:
        model: Any model, converted or plain. What `torch.compile` or `DataParallel` put around it is left out.
        path: The file.
        dtype: Round the parameters to this when writing, torch.float16 for example; buffers stay as they are.
            `load` gives them back in the model's own dtype, rounded.
        keep_pruned: Also store the weights and log-odds of pruned synapses, for those who will switch some on again.

    Raises:
        ArgumentError: The path cannot be written to, or the model holds what no file can.
        MissingPackageError: safetensors is not installed.

    >>> import tempfile
    >>> plain = torch.nn.Linear(784, 1000)
    >>> pruned = dropconnectpp.prune(dropconnectpp.convert(plain), keep=0.01)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(pruned, f"{folder}/pruned.safetensors")
    ...     again = dropconnectpp.load(f"{folder}/pruned.safetensors", plain)
    ...     os.path.getsize(f"{folder}/pruned.safetensors") < 0.03 * 4 * plain.weight.numel()
    True
    >>> x = torch.randn(8, 784)
    >>> torch.equal(again.eval()(x), pruned.eval()(x))
    True
    """
    if dtype is not None and dtype not in ROUNDED:
        listed = ", ".join(f"torch.{dtype_name(known)}" for known in ROUNDED)
        raise ArgumentError(f"save: dtype must be one of {listed}; got {dtype!r}.")
    require("safetensors", "io")  # not to write: so that what is saved here can be loaded here
    model = unwrapped(model)
    state = _state(model)
    stored, aliases = _without_aliases(state)
    layers = masked_by_name(model)
    kept = {} if keep_pruned else _kept_of(model, layers, aliases)
    stored = {key: value.detach().cpu().contiguous() for key, value in stored.items()}
    for key, (mask, start) in kept.items():
        stored[key] = stored[key].masked_fill(~stored[mask], start)
    if dtype is not None:
        _round(stored, _parameters(model), dtype)
    tensors: dict[str, Tensor] = {}
    packed: dict[str, Packed] = {}
    for key, value in stored.items():
        found = pack(value, (kept[key][0], stored[kept[key][0]]) if key in kept else None)
        if found is None:
            tensors[key] = value
        else:
            packed[key] = found[0]
            tensors.update({key + end: part for end, part in found[1].items()})
    clash = next((key for key in packed for part in packed[key].parts() if key + part in stored), None)
    if clash is not None:
        raise ArgumentError(f"save: parts of {clash!r} would be stored under names that the model has. Rename those.")
    described = {name: describe_layer(layer) for name, layer in layers.items()}
    metadata = to_metadata(Description(described, aliases, packed, describe(model), remembered(model)))
    with replacing(path) as temporary:
        write(temporary, tensors, metadata)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by plain names, if all of it can be stored."""
    state: dict[str, Tensor] = {}
    for key, value in stored_state(model).items():
        why = _unstorable(value)
        if why is not None:
            raise ArgumentError(f"save: {key} {why}")
        state[plain_name(key)] = value
    return state


def _unstorable(value: Any) -> str | None:
    """What keeps a value out of a file, and what to do about it."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, and a file holds tensors. Leave it out of the model's state."
    if hasattr(value, "full_tensor"):
        return "is spread over processes. Gather it first, by its full_tensor()."
    if value.is_meta:
        return "is on the meta device and has no values. Materialise the model first."
    if nn.parameter.is_lazy(value):
        return "has no shape yet. Run the model once on a batch first."
    if value.layout != torch.strided or value.is_quantized or value.dtype not in NAMES:
        kind = "quantized" if value.is_quantized else f"{value.layout} {dtype_name(value.dtype)}"
        return f"is {kind.removeprefix('torch.')}. A file holds dense tensors of {', '.join(sorted(NAMES.values()))}."
    return None


def _without_aliases(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied tensors are stored once; ``aliases`` maps the other names to the stored one."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for key, value in state.items():
        identity = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else key
        if identity in first:
            aliases[key] = first[identity]
        else:
            first[identity] = key
            stored[key] = value
    return stored, aliases


def _parameters(model: nn.Module) -> set[str]:
    return {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}


def _kept_of(model: nn.Module, layers: dict[str, MaskedLayer], aliases: dict[str, str]) -> dict[str, tuple[str, float]]:
    """Stored tensors that matter only where a mask is True: the mask's name, and the value for elsewhere.

    A tensor that somebody else reads too, such as an embedding tied to the output layer, matters everywhere.
    """
    readers = Counter(
        _storage(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )
    claims: dict[int, list[tuple[str, str, Tensor, float]]] = {}
    for prefix, layer in layers.items():
        starts = layer.posterior_start() if isinstance(layer, DropConnectPPLayer) else {}
        ends = {"": 0.0, **{f"_{suffix}": value for suffix, value in starts.items()}}
        for name in layer.synapse_names:
            mask = layer.kept(name)
            for end, start in ends.items():
                tensor = layer._parameters.get(name + end)
                if tensor is not None and mask is not None and tensor.shape == mask.shape:
                    claim = (join(prefix, name + end), join(prefix, f"{name}_kept"), mask, start)
                    claims.setdefault(_storage(tensor), []).append(claim)
    found: dict[str, tuple[str, float]] = {}
    for storage, of_it in claims.items():
        key, name, mask, start = of_it[0]
        if readers[storage] == len(of_it) and all(torch.equal(mask, other) for _, _, other, _ in of_it[1:]):
            found[aliases.get(key, key)] = (aliases.get(name, name), start)
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _round(stored: dict[str, Tensor], parameters: set[str], dtype: torch.dtype) -> None:
    """Round the floating-point parameters, in the mapping."""
    for key in parameters & stored.keys():
        value = stored[key]
        if value.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            rounded = value.to(dtype)
            if bool((rounded.isinf() & value.isfinite()).any()):
                raise ArgumentError(
                    f"save: {key} has values up to {value.abs().max().item():.3g}, beyond {dtype_name(dtype)}'s "
                    f"{torch.finfo(dtype).max:.3g}. Use dtype=torch.bfloat16, or none."
                )
            stored[key] = rounded
