"""What trained networks given as layers weigh, and how long they run, once whole units that are off are taken out."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import dropconnectpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.replicas import layered_modules, timing
from dropconnectpp.lab.replicas.layered_stack import LayeredStack

IMAGES = 128
"""How many a timed pass predicts, at most."""
ROUNDS = 9


@dataclass(frozen=True)
class Deployment:
    """A network before and after `compact`."""

    sizes: dict[str, Any]
    """Parameters and their bytes: the same whenever the network is trained again."""
    passes: dict[str, Any]
    """Milliseconds, and of how many images: never the same, and so no part of a row."""


@torch.no_grad()
def measure(stack: LayeredStack, rounds: int = ROUNDS) -> list[Deployment | None]:
    """What each replica weighs and how long its pass takes on the CPU.

    None where no unit or input is off, or a weight is not finite.
    """
    return [_one(stack, replica, rounds) for replica in range(len(stack.units))]


def _one(stack: LayeredStack, replica: int, rounds: int) -> Deployment | None:
    whole = layered_modules.to_module(stack, replica).float()
    if not all(bool(parameter.isfinite().all()) for parameter in whole.parameters()):
        return None
    try:
        small = dropconnectpp.compact(whole)
    except ArgumentError:  # nothing to take out, as it says
        return None
    batch = stack.examples.test_images[:IMAGES].permute(0, 3, 1, 2).float().cpu()
    passes: list[timing.Runs] = [{"pass": _pass(model, batch)} for model in (whole, small)]
    taken = timing.all_rounds(passes, torch.device("cpu"), rounds)
    compaction: Any = small.compaction
    return Deployment(
        {"parameters": list(compaction.parameters), "bytes": list(compaction.bytes)},
        {"ms": [1e3 * statistics.median(one["pass"]) for one in taken], "images": len(batch)},
    )


def _pass(model: nn.Module, batch: torch.Tensor) -> Callable[[], object]:
    @torch.no_grad()
    def run() -> None:
        model(batch)

    return run
