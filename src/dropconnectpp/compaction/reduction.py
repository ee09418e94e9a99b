"""`compact`: a pruned model as an ordinary one with fewer units."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from dropconnectpp.compaction.chains import LAYERS, NORMS, Chain, is_chain, read_chain
from dropconnectpp.compaction.cutting import cut, select_inputs
from dropconnectpp.compaction.folding import reading, settle, writing
from dropconnectpp.compaction.structure import replace_modules
from dropconnectpp.compaction.summary import CompactedLayer, Compaction, count_bytes, count_parameters
from dropconnectpp.conversion import to_dense
from dropconnectpp.errors import ArgumentError
from dropconnectpp.layers.base import masked_layers


def compact(model: nn.Module, example_input: Any = None, *, inplace: bool = False) -> nn.Module:
    """An ordinary model with the same outputs in eval mode and fewer units: smaller and faster.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    >>> pruned = dropconnectpp.prune(model.eval(), keep=0.01)
    >>> small = dropconnectpp.compact(pruned)
    >>> x = torch.randn(8, 64)
    >>> torch.allclose(small(x), pruned(x), atol=1e-6)
    True
    >>> small.compaction.parameters[1] < small.compaction.parameters[0] / 2
    True
    """
    _check_model(model)
    masked = bool(masked_layers(model))
    dense = to_dense(model)
    _check_something_is_off(dense, masked)
    wiring = _read(dense)
    before = {name: _facts(module) for name, module in _layers(dense).items()}
    totals = count_parameters(dense), count_bytes(dense)
    folded = settle(dense, wiring)
    cut(dense, wiring)
    selected = select_inputs(dense, list(wiring.reads))
    small = replace_modules(dense, {dense.get_submodule(name): module for name, module in selected.items()})
    rows = [
        _row(name, facts, _facts(small.get_submodule(name)), wiring.outputs.get(name), folded.get(name, 0))
        for name, facts in before.items()
    ]
    record = Compaction(
        tuple(rows), (totals[0], count_parameters(small)), (totals[1], count_bytes(small)), dict(wiring.left)
    )
    small.compaction = record  # type: ignore[assignment]
    return _give_back(model, small) if inplace else small


def _read(dense: nn.Module) -> Chain:
    if not is_chain(dense) and not isinstance(dense, LAYERS):
        raise ArgumentError(
            f"compact: {type(dense).__name__} calls its layers in its own way, and compact follows nn.Sequential alone."
        )
    return read_chain(dense)


def _give_back(model: nn.Module, small: nn.Module) -> nn.Module:
    """The compact model in the object that was given, where it is of that type."""
    if type(model) is not type(small):
        return small
    model.__dict__.clear()
    model.__dict__.update(copy.copy(small.__dict__))
    return model


# --------------------------------------------------------------------------------------------- checks


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        shown = name or "the model"
        if module._forward_hooks or module._forward_pre_hooks:
            raise ArgumentError(
                f"compact: {shown} has a forward hook, which may read or change what a smaller layer gives. "
                "Remove it first, and put it on the compact model if it fits there."
            )
        if nn.utils.parametrize.is_parametrized(module):
            raise ArgumentError(
                f"compact: a parameter of {shown} is parametrised, so that its values are computed. "
                "Use torch.nn.utils.parametrize.remove_parametrizations first."
            )
        if isinstance(module, nn.modules.batchnorm._NormBase) and (module.training or module.running_mean is None):
            raise ArgumentError(
                f"compact: {shown} is a {type(module).__name__} that uses the statistics of the batch, so that "
                "no unit's output is known. "
                + ("Call model.eval() first." if module.training else "Give it running statistics.")
            )


def _check_something_is_off(dense: nn.Module, masked: bool) -> None:
    layers = _layers(dense)
    if not layers:
        raise ArgumentError("compact: the model has no linear or convolutional layer. There is nothing to remove.")
    if masked:
        return
    if all(bool(writing(layer).all()) and bool(reading(layer).all()) for layer in layers.values()):
        raise ArgumentError(
            "compact: no unit and no input of any layer is off: the model was not pruned, or in single connections "
            "only. Use dropconnectpp.prune first, or dropconnectpp.to_sparse for single connections."
        )


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, (*LAYERS, *NORMS))}


def _facts(module: Any) -> CompactedLayer:
    parameters = sum(p.numel() for p in module.parameters())
    if isinstance(module, NORMS):
        size = int(module.num_features)
        return CompactedLayer("", type(module).__name__, (size, size), (size, size), (parameters,) * 2, (0, 0))
    linear = isinstance(module, nn.Linear)
    units = module.out_features if linear else module.out_channels
    inputs = module.in_features if linear else module.in_channels
    operations = 2 * module.weight.numel()
    known = (operations, operations) if linear else None
    return CompactedLayer("", type(module).__name__, (units, units), (inputs, inputs), (parameters,) * 2, known)


def _row(name: str, old: CompactedLayer, new: CompactedLayer, positions: int | None, folded: int) -> CompactedLayer:
    flops = None if old.flops is None or new.flops is None else (old.flops[0], new.flops[1])
    return replace(
        old,
        name=name or "(the model)",
        kind=new.kind,
        units=(old.units[0], new.units[1]),
        inputs=(old.inputs[0], new.inputs[1]),
        parameters=(old.parameters[0], new.parameters[1]),
        flops=flops,
        folded=folded,
    )
