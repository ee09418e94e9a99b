"""The paper's only preprocessing, "local zero mean and unit variance", done on the device batch by batch.

Shapes: any leading axes (replicas, batch), then C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from dropconnectpp.lab.config.protocol import Normalisation
from dropconnectpp.lab.data.dataset import DataError

PAPER = Normalisation()


@dataclass(frozen=True)
class ChannelStatistics:
    """Mean and standard deviation of each channel over a training set, in grey levels (0 to 255)."""

    mean: tuple[float, ...]
    standard_deviation: tuple[float, ...]


def channel_statistics(images: Tensor, batch_size: int = 4096) -> ChannelStatistics:  # (N, C, H, W) of uint8
    """Each channel's mean and standard deviation. The sums are integers, so the batch size does not change them.

    >>> channel_statistics(torch.tensor([[[[0, 10]]]], dtype=torch.uint8))
    ChannelStatistics(mean=(5.0,), standard_deviation=(5.0,))
    """
    total = torch.zeros(images.shape[1], dtype=torch.int64, device=images.device)
    squares = torch.zeros_like(total)
    for batch in images.split(batch_size):
        values = batch.to(torch.int64)
        total += values.sum(dim=(0, 2, 3))
        squares += values.square().sum(dim=(0, 2, 3))
    count = images.numel() // images.shape[1]
    mean = total.double() / count
    variance = squares.double() / count - mean.square()
    return ChannelStatistics(tuple(mean.tolist()), tuple(variance.clamp(min=0).sqrt().tolist()))


def standardise(
    images: Tensor,  # (..., C, H, W) of uint8
    normalisation: Normalisation = PAPER,
    *,
    statistics: ChannelStatistics | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # (..., C, H, W)
    """Images with zero mean and unit variance. A constant image becomes zeros.

    >>> standardise(torch.tensor([[[0, 2]]], dtype=torch.uint8))
    tensor([[[-1.,  1.]]])
    """
    values = images.to(dtype)
    if normalisation.local_contrast:
        values = _local_contrast(values, normalisation.window)
    if normalisation.scope != "data-set":
        axes = (-2, -1) if normalisation.scope == "channel" else (-3, -2, -1)
        return _unit(values, values.mean(axes, keepdim=True), axes)
    if normalisation.local_contrast:
        return values  # each neighbourhood of every image already has zero mean and unit spread
    if statistics is None:
        raise DataError("scope 'data-set' needs statistics: pass channel_statistics of the training images.")
    mean, deviation = (
        # Not torch.tensor: a copy from the host could not be part of a CUDA graph.
        torch.stack([torch.full((1, 1), n, dtype=dtype, device=images.device) for n in numbers])
        for numbers in (statistics.mean, statistics.standard_deviation)
    )
    return (values - mean) / torch.where(deviation > 0, deviation, 1.0)


def _unit(values: Tensor, mean: Tensor, axes: tuple[int, ...]) -> Tensor:
    centred = values - mean
    deviation = centred.square().mean(axes, keepdim=True).sqrt()
    # Half a grey level in one pixel of 3 x 32 x 32 gives 0.009; below 1e-3 there is only rounding.
    return centred / torch.where(deviation > 1e-3, deviation, torch.inf)


def _local_contrast(values: Tensor, window: int) -> Tensor:
    """Subtractive, then divisive normalisation over a square window and all channels.

    A spread below the image's own mean spread is raised to it, so that flat regions stay flat.
    """
    flat = values.reshape(-1, *values.shape[-3:])
    centred = flat - _neighbourhood(flat, window)
    spread = _neighbourhood(centred.square(), window).sqrt()
    floor = spread.mean(dim=(1, 2, 3), keepdim=True).clamp(min=1.0)  # a grey level
    return (centred / torch.maximum(spread, floor)).reshape(values.shape)


def _neighbourhood(values: Tensor, window: int) -> Tensor:  # (N, C, H, W) -> (N, 1, H, W)
    mean = values.mean(1, keepdim=True)
    return avg_pool2d(mean, window, stride=1, padding=window // 2, count_include_pad=False)
