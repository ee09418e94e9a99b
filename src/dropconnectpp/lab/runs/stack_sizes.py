"""How many networks train in one stack: as many as the memory holds, and few enough that every worker has some."""

from __future__ import annotations

import math

from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas import evaluation, layered_evaluation
from dropconnectpp.lab.replicas.layered_front import fitting_front
from dropconnectpp.lab.replicas.network import Shape

CPU_GROUP = 8
"""Replicas of a stack on a CPU, where more at once gain nothing."""
GPU_GROUP = 64
LAYERED_GROUP = 200
MEMORY_SHARE = 0.8
"""Of the free memory of a device, what a stack may take."""


def fair_share(left: int, workers: int, most: int) -> int:
    """The size of the next stack: all rounds that are left are full, and all workers end about together.

    Args:
        left: networks that are not done.
        workers: how many work side by side.
        most: what a stack may have.

    >>> [fair_share(left, 8, 64) for left in (1000, 512, 100, 9, 1)]
    [63, 64, 13, 2, 1]
    """
    if workers <= 1:
        return most
    rounds = -(-left // (workers * most))
    return max(1, min(most, -(-left // (workers * max(rounds, 1)))))


def bytes_of(protocol: Protocol, dataset: Dataset) -> int:
    """Roughly what one replica of a stack needs on a GPU, training or being evaluated."""
    channels, side, classes, batch = *dataset.shape[:2], len(dataset.classes), protocol.training.batch_size
    if not protocol.architecture.layered:
        return bytes_per_replica(Shape(protocol.architecture, channels, side, classes), batch)
    given = protocol.architecture.shape(channels, side - 2 * protocol.normalisation.crop, classes)
    layers, images = given.weight_layers(), max(batch, layered_evaluation.CHUNK)
    if fitting_front(given) is not None and protocol.precision == "mixed":
        # Only pooled maps go to memory: each layer's input, its gradient, and what the kernels keep of it.
        maps = sum(one.inputs * (one.side_in**2 if one.convolution else 1) + 2 * one.units for one in layers)
        return 4 * (12 * sum(one.weights for one in layers) + 4 * images * maps) + 8 * len(dataset.train)
    # Windows, maps before and after a pool, and what backward makes of them.
    maps = sum(one.side_out**2 * (3 * one.fan_in * one.convolution + 4 * one.units) for one in layers)
    return 4 * (12 * sum(one.weights for one in layers) + images * maps) + 8 * len(dataset.train)


def bytes_per_replica(shape: Shape, batch: int) -> int:
    """Roughly what one replica of a stack needs on a GPU, training or being evaluated."""
    architecture = shape.architecture
    weights = sum(math.prod(size) for size in shape.parameters().values())
    maps, side, channels, windows = 0, shape.side, shape.channels, 0
    for count, after in zip(architecture.maps, architecture.sides(shape.side), strict=True):
        maps += count * (3 * side**2 + 2 * after**2)
        windows = max(windows, (channels + 3) // 4 * 4 * architecture.filter_size**2 * side**2)
        side, channels = after, count
    images = max(batch, evaluation.CHUNK)
    return 4 * 10 * weights + 2 * images * (maps + windows) + 4 * images * 3 * shape.dense[1]
