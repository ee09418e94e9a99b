"""A linear layer with one mask for each example on a GPU: masks live in registers and are drawn again where needed.

Shapes: B examples, O out, I in, S the shape of a parameter, K weightings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.ops import gpu

HEIGHT, WIDTH = 16, 64
"""The tile of a weight that a program works on."""


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of one weight (O, I), one for each example."""

    logit: Tensor
    kept: Tensor | None
    seed: Tensor
    stream: int
    mirrored: bool

    @property
    def switches(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        return {"KEPT": self.kept is not None, "MIRRORED": self.mirrored, "HEIGHT": HEIGHT, "WIDTH": WIDTH}


def supported(masks: Masks, *tensors: Tensor) -> bool:
    """Whether the kernels can take a weight's masks, and tensors that go with them."""
    return masks.logit.ndim == 2 and gpu.supported(masks.logit, *tensors)


def uniform(shape: torch.Size, seed: Tensor, stream: int, first: int = 0) -> Tensor:
    """The noise behind the masks of examples from ``first`` on, (B, *S): an example's own, in whatever block it is."""
    out = torch.empty(shape, device=seed.device)
    rows = shape[1] if len(shape) > 2 else 1
    columns = shape[1:].numel() // max(rows, 1)
    if out.numel():
        grid = (shape[0], _tiles(rows, HEIGHT), _tiles(columns, WIDTH))
        arguments = (out, seed, stream, first, rows, columns)
        gpu.launch("example_uniform_kernel", grid, arguments, HEIGHT=HEIGHT, WIDTH=WIDTH)
    return out


def _tiles(count: int, size: int) -> int:
    return -(-count // size)


def product(input: Tensor, weight: Tensor, masks: Masks, dtype: torch.dtype) -> Tensor:
    """(Z_b * W) x_b for each example: (B, I) -> (B, O), summed in float32."""
    outs, ins = weight.shape
    out = torch.empty((input.shape[0], outs), device=input.device, dtype=dtype)
    kept = gpu.as_bytes(masks.kept, masks.logit)
    arguments = (input, weight, masks.logit, kept, out, masks.seed, masks.stream, outs, ins)
    gpu.launch("example_product_kernel", (input.shape[0], _tiles(outs, HEIGHT)), arguments, **masks.switches)
    return out


def by_input(grad: Tensor, weight: Tensor, masks: Masks, dtype: torch.dtype) -> Tensor:
    """The gradient of `product` by its input (B, I)."""
    outs, ins = weight.shape
    out = torch.empty((grad.shape[0], ins), device=grad.device, dtype=dtype)
    kept = gpu.as_bytes(masks.kept, masks.logit)
    arguments = (grad, weight, masks.logit, kept, out, masks.seed, masks.stream, outs, ins)
    gpu.launch("example_input_kernel", (grad.shape[0], _tiles(ins, WIDTH)), arguments, **masks.switches)
    return out


def by_weight(grad: Tensor, input: Tensor, weight: Tensor, masks: Masks, through: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of `product` by the weight and, straight through, by its logits."""
    outs, ins = weight.shape
    found = torch.empty_like(weight)
    by_logit = torch.empty_like(masks.logit) if through else None
    arguments = (
        grad,
        input,
        weight,
        masks.logit,
        gpu.as_bytes(masks.kept, masks.logit),
        found,
        masks.logit if by_logit is None else by_logit,
        masks.seed,
        masks.stream,
        input.shape[0],
        outs,
        ins,
    )
    grid = (_tiles(outs, HEIGHT), _tiles(ins, WIDTH))
    gpu.launch("example_weight_kernel", grid, arguments, THROUGH=through, **masks.switches)
    return found, by_logit


def weighted_sum(weights: Tensor, masks: Masks) -> Tensor:
    """sum_b c_kb Z_b for weightings (K, B): (K, O, I)."""
    outs, ins = masks.logit.shape
    sums, examples = weights.shape
    out = torch.empty((sums, outs, ins), device=weights.device)
    kept = gpu.as_bytes(masks.kept, masks.logit)
    weights = weights.float().contiguous()
    arguments = (weights, masks.logit, kept, out, masks.seed, masks.stream, examples, outs, ins)
    grid = (_tiles(outs, HEIGHT), _tiles(ins, WIDTH))
    gpu.launch("example_sum_kernel", grid, arguments, SUMS=sums, ROOM=1 << (sums - 1).bit_length(), **masks.switches)
    return out


class _Product(torch.autograd.Function):
    """`product` with its gradient, for which the masks are drawn again."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, logit: Tensor, masks: Masks, through: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.masks, ctx.through = masks, through
        # The logits too, so that a change of them before backward is noticed.
        ctx.save_for_backward(input, weight, logit)
        return product(input, weight, masks, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        grad, through = grad.contiguous(), ctx.through and ctx.needs_input_grad[2]
        grad_input = by_input(grad, weight, ctx.masks, input.dtype) if ctx.needs_input_grad[0] else None
        found: tuple[Tensor | None, Tensor | None] = None, None
        if ctx.needs_input_grad[1] or through:
            found = by_weight(grad, input, weight, ctx.masks, through)
        return grad_input, *found, None, None, None


def masked_product(
    input: Tensor, weight: Tensor, logit: Tensor, masks: Masks, through: bool, dtype: torch.dtype
) -> Tensor:
    """`product`, differentiable by input and weight and, straight through, by the logits."""
    known = logit if through else logit.detach()
    found: Tensor = _Product.apply(input.contiguous(), weight, known, masks, through, dtype)  # type: ignore[no-untyped-call]
    return found
