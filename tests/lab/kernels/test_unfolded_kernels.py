"""Convolutions as products over windows: against torch's own, and the kernels, interpreted, against their twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import conv2d

from dropconnectpp.lab.kernels import unfolded

INTERPRETED = """
import torch
from dropconnectpp.lab.kernels import unfolded
from dropconnectpp.lab.kernels.unfolded_triton import fold_kernel, unfold_kernel

torch.manual_seed(0)
for maps, side, size, stride, padding in ((1, 7, 5, 1, 0), (3, 6, 3, 2, 1), (2, 5, 3, 1, 2)):
    x = torch.randn(2, 3, side, side, maps)
    right = unfolded.unfold(x, size, stride, padding)
    places = unfolded.places_of(side, size, stride, padding)
    filled = right.shape[2]
    lanes, total = 1 << (filled - 1).bit_length(), 6 * places**2
    sizes = dict(MAPS=maps, SIZE=size, STRIDE=stride, PADDING=padding, FILLED=filled)
    found = torch.full_like(right, 9.0)
    unfold_kernel[(-(-total // 4),)](x, found, total, side, side, places, places, LANES=lanes, BLOCK=4, **sizes)
    assert torch.equal(found, right)
    y, back = torch.randn_like(right), torch.full_like(x, 9.0)
    fold_kernel[(-(-side * side * maps // 16), 6)](y, back, side, side, places, places, BLOCK=16, **sizes)
    torch.testing.assert_close(back, unfolded.fold(y, tuple(x.shape), size, stride, padding))
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twins(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.parametrize(("size", "stride", "padding"), [(5, 1, 0), (3, 2, 1)])
def test_a_convolution_and_its_gradients_are_torchs(size: int, stride: int, padding: int) -> None:
    x = torch.randn(2, 3, 8, 8, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, size * size * 4, 5, dtype=torch.float64, requires_grad=True)
    found = unfolded.convolve(x, weight, size, stride, padding)
    filters = weight.view(2, size, size, 4, 5).permute(0, 4, 3, 1, 2)
    right = torch.stack(
        [conv2d(a.permute(0, 3, 1, 2), f, None, stride, padding).permute(0, 2, 3, 1) for a, f in zip(x, filters)]  # noqa: B905
    )
    torch.testing.assert_close(found, right)
    up = torch.randn_like(right)
    ours, theirs = (torch.autograd.grad(one, (x, weight), up) for one in (found, right))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
