"""Which corruptions of test images can be asked for, and how strong each is at five severities.

Names and strengths are those of CIFAR-10-C, Hendrycks & Dietterich (2019). What needs files of others, such as frost,
or an image library's own motion blur, is not among them. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

CorruptionName = Literal[
    "gaussian_noise", "impulse_noise", "defocus_blur", "contrast", "brightness", "jpeg_compression", "pixelate"
]
CORRUPTIONS: tuple[CorruptionName, ...] = get_args(CorruptionName)
SEVERITIES = (1, 2, 3, 4, 5)
STRENGTHS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
        "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
        "defocus_blur": (0.3, 0.4, 0.5, 1.0, 1.5),
        "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
        "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
        "jpeg_compression": (80, 65, 58, 50, 40),
        "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    }
)
"""The noise's standard deviation; the share of values set to black or white; the disk's radius; what contrast is
multiplied by; what is added to the brightest channel; the quality; the side's share that is kept."""
SOFTENING = (0.4, 0.5, 0.6, 0.2, 0.1)
"""Standard deviation of the Gaussian that softens the blur's disk."""
