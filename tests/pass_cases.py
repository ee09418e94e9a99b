"""What a context may not leave behind on a model."""

from __future__ import annotations

from typing import Any

from torch import nn


def trace_of(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module: switches by value, all else by identity, and dictionaries entry by entry."""
    return {
        f"{name}.{key}": _value(value) for name, module in model.named_modules() for key, value in vars(module).items()
    }


def _value(value: object) -> Any:
    if isinstance(value, dict):
        return {key: id(entry) for key, entry in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else id(value)
