"""`compact`: a pruned model as an ordinary one with fewer units."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.compaction.attention import attentions, heads_on, select_heads
from dropconnectpp.compaction.chains import LAYERS, is_chain, read_chain
from dropconnectpp.compaction.costs import cost, counted, row
from dropconnectpp.compaction.coupled import read_coupled
from dropconnectpp.compaction.cutting import cut, select_inputs
from dropconnectpp.compaction.folding import reading, settle, writing
from dropconnectpp.compaction.structure import replace_modules
from dropconnectpp.compaction.summary import Compaction, count_bytes, count_parameters
from dropconnectpp.compaction.tracing import Inputs, as_inputs, check_example, count_positions, floats, probes
from dropconnectpp.compaction.wiring import Wiring
from dropconnectpp.conversion import to_dense
from dropconnectpp.errors import ArgumentError
from dropconnectpp.layers.base import masked_layers

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far outputs may be from the original's, as a share of its largest: what another order of sums does."""


def compact(
    model: nn.Module, example_input: Any = None, *, select_inputs: bool = True, inplace: bool = False
) -> nn.Module:
    """An ordinary model with the same outputs in eval mode and fewer units: smaller and faster.

    Gates are folded as by `to_dense`, Eq. (19). Then every unit, channel and input goes whose connections are all off,
    with all that only it needs or that only needs it. A unit that is constant is folded into the next layer's bias.
    Single connections that are off inside the remaining rows and columns stay zeros: see `to_sparse`.

    Followed are linear and convolutional layers (groups too), BatchNorm, PReLU, activations, pooling, flattening,
    residual sums, concatenations and the heads of nn.MultiheadAttention. What is not followed is left whole, and named
    in the result's `compaction.left`: outputs of LayerNorm, softmax or a product with something else, layers that are
    used twice, and constant channels before a zero padding, where folding would be wrong at the border.

    Args:
        model: A pruned model, masked or plain. It is not changed, unless ``inplace``.
        example_input: An input, a tuple of positional inputs or a dict of keywords. Needed where layers are not simply
            in a `nn.Sequential`, together with the extra ``dropconnectpp[compact]``. With it the result is run and
            compared with the original.
        select_inputs: Where inputs of a layer are off that cannot be taken out, such as pixels of an image, let it pick
            the others first: the smallest network, and the fastest for few rows. False leaves such layers all inputs:
            with many rows, and on a GPU, the picking may cost more than it saves.
        inplace: Change ``model`` itself.

    Returns:
        The model, with a record of what went as its attribute `compaction`: print it.

    Raises:
        ArgumentError: Nothing is off; a hook, a parametrisation or a BatchNorm in training mode is in the way; the
            example does not fit; or the model cannot be followed. The model is as it was.
        MissingPackageError: Torch-Pruning is needed, and not installed.

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
    inputs = None if example_input is None else as_inputs(example_input)
    with _evaluating(dense):
        expected = None if inputs is None else [check_example(dense, given) for given in probes(inputs)]
    small = _followed(dense, inputs, expected, select_inputs)
    return _give_back(model, small) if inplace else small


@dataclass(frozen=True)
class Way:
    """What is followed and replaced."""

    reshapes: bool = True
    selections: bool = True
    heads: bool = True


def _followed(
    dense: nn.Module, inputs: Inputs | None, expected: list[list[Tensor]] | None, selections: bool
) -> nn.Module:
    """The compact model by the first way of following it that gives the same outputs."""
    ways = (Way(), Way(selections=False), Way(heads=False), Way(False, False, False))
    for way in dict.fromkeys(replace(way, selections=way.selections and selections) for way in ways):
        small = _reduced(copy.deepcopy(dense), inputs, way)
        difference = None if inputs is None or expected is None else _difference(small, inputs, expected)
        if difference is None:
            return small
    raise ArgumentError(
        f"compact: the model cannot be followed: made compact it would {difference}. It may read its layers' weights "
        "or shapes instead of calling them. Make its parts compact one by one; nothing was changed."
    )


def _reduced(dense: nn.Module, inputs: Inputs | None, way: Way) -> nn.Module:
    """The compact model, with its record."""
    before = {name: cost(module) for name, module in counted(dense).items()}
    totals = count_parameters(dense), count_bytes(dense)
    with _evaluating(dense), torch.no_grad():
        wiring = _wiring(dense, inputs, way.reshapes)
        folded = settle(dense, wiring)
        cut(dense, wiring)
        selected = select_inputs(dense, list(wiring.reads)) if way.selections else {}
        if way.heads:
            selected.update(select_heads(dense, wiring.left))
    small = replace_modules(dense, {dense.get_submodule(name): module for name, module in selected.items()})
    rows = [
        row(name, (old, cost(small.get_submodule(name))), wiring.outputs.get(name), folded.get(name, 0))
        for name, old in before.items()
    ]
    small.compaction = Compaction(  # type: ignore[assignment]
        tuple(rows), (totals[0], count_parameters(small)), (totals[1], count_bytes(small)), dict(wiring.left)
    )
    return small


def _wiring(dense: nn.Module, inputs: Inputs | None, reshapes: bool) -> Wiring:
    if is_chain(dense) or isinstance(dense, LAYERS):
        chain = read_chain(dense)
        if inputs is None or not chain.blocks:
            chain.outputs = {} if inputs is None else count_positions(dense, inputs, (*LAYERS, nn.MultiheadAttention))
            return chain
    if inputs is None:
        raise ArgumentError(
            f"compact: {type(dense).__name__} calls its layers in its own way. Give example_input, an input as the "
            "model takes it, so that they can be followed."
        )
    return read_coupled(dense, inputs, reshapes)


def _difference(small: nn.Module, inputs: Inputs, expected: list[list[Tensor]]) -> str | None:
    """What is wrong with the outputs; None if they are the same."""
    with _evaluating(small), torch.no_grad():
        for given, wanted in zip(probes(inputs), expected, strict=True):
            try:
                found = floats(small(*given[0], **given[1]))
            except Exception as error:
                return f"not run ({error})"
            for one, other in zip(found, wanted, strict=True):
                scale = max(1.0, float(other.abs().amax())) if other.numel() else 1.0
                close = TOLERANCE[other.dtype] * scale
                if one.shape != other.shape or not torch.allclose(one, other, rtol=0.0, atol=close, equal_nan=True):
                    return f"give other outputs (by up to {float((one - other).abs().amax()):.1e})"
    return None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, and every module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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
    layers = [layer for layer in counted(dense).values() if isinstance(layer, LAYERS)]
    attending = list(attentions(dense).values())
    if not (layers or attending):
        raise ArgumentError(
            "compact: the model has no linear layer, convolution or attention. There is nothing to remove."
        )
    if masked or not all(bool(heads_on(layer).all()) for layer in attending):
        return
    if all(bool(writing(layer).all()) and bool(reading(layer).all()) for layer in layers):
        raise ArgumentError(
            "compact: no unit, input or head of any layer is off: the model was not pruned, or in single connections "
            "only. Use dropconnectpp.prune first, or dropconnectpp.to_sparse for single connections."
        )
