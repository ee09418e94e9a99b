"""Adam for everything that a stack of replicas trains, with a step size for each replica.

Plain tensors on any device: the count of steps stays there, so that a CUDA graph can take the step. R replicas lie
along the first axis; R may differ from tensor to tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

BETA1, BETA2 = 0.9, 0.999
EPSILON = 1e-8
"""Kingma and Ba's, as torch has them."""


def adam_all_(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    sizes: Sequence[Tensor],
    taken: Tensor,
) -> None:
    """p -= step m^ / (sqrt(v^) + epsilon), in place.

    values, gradients and both averages are (R, ...), step sizes (R,); ``taken`` is how many steps were taken before.

    >>> import torch
    >>> value, first, second = torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    >>> adam_all_([value], [torch.ones(1, 1)], [first], [second], [torch.tensor([0.1])], torch.tensor(0))
    >>> value
    tensor([[0.9000]])
    """
    count = taken.double() + 1
    first_correction, second_correction = 1 - BETA1**count, 1 - BETA2**count
    for value, gradient, average, square, steps in zip(values, gradients, averages, squares, sizes, strict=True):
        average.lerp_(gradient, 1 - BETA1)
        square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        root = (square / second_correction.to(value.dtype)).sqrt_().add_(EPSILON)
        size = (steps / first_correction.to(value.dtype)).view(-1, *[1] * (value.ndim - 1))
        value.sub_(average.div(root).mul_(size))
