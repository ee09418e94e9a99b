"""Convolutions of a stack of replicas: one call for all of them on a GPU, one after the other on a CPU.

On a GPU `kernels.convolution` takes what it supports; the code here defines it and takes the rest.
Shapes: R replicas, B batch, C maps in, O maps out, H W sides, K filter side. On a GPU a stack of maps is held
as (B, H, W, R, C) in memory, which is a grouped convolution's channels-last (B, R*C, H, W).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d, pad

from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.kernels import convolution
from dropconnectpp.lab.kernels.maps import padded_columns, pool_activation, windows

FEW_MAPS = 4
"""Up to this many maps in, the channels of images, a convolution is one product over windows."""


def features(images: Tensor, parameters: dict[str, Tensor], architecture: Architecture) -> Tensor:  # (R, B, I)
    """What the convolutional layers make of the images (R, B, C, H, W), flattened for the dense layer.

    On a CPU a replica's numbers do not depend on how many replicas there are: each has its own calls.
    """
    if images.device.type == "cpu":
        replicas = [
            _one_replica(own, {k: v[r] for k, v in parameters.items() if k.startswith("conv")}, architecture)
            for r, own in enumerate(images)
        ]
        return torch.stack(replicas)
    if convolution.supported(images, architecture):
        return convolution.features(images, parameters, architecture)
    return grouped_features(images, parameters, architecture)


def _one_replica(x: Tensor, parameters: dict[str, Tensor], architecture: Architecture) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    for layer, pooled in enumerate(architecture.pooled):
        weight, bias = parameters[f"conv{layer}.weight"], parameters[f"conv{layer}.bias"]
        x = conv2d(x, weight, bias, padding=architecture.padding)
        x = _pool(x, architecture) if pooled else x
        x = torch.relu(x)  # after the pool, where it is the same and there is less of it
    return x.flatten(1)


def grouped_features(images: Tensor, parameters: dict[str, Tensor], architecture: Architecture) -> Tensor:
    """`features` with one call per layer for the whole stack."""
    replicas = len(images)
    x = images.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    for layer, pooled in enumerate(architecture.pooled):
        weight, bias = parameters[f"conv{layer}.weight"], parameters[f"conv{layer}.bias"]
        if pooled:
            x = grouped_convolution(x, weight, None, architecture.padding)
            size, stride = architecture.pool_size, architecture.pool_stride
            x = pool_activation(x, bias.flatten(), size, stride, architecture.ceil_mode)
        else:
            x = torch.relu(grouped_convolution(x, weight, bias, architecture.padding))
    flat: Tensor = x.unflatten(1, (replicas, -1)).transpose(0, 1).flatten(2)
    return flat


def _pool(x: Tensor, architecture: Architecture) -> Tensor:
    return max_pool2d(x, architecture.pool_size, architecture.pool_stride, ceil_mode=architecture.ceil_mode)


def grouped_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Each replica's maps under its own filters: x (B, R*C, H, W), weight (R, O, C, K, K), bias (R, O) or none."""
    if x.dtype != torch.bfloat16:
        flat = None if bias is None else bias.flatten()
        return conv2d(x, weight.flatten(0, 1), flat, padding=padding, groups=len(weight))
    # Not by requires_grad alone: in evaluation no layer needs gradients, and the windows of many maps fill the memory.
    first = weight.shape[2] <= FEW_MAPS and not x.requires_grad
    kind = _FirstConvolution if first else _MixedConvolution
    output: Tensor = kind.apply(x, weight, bias, padding)  # type: ignore[no-untyped-call]
    return output


class _MixedConvolution(torch.autograd.Function):
    """bf16 products, float32 sums: weights and their gradients stay float32.

    torch's own bf16 convolution rounds the weights' gradient to bf16. Here the product of bf16
    values has a float32 result, so nothing is rounded after the sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        low = weight.to(torch.bfloat16).flatten(0, 1).contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, low)
        ctx.padding, ctx.shape = padding, weight.shape
        flat = None if bias is None else bias.flatten().to(torch.bfloat16)
        return conv2d(x, low, flat, padding=padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, low = ctx.saved_tensors
        replicas, side = ctx.shape[0], ctx.shape[-1]
        wanted = [ctx.needs_input_grad[0], False, False]
        grad_input = torch.ops.aten.convolution_backward(
            gradient, x, low, None, [1, 1], [ctx.padding] * 2, [1, 1], False, [0, 0], replicas, wanted
        )[0]
        grad_weight = _weight_gradient(windows(x, replicas, side, ctx.padding), gradient, ctx.shape)
        return grad_input, grad_weight, _bias_gradient(gradient, replicas) if ctx.needs_input_grad[2] else None, None


class _FirstConvolution(torch.autograd.Function):
    """The same for the first layer, as one product over windows: they are few, the backward pass needs them
    again, and cuDNN's grouped convolution of three maps takes five times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        replicas, outputs, inputs, side, _ = weight.shape
        batch, _, height, width = x.shape
        laid = windows(x, replicas, side, padding)  # (R, B*H*W, columns)
        filters = weight.permute(0, 3, 4, 2, 1).flatten(1, 3).to(torch.bfloat16)
        filters = pad(filters, [0, 0, 0, padded_columns(inputs, side) - filters.shape[1]])
        rows, columns = height + 2 * padding - side + 1, width + 2 * padding - side + 1
        stacked = torch.empty((batch * rows * columns, replicas, outputs), dtype=x.dtype, device=x.device)
        torch.bmm(laid, filters, out=stacked.transpose(0, 1))
        if bias is not None:
            stacked += bias.to(x.dtype)
        ctx.save_for_backward(laid)
        ctx.shape = weight.shape
        return stacked.view(batch, rows, columns, replicas * outputs).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None, None]:
        (laid,) = ctx.saved_tensors
        grad_bias = _bias_gradient(gradient, ctx.shape[0]) if ctx.needs_input_grad[2] else None
        return None, _weight_gradient(laid, gradient, ctx.shape), grad_bias, None


def _weight_gradient(laid: Tensor, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(R, O, C, K, K) in float32 from windows and the output's gradient: the sum over examples and places."""
    replicas, _, inputs, side, _ = shape
    left = gradient.permute(0, 2, 3, 1).flatten(0, 2).unflatten(1, (replicas, -1)).permute(1, 2, 0)  # (R, O, B*H*W)
    if laid.device.type == "cpu":
        product = torch.bmm(left.float(), laid.float())
    else:
        product = torch.bmm(left, laid, out_dtype=torch.float32)
    filters = product[..., : side * side * inputs].unflatten(-1, (side, side, inputs))
    ordered: Tensor = filters.permute(0, 1, 4, 2, 3)
    return ordered


def _bias_gradient(gradient: Tensor, replicas: int) -> Tensor:
    return gradient.sum(dim=(0, 2, 3), dtype=torch.float32).view(replicas, -1)
