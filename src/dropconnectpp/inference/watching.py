"""Gates that no forward pass asks for: noticed in a training's first steps, and named."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from dropconnectpp import _compat
from dropconnectpp.layers.passes import Assignment, Gates, Watched

STEPS = 20
"""How many steps are watched: a layer may have no part in some of them, as an expert that was not chosen."""


class Watch:
    """Which gates the passes of a training's first steps ask for.

    A gradient proves nothing: the KL gives one to gates that the network never uses. A model with compiled parts is
    not watched, since Python does not see what they ask for.
    """

    def __init__(self) -> None:
        self.left = STEPS
        self.asked: set[nn.Module] = set()
        self._current: list[Watched] = []

    def of(self, gates: Mapping[nn.Module, Gates], model: nn.Module) -> Assignment:
        """The assignment for a pass: one that notes what is asked, while there are steps left."""
        if not self.left or torch.compiler.is_compiling():
            return gates
        if self.left == STEPS and _has_compiled_parts(model):
            self.left = 0
            return gates
        self._current.append(Watched(gates))
        return self._current[-1]

    def step(self, layers: Mapping[str, nn.Module]) -> None:
        """A step is over; after the last one warn of gates that no pass has asked for."""
        if not self.left or torch.compiler.is_compiling():
            return
        self.asked.update(*(watched.asked for watched in self._current))
        self._current.clear()
        self.left -= 1
        if self.left:
            return
        unasked = [name or "the model itself" for name, layer in layers.items() if layer not in self.asked]
        self.asked.clear()
        if unasked:
            warnings.warn(
                f"ELBO: no forward pass of the first {STEPS} steps has asked for the gates of {', '.join(unasked)}: "
                "their owner reads the weight instead of calling the layer, or does without it. Their keep "
                "probabilities follow the prior alone, and to_dense would give another network. "
                "convert(..., example_input=...) finds such layers before the training.",
                UserWarning,
                stacklevel=3,
            )


def _has_compiled_parts(model: nn.Module) -> bool:
    return any(_compat.is_compiled(module) for module in model.modules())
