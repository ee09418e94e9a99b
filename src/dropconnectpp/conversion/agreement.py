"""Whether a converted model's passes use its gates: one pass is compared with the model that has them folded in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp import _compat
from dropconnectpp.conversion.dense import without_gates
from dropconnectpp.conversion.hosting import module_name
from dropconnectpp.conversion.swapping import copied, swap
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.grouped import GroupedLayer
from dropconnectpp.layers.passes import ForcedGates, Gates, Watched, running
from dropconnectpp.layers.seeds import fresh_draws
from dropconnectpp.ops.drawn import Synapses

Masks = dict[str, dict[str, Tensor]]
"""By layer and parameter."""


@dataclass(frozen=True)
class Disagreement:
    """Layers whose gates a pass does not use, and what to say of them."""

    names: list[str]
    text: str


@torch.no_grad()
def disagreement(model: nn.Module, example: Any) -> Disagreement | None:
    """What a pass shows of layers whose gates it does not use; None if it is `to_dense`'s.

    Every gate is on or off by the toss of a coin, whatever its posterior: one factor for all synapses would go unseen
    where a normalisation follows.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        layers, masks = masked_layers(model), _tossed(model)
        output, asked = _pass(model, masks, example)
        unasked = _of_modules(name for name, layer in layers.items() if layer not in asked)
        if unasked:
            text = (
                f"a pass on example_input did not ask for the gates of {_listed(unasked)}. Either it does without the "
                f"layer, or the layer's owner reads its weight instead of calling it. {_advice(unasked)}"
            )
            return Disagreement(unasked, text)
        if _agree(output, _folded_pass(model, masks, example, list(masks))):
            return None
        read = [name for name in masks if not _agree(output, _folded_pass(model, masks, example, [name]))]
        read = _of_modules(read or masks)
        text = (
            f"the output on example_input is not that of to_dense: the weights of {_listed(read)} are "
            f"also read as they are, without their gates. {_advice(read)}"
        )
        return Disagreement(read, text)
    finally:
        for module, training in modes.items():
            module.training = training


def _of_modules(names: Iterable[str]) -> list[str]:
    """The names of modules instead of those of the gates that are in them."""
    return list(dict.fromkeys(module_name(name) for name in names))


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) if name else "the model itself" for name in names)


def _advice(names: list[str]) -> str:
    return f"Leave it plain by exclude={names!r}."


def _tossed(model: nn.Module) -> Masks:
    """Masks at a keep probability of one half, one for what shares its gates."""
    layers = masked_layers(model)
    if not layers:
        return {}
    generator = torch.Generator().manual_seed(0)
    draw = fresh_draws(1, next(iter(layers.values())).weight.device, generator)[0]
    streams: dict[Any, int] = {}
    found: Masks = {}
    for prefix, layer in layers.items():
        found[prefix] = {}
        for name in layer.synapse_names:
            stream = streams.setdefault(layer.tie(name), len(streams))
            even = torch.zeros((), device=layer.weight.device)
            assert isinstance(layer, GroupedLayer)
            shape = layer.gate_shape(layer.gate_of(name))
            mask = layer.spread(name, draw.mask(shape, Synapses(even.expand(shape).contiguous(), None, stream)))
            kept = layer.kept(name)
            found[prefix][name] = mask if kept is None else mask & kept
    return found


def _pass(model: nn.Module, masks: Masks, example: Any) -> tuple[Any, set[nn.Module]]:
    layers = masked_layers(model)
    forced: dict[nn.Module, Gates] = {
        layers[name]: ForcedGates(given["weight"], given.get("bias")) for name, given in masks.items() if name in layers
    }
    watched = Watched(forced)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with running(watched), torch.random.fork_rng(devices):  # what else the model draws is the same in each pass
        torch.manual_seed(0)
        return _call(model, example), watched.asked


def _call(model: nn.Module, example: Any) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def _folded_pass(model: nn.Module, masks: Masks, example: Any, names: list[str]) -> Any:
    """The pass of a copy in which the masks of some layers are in their weights."""
    copy = copied(model)
    layers = masked_layers(copy)
    tied: dict[Any, nn.Parameter] = {}
    values = {layers[n]: {k: _folded(layers[n], k, mask, tied) for k, mask in masks[n].items()} for n in names}
    return _pass(swap(copy, without_gates(values)), masks, example)[0]


def _folded(layer: MaskedLayer, name: str, mask: Tensor, tied: dict[Any, nn.Parameter]) -> nn.Parameter:
    parameter = getattr(layer, name)
    key = (layer.tie(name), id(parameter))
    if key not in tied:
        tied[key] = nn.Parameter(parameter.detach() * mask, requires_grad=False)
    return tied[key]


def _agree(first: Any, second: Any) -> bool:
    ours, theirs = list(_tensors(first)), list(_tensors(second))
    return len(ours) == len(theirs) and all(_close(a, b) for a, b in zip(ours, theirs, strict=True))


def _close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return bool(torch.equal(first, second))
    margin = torch.finfo(first.dtype).eps ** 0.5
    scale = float(second[second.isfinite()].abs().amax()) if bool(second.isfinite().any()) else 0.0
    return bool(torch.isclose(first, second, rtol=margin, atol=margin * scale, equal_nan=True).all())


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output: nested as torch knows it, in mappings, or as an object's attributes."""
    for leaf in _compat.tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(list(leaf.values()))
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))
