"""Which unit of which layer feeds which input of which other: what must be known to take units out.

A channel is what goes out together: a unit of a dense layer or a channel of a convolution, with all that reads it, and
all that is added to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

NOBODY = -1
"""The channel of an input or output that could not be followed."""


@dataclass
class Wiring(ABC):
    """The channels of a model, by the names of its modules."""

    reads: dict[str, Tensor] = field(default_factory=dict)
    """For each layer the channel behind each of its inputs."""
    writes: dict[str, Tensor] = field(default_factory=dict)
    """For each layer the channel behind each of its outputs."""
    carries: dict[str, Tensor] = field(default_factory=dict)
    """For each module with one parameter a channel, such as BatchNorm, the channel of each."""
    count: int = 0
    stays: set[int] = field(default_factory=set)
    """Channels that must not be taken out."""
    left: dict[str, str] = field(default_factory=dict)
    """What could not be followed, and why."""
    outputs: dict[str, int] = field(default_factory=dict)
    """How many positions a layer's output has for one example, where that is known."""

    def fresh(self, size: int) -> Tensor:
        """The numbers of new channels."""
        self.count += size
        return torch.arange(self.count - size, self.count)

    def keep(self, channels: Tensor, name: str | None = None, reason: str | None = None) -> None:
        """These channels stay; ``name`` is the module that makes them."""
        self.stays.update(channels[channels >= 0].tolist())
        if name is not None and reason is not None:
            self.left.setdefault(name, reason)

    def staying(self) -> Tensor:
        """For each channel, whether it must stay."""
        mask = torch.zeros(self.count, dtype=torch.bool)
        mask[torch.tensor(sorted(self.stays), dtype=torch.long)] = True
        return mask

    @abstractmethod
    def values(self, model: nn.Module, still: Tensor) -> dict[str, Tensor]:
        """What each layer reads from the channels that are ``still``, in double precision; NaN for the other inputs.

        ``still`` are channels whose producers have no weight left, so that they give their biases.
        """
