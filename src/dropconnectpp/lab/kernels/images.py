"""The images of a step, gathered, standardised and cast for a stack of replicas: one launch on a GPU with Triton.

Elsewhere, and for what the kernel does not support, the twin runs, with the same result to rounding. Shapes: N
images, R replicas, B batch, C channels, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Normalisation
from dropconnectpp.lab.data.normalisation import ChannelStatistics, standardise
from dropconnectpp.lab.kernels.support import has_triton

BLOCK = 1024
"""Values of an image that a program takes at a time."""
MOST_CHANNELS = 16
"""The most channels: the statistics of each are arguments of the kernel."""


def supported(images: Tensor, chosen: Tensor, normalisation: Normalisation, dtype: torch.dtype) -> bool:
    """Whether the kernel can take images: standardised each alone or by their set's statistics, in at most float32."""
    return (
        images.is_cuda
        and chosen.is_cuda
        and images.dtype == torch.uint8
        and images.is_contiguous()
        and dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not normalisation.local_contrast
        and (normalisation.scope == "image" or (normalisation.scope == "data-set" and images.shape[1] <= MOST_CHANNELS))
        and has_triton()
    )


def gather_standardised(
    images: Tensor,  # (N, C, H, W) of uint8
    chosen: Tensor,  # (R, B) of int64
    normalisation: Normalisation,
    statistics: ChannelStatistics | None,
    dtype: torch.dtype,
) -> Tensor:  # (R, B, C, H, W), channels last in memory
    """`standardise` of the chosen images: in float32 at least, then cast; they lie in memory as (R, B, H, W, C).

    >>> images = torch.tensor([[[[7, 7]]], [[[0, 2]]]], dtype=torch.uint8)
    >>> gather_standardised(images, torch.tensor([[1, 0]]), Normalisation(), None, torch.float32).flatten(1)
    tensor([[-1.,  1.,  0.,  0.]])
    """
    known = normalisation.scope != "data-set" or statistics is not None  # else the twin says what is missing
    if known and supported(images, chosen, normalisation, dtype):
        return _gather_by_kernel(images, chosen, normalisation, statistics, dtype)
    exact = torch.promote_types(dtype, torch.float32)
    flat = standardise(images[chosen.flatten()], normalisation, statistics=statistics, dtype=exact)
    laid: Tensor = flat.to(dtype, memory_format=torch.channels_last).unflatten(0, chosen.shape)
    return laid


def _gather_by_kernel(
    images: Tensor,
    chosen: Tensor,
    normalisation: Normalisation,
    statistics: ChannelStatistics | None,
    dtype: torch.dtype,
) -> Tensor:
    from dropconnectpp.lab.kernels.images_triton import image_kernel

    _, channels, height, width = images.shape
    y = torch.empty((*chosen.shape, height, width, channels), dtype=dtype, device=images.device)
    means, deviations = channel_arguments(channels, normalisation, statistics)
    image_kernel[(chosen.numel(),)](
        images,
        chosen.contiguous(),
        y,
        means,
        deviations,
        OWN=normalisation.scope == "image",
        C=channels,
        PIXELS=height * width,
        BLOCK=BLOCK,
    )
    return y.permute(0, 1, 4, 2, 3)


def channel_arguments(
    channels: int, normalisation: Normalisation, statistics: ChannelStatistics | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and divisor of each channel, as the kernel takes them; a single number stands for what it does not use."""
    if normalisation.scope == "image" or statistics is None:
        return (0.0,), (1.0,)
    assert len(statistics.mean) == channels
    return statistics.mean, tuple(d if d > 0 else 1.0 for d in statistics.standard_deviation)
