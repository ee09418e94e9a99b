"""Models that FSDP2 shards over processes: whole while a step reads their posterior."""

from __future__ import annotations

import torch
from torch import nn

from dropconnectpp.errors import ArgumentError
from dropconnectpp.layers.base import masked_layers


def gather(model: nn.Module) -> None:
    """Have a sharded model's parameters whole on each process, from before its KL is taken until backward is over.

    Raises:
        ArgumentError: Parts of the model are sharded apart: their gradients are reduced before the KL's are there.
    """
    distributed = torch.distributed
    if torch.compiler.is_compiling() or not distributed.is_available() or not distributed.is_initialized():
        return
    if not _sharded(model):
        return
    from torch.distributed.fsdp import FSDPModule  # slow to import, and only now it matters

    if isinstance(model, FSDPModule):
        model.unshard()
    apart = _sharded(model)
    if apart:
        raise ArgumentError(
            f"ELBO: the posterior of {', '.join(apart[:5])}{', …' if len(apart) > 5 else ''} is sharded apart from the "
            "rest, and FSDP would reduce its gradient before the KL's is there. Shard the model as a whole: "
            "fully_shard(model) alone, without its layers."
        )


def _sharded(model: nn.Module) -> list[str]:
    """The masked layers whose parameters are spread over processes now."""
    return [
        name or "the model itself"
        for name, layer in masked_layers(model).items()
        if any(hasattr(parameter, "full_tensor") for parameter in layer.parameters())
    ]
