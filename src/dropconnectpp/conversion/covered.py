"""`coverage`: what of a model was converted, what was not, and why."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from dropconnectpp.conversion.choosing import convertible, each_module, is_converted
from dropconnectpp.conversion.hosting import ON_REQUEST, module_name
from dropconnectpp.conversion.making import obstacle, reads_itself
from dropconnectpp.layers.base import MaskedLayer, masked_layers

LEAST_SHARE = 0.5
"""Below this share of gated parameters `coverage` warns."""


@dataclass(frozen=True)
class CoveredModule:
    """A module that has parameters of its own."""

    name: str
    kind: str
    """The type of the module; of a converted one, what it was."""
    parameters: int
    """How many numbers its parameters have."""
    gated: int
    """How many of these have gates."""
    why: str
    """What keeps the others plain; "" where there are none."""


@dataclass(frozen=True)
class Coverage:
    """What became of a model's parameters. Print it for a table."""

    modules: tuple[CoveredModule, ...]

    @property
    def parameters(self) -> int:
        """How many numbers the model's parameters have, those of the posterior aside; shared ones count once."""
        return sum(module.parameters for module in self.modules)

    @property
    def gated(self) -> int:
        """How many of these have gates."""
        return sum(module.gated for module in self.modules)

    @property
    def share(self) -> float:
        """The share of the parameters that have gates."""
        return self.gated / self.parameters if self.parameters else 0.0

    @property
    def converted(self) -> list[str]:
        """The names of the modules with gates."""
        return [module.name for module in self.modules if module.gated]

    @property
    def left(self) -> dict[str, str]:
        """The modules with parameters that have no gates, and why."""
        return {module.name: module.why for module in self.modules if module.gated < module.parameters}

    def __str__(self) -> str:
        header = ("module", "type", "parameters", "gated", "why not")
        rows = [
            (m.name or "(the model itself)", m.kind, f"{m.parameters:,}", f"{m.gated:,}", m.why) for m in self.modules
        ]
        rows.append(("all", "", f"{self.parameters:,}", f"{self.gated:,}", f"{self.share:.1%} gated"))
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(4)]
        lines = []
        for row in [header, *rows]:
            cells = [row[c].ljust(widths[c]) if c < 2 else row[c].rjust(widths[c]) for c in range(4)]
            lines.append("  ".join([*cells, row[4]]).rstrip())
        return "\n".join(lines)


def coverage(model: nn.Module) -> Coverage:
    """What of a model was converted, what has parameters and was not, and why.

    Args:
        model: Any model, usually one that `convert` gave.

    Returns:
        One row for each module with parameters of its own. A share of gated parameters under one half is a warning
        too: what is left plain has no posterior, and is neither learned nor pruned.

    >>> model = dropconnectpp.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
    >>> print(coverage(model))
    module  type       parameters  gated  why not
    0       Linear             72     72
    1       LayerNorm          16      0  a LayerNorm is converted where parameters= names its parameters
    2       Linear             18     18
    all                       106     90  84.9% gated
    """
    gated = _gated(model)
    seen: set[int] = set()
    rows: list[CoveredModule] = []
    for name, module, owner in each_module(model):
        if isinstance(module, MaskedLayer) and module_name(name) != name:
            continue  # the gates of a host, whose own row has them
        posterior = set(getattr(module, "posterior_names", ()))
        own = [value for key, value in _own(module) if key not in posterior and id(value) not in seen]
        seen.update(id(value) for value in own)
        total = sum(value.numel() for value in own)
        if total:
            count = sum(value.numel() for value in own if id(value) in gated)
            rows.append(CoveredModule(name, _kind(module), total, count, _why(module, owner) if count < total else ""))
    found = Coverage(tuple(rows))
    if found.parameters and found.share < LEAST_SHARE:
        largest = max((row for row in rows if row.gated < row.parameters), key=lambda row: row.parameters - row.gated)
        warnings.warn(
            f"coverage: {found.share:.1%} of the model's {found.parameters:,} parameters have gates. The most of the "
            f"others are in {largest.name or 'the model itself'}: {largest.why}.",
            UserWarning,
            stacklevel=2,
        )
    return found


def _gated(model: nn.Module) -> set[int]:
    """The parameters that have gates."""
    found: set[int] = set()
    for layer in masked_layers(model).values():
        for name in layer.synapse_names:
            if parametrize.is_parametrized(layer, name):
                behind: Any = layer.parametrizations
                found.update(id(parameter) for parameter in behind[name].parameters())
            else:
                found.add(id(getattr(layer, name)))
    return found


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    known = [(key, value) for key, value in module._parameters.items() if value is not None]
    return [(key, value) for key, value in known if not nn.parameter.is_lazy(value)]


def _kind(module: nn.Module) -> str:
    plain = getattr(module, "plain_type", None)
    return plain.__name__ if isinstance(plain, type) and is_converted(module) else type(module).__name__


def _why(module: nn.Module, owner: nn.Module | None) -> str:
    """Why a module has parameters without gates."""
    kind = _kind(module)
    if is_converted(module):
        return f"only some parameters of this {kind} were named"
    if isinstance(module, ON_REQUEST):
        return obstacle(module, True, {}) or f"a table is converted where include= has its full name, or nn.{kind}"
    if convertible(module):
        reads = reads_itself(module, owner, "dropconnect++")
        return obstacle(module, reads, {}) or "it was not included, or left plain for its options"
    return f"a {kind} is converted where parameters= names its parameters"
