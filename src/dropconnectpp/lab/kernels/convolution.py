"""Convolution, bias, ReLU and pool of a stack of replicas in one kernel a layer, and both gradients in one each.

The kernels are CUDA C++ (`convolution.cu`), compiled at run time by the compiler that torch brings along: no other
compiler is needed. Only pooled maps go to memory. `replicas.convolutions` defines what they compute, and takes all that
they do not support: other architectures, other cards, machines without CUDA.

Shapes: R replicas, B batch; maps are (R, B, side, side, maps) in bf16. The last layer's are planar, (maps, side, side),
in the order of the dense layer's weights.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropconnectpp._compat import CudaKernel, compile_cuda_kernel
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.kernels.convolution_launch import (
    SHARED_BYTES,
    CudaLaunch,
    Layer,
    arrange_launch,
    ceil_div,
    filter_launch,
    forward_launch,
    fragment_words,
    input_launch,
    layer_supported,
    layers_of,
    partial_numbers,
    reduce_launch,
)

# ------------------------------------------------------------------------------------------- compiling


@cache
def source() -> str:
    """The CUDA source."""
    return Path(__file__).with_name("convolution.cu").read_text()


_entered = threading.local()


def _enter(device: int) -> None:
    """Give a thread the card's context: torch compiles and starts our kernels through the driver, which gives none.

    autograd goes backward in a thread of its own, and the first thing that it does there may be a kernel of ours.
    """
    if device not in (seen := _entered.__dict__.setdefault("devices", set())):
        torch.cuda.mem_get_info(device)  # any call of CUDA's runtime will do
        seen.add(device)


@cache
def _kernel(launch: CudaLaunch, device: int) -> CudaKernel:
    options = [f"-D{key}={value}" for key, value in launch.settings]
    with torch.cuda.device(device):
        return compile_cuda_kernel(source(), launch.name, options, launch.shared)


@cache
def _limit(device: int) -> int:
    """Bytes of shared memory that a block may have on a card."""
    properties = torch.cuda.get_device_properties(device)
    return min(SHARED_BYTES, getattr(properties, "shared_memory_per_block_optin", 49_152))


@cache
def _compiles(device: int) -> bool:
    """Whether the kernels compile for a card: it has bf16 products, and torch's compiler is at hand."""
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    probe = Layer(8, 32, 32, 5, 3, 2, 4)
    try:
        _kernel(arrange_launch(probe, False), device)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:  # another torch, no NVRTC
        warnings.warn(f"Convolutions go through plain PyTorch: compiling their kernels failed ({error}).", stacklevel=2)
        return False
    return True


def supported(images: Tensor, architecture: Architecture) -> bool:
    """Whether the kernels can take images (R, B, C, H, W)."""
    if not images.is_cuda or images.dtype != torch.bfloat16 or images.shape[3] != images.shape[4]:
        return False
    layers = layers_of(architecture, images.shape[2], images.shape[3])
    device = images.device.index
    return layers is not None and _compiles(device) and all(layer_supported(layer, _limit(device)) for layer in layers)


def _start(launch: CudaLaunch, grid: tuple[int, int, int], arguments: list[Any]) -> None:
    device = arguments[0].device.index
    _enter(device)
    kernel = _kernel(launch, device)
    kernel(grid=grid, block=(launch.threads, 1, 1), args=arguments, shared_mem=launch.shared)


# --------------------------------------------------------------------------------- forward and backward


def _arranged(layer: Layer, filters: Tensor, turned: bool = False) -> Tensor:
    count = fragment_words(layer.turned() if turned else layer)
    fragments = torch.empty((len(filters), count), dtype=torch.int32, device=filters.device)
    launch = arrange_launch(layer, turned)
    _start(launch, (ceil_div(count, launch.threads), len(filters), 1), [filters, fragments, count])
    return fragments


@dataclass(frozen=True)
class Passed:
    """What the backward pass needs of a layer: its input, its output, and places in the pool's windows."""

    x: Tensor
    y: Tensor
    places: Tensor


