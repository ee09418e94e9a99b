"""Maps of a stack of replicas: bias, pool and ReLU in one pass, its backward pass, and windows for a product.

On a GPU with Triton each is a kernel, elsewhere the twin. Maps are (B, channels, H, W) with channels last in memory,
R*C channels for R replicas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from dropconnectpp.lab.config.protocol import pooled_side
from dropconnectpp.lab.kernels.support import has_triton

LANES = 512
"""Channels that one program pools."""
ALIGNMENT = 8
"""Columns of the windows are filled up to a multiple of this: 16 bytes, without which products are slow."""


def supported(maps: Tensor) -> bool:
    """Whether kernels can take maps: on a GPU with Triton, channels last in memory."""
    return maps.is_cuda and maps.is_contiguous(memory_format=torch.channels_last) and has_triton()


# ----------------------------------------------------------------------------------- bias, pool, ReLU


def pool_activation(x: Tensor, bias: Tensor, size: int, stride: int, ceil_mode: bool) -> Tensor:
    """relu(max pool of x + bias): x (B, channels, H, W), bias (channels,) in float32."""
    if supported(x) and x.dtype == torch.bfloat16 and size <= 15:  # places are bytes, and 255 is none
        output: Tensor = _PoolActivation.apply(x, bias, size, stride, ceil_mode)  # type: ignore[no-untyped-call]
        return output
    pooled = max_pool2d(x, size, stride, ceil_mode=ceil_mode)
    return torch.relu(pooled + bias[:, None, None]).to(x.dtype)


class _PoolActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, size: int, stride: int, ceil_mode: bool) -> Tensor:
        from dropconnectpp.lab.kernels.maps_triton import pool_kernel

        batch, channels, height, width = x.shape
        rows, columns = (pooled_side(side, size, stride, ceil_mode) for side in (height, width))
        shape = (batch, channels, rows, columns)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        places = torch.empty(shape, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
        pool_kernel[(batch * rows * columns, -(-channels // LANES))](
            x,
            bias.contiguous(),
            y,
            places,
            height,
            width,
            rows,
            columns,
            channels,
            SIZE=size,
            STRIDE=stride,
            BLOCK=LANES,
        )
        ctx.save_for_backward(places)
        ctx.sizes = (x.shape, size, stride)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        from dropconnectpp.lab.kernels.maps_triton import pool_backward_kernel

        (places,) = ctx.saved_tensors
        (batch, channels, height, width), size, stride = ctx.sizes
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        rows, columns = gradient.shape[2:]
        grad_x = torch.empty(
            ctx.sizes[0], dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last
        )
        pool_backward_kernel[(batch * height * width, -(-channels // LANES))](
            gradient, places, grad_x, height, width, rows, columns, channels, SIZE=size, STRIDE=stride, BLOCK=LANES
        )
        grad_bias = torch.where(places == 255, 0.0, gradient).sum((0, 2, 3), dtype=torch.float32)
        return grad_x, grad_bias, None, None, None


# --------------------------------------------------------------------------------------------- windows


def padded_columns(channels: int, side: int) -> int:
    """Columns of `windows`: K*K*C, filled up with zeros."""
    return -(-channels * side * side // ALIGNMENT) * ALIGNMENT


def windows(x: Tensor, replicas: int, side: int, padding: int) -> Tensor:
    """Every window of every replica's maps, (R, B*H*W, columns): a window's rows, columns and maps side by side."""
    batch, channels, height, width = x.shape
    per = channels // replicas
    filled = padded_columns(per, side)
    rows, columns = (length + 2 * padding - side + 1 for length in (height, width))
    places = batch * rows * columns
    if supported(x):
        from dropconnectpp.lab.kernels.maps_triton import window_kernel

        y = torch.empty((replicas, places, filled), dtype=x.dtype, device=x.device)
        lanes = 1 << (filled - 1).bit_length()
        block = max(1, 4096 // lanes)
        window_kernel[(-(-places // block), replicas)](
            x, y, places, height, width, rows, columns, replicas, padding,
            C=per, SIDE=side, PADDED=filled, WIDTH=lanes, BLOCK=block,
        )  # fmt: skip
        return y
    padded = pad(x.permute(0, 2, 3, 1), [0, 0, padding, padding, padding, padding]).unflatten(3, (replicas, per))
    views = padded.unfold(1, side, 1).unfold(2, side, 1)  # (B, H, W, R, C, K, K), no copy yet
    copied = views.permute(3, 0, 1, 2, 5, 6, 4).reshape(replicas, places, per * side * side)
    return pad(copied, [0, filled - per * side * side])
