"""Cases of the running baseline: moments, rewards and squared scores of several shapes."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES = [(1, 1, 1, 1), (1, 3, 5, 1), (3, 4, 1030, 2), (10, 50, 2048, 1)]
"""Samples, replicas, and how many partial sums there are of weights and of biases."""


def make(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    samples, stack, *counts = shape
    generator = torch.Generator().manual_seed(sum(shape))
    moments = torch.rand((2, stack), generator=generator)
    moments[:, -1] = 0.0  # a replica that has seen nothing yet
    rewards = -torch.rand((samples, stack), generator=generator)
    return moments, rewards, [torch.rand((samples, stack, count), generator=generator) for count in counts]
