"""A training step without an `ELBO` that teaches the keep probabilities nothing: noticed once, and said."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from dropconnectpp.layers.passes import assigned, replayed
from dropconnectpp.ops.drawn import transformed

said: set[str] = set()
"""Names of the estimators whose warning has been given in this process."""


def watch(layer: nn.Module, output: Tensor, estimator: str) -> None:
    """Warn when a gradient comes back to an output whose masks no `ELBO` drew, and whose estimator needs one."""
    if torch.compiler.is_compiling() or estimator in said or transformed() or not output.requires_grad:
        return
    if replayed(layer) is not None or assigned(layer) is not None:
        return
    kind = type(layer).__name__

    def warn(_: Tensor) -> None:
        if estimator in said:
            return
        said.add(estimator)
        warnings.warn(
            f"A loss without dropconnectpp.ELBO reaches {kind}: with estimator={estimator!r} its keep probabilities "
            "get no gradient and stay where they are. Train with elbo = ELBO(model, likelihood, num_data=...) and "
            "elbo(x, target=y).loss, or convert with estimator='straight-through'.",
            UserWarning,
            stacklevel=2,
        )

    output.register_hook(warn)
