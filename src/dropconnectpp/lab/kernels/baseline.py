"""The running baseline of a stack's score estimators: to weigh rewards by it and to fold them into it, a launch each.

Elsewhere than on a GPU with Triton the twins run, which are the estimators' own functions, with the same result to
rounding.
Shapes: L samples, R replicas; moments are (2, R).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropconnectpp.estimators import running_coefficient, update_moments
from dropconnectpp.lab.kernels.support import supported

BLOCK = 1024
"""Partial sums that a program adds up at a time."""


@torch.no_grad()
def weigh(rewards: Tensor, moments: Tensor) -> Tensor:
    """The weight of each sample's score: (reward - varpi) / L, (L, R), Eq. (10) with moments of earlier minibatches."""
    samples, stack = rewards.shape
    if not supported(rewards, moments):
        return running_coefficient(rewards, moments) / samples
    from dropconnectpp.lab.kernels.baseline_triton import weigh_kernel

    found = torch.empty_like(rewards)
    weigh_kernel[(stack, samples)](rewards, moments, found)
    return found


@torch.no_grad()
def fold_in_(moments: Tensor, rewards: Tensor, squared: Sequence[Tensor], decay: float) -> None:
    """Fold rewards (L, R) and squared scores into the moments, in place: a CUDA graph replays on the same memory.

    ``squared`` are pieces (L, R, any number) whose sum over the last axis and over the pieces counts.

    >>> moments = torch.tensor([[0.0], [0.0]])
    >>> fold_in_(moments, torch.tensor([[-2.0]]), [torch.tensor([[[1.0, 3.0]]])], decay=0.5)
    >>> moments
    tensor([[-4.],
            [ 2.]])
    """
    if len(squared) == 2 and supported(moments, rewards, *squared):
        from dropconnectpp.lab.kernels.baseline_triton import fold_kernel

        fold_kernel[(len(moments[0]),)](
            moments,
            rewards,
            *squared,
            *(piece.shape[2] for piece in squared),
            decay,
            SAMPLES=len(rewards),
            BLOCK=BLOCK,
        )
        return
    sums = torch.stack([piece.sum(2) for piece in squared]).sum(0)  # (L, R)
    total = sums.sum(0)
    # The mean reward, each sample counting by its score: for one sample that is its reward.
    reward = rewards[0] if len(sums) == 1 else (rewards * sums).sum(0) / total.clamp_min(torch.finfo(total.dtype).tiny)
    moments.copy_(update_moments(moments, reward, total / len(sums), decay))
