"""Modules put in the place of others, and copies of models."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from dropconnectpp.conversion.owners import settle

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
    """Put each new module wherever its old one stands, and settle what owners may do with their layers' weights."""
    root = replacements.get(model, model)
    for owner in [*model.modules(), *replacements.values()]:
        for name, child in list(owner._modules.items()):
            if child is not None and child in replacements:
                owner._modules[name] = replacements[child]
    for owner in root.modules():
        settle(owner)
    return root
