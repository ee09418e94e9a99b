"""Kernels of the maps: interpreted on the CPU everywhere, and on a GPU, against their plain-torch twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import max_pool2d

from dropconnectpp.lab.config.protocol import pooled_side
from dropconnectpp.lab.kernels import maps

# Launched by hand: the package takes CUDA tensors alone. Outputs lie in poisoned buffers, so that a write outside
# their range shows too.
INTERPRETED = """
import torch
from dropconnectpp.lab.kernels import maps
from dropconnectpp.lab.kernels.maps_triton import pool_backward_kernel, pool_kernel, window_kernel

torch.manual_seed(0)
LAST = torch.channels_last

def pool(batch, channels, height, width, size, stride, block):
    x = torch.randint(-4, 5, (batch, channels, height, width)).float().contiguous(memory_format=LAST)
    x[0, 0, 0, 0] = float("nan")
    bias = torch.randint(-2, 3, (channels,)).float()
    leaf, bias_leaf = x.clone(memory_format=torch.preserve_format).requires_grad_(), bias.clone().requires_grad_()
    wanted = maps.pool_activation(leaf, bias_leaf, size, stride, True)
    rows, columns = wanted.shape[2:]
    places = batch * rows * columns
    y = torch.full((places + 2, channels), 77.0)
    where = torch.full((places + 2, channels), 99, dtype=torch.uint8)
    grid = (places, -(-channels // block))
    pool_kernel[grid](
        x, bias, y[1:], where[1:], height, width, rows, columns, channels, SIZE=size, STRIDE=stride, BLOCK=block
    )
    found = y[1:-1].view(batch, rows, columns, channels).permute(0, 3, 1, 2)
    assert torch.equal(found.nan_to_num(1e9), wanted.detach().nan_to_num(1e9))
    assert (y[[0, -1]] == 77.0).all() and (where[[0, -1]] == 99).all()
    gradient = torch.randint(-3, 4, wanted.shape).float().contiguous(memory_format=LAST)
    gradient[wanted.isnan()] = 0.0
    grad_x, grad_bias = torch.autograd.grad(wanted, [leaf, bias_leaf], gradient)
    pixels = batch * height * width
    back = torch.full((pixels + 2, channels), 77.0)
    pool_backward_kernel[(pixels, -(-channels // block))](
        gradient, where[1:], back[1:], height, width, rows, columns, channels, SIZE=size, STRIDE=stride, BLOCK=block
    )
    assert torch.equal(back[1:-1].view(batch, height, width, channels).permute(0, 3, 1, 2), grad_x)
    assert (back[[0, -1]] == 77.0).all()
    on = where[1:-1].view(batch, rows, columns, channels).permute(0, 3, 1, 2) != 255
    assert torch.equal((gradient * on).sum((0, 2, 3)), grad_bias)

def windows(batch, replicas, per, side, padding, height, width, block):
    x = torch.randn(batch, replicas * per, height, width).contiguous(memory_format=LAST)
    wanted = maps.windows(x, replicas, side, padding)
    count, filled = wanted.shape[1:]
    room = torch.full((replicas * count + 2, filled), 77.0)
    rows, columns = height + 2 * padding - side + 1, width + 2 * padding - side + 1
    lanes = 1 << (filled - 1).bit_length()
    window_kernel[(-(-count // block), replicas)](
        x, room[1:], count, height, width, rows, columns, replicas, padding,
        C=per, SIDE=side, PADDED=filled, WIDTH=lanes, BLOCK=block,
    )
    assert torch.equal(room[1:-1].view(wanted.shape), wanted)
    assert (room[[0, -1]] == 77.0).all()

pool(2, 6, 6, 6, 3, 2, 4)
pool(1, 3, 5, 4, 3, 2, 8)
pool(2, 5, 4, 7, 2, 2, 4)
pool(1, 2, 5, 5, 2, 3, 2)
windows(2, 2, 3, 3, 1, 4, 4, 4)
windows(1, 3, 1, 5, 2, 3, 4, 2)
windows(2, 1, 4, 3, 0, 4, 5, 8)
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twins(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


def test_windows_of_the_twin_hold_what_a_filter_sees() -> None:
    x = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    laid = maps.windows(x, replicas=2, side=3, padding=1)
    assert laid.shape == (2, 2 * 4 * 5, 32)
    window = laid[1, (1 * 4 + 2) * 5 + 3, :27].view(3, 3, 3)  # replica 1, example 1, row 2, column 3
    for i in range(3):
        for j in range(3):
            h, w = 2 + i - 1, 3 + j - 1
            expected = x[1, 3:6, h, w] if 0 <= h < 4 and 0 <= w < 5 else torch.zeros(3, dtype=torch.float64)
            assert torch.equal(window[i, j], expected)
    assert not laid[..., 27:].any()


@pytest.mark.parametrize("side", range(3, 12))
@pytest.mark.parametrize(("size", "stride"), [(3, 2), (2, 2), (2, 3), (3, 1), (3, 4)])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_the_side_of_a_pooled_map_is_torchs(side: int, size: int, stride: int, ceil_mode: bool) -> None:
    expected = max_pool2d(torch.zeros(1, 1, side, side), size, stride, ceil_mode=ceil_mode).shape[-1]
    assert pooled_side(side, size, stride, ceil_mode) == expected


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "channels", "side"), [(1, 32, 32), (7, 3 * 32, 32), (5, 50 * 32, 16), (3, 1000, 9)])
def test_pooling_on_a_gpu_is_its_twin(batch: int, channels: int, side: int) -> None:
    # Whole numbers: bf16 holds them and their sums, so that both must agree exactly, ties included.
    x = torch.randint(-8, 9, (batch, channels, side, side)).bfloat16().contiguous(memory_format=torch.channels_last)
    bias = torch.randint(-4, 5, (channels,)).float()
    wanted_leaves = [x.float().requires_grad_(), bias.clone().requires_grad_()]
    wanted = maps.pool_activation(*wanted_leaves, 3, 2, True)
    gradient = torch.randint(-4, 5, wanted.shape).float()
    expected = torch.autograd.grad(wanted, wanted_leaves, gradient)
    for _ in range(3):
        leaves = [x.cuda().requires_grad_(), bias.cuda().requires_grad_()]
        found = maps.pool_activation(*leaves, 3, 2, True)
        assert torch.equal(found.float().cpu(), wanted)
        grad_x, grad_bias = torch.autograd.grad(found, leaves, gradient.cuda().bfloat16())
        assert torch.equal(grad_x.float().cpu(), expected[0])
        assert torch.equal(grad_bias.cpu(), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("replicas", "per", "side"), [(1, 1, 32), (3, 2, 32), (50, 3, 32), (4, 32, 16), (7, 32, 9)])
def test_windows_on_a_gpu_are_those_of_the_twin(replicas: int, per: int, side: int) -> None:
    x = torch.randn(5, replicas * per, side, side).bfloat16().contiguous(memory_format=torch.channels_last)
    wanted = maps.windows(x, replicas, 5, 2)
    for _ in range(3):
        assert torch.equal(maps.windows(x.cuda(), replicas, 5, 2).cpu(), wanted)
