"""Adagrad for everything that a stack of replicas trains: one launch on a GPU with Triton.

Elsewhere, and for what the kernel does not support, the twin runs, tensor after tensor, with the same result to
rounding. Shapes: R replicas along the first axis; R may differ from tensor to tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dropconnectpp.lab.kernels.support import supported

BLOCK = 1024
MOST = 16
"""The most tensors of one launch: the kernel has a branch for each."""


def adagrad_all_(
    values: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sums: Sequence[Tensor],
    sizes: Sequence[Tensor],
    epsilon: float,
    inside: bool,
) -> None:
    """p -= step g / sqrt(sum g^2 + epsilon), as Lasagne has it, or with epsilon outside the root; in place.

    values, gradients and the sums of squares are (R, ...), step sizes (R,). Nothing is copied from the host.

    >>> value, total = torch.ones(1, 2), torch.zeros(1, 2)
    >>> adagrad_all_([value], [torch.tensor([[3.0, 0.0]])], [total], [torch.tensor([0.5])], 1e-6, True)
    >>> value, total
    (tensor([[0.5000, 1.0000]]), tensor([[9., 0.]]))
    """
    together = []
    for value, given, total, steps in zip(values, gradients, sums, sizes, strict=True):
        gradient = given.contiguous() if given.is_cuda else given  # a filter's may be permuted
        if supported(value, gradient, total, steps):
            together.append((value, gradient, total, steps))
        else:
            _one(value, gradient, total, steps, epsilon, inside)
    for start in range(0, len(together), MOST):
        _launch(together[start : start + MOST], epsilon, inside)


def _one(value: Tensor, gradient: Tensor, total: Tensor, steps: Tensor, epsilon: float, inside: bool) -> None:
    """The twin, for one tensor."""
    total.addcmul_(gradient, gradient)
    root = (total + epsilon).sqrt_() if inside else total.sqrt().add_(epsilon)
    value.sub_(gradient.div(root).mul_(steps.view(-1, *[1] * (value.ndim - 1))))


def _launch(together: list[tuple[Tensor, Tensor, Tensor, Tensor]], epsilon: float, inside: bool) -> None:
    from dropconnectpp.lab.kernels.adagrad_triton import adagrad_kernel

    values, gradients, sums, sizes = zip(*together, strict=True)
    rows = tuple(len(value) for value in values)
    counts = tuple(value[0].numel() for value in values)
    grid = (sum(-(-count // BLOCK) for count in counts), max(rows))
    adagrad_kernel[grid](
        values, gradients, sums, sizes, rows, counts, epsilon, NUMBER=len(values), INSIDE=inside, BLOCK=BLOCK
    )
