"""The convolutions that a network given as layers begins with, through the kernels of the paper's network.

They take what those kernels take: odd filters of one size that keep a map's side, one kind of pool after all of them
but the last. Elsewhere, and on a CPU, `layered_network` runs the same layers one by one.
Shapes: R replicas, B batch, H W sides, C maps; maps are (R, B, H, W, C), weights (R, rows * columns * maps, O).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dropconnectpp.lab.config.layers import Layer, LayeredShape
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.kernels import convolution
from dropconnectpp.lab.kernels.convolution_launch import layers_of
from dropconnectpp.lab.replicas.convolutions import features


@dataclass(frozen=True)
class Front:
    """The first layers of a list, as convolutions of the paper's network."""

    architecture: Architecture
    layers: int
    """How many of the list they are."""

    @property
    def weight_layers(self) -> int:
        """How many of them have weights."""
        return len(self.architecture.maps)

    def run(self, images: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        """Maps after these layers, (R, B, H, W, C), of images (R, B, H, W, C)."""
        parameters = {}
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=False)):
            if number == self.weight_layers:
                break
            parameters[f"conv{number}.weight"] = self._filters(weight)
            parameters[f"conv{number}.bias"] = bias
        planar = features(images.permute(0, 1, 4, 2, 3), parameters, self.architecture)  # (R, B, C * H * W)
        side = self.architecture.sides(images.shape[2])[-1]
        maps: Tensor = planar.unflatten(2, (-1, side, side)).permute(0, 1, 3, 4, 2).contiguous()
        return maps

    def _filters(self, weight: Tensor) -> Tensor:  # (R, rows * columns * maps, O) -> (R, O, maps, rows, columns)
        size = self.architecture.filter_size
        filters: Tensor = weight.unflatten(1, (size, size, -1)).permute(0, 4, 3, 1, 2).contiguous()
        return filters


def front_of(layers: Sequence[Layer]) -> Front | None:
    """The convolutions at the start of a list, with their pools and ReLUs; None where they do not fit the kernels."""
    maps: list[Layer] = []
    pools: list[Layer | None] = []
    place = 0
    while place < len(layers) and layers[place].kind == "convolution":
        maps.append(layers[place])
        pooled = place + 1 < len(layers) and layers[place + 1].kind == "pool"
        pools.append(layers[place + 1] if pooled else None)
        place += 2 if pooled else 1
        if place >= len(layers) or layers[place] != Layer(kind="activation"):
            return None
        place += 1
    alike = {(one.size, one.step, one.padding) for one in maps}
    windows = {(one.size, one.step, one.ceil_mode) for one in pools if one is not None}
    if len(alike) != 1 or len(windows) > 1 or place == len(layers) or layers[place].kind != "dense":
        return None
    ((size, step, padding),) = alike
    if step != 1 or any(one is not None and one.padding for one in pools):
        return None
    pool_size, pool_stride, ceil_mode = windows.pop() if windows else (1, 1, True)
    architecture = Architecture(
        maps=tuple(one.units or 0 for one in maps),
        filter_size=size or 1,
        padding=padding,
        pool_size=pool_size or 1,
        pool_stride=pool_stride,
        pooled=tuple(one is not None for one in pools),
        ceil_mode=ceil_mode,
    )
    return Front(architecture, place)


def fitting_front(shape: LayeredShape) -> Front | None:
    """The front of a network, if the kernels take maps of its sizes; whether a device has them is another matter."""
    front = front_of(shape.layers)
    fits = front is not None and layers_of(front.architecture, shape.channels, shape.side) is not None
    return front if fits else None


def supported_front(shape: LayeredShape, device: torch.device, dtype: torch.dtype) -> Front | None:
    """The front of a network that the kernels take on a device, for images of a precision; None without one."""
    front = fitting_front(shape)
    if front is None or device.type != "cuda":
        return None
    images = torch.empty((1, 1, shape.channels, shape.side, shape.side), device=device, dtype=dtype)
    return front if convolution.supported(images, front.architecture) else None
