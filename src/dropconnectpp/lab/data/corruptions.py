"""Corrupted test images, made on the device: the same on every machine, whatever the experiment.

They follow CIFAR-10-C, Hendrycks & Dietterich (2019), as `lab.config.corruptions` lists them. The noise is drawn from
streams of its own, so the images are equal to CIFAR-10-C's in distribution, not in every pixel. Arithmetic is in
float64: rounding to grey levels then falls alike on a CPU and a GPU. Shapes: N images, C channels, S side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dropconnectpp.lab.config.corruptions import SOFTENING, STRENGTHS, CorruptionName
from dropconnectpp.lab.philox import Stream

AT_ONCE = 1000
"""Images that are corrupted at a time."""
DISK = 3
"""Pixels from the middle of the blur's kernel to its edge."""


def corrupt(images: Tensor, name: CorruptionName, severity: int) -> Tensor:  # (N, C, S, S) of uint8, and back
    """Images under one corruption; the k-th image has the same noise in any company.

    >>> grey = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
    >>> corrupt(grey, "brightness", 2).unique()
    tensor([125], dtype=torch.uint8)
    """
    strength = STRENGTHS[name][severity - 1]
    found = torch.empty_like(images)
    for first in range(0, len(images), AT_ONCE):
        part = images[first : first + AT_ONCE]
        numbers = torch.arange(first, first + len(part), device=images.device)
        found[first : first + AT_ONCE] = MAKERS[name](part, strength, severity, numbers)
    return found


def _levels(values: Tensor) -> Tensor:
    """Values from 0 to 1 as grey levels, cut off as CIFAR-10-C does, not rounded."""
    # What is a whole grey level but for the last bit counts as one.
    return (values.clamp(0.0, 1.0) * 255.0 + 1e-6).floor().to(torch.uint8)


def _unit(images: Tensor) -> Tensor:
    return images.double() / 255.0


def _gaussian_noise(images: Tensor, strength: float, severity: int, numbers: Tensor) -> Tensor:
    stream = Stream(0, "corruption:gaussian_noise")
    noise = stream.normal(numbers, severity, images[0].numel(), dtype=torch.float64)
    return _levels(_unit(images) + strength * noise.view(images.shape))


def _impulse_noise(images: Tensor, strength: float, severity: int, numbers: Tensor) -> Tensor:
    stream = Stream(0, "corruption:impulse_noise")
    noise = stream.uniform(numbers, severity, images[0].numel(), dtype=torch.float64).view(images.shape)
    black, white = noise < 0.5 * strength, noise >= 1.0 - 0.5 * strength
    return torch.where(black, 0, torch.where(white, 255, images))


def _defocus_blur(images: Tensor, strength: float, severity: int, numbers: Tensor) -> Tensor:
    kernel, side = disk(strength, SOFTENING[severity - 1]).tolist(), images.shape[-1]
    wide = F.pad(_unit(images), (DISK,) * 4, mode="reflect")
    blurred = torch.zeros(images.shape, dtype=torch.float64, device=images.device)
    for y, row in enumerate(kernel):  # most of them are zero: faster than a convolution in float64
        for x, weight in enumerate(row):
            if weight:
                blurred += weight * wide[..., y : y + side, x : x + side]
    return _levels(blurred)


def disk(radius: float, softening: float) -> Tensor:
    """A disk of pixels softened by a Gaussian over three: the kernel of the blur, with a sum of 1."""
    places = torch.arange(-DISK, DISK + 1, dtype=torch.float64)
    inside = ((places[:, None].square() + places.square()) <= radius**2).double()
    bell = torch.exp(-0.5 * (torch.arange(-1, 2, dtype=torch.float64) / softening).square())
    soft = bell[:, None] * bell / bell.sum().square()
    return F.conv2d((inside / inside.sum())[None, None], soft[None, None], padding=1)[0, 0]


def _contrast(images: Tensor, strength: float, severity: int, numbers: Tensor) -> Tensor:
    values = _unit(images)
    mean = values.mean((2, 3), keepdim=True)
    return _levels((values - mean) * strength + mean)


def _brightness(images: Tensor, strength: float, severity: int, numbers: Tensor) -> Tensor:
    """More of the value of HSV: at one hue and saturation all channels grow in proportion to the largest."""
    values = _unit(images)
    most = values.amax(1, keepdim=True)
    brighter = (most + strength).clamp(max=1.0)
    return _levels(torch.where(most > 0.0, values * (brighter / most.clamp_min(1e-9)), brighter))


