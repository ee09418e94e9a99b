"""What `compact` removed: a table by layer, parameters, FLOPs and bytes, and what it left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class CompactedLayer:
    """One layer before and after: how many units (heads, of attention) it has, and how many inputs it reads."""

    name: str
    kind: str
    units: tuple[int, int]
    inputs: tuple[int, int]
    parameters: tuple[int, int]
    flops: tuple[int, int] | None
    """For one example, a multiplication and an addition counted as two; None where the output's size is not known."""
    folded: int = 0
    """Inputs that were constant, and are in the bias now."""


@dataclass(frozen=True)
class Compaction:
    """What was removed from a model. Before is the model with its gates folded in, zeros and all."""

    layers: tuple[CompactedLayer, ...]
    parameters: tuple[int, int]
    bytes: tuple[int, int]
    """Of all parameters and buffers."""
    left: Mapping[str, str] = field(default_factory=dict)
    """What could not be followed and is whole, with the reason."""

    @property
    def flops(self) -> tuple[int, int] | None:
        """For one example, of the layers named; None where one of them is not known."""
        known = [layer.flops for layer in self.layers if layer.flops is not None]
        if len(known) < len(self.layers):
            return None
        return sum(before for before, _ in known), sum(after for _, after in known)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "kind", "units", "inputs", "parameters", "FLOPs")]
        for layer in self.layers:
            numbers = (layer.units, layer.inputs, layer.parameters, layer.flops)
            rows.append((layer.name, layer.kind, *(_change(pair) for pair in numbers)))
        rows.append(("all", "", "", "", _change(self.parameters), _change(self.flops)))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        before, after = self.bytes
        lines.append(f"bytes: {before:,} -> {after:,} ({before / max(after, 1):.1f} times smaller)")
        lines += [f"left whole: {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def _change(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return "?"
    return f"{pair[0]:,}" if pair[0] == pair[1] else f"{pair[0]:,} -> {pair[1]:,}"


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [text.ljust(w) if i < 2 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))]


def count_parameters(model: nn.Module) -> int:
    """How many numbers are parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_bytes(model: nn.Module) -> int:
    """The size of all parameters and buffers, shared ones once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
