"""Standardised images: zero mean, unit variance, over what was asked, on any device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dropconnectpp.lab import data
from dropconnectpp.lab.config.protocol import Normalisation
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.normalisation import ChannelStatistics, channel_statistics, standardise


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (6, 2, 32, 32), dtype=torch.uint8)


def test_each_image_has_zero_mean_and_unit_variance_as_a_whole(images):
    values = standardise(images, dtype=torch.float64)
    oracle = images.numpy().astype(np.float64)
    axes = (1, 2, 3)
    oracle = (oracle - oracle.mean(axes, keepdims=True)) / oracle.std(axes, keepdims=True)
    assert np.allclose(values.numpy(), oracle, atol=1e-12)
    assert not torch.allclose(values.mean((-2, -1)), torch.zeros((), dtype=torch.float64), atol=1e-3), "cameras differ"


def test_a_stereo_pair_can_be_standardised_per_camera(images):
    values = standardise(images, Normalisation(scope="channel"), dtype=torch.float64)
    assert torch.allclose(values.mean((-2, -1)), torch.zeros((), dtype=torch.float64), atol=1e-12)
    assert torch.allclose(values.var((-2, -1), correction=0), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("scope", ["image", "channel"])
@pytest.mark.parametrize("level", [0, 7, 255])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_image_becomes_zero(scope, level, dtype):
    values = standardise(torch.full((1, 3, 32, 32), level, dtype=torch.uint8), Normalisation(scope=scope), dtype=dtype)
    assert not values.any()


def test_the_faintest_image_is_not_taken_for_a_constant():
    faint = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    faint[0, 0, 0, 0] = 254
    assert standardise(faint, dtype=torch.float32).square().mean().item() == pytest.approx(1.0, abs=1e-3)


def test_leading_axes_and_batches_make_no_difference(images):
    stack = images.reshape(2, 3, 2, 32, 32)
    assert torch.equal(standardise(stack).reshape(images.shape), standardise(images))
    assert torch.equal(torch.cat([standardise(batch) for batch in images.split(2)]), standardise(images))


def test_statistics_of_the_training_set(images):
    oracle = images.numpy().astype(np.float64)
    found = channel_statistics(images, batch_size=4)
    assert np.allclose(found.mean, oracle.mean((0, 2, 3)))
    assert np.allclose(found.standard_deviation, oracle.std((0, 2, 3)))
    assert found == channel_statistics(images, batch_size=1)
    values = standardise(images, Normalisation(scope="data-set"), statistics=found, dtype=torch.float64)
    assert torch.allclose(values.mean((0, 2, 3)), torch.zeros((), dtype=torch.float64), atol=1e-12)
    assert torch.allclose(values.var((0, 2, 3), correction=0), torch.ones((), dtype=torch.float64))


def test_a_constant_channel_of_the_training_set_is_only_centred(images):
    flat = ChannelStatistics(mean=(5.0, 5.0), standard_deviation=(0.0, 2.0))
    values = standardise(images, Normalisation(scope="data-set"), statistics=flat)
    assert torch.equal(values[:, 0], images[:, 0].float() - 5)


def test_statistics_must_be_given(images):
    with pytest.raises(data.DataError, match="needs statistics"):
        standardise(images, Normalisation(scope="data-set"))


def test_local_contrast_against_a_slow_loop():
    images = torch.randint(0, 256, (2, 3, 9, 8), dtype=torch.uint8)
    window = 5
    values = standardise(
        images, Normalisation(local_contrast=True, window=window, scope="data-set"), dtype=torch.float64
    )

    def mean_around(image: np.ndarray, y: int, x: int) -> float:
        reach = window // 2
        return float(image[:, max(0, y - reach) : y + reach + 1, max(0, x - reach) : x + reach + 1].mean())

    for image, result in zip(images.numpy().astype(np.float64), values.numpy(), strict=True):
        height, width = image.shape[1:]
        grid = [(y, x) for y in range(height) for x in range(width)]
        centred = image - np.array([mean_around(image, y, x) for y, x in grid]).reshape(1, height, width)
        spread = np.sqrt(np.array([mean_around(centred**2, y, x) for y, x in grid]).reshape(1, height, width))
        assert np.allclose(result, centred / np.maximum(spread, max(spread.mean(), 1.0)), atol=1e-12)


def test_local_contrast_is_still_standardised(images):
    values = standardise(images, Normalisation(local_contrast=True), dtype=torch.float64)
    assert torch.allclose(values.var((1, 2, 3), correction=0), torch.ones((), dtype=torch.float64))
    assert not standardise(torch.full((1, 3, 32, 32), 9, dtype=torch.uint8), Normalisation(local_contrast=True)).any()


@pytest.mark.parametrize(
    ("settings", "message"), [({"scope": "batch"}, "scope must be one of"), ({"window": 4}, "odd")]
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ProtocolError, match=message):
        Normalisation(**settings)
