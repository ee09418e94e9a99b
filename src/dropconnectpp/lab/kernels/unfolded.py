"""Convolutions of a stack of replicas as products over windows: one product for all replicas, and its gradients.

On a GPU with Triton windows are laid out, and summed back, by a kernel each; elsewhere the twin runs. Shapes: R
replicas, B batch, H W sides, C maps in, O maps out, K filter side; maps are (R, B, H, W, C), weights (R, K*K*C, O) with
a window's rows, columns and maps in this order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dropconnectpp.lab.kernels.support import has_triton

ALIGNMENT = 8
"""Columns of the windows are filled up to a multiple of this: 16 bytes in bf16, without which products are slow."""
BLOCK = 1024


def filled_columns(columns: int) -> int:
    """Columns of a window with its filling."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def places_of(side: int, size: int, stride: int, padding: int) -> int:
    """Windows along a side."""
    return (side + 2 * padding - size) // stride + 1


def unfold(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Every window of every map, (R, B*L, columns), columns filled up with zeros."""
    replicas, batch, height, width, maps = x.shape
    rows, columns = (places_of(side, size, stride, padding) for side in (height, width))
    filled = filled_columns(size * size * maps)
    if x.is_cuda and x.is_contiguous() and has_triton():
        from dropconnectpp.lab.kernels.unfolded_triton import unfold_kernel

        y = torch.empty((replicas, batch * rows * columns, filled), dtype=x.dtype, device=x.device)
        lanes = 1 << (filled - 1).bit_length()
        block = max(1, 4 * BLOCK // lanes)
        total = replicas * batch * rows * columns
        unfold_kernel[(-(-total // block),)](
            x, y, total, height, width, rows, columns,
            MAPS=maps, SIZE=size, STRIDE=stride, PADDING=padding, FILLED=filled, LANES=lanes, BLOCK=block,
        )  # fmt: skip
        return y
    padded = pad(x, [0, 0, padding, padding, padding, padding])
    views = padded.unfold(2, size, stride).unfold(3, size, stride)  # (R, B, rows, columns, C, K, K), no copy yet
    copied = views.permute(0, 1, 2, 3, 5, 6, 4).reshape(replicas, batch * rows * columns, size * size * maps)
    return pad(copied, [0, filled - size * size * maps])


def fold(y: Tensor, shape: tuple[int, ...], size: int, stride: int, padding: int) -> Tensor:
    """The sum of windows where they overlap: the gradient of `unfold`, for maps of a shape (R, B, H, W, C)."""
    replicas, batch, height, width, maps = shape
    rows, columns = (places_of(side, size, stride, padding) for side in (height, width))
    if y.is_cuda and y.is_contiguous() and has_triton():
        from dropconnectpp.lab.kernels.unfolded_triton import fold_kernel

        x = torch.empty(shape, dtype=y.dtype, device=y.device)
        fold_kernel[(-(-height * width * maps // BLOCK), replicas * batch)](
            y, x, height, width, rows, columns,
            MAPS=maps, SIZE=size, STRIDE=stride, PADDING=padding, FILLED=y.shape[-1], BLOCK=BLOCK,
        )  # fmt: skip
        return x
    windows = y[..., : size * size * maps].reshape(replicas, batch, rows, columns, size, size, maps)
    x = y.new_zeros((replicas, batch, height + 2 * padding, width + 2 * padding, maps))
    for i in range(size):
        for j in range(size):
            x[:, :, i : i + stride * rows : stride, j : j + stride * columns : stride] += windows[:, :, :, :, i, j]
    return x[:, :, padding : padding + height, padding : padding + width].contiguous()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, size: int, stride: int, padding: int) -> Tensor:
        laid = unfold(x, size, stride, padding)
        low = pad(weight.to(x.dtype), [0, 0, 0, laid.shape[2] - weight.shape[1]])
        ctx.save_for_backward(laid, low)
        ctx.sizes = (tuple(x.shape), weight.shape[1], size, stride, padding)
        rows, columns = (places_of(side, size, stride, padding) for side in x.shape[2:4])
        return torch.bmm(laid, low).view(*x.shape[:2], rows, columns, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        laid, low = ctx.saved_tensors
        shape, columns, size, stride, padding = ctx.sizes
        flat = gradient.reshape(shape[0], -1, gradient.shape[-1])
        left = laid.transpose(1, 2)
        if flat.dtype == torch.bfloat16 and flat.is_cuda:  # bf16 products with float32 sums
            grad_weight = torch.bmm(left, flat, out_dtype=torch.float32)
        else:
            grad_weight = torch.bmm(left, flat).to(torch.promote_types(flat.dtype, torch.float32))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = fold(torch.bmm(flat, low.transpose(1, 2)), shape, size, stride, padding)
        return grad_x, grad_weight[:, :columns].contiguous(), None, None, None


def convolve(x: Tensor, weight: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Each replica's maps under its own filters, without bias, in the maps' precision: (R, B, rows, columns, O)."""
    output: Tensor = _Convolution.apply(x.contiguous(), weight, size, stride, padding)  # type: ignore[no-untyped-call]
    return output
