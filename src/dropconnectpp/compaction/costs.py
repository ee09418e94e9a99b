"""What a layer costs before and after: units, parameters, multiplications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from dropconnectpp.compaction.attention import SelectedAttention
from dropconnectpp.compaction.chains import LAYERS, NORMS
from dropconnectpp.compaction.selected import SELECTED
from dropconnectpp.compaction.summary import CompactedLayer

ATTENTION = (nn.MultiheadAttention, SelectedAttention)


@dataclass(frozen=True)
class Cost:
    """What is known of one layer without an input."""

    kind: str
    units: int
    inputs: int
    parameters: int
    each: int
    """FLOPs for each position of the output."""
    pairs: int = 0
    """FLOPs for each pair of positions."""


def counted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that a table of costs names."""
    kinds = (*LAYERS, *NORMS, *SELECTED.values(), *ATTENTION)
    return {name: module for name, module in model.named_modules() if type(module) in kinds}


def cost(module: Any) -> Cost:
    """The cost of one layer as it is now."""
    kind, parameters = type(module).__name__, sum(p.numel() for p in module.parameters())
    if isinstance(module, NORMS):
        return Cost(kind, int(module.num_features), int(module.num_features), parameters, 0)
    if isinstance(module, ATTENTION):
        weights = sum(p.numel() for p in module.parameters() if p.ndim == 2)
        # Scores and their product with the values: each a product of head_dim numbers for each head.
        return Cost(
            kind, module.num_heads, module.embed_dim, parameters, 2 * weights, 4 * module.num_heads * module.head_dim
        )
    linear = isinstance(module, nn.Linear)
    units = module.out_features if linear else module.out_channels
    inputs = module.in_features if linear else module.in_channels
    return Cost(kind, units, inputs, parameters, 2 * module.weight.numel())


def row(name: str, costs: tuple[Cost, Cost], positions: int | None, folded: int) -> CompactedLayer:
    """A layer of the table, from its costs before and after."""
    old, new = costs
    if positions is None and ("Linear" in old.kind or "Norm" in old.kind):
        positions = 1
    flops = None
    if positions is not None:
        before, after = (positions * one.each + positions**2 * one.pairs for one in costs)
        flops = (before, after)
    return CompactedLayer(
        name=name or "(the model)",
        kind=new.kind,
        units=(old.units, new.units),
        inputs=(old.inputs, new.inputs),
        parameters=(old.parameters, new.parameters),
        flops=flops,
        folded=folded,
    )
