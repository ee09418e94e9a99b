"""Corrupted images against Pillow, colorsys and the definitions; the same in any company."""

from __future__ import annotations

import colorsys
import io

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor

from dropconnectpp.lab.config.corruptions import CORRUPTIONS, SEVERITIES, SOFTENING, STRENGTHS
from dropconnectpp.lab.data import corruptions
from dropconnectpp.lab.data.corruptions import corrupt, disk

SIDE = 32


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Smooth colours with an edge and some grain, as photographs have."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    made = []
    for _ in range(12):
        a, b, c = random.uniform(-1, 1, (3, 3, 1, 1))
        smooth = 120 + 90 * np.sin(4 * (a * x + b * y + c)) + 40 * (x + y > 1)
        made.append(np.clip(smooth + random.normal(0, 6, (3, SIDE, SIDE)), 0, 255))
    return torch.from_numpy(np.stack(made).astype(np.uint8))


def by_pillow(images: Tensor, name: str, strength: float) -> NDArray[np.uint8]:
    found = []
    for one in images.permute(0, 2, 3, 1).numpy():
        image = Image.fromarray(one)
        if name == "jpeg_compression":
            written = io.BytesIO()
            image.save(written, "JPEG", quality=int(strength))
            image = Image.open(written)
        else:
            small = (int(SIDE * strength),) * 2
            image = image.resize(small, Image.Resampling.BOX).resize((SIDE, SIDE), Image.Resampling.BOX)
        found.append(np.asarray(image))
    return np.stack(found).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_is_pillows(images: Tensor, severity: int) -> None:
    theirs = by_pillow(images, "pixelate", STRENGTHS["pixelate"][severity - 1])
    assert (corrupt(images, "pixelate", severity).numpy() == theirs).all()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_loses_what_pillows_jpeg_loses(images: Tensor, severity: int) -> None:
    theirs = by_pillow(images, "jpeg_compression", STRENGTHS["jpeg_compression"][severity - 1]).astype(float)
    ours = corrupt(images, "jpeg_compression", severity).numpy().astype(float)
    lost = np.abs(theirs - images.numpy()).mean()
    assert np.abs(ours - theirs).mean() < 0.2 * lost  # another rounding of the cosines moves a coefficient by a step
    assert np.abs(ours - images.numpy()).mean() == pytest.approx(lost, rel=0.02)


def test_brightness_raises_the_value_of_hsv(images: Tensor) -> None:
    found = corrupt(images, "brightness", 3).permute(0, 2, 3, 1).reshape(-1, 3)[:500].tolist()
    given = images.permute(0, 2, 3, 1).reshape(-1, 3)[:500].tolist()
    for before, after in zip(given, found, strict=True):
        h, s, v = colorsys.rgb_to_hsv(*(level / 255 for level in before))
        expected = [255 * level for level in colorsys.hsv_to_rgb(h, s, min(1.0, v + 0.15))]
        assert after == [int(level + 1e-6) for level in expected]
    assert corrupt(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), "brightness", 1).unique().tolist() == [12]


def test_contrast_shrinks_towards_each_channels_mean(images: Tensor) -> None:
    values = images.double() / 255
    mean = values.mean((2, 3), keepdim=True)
    expected = (((values - mean) * 0.4 + mean).clamp(0, 1) * 255 + 1e-6).floor()
    assert (corrupt(images, "contrast", 3).double() == expected).all()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_the_blur_is_a_convolution_with_a_softened_disk(images: Tensor, severity: int) -> None:
    kernel = disk(STRENGTHS["defocus_blur"][severity - 1], SOFTENING[severity - 1]).numpy()
    assert kernel.sum() == pytest.approx(1.0)
    assert (kernel == kernel.T).all()
    expected = ndimage.convolve(images[0, 1].numpy() / 255, kernel, mode="mirror")
    found = corrupt(images, "defocus_blur", severity)[0, 1].double().numpy()
    assert np.abs(found - 255 * expected + 0.5).max() <= 0.51
    assert (disk(1.5, 0.1) > 1e-9).sum() == 9  # three by three pixels, hardly softened


def test_noise_has_the_strength_it_should_have() -> None:
    grey = torch.full((40, 3, SIDE, SIDE), 128, dtype=torch.uint8)
    moved = corrupt(grey, "gaussian_noise", 2).double() - 128
    assert float(moved.std()) == pytest.approx(0.06 * 255, rel=0.02)
    assert float(moved.mean()) == pytest.approx(-0.5, abs=0.3)  # grey levels are cut off, not rounded
    salted = corrupt(grey, "impulse_noise", 5)
    assert float((salted == 255).double().mean()) == pytest.approx(0.035, rel=0.05)
    assert float((salted == 0).double().mean()) == pytest.approx(0.035, rel=0.05)
    assert salted.unique().tolist() == [0, 128, 255]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_is_corrupted_alike_in_any_company(images: Tensor, name, monkeypatch: pytest.MonkeyPatch) -> None:
    together = corrupt(images, name, 4)
    monkeypatch.setattr(corruptions, "AT_ONCE", 5)
    assert (corrupt(images, name, 4) == together).all()
    assert (corrupt(images[:3], name, 4) == together[:3]).all()
    assert not (together == images).all()
    assert together.dtype == torch.uint8


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_grey_images_and_other_sides_are_taken(name) -> None:
    grey = torch.arange(2 * 28 * 28).view(2, 1, 28, 28).remainder(251).to(torch.uint8)
    assert corrupt(grey, name, 5).shape == grey.shape