def _pixelate(images: Tensor, strength: float, severity: int, numbers: Tensor) -> Tensor:
    side = images.shape[-1]
    small = max(1, int(side * strength))
    return _resized(_resized(images, small), side)


def _resized(images: Tensor, side: int) -> Tensor:
    """Each pixel the mean of the whole pixels that lie under it, columns first, rounded after each of the two."""
    for axis in (-1, -2):
        weights = box_weights(images.shape[axis], side).to(images.device)
        moved = images.double().movedim(axis, -1) @ weights.T
        images = (moved + 0.5 + 1e-6).floor().clamp(0, 255).to(torch.uint8).movedim(-1, axis)
    return images


def box_weights(before: int, after: int) -> Tensor:
    """What each of the pixels before counts for each after, (after, before): the box filter of image libraries."""
    scale = before / after
    reach = 0.5 * max(scale, 1.0)
    weights = torch.zeros(after, before, dtype=torch.float64)
    for place in range(after):
        middle = (place + 0.5) * scale
        for pixel in range(max(0, int(middle - reach + 0.5)), min(before, int(middle + reach + 0.5))):
            offset = (pixel - middle + 0.5) / max(scale, 1.0)
            weights[place, pixel] = float(-0.5 < offset <= 0.5)
    return weights / weights.sum(1, keepdim=True)


# ------------------------------------------------------------------------------------------------- JPEG

LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
"""Steps of quantisation at quality 50, of brightness: Annex K of the standard."""
CHROMA = ((17, 18, 24, 47), (18, 21, 26, 66), (24, 26, 56, 99), (47, 66, 99, 99))
"""Of colour: the corner; all others are 99."""
TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
BLOCK = 8


def _jpeg(images: Tensor, strength: float, severity: int, numbers: Tensor) -> Tensor:
    """What JPEG loses: colour at half the side, and quantised cosine coefficients. The rest of it loses nothing."""
    side, values = images.shape[-1], images.double()
    spare = -side % (2 * BLOCK)
    values = F.pad(values, (0, spare, 0, spare), mode="replicate")
    if values.shape[1] != 3:  # grey levels, or cameras: each channel as brightness
        return _rounded(_quantised(values, _steps(strength, "luma")))[..., :side, :side]
    matrix = torch.tensor(TO_YCC, dtype=torch.float64, device=images.device)
    ycc = torch.einsum("kc,nchw->nkhw", matrix, values)
    luma = _quantised(ycc[:, :1].round(), _steps(strength, "luma"))
    halved = F.avg_pool2d(ycc[:, 1:].round(), 2).round() + 128.0
    colour = _rounded(_quantised(halved, _steps(strength, "chroma"))).double() - 128.0
    colour = F.interpolate(colour, scale_factor=2, mode="bilinear", align_corners=False).round()
    decoded = torch.cat([_rounded(luma).double(), colour], 1)
    return _rounded(torch.einsum("kc,nchw->nkhw", matrix.inverse(), decoded))[..., :side, :side]


def _rounded(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


def _steps(quality: float, kind: str) -> Tensor:
    base = torch.full((BLOCK, BLOCK), 99.0, dtype=torch.float64)
    table = torch.tensor(LUMA if kind == "luma" else CHROMA, dtype=torch.float64)
    base[: len(table), : len(table)] = table
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return ((base * scale + 50) / 100).floor().clamp(1, 255)


def _quantised(planes: Tensor, steps: Tensor) -> Tensor:  # (N, C, S, S) of levels from 0 to 255
    """Planes after each block's cosine coefficients were rounded to whole steps."""
    waves = _cosines().to(planes.device)
    count, channels, side, width = planes.shape
    blocks = (planes - 128.0).view(count, channels, side // BLOCK, BLOCK, width // BLOCK, BLOCK).transpose(3, 4)
    quantum = steps.to(planes.device)
    coefficients = ((waves @ blocks @ waves.T) / quantum).round() * quantum
    found = (waves.T @ coefficients @ waves).transpose(3, 4)
    return found.reshape(planes.shape) + 128.0


def _cosines() -> Tensor:
    """The orthonormal cosine transform of a block's side."""
    place = torch.arange(BLOCK, dtype=torch.float64)
    waves = torch.cos((2 * place + 1) * place[:, None] * math.pi / (2 * BLOCK)) * math.sqrt(2 / BLOCK)
    waves[0] /= math.sqrt(2)
    return waves


MAKERS: Mapping[str, Callable[[Tensor, float, int, Tensor], Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": _defocus_blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "jpeg_compression": _jpeg,
    "pixelate": _pixelate,
}
