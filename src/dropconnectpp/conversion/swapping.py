"""Modules put in the place of others, and copies of models."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.sparse import SparseLinear

ModelT = TypeVar("ModelT", bound=nn.Module)


def copied(model: ModelT) -> ModelT:
    """A deep copy, also of a model whose weights hooks compute, as `nn.utils.prune` and the old `weight_norm` do.

    Such a weight is no parameter, and torch copies leaves of autograd's graph alone; the hook computes it again.
    """
    computed: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                computed[id(value)] = value.detach().clone()
    return copy.deepcopy(model, computed)


def swap(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    """Put each new module wherever its old one stands, and set the transformers' fast paths right."""
    if model in replacements:
        return replacements[model]
    for owner in list(model.modules()):
        for name, child in list(owner._modules.items()):
            if child is not None and child in replacements:
                owner._modules[name] = replacements[child]
    for owner in model.modules():
        _set_fast_path(owner)
    return model


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
