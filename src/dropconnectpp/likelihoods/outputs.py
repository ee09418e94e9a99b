"""What every likelihood needs of a model's output: its tensor, wide enough, with an example's values summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.errors import ShapeError

LogLikelihood = Callable[..., Tensor]
"""Any callable (output, target) -> (B,) will do; those of this package also tell `predict` what to average."""


def tensor_of(output: Any) -> Any:
    """The logits of an output object (``output.logits`` or ``output["logits"]``); anything else as it is."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def per_example(values: Tensor) -> Tensor:
    """Sum over all that belongs to an example: (B, *) to (B,)."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def wide(output: Tensor) -> Tensor:
    """Half precisions are widened: a log-likelihood of 8 bits is no reward."""
    return output.float() if output.dtype.itemsize < 4 else output


def check_same_shape(name: str, output: Tensor, target: Tensor) -> None:
    """Raise unless both have one shape, so that nothing broadcasts."""
    if output.shape != target.shape:
        raise ShapeError(
            f"{name} needs output and target of one shape, got {tuple(output.shape)} and {tuple(target.shape)}."
        )


def along_outputs(name: str, values: Tensor, output: Tensor) -> Tensor:
    """One value for all, or one per output along axis 1, ready to broadcast with an output (B, K, *)."""
    values = values.to(output.device, torch.promote_types(output.dtype, torch.float32))
    if values.numel() == 1:
        return values.reshape(())
    if output.ndim < 2 or output.shape[1] != values.numel():
        raise ShapeError(
            f"{name} has a noise scale for each of {values.numel()} outputs and needs an output of shape "
            f"(B, {values.numel()}, ...), got {tuple(output.shape)}."
        )
    return values.view(-1, *[1] * (output.ndim - 2))