def forward(layer: Layer, x: Tensor, filters: Tensor, bias: Tensor) -> Passed:
    """x (R, B, side, side, maps) through convolution, bias, ReLU and pool."""
    replicas, batch = x.shape[:2]
    shape = (layer.pooled, layer.pooled, layer.outputs) if layer.pool else (layer.outputs, layer.side, layer.side)
    y = torch.empty((replicas, batch, *shape), dtype=torch.bfloat16, device=x.device)
    places = torch.empty(y.shape if layer.pool else (0,), dtype=torch.uint8, device=x.device)
    launch = forward_launch(layer, _limit(x.device.index))
    rest = [_arranged(layer, filters), bias, y, places, batch]
    _start(launch, (launch.blocks(batch), replicas, launch.parts), [x, *rest] if layer.first else [x, x, *rest])
    return Passed(x, y, places)


def backward(layer: Layer, passed: Passed, gradient: Tensor, filters: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients by the input (none by images), and by filters and bias in float32."""
    replicas, batch = passed.x.shape[:2]
    side_input = passed.places if layer.pool else passed.y
    groups = ceil_div(batch, layer.group)
    count = partial_numbers(layer)
    device = gradient.device
    partial = torch.empty((replicas, groups, count), device=device)
    grad_filters, grad_bias = torch.empty_like(filters), torch.empty((replicas, layer.outputs), device=device)
    limit = _limit(device.index)
    launch = filter_launch(layer, limit)
    grid = (groups, replicas, launch.parts)
    if layer.first:
        _start(launch, grid, [passed.x, gradient, side_input, partial, batch])
    else:
        bias_partial = torch.empty((replicas, groups, layer.outputs), device=device)
        _start(launch, grid, [passed.x, gradient, side_input, partial, bias_partial, batch])
        grad_bias = bias_partial.sum(1)
    adding = reduce_launch(layer)
    where = (ceil_div(count, adding.threads), replicas, 1)
    _start(adding, where, [partial, grad_filters, grad_bias, groups, count])
    if layer.first:
        return None, grad_filters, grad_bias
    grad_x = torch.empty_like(passed.x)
    launch = input_launch(layer, limit)
    turned = _arranged(layer, filters, turned=True)
    _start(
        launch,
        (launch.blocks(batch), replicas, launch.parts),
        [gradient, side_input, turned, grad_bias, grad_x, passed.places, batch],
    )
    return grad_x, grad_filters, grad_bias


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: Sequence[Layer], x: Tensor, *parameters: Tensor) -> Tensor:
        filters, biases = parameters[::2], parameters[1::2]
        passed = []
        for layer, weight, bias in zip(layers, filters, biases, strict=True):
            passed.append(forward(layer, x, weight, bias))
            x = passed[-1].y
        ctx.layers = layers
        ctx.save_for_backward(*filters, *(t for p in passed for t in (p.x, p.y, p.places)))
        return x.flatten(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.layers)
        filters, saved = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        found: list[Tensor | None] = []
        back: Tensor | None = gradient.contiguous()
        for number in reversed(range(count)):
            assert back is not None
            passed = Passed(*saved[3 * number : 3 * number + 3])
            back, grad_filters, grad_bias = backward(ctx.layers[number], passed, back, filters[number])
            found = [grad_filters, grad_bias, *found]
        return None, None, *found


def features(images: Tensor, parameters: dict[str, Tensor], architecture: Architecture) -> Tensor:
    """`convolutions.features` of `supported` images: (R, B, C, H, W) in bf16 to (R, B, maps * side * side)."""
    layers = layers_of(architecture, images.shape[2], images.shape[3])
    assert layers is not None
    values = [parameters[f"conv{n}.{kind}"] for n in range(len(layers)) for kind in ("weight", "bias")]
    x = images.permute(0, 1, 3, 4, 2).contiguous()
    result: Tensor = _Features.apply(layers, x, *values)  # type: ignore[no-untyped-call]
    return result
