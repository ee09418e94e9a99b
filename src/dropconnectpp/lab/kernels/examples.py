"""A product with one mask for each example: DropConnect as its paper draws masks, for a stack of replicas.

On a GPU with Triton masks are drawn in registers, forward and backward anew. Elsewhere, and for what the kernels do not
support, the twin runs, an example at a time, with the same masks bit for bit and the same result to rounding. A number
has 16 bits, so that a word of the stream serves two synapses: drawing is most of the cost, and a keep probability is
met to 2^-17. Shapes: R replicas, B batch, I inputs, O units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.kernels.support import step_tensor, supported
from dropconnectpp.lab.philox import Stream

LEVELS = 65536
"""Values of a number of 16 bits."""
HEIGHT, WIDTH = 16, 128
"""Units and inputs of a tile."""


def example_product(
    x: Tensor, weight: Tensor, keep: Tensor, stream: Stream, replicas: Tensor, step: Tensor | int
) -> Tensor:
    """y_b = (Z_b * W) x_b with z ~ Bernoulli(keep): x (R, B, I), weight (R, O, I), keep (R,) -> (R, B, O).

    Differentiable by x and weight.
    """
    bounds = (keep.double() * LEVELS).round().to(torch.int32)
    found: Tensor = _ExampleProduct.apply(x, weight, bounds, stream, replicas, step)  # type: ignore[no-untyped-call]
    return found


def example_mask(
    shape: torch.Size, bounds: Tensor, stream: Stream, replicas: Tensor, step: Tensor | int, example: int
) -> Tensor:
    """One example's mask, (R, O, I): a block of eight numbers never spans two units."""
    units, inputs = shape[1:]
    wide = -(-inputs // 8) * 8
    words = stream.words(replicas, step, units * wide // 2, example)
    halves = torch.stack((words & (LEVELS - 1), words >> 16), -1).view(len(replicas), units, wide)
    return halves[:, :, :inputs] < bounds[:, None, None]


class _ExampleProduct(torch.autograd.Function):
    """The product, and its gradients with the masks drawn again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bounds: Tensor, stream: Stream, replicas: Tensor, step: Tensor | int
    ) -> Tensor:
        step = step_tensor(step, x.device).clone()  # the stack counts up in place
        ctx.save_for_backward(x, weight, bounds, replicas, step)
        ctx.stream = stream
        if supported(x, weight):
            return _forward_kernel(x, weight, bounds, stream, replicas, step)
        out = x.new_empty((*x.shape[:2], weight.shape[1]))
        for b in range(x.shape[1]):
            mask = example_mask(weight.shape, bounds, stream, replicas, step, b)
            out[:, b] = ((weight * mask) @ x[:, b, :, None])[..., 0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bounds, replicas, step = ctx.saved_tensors
        grad, stream = grad.contiguous(), ctx.stream
        if supported(x, weight, grad):
            return (*_backward_kernels(x, weight, grad, bounds, stream, replicas, step), None, None, None, None)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for b in range(x.shape[1]):
            mask = example_mask(weight.shape, bounds, stream, replicas, step, b)
            grad_x[:, b] = (grad[:, b, None, :] @ (weight * mask))[:, 0]
            grad_weight += (grad[:, b, :, None] * x[:, b, None, :]) * mask
        return grad_x, grad_weight, None, None, None, None


def _forward_kernel(
    x: Tensor, weight: Tensor, bounds: Tensor, stream: Stream, replicas: Tensor, step: Tensor
) -> Tensor:
    from dropconnectpp.lab.kernels.examples_triton import forward_kernel

    (count, batch, inputs), units = x.shape, weight.shape[1]
    out = x.new_empty((count, batch, units))
    grid = (-(-units // HEIGHT), batch, count)
    forward_kernel[grid](
        x, weight, out, bounds, replicas, step, stream.seed, batch, units, inputs, HEIGHT=HEIGHT, WIDTH=WIDTH
    )
    return out


def _backward_kernels(
    x: Tensor, weight: Tensor, grad: Tensor, bounds: Tensor, stream: Stream, replicas: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    from dropconnectpp.lab.kernels.examples_triton import input_kernel, weight_kernel

    (count, batch, inputs), units = x.shape, weight.shape[1]
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    wide = -(-inputs // WIDTH)
    sizes = (batch, units, inputs)
    input_kernel[(wide, batch, count)](
        grad, weight, grad_x, bounds, replicas, step, stream.seed, *sizes, HEIGHT=HEIGHT, WIDTH=WIDTH
    )
    weight_kernel[(wide, -(-units // HEIGHT), count)](
        grad, x, grad_weight, bounds, replicas, step, stream.seed, *sizes, HEIGHT=HEIGHT, WIDTH=WIDTH
    )
    return grad_x, grad_weight
