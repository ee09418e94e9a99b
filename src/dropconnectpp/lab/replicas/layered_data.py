"""A data set on a device for networks given as layers: standardised once, since the networks never change it."""

from __future__ import annotations

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Normalisation, Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.data.normalisation import ChannelStatistics, channel_statistics, standardise
from dropconnectpp.lab.device import as_tensor
from dropconnectpp.lab.philox import Stream

PART = 4096
"""Images standardised at a time."""


class LayeredExamples:
    """What is trained on and what is evaluated on; images (N, H, W, C)."""

    def __init__(self, dataset: Dataset, protocol: Protocol, device: torch.device, dtype: torch.dtype) -> None:
        channels, side, width = dataset.shape
        if side != width:
            raise ProtocolError(f"images must be square, got {side} x {width}.")
        crop = protocol.normalisation.crop
        if 2 * crop >= side:
            raise ProtocolError(f"crop must leave something of images of {side} x {side}, got {crop}.")
        self.shape = channels, side - 2 * crop
        count, holdout = len(dataset.train), protocol.training.holdout
        if not 0 <= holdout < count:
            raise ProtocolError(f"holdout must be less than the {count} training examples, got {holdout}.")
        self.rows, held = torch.arange(count, device=device), None
        if holdout and protocol.training.holdout_kind == "last":
            self.rows, held = self.rows[:-holdout], self.rows[-holdout:]
        elif holdout:
            # The same examples for all replicas and methods, which are compared on them.
            shuffled = Stream(protocol.root_seed, "holdout").permutation(torch.zeros_like(self.rows[:1]), 0, count)[0]
            self.rows, held = shuffled[holdout:], shuffled[:holdout]
        images = cropped(as_tensor(dataset.train.images, device), crop)
        self.labels = as_tensor(dataset.train.labels, device)
        self.statistics: ChannelStatistics | None = None
        if protocol.normalisation.scope == "data-set":
            self.statistics = channel_statistics(images[self.rows])
        self.normalisation, self.dtype = protocol.normalisation, dtype
        self.images = self.standardise(images)
        self._converted = {dtype: self.images}
        if held is None:
            self.test_images = self.standardise(cropped(as_tensor(dataset.test.images, device), crop))
            self.test_labels = as_tensor(dataset.test.labels, device)
        else:
            self.test_images, self.test_labels = self.images[held], self.labels[held]

    def standardise(self, images: Tensor) -> Tensor:
        """Images as the networks see them, (N, C, H, W) -> (N, H, W, C)."""
        parts = [standardised(part, self.normalisation, self.statistics, self.dtype) for part in images.split(PART)]
        return torch.cat(parts).permute(0, 2, 3, 1).contiguous()

    def _in(self, dtype: torch.dtype) -> Tensor:
        """The images in a precision: converted once, since a step that converts its own reads three times as much."""
        if dtype not in self._converted:
            self._converted[dtype] = self.images.to(dtype)
        return self._converted[dtype]

    def gather(self, chosen: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Images (R, B, H, W, C) and labels (R, B) of each replica's batch, by their places in `rows`."""
        places = self.rows[chosen.flatten()]
        images = self._in(dtype).index_select(0, places)
        return images.unflatten(0, chosen.shape), self.labels[places].view(chosen.shape)


def cropped(images: Tensor, crop: int) -> Tensor:
    """Images without some pixels at each edge."""
    return images[..., crop : images.shape[-2] - crop, crop : images.shape[-1] - crop].contiguous()


def standardised(
    images: Tensor, normalisation: Normalisation, statistics: ChannelStatistics | None, dtype: torch.dtype
) -> Tensor:
    """`normalisation.standardise`, and by given numbers."""
    if normalisation.scope == "given":
        return (images.to(dtype) / 255.0 - normalisation.mean) / normalisation.standard_deviation
    return standardise(images, normalisation, statistics=statistics, dtype=dtype)
