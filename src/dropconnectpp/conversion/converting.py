"""`convert`: a model's layers become DropConnect++ layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from torch import nn

from dropconnectpp.conversion.agreement import disagreement
from dropconnectpp.conversion.choosing import (
    Choice,
    Pattern,
    each_module,
    names_of,
    parameter_patterns,
    patterns,
)
from dropconnectpp.conversion.kinds import CONVERTED
from dropconnectpp.conversion.making import Making, quantised
from dropconnectpp.conversion.swapping import copied, swap
from dropconnectpp.errors import ArgumentError, ConversionError, check_choice
from dropconnectpp.layers import public as kinds
from dropconnectpp.layers.dropconnectpp import PosteriorOptions
from dropconnectpp.presets import preset_options


def convert(
    model: nn.Module,
    include: Pattern | Sequence[Pattern] | None = None,
    exclude: Pattern | Sequence[Pattern] = (),
    *,
    parameters: str | Sequence[str] = (),
    kind: str = "dropconnect++",
    preset: str | None = None,
    example_input: Any = None,
    inplace: bool = False,
    **options: Any,
) -> nn.Module:
    """Turn a model's layers into DropConnect++ layers, weights kept.

    Linear layers and convolutions become layers of ours. Recurrent networks and their cells, transposed convolutions,
    nn.Bilinear, nn.MultiheadAttention, subclasses with a forward of their own and Hugging Face's Conv1D keep their
    forward and read gated weights: a mask lasts for a sequence. nn.Embedding and nn.EmbeddingBag do so where they are
    asked for, and any parameter of any module by ``parameters``. `coverage` tells what became of a model.

    ``include`` and ``exclude`` are module names with wildcards ("fc*", "features.0") or types
    (nn.Linear); by default every layer that can be converted is, embeddings aside. A pattern of ``include`` that
    matches no such layer is an error. An embedding needs its full name, or its type. ``parameters`` are names of
    parameters with wildcards ("*.experts.down_proj"). ``options`` go to each layer
    (estimator, hyper, mask, alpha, ...); ``preset`` names a set of them, see `PRESETS`, and what
    ``options`` say goes before it. Parameters stay the same objects, so ties, devices,
    dtypes, requires_grad and optimiser states hold; layers that share a weight share its logits.
    ``kind="dropconnect"`` gives layers with one fixed rate instead.

    A layer whose owner reads its `weight` instead of calling it would silently ignore its masks. Give
    ``example_input``, what the model is called with (a tensor, a tuple of arguments or a dictionary of keywords): one
    pass under random masks is compared with `to_dense`. Layers whose gates it did not ask for, or whose weights were
    read as they are, then have their gates where the weight is read; if that does not help, an error names them.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> [type(layer).__name__ for layer in convert(model, include=["0"])]
    ['DropConnectPPLinear', 'ReLU', 'Linear']
    """
    check_choice("kind", kind, CONVERTED)
    if preset is not None:
        if kind != "dropconnect++":
            raise ArgumentError(f"preset={preset!r} needs kind='dropconnect++', got {kind!r}, which learns no rate.")
        options = preset_options(preset) | options
    _check_options(kind, options)
    model = model if inplace else copied(model)
    choice = Choice(patterns(include), patterns(exclude) or [], parameter_patterns(parameters))
    choice.check(model)
    making = Making(kind, options)
    for name, module, owner in each_module(model):
        chosen = choice.of(name, module, owner)
        if chosen is None:
            continue
        obstacle = making.replace(module, owner, chosen.parameters)
        if obstacle is None:
            continue
        if chosen.by_name or quantised(module):
            raise ConversionError(f"convert: {name or 'the model'} cannot be converted: {obstacle}.")
        making.left.append(f"{name} ({obstacle})")
    if making.left:
        warnings.warn(f"convert left plain: {'; '.join(making.left)}.", UserWarning, stacklevel=2)
    if not making.replacements:
        warnings.warn(
            f"convert: nothing was converted. Layers that could be: {names_of(model)}.",
            UserWarning,
            stacklevel=2,
        )
    converted = swap(model, dict(making.replacements))
    if example_input is not None:
        converted = _agreeing(converted, example_input, making)
    return converted


def _agreeing(converted: nn.Module, example: Any, making: Making) -> nn.Module:
    """The model whose pass on an example is that of `to_dense`: gates go to where a weight is read, if they must."""
    fault = disagreement(converted, example)
    if fault is not None:
        converted = swap(converted, making.host(converted, fault.names))
        fault = disagreement(converted, example)
    if fault is not None:
        swap(converted, {made: plain for plain, made in making.replacements.items()})
        raise ConversionError(f"convert: {fault.text}")
    return converted


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
