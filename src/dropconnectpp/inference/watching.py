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

    def of(self, gates: Mapping[nn.Module, Gates], bound: nn.Module) -> Assignment:
        """The assignment for a pass of an ELBO: one that notes what is asked, while there are steps left."""
        if not self.left or torch.compiler.is_compiling():
            return gates
        if self.left == STEPS and not self._current:
            _require_one_network(bound)
            if _has_compiled_parts(bound):
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


def _require_one_network(bound: nn.Module) -> None:
    """Warn of a training in several processes in which nothing averages the gradients."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in bound.parameters())
    if not trains or _compat.data_parallel_is_running():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import, and only now it matters

    around = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    if any(isinstance(module, around) for module in bound.modules()):
        return
    warnings.warn(
        f"ELBO: {distributed.get_world_size()} processes train, and the model is called outside "
        "DistributedDataParallel: nothing averages the gradients, and the processes' networks drift apart. Give ELBO "
        "the wrapped model, in a Trainer the one that compute_loss is given and not self.model, or wrap the ELBO: "
        "DistributedDataParallel(ELBO(model, ...)).",
        UserWarning,
        stacklevel=4,
    )
