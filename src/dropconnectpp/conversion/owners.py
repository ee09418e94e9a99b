"""What owners of masked layers do with their weights: fast paths off, methods refused that would lose the gates.

An owner is known by its methods, as Hugging Face's and PEFT's models have them: nothing of theirs is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dropconnectpp.errors import ConversionError
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.sampling import one_draw
from dropconnectpp.layers.sparse import SparseLinear


def settle(owner: nn.Module) -> None:
    """Set an owner right for the layers that it has now."""
    _set_fast_path(owner)
    _set_guards(owner)
    base = owner._modules.get("base_layer")
    if base is not None and hasattr(type(base), "gated_names"):
        base.adapted = True  # type: ignore[assignment]


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
        masked = any(isinstance(module, UNREADABLE) or _in_pieces(module) for module in owner.modules())
        if masked and not hasattr(owner, memory):
            setattr(owner, memory, getattr(owner, switch))
            setattr(owner, switch, 0)
        elif not masked and hasattr(owner, memory):
            setattr(owner, switch, getattr(owner, memory))
            delattr(owner, memory)


def _in_pieces(module: nn.Module) -> bool:
    """Whether a block has a layer and its activation where it expects a layer with a weight."""
    return isinstance(module, nn.TransformerEncoderLayer) and not all(
        hasattr(layer, "weight") for layer in (module.linear1, module.linear2, module.self_attn.out_proj)
    )


# ------------------------------------------------------------------------------------------ methods


def _set_guards(owner: nn.Module) -> None:
    """Put our method in front of an owner's while masked layers inside would suffer from it."""
    for name, (needed, method) in _GUARDS.items():
        if callable(getattr(type(owner), name, None)):
            guarded = isinstance(vars(owner).get(name), _Guard)
            if needed(owner) and not guarded:
                setattr(owner, name, _Guard(method, owner))
            elif guarded and not needed(owner):
                delattr(owner, name)


class _Guard(partial):  # type: ignore[type-arg]
    """A method of ours on one owner, told apart from the user's own."""


def _save_pretrained(owner: nn.Module, folder: Any, *arguments: Any, **options: Any) -> Any:
    """With a state given it is a trainer's checkpoint, which is loaded into the converted model again."""
    if options.get("state_dict") is not None:
        return type(owner).save_pretrained(owner, folder, *arguments, **options)  # type: ignore[attr-defined]
    raise ConversionError(
        f"save_pretrained of a converted {type(owner).__name__} would write its weights without their gates, and "
        "from_pretrained would load them into plain layers. Use dropconnectpp.save(model, file) and load, or "
        "save_pretrained and from_pretrained of dropconnectpp.integrations.transformers, or "
        "to_dense(model).save_pretrained(folder) for the model with its gates folded in."
    )


def _merge(owner: nn.Module, *arguments: Any, **options: Any) -> Any:
    raise ConversionError(
        f"a {type(owner).__name__} with masked layers cannot be merged: the sum of weights has one gate where its "
        "parts have one each. Fold the gates first: to_dense(model), and merge that."
    )


def _resize_token_embeddings(owner: nn.Module, *arguments: Any, **options: Any) -> Any:
    """The owner's own, with a plain layer in the place of a masked head; gates of new tokens start as usual."""
    model: Any = owner
    table = model.get_input_embeddings()
    if any(isinstance(module, MaskedLayer) for module in table.modules()):
        raise ConversionError(
            f"resize_token_embeddings: the embeddings of {type(owner).__name__} have gates, which would be lost. "
            "Resize the model before convert, or convert it without its embeddings."
        )
    head = model.get_output_embeddings()
    if not isinstance(head, MaskedLayer):
        return type(model).resize_token_embeddings(model, *arguments, **options)
    plain = nn.utils.skip_init(head.plain_type, **head.arguments(), device=head.weight.device)
    plain.register_parameter("weight", head.weight)
    plain.register_parameter("bias", head._parameters["bias"])
    model.set_output_embeddings(plain)
    try:
        return type(model).resize_token_embeddings(model, *arguments, **options)
    finally:
        resized = model.get_output_embeddings()
        head.register_parameter("weight", resized.weight)
        head.register_parameter("bias", resized.bias)
        head.out_features = resized.out_features
        _refit(head)
        model.set_output_embeddings(head)


def _generate(owner: nn.Module, *arguments: Any, **options: Any) -> Any:
    """The owner's own, by one network from the first token to the last."""
    with one_draw():
        return type(owner).generate(owner, *arguments, **options)  # type: ignore[attr-defined]


@torch.no_grad()
def _refit(layer: MaskedLayer) -> None:
    """Give a layer whose parameters have other sizes now gates for them; those that there were stay."""
    if not isinstance(layer, DropConnectPPLayer):
        return
    layer.retile()
    starts = layer.posterior_start()
    for name in layer.synapse_names:
        kept = layer.kept(name)
        if kept is not None and kept.shape != getattr(layer, name).shape:
            layer.keep_only(name, _grown(kept, getattr(layer, name).shape, True))
        for key in layer.posterior_names_of(name):
            old: nn.Parameter = getattr(layer, key)
            grown = _grown(old, layer.gate_shape(name), starts[key.removeprefix(f"{name}_")])
            layer.register_parameter(key, nn.Parameter(grown, requires_grad=old.requires_grad))


def _grown(value: torch.Tensor, shape: torch.Size, start: float) -> torch.Tensor:
    grown = torch.full(shape, start, dtype=value.dtype, device=value.device)
    common = tuple(slice(0, min(sizes)) for sizes in zip(value.shape, shape, strict=True))
    grown[common] = value[common]
    return grown


def _masked_inside(owner: nn.Module) -> bool:
    return any(isinstance(module, MaskedLayer) for module in owner.modules())


def _is_masked_adapter(owner: nn.Module) -> bool:
    """Whether an owner is PEFT's layer around another, and either is masked."""
    return "base_layer" in owner._modules and _masked_inside(owner)


def _has_masked_adapter(owner: nn.Module) -> bool:
    return any(_is_masked_adapter(module) for module in owner.modules())


def _would_be_saved(owner: nn.Module) -> bool:
    """Whether an owner's files would hold masked layers: of PEFT's models, whether its adapters are masked."""
    names = masked_layers(owner)
    return bool(names) and (not hasattr(owner, "peft_config") or any(".lora_" in name for name in names))


_GUARDS: dict[str, tuple[Callable[[nn.Module], bool], Callable[..., Any]]] = {
    "save_pretrained": (_would_be_saved, _save_pretrained),
    "generate": (_masked_inside, _generate),
    "merge": (_is_masked_adapter, _merge),
    "merge_adapter": (_has_masked_adapter, _merge),
    "merge_and_unload": (_has_masked_adapter, _merge),
    "resize_token_embeddings": (_masked_inside, _resize_token_embeddings),
}
