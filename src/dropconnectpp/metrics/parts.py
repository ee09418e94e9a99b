"""What a result is made of: measured numbers, and what its figure shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dropconnectpp.metrics.classes import Reliability


@dataclass(frozen=True)
class Figure:
    """A measured number."""

    value: float
    unit: str = ""
    error: float | None = None
    """The standard error over examples, for means."""

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.value:.4g}{unit}" if self.error is None else f"{self.value:.4g}{unit} ± {self.error:.2g}"


@dataclass(frozen=True, eq=False)
class Panels:
    """What a figure shows."""

    reliability: Reliability | None = None
    risk: tuple[Tensor, Tensor] | None = None
    """Share answered, and the error among them."""
    pit: Tensor | None = None
    """Share of targets in each twentieth of their predicted distribution: even if that is right."""
    doubts: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """By set, the doubts that rank foreign examples."""
