"""Networks given as layers, with a replica axis: their parameters, where they start, and a pass.

Shapes: R replicas, B batch, H W sides, C maps, I inputs and O units of a layer with weights. Maps are (R, B, H, W, C),
weights (R, I, O), where a convolution's inputs are a window's rows, columns and maps, in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from dropconnectpp.lab.config.layers import Layer, LayeredShape, WeightLayer
from dropconnectpp.lab.kernels.unfolded import convolve
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.layered_front import Front

Affine = Callable[[int, Tensor, bool], Tensor]
"""What a layer with weights makes of its inputs, given its number and whether its bias is to be added."""


def start(layers: Sequence[WeightLayer], root_seed: int, replicas: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Fresh weights (R, I, O): Glorot's uniform start, the same for every method. Biases start at zero."""
    found = []
    for one in layers:
        limit = math.sqrt(6.0 / (one.fan_in + one.fan_out))
        noise = Stream(root_seed, f"start:{one.name}").uniform(replicas, 0, one.weights, dtype=torch.float64)
        found.append(((2.0 * noise - 1.0) * limit).to(dtype).view(len(replicas), one.fan_in, one.units))
    return found


def run_layers(shape: LayeredShape, images: Tensor, affine: Affine, biases: Sequence[Tensor], done: int = 0) -> Tensor:
    """Logits (R, B, K) of images (R, B, H, W, C), or of the maps that the first ``done`` layers made of them.

    A pool that follows a convolution comes before its bias: the result is the same, and there is less to add to.
    """
    x, number = images, sum(one.kind in ("convolution", "dense") for one in shape.layers[:done])
    for layer, after in _with_next(shape.layers[done:]):
        if layer.kind == "activation":
            x = torch.relu(x) if layer.function == "relu" else torch.tanh(x)
        elif layer.kind == "pool":
            x = pool(x, layer)
        else:
            waits = layer.kind == "convolution" and after is not None and after.kind == "pool"
            x = affine(number, x, not waits)
            if waits:
                assert after is not None
                bias = biases[number]
                x = pool(x, after) + bias[:, None, None, None, :].to(x.dtype)
            number += 1
    return x


def _with_next(layers: Sequence[Layer]) -> Iterator[tuple[Layer, Layer | None]]:
    """Each layer with the one after it, without the pools that belong to a convolution before them."""
    for place, layer in enumerate(layers):
        if layer.kind == "pool" and place and layers[place - 1].kind == "convolution":
            continue
        yield layer, layers[place + 1] if place + 1 < len(layers) else None


def pool(x: Tensor, layer: Layer) -> Tensor:
    """Max pooling of maps (R, B, H, W, C)."""
    flat = x.flatten(0, 1).permute(0, 3, 1, 2)  # channels last in memory, as torch calls it
    pooled = max_pool2d(flat, layer.size or 1, layer.step, ceil_mode=layer.ceil_mode)
    maps: Tensor = pooled.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
    return maps


def apply_weights(one: WeightLayer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A layer's map of x: (R, B, O), or maps (R, B, H, W, O) in the precision of x.

    On a CPU a replica's numbers do not depend on how many replicas there are: each has its own calls.
    """
    if one.convolution:
        return _convolved(one, x, weight, bias)
    x = x.flatten(2).to(weight.dtype)
    if x.device.type == "cpu":
        if bias is None:
            return torch.stack([own @ w for own, w in zip(x, weight, strict=True)])
        return torch.stack([torch.addmm(b, own, w) for own, w, b in zip(x, weight, bias, strict=True)])
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)


def _convolved(one: WeightLayer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    size, stride, padding = one.layer.size or 1, one.layer.step, one.layer.padding
    if x.device.type != "cpu":
        maps = convolve(x, weight, size, stride, padding)
        return maps if bias is None else maps + bias[:, None, None, None, :].to(maps.dtype)
    replicas = []
    for r, own in enumerate(x):
        filters = weight[r].view(size, size, one.inputs, one.units).permute(3, 2, 0, 1)
        maps = conv2d(own.permute(0, 3, 1, 2), filters, None if bias is None else bias[r], stride, padding)
        replicas.append(maps.permute(0, 2, 3, 1))
    return torch.stack(replicas)


def predict(
    shape: LayeredShape,
    images: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    front: Front | None = None,
) -> Tensor:  # (b, H, W, C) -> (R, b, K)
    """Logits of every replica for the same images, by given weights; the first layers through ``front``."""
    layers = shape.weight_layers()

    def affine(number: int, x: Tensor, with_bias: bool) -> Tensor:
        return apply_weights(layers[number], x, weights[number], biases[number] if with_bias else None)

    stacked = images.expand(len(biases[0]), *images.shape)
    if front is None:
        return run_layers(shape, stacked, affine, biases)
    return run_layers(shape, front.run(stacked, weights, biases), affine, biases, front.layers)
