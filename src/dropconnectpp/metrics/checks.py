"""What the metrics ask of their arguments, with one voice."""

from __future__ import annotations

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, NonFiniteError, ShapeError


def check_classes(probabilities: Tensor, target: Tensor) -> Tensor:
    """The target (B,) as whole numbers if it fits probabilities (B, C), else raise."""
    if probabilities.ndim != 2 or target.shape != probabilities.shape[:1]:
        raise ShapeError(
            "Class metrics need probabilities of shape (B, C) and classes of shape (B,), got "
            f"{tuple(probabilities.shape)} and {tuple(target.shape)}."
        )
    if target.is_floating_point():
        raise ArgumentError(f"Classes must be whole numbers, got {target.dtype}. Use target.long().")
    check_some(target)
    low, high = int(target.min()), int(target.max())
    if low < 0 or high >= probabilities.shape[1]:
        raise ArgumentError(f"Classes must run from 0 to {probabilities.shape[1] - 1}, got {low} to {high}.")
    check_finite("probabilities", probabilities)
    return target.long()


def check_pairs(name: str, first: Tensor, second: Tensor) -> None:
    """Raise unless two tensors have one shape, and any elements."""
    if first.shape != second.shape:
        raise ShapeError(f"{name} needs two tensors of one shape, got {tuple(first.shape)} and {tuple(second.shape)}.")
    check_some(first)


def check_some(values: Tensor) -> None:
    """Raise if there is nothing to measure."""
    if not values.numel():
        raise ArgumentError("There is no example to measure.")


def check_finite(name: str, values: Tensor) -> Tensor:
    """The values if all are finite, else raise."""
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteError(f"{name} hold NaN or infinity.")
    return values
