"""Kernels that draw uniform, normal and Gamma numbers: interpreted on the CPU, and on a GPU, against their twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dropconnectpp.lab.kernels import noise
from dropconnectpp.lab.philox import Stream

STREAM = Stream(7, "heads:weight")

# Launched by hand: the package takes CUDA tensors alone. Outputs lie in poisoned buffers, so that a write outside
# their range shows too.
INTERPRETED = """
import torch
from dropconnectpp.lab.kernels import noise
from dropconnectpp.lab.kernels.noise_triton import gamma_kernel, numbers_kernel
from dropconnectpp.lab.philox import Stream

torch.manual_seed(0)
replicas, step, stream = torch.tensor([4, 0, 17]), torch.tensor(12), Stream(7, "heads:weight")

for count, block in ((1, 4), (5, 4), (16, 4), (130, 8), (1000, 64)):
    grid, room = (-(-count // (4 * block)), 3), torch.full((5, count), 77.0)
    numbers_kernel[grid](room[1:], replicas, step, 2, stream.seed, count, NORMAL=False, BLOCK=block)
    assert torch.equal(room[1:4], stream.uniform(replicas, step, count, 2)), (count, block)
    assert (room[[0, 4]] == 77.0).all()
    room = torch.full((5, count), 77.0)
    numbers_kernel[grid](room[1:], replicas, step, 3, stream.seed, count, NORMAL=True, BLOCK=block)
    assert torch.allclose(room[1:4], stream.normal(replicas, step, count, 3), rtol=1e-5, atol=1e-6), (count, block)
    assert (room[[0, 4]] == 77.0).all()
    shape = 0.05 + 4 * torch.rand(3, count)
    tiny = torch.finfo(torch.float32).tiny
    for attempts in (1, 2, 8):  # the first fails for one in thirty
        noise.ATTEMPTS = attempts
        room = torch.full((5, count), 77.0)
        gamma_kernel[grid](shape, room[1:], replicas, step, stream.seed, count, tiny, ATTEMPTS=attempts, BLOCK=block)
        wanted = noise.draw_gamma(shape, stream, replicas, step)
        assert torch.allclose(room[1:4], wanted, rtol=2e-4, atol=1e-6), (count, block, attempts)
        assert (room[[0, 4]] == 77.0).all()
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twins(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_those_of_the_stream(dtype: torch.dtype) -> None:
    like, replicas = torch.zeros(2, 3, 5, dtype=dtype), torch.tensor([3, 1])
    drawn = noise.draw_uniform(STREAM, like, replicas, 9, 1)
    assert torch.equal(drawn, STREAM.uniform(replicas, 9, 15, 1, dtype=dtype).view(2, 3, 5))
    drawn = noise.draw_normal(STREAM, like, replicas, 9, 1)
    assert torch.equal(drawn, STREAM.normal(replicas, 9, 15, 1, dtype=dtype).view(2, 3, 5))


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 4097, 262_144])
@pytest.mark.parametrize("replicas", [1, 3, 60])
def test_numbers_on_a_gpu_are_those_of_the_twin(replicas: int, count: int) -> None:
    numbers, shape = torch.arange(replicas) * 5, 0.05 + 4 * torch.rand(replicas, count)
    checked = slice(max(replicas - 4, 0), replicas)  # the twin is slow
    uniform = noise.draw_uniform(STREAM, shape[checked], numbers[checked], 9, 1)
    normal = noise.draw_normal(STREAM, shape[checked].double(), numbers[checked], 9, 1)
    gamma = noise.draw_gamma(shape[checked].double(), STREAM, numbers[checked], 9)
    first = None
    for step in (9, torch.tensor(9, device="cuda"), 9):
        drawn = noise.draw_uniform(STREAM, shape.cuda(), numbers.cuda(), step, 1)
        assert torch.equal(drawn[checked].cpu(), uniform)
        drawn = noise.draw_normal(STREAM, shape.cuda(), numbers.cuda(), step, 1)
        torch.testing.assert_close(drawn[checked].cpu().double(), normal, rtol=1e-4, atol=1e-5)
        found = noise.draw_gamma(shape.cuda(), STREAM, numbers.cuda(), step)
        # Where a number is accepted within rounding of the limit, kernel and twin may decide differently.
        close = torch.isclose(found[checked].cpu().double(), gamma, rtol=1e-3, atol=1e-6)
        assert (~close).sum() <= 1e-5 * close.numel()
        first = found if first is None else first
        assert torch.equal(first, found), "the same every time"
