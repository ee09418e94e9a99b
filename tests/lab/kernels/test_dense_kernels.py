"""Kernels of the dense layer: interpreted on the CPU everywhere, and on a GPU, against their plain-torch twins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dropconnectpp.lab.kernels import dense
from dropconnectpp.lab.philox import Stream

STREAM = Stream(7, "mask:weight")

# Launched by hand: the package takes CUDA tensors alone. Outputs lie in poisoned buffers, so that a write outside
# their range shows too.
INTERPRETED = """
import torch
from dropconnectpp import _polynomials as polynomials
from dropconnectpp import functional
from dropconnectpp.lab.kernels import dense
from dropconnectpp.lab.kernels.dense_triton import mask_kernel, score_kernel
from dropconnectpp.lab.philox import Stream

torch.manual_seed(0)
replicas, step, stream = torch.tensor([4, 0, 17]), torch.tensor(12), Stream(7, "mask:weight")

def masks(count, block, constant):
    keep = torch.rand(3, 1).expand(3, count) if constant else torch.rand(3, count)
    room = torch.full((5, count), 77, dtype=torch.uint8)
    mask_kernel[(-(-count // (4 * block)), 3)](
        keep, room[1:], replicas, step, 2, stream.seed, count, keep.stride(0), 0 if constant else 1, BLOCK=block
    )
    assert torch.equal(room[1:4].bool(), stream.bernoulli(keep, replicas, step, 2)), (count, block, constant)
    assert (room[[0, 4]] == 77).all() and (room[1:4] <= 1).all()

def scores(count, block):
    logit, mask, coefficient = 4 * torch.randn(3, count), torch.rand(3, count) < 0.5, torch.randn(3)
    logit[0, 0], kl_scale = 0.0, torch.tensor([0.3, 0.0, 2.0])
    programs = -(-count // block)
    room, partial = torch.full((5, count), 77.0), torch.full((3, programs), 77.0)
    score_kernel[(programs, 3)](
        logit, mask.view(torch.uint8), coefficient, kl_scale, room[1:], partial, count, programs,
        polynomials.GRADIENT_POLYNOMIAL[torch.float32], BLOCK=block,
    )
    gradient, squared = dense.score_pass(logit.double(), mask, coefficient.double(), kl_scale.double())
    assert torch.allclose(room[1:4].double(), gradient, rtol=1e-5, atol=1e-6), (count, block)
    assert torch.allclose(partial.sum(1).double(), squared, rtol=1e-5)
    assert (room[[0, 4]] == 77.0).all()

for count, block in ((1, 4), (5, 4), (16, 4), (130, 8)):
    for flag in (False, True):
        masks(count, block, flag)
    scores(count, block)
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twins(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.parametrize("count", [64, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pass_in_chunks_is_the_whole_pass(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logit, mask = 4 * torch.randn(3, 2, count, dtype=dtype), torch.rand(3, 2, count) < 0.4
    logit[0, 0, :2] = torch.tensor([0.0, -40.0])
    coefficient, kl_scale = torch.randn(3, dtype=dtype), torch.rand(3, dtype=dtype)
    whole = dense.score_pass(logit, mask, coefficient, kl_scale)
    monkeypatch.setattr(dense, "CACHED", 256)
    chunks = dense.score_pass(logit, mask, coefficient, kl_scale)
    torch.testing.assert_close(chunks[0], whole[0], rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=1e-7)
    torch.testing.assert_close(chunks[1], whole[1], rtol=1e-6, atol=0)
    if count % 256 == 0:  # as a network's layers have it: no digit moves
        assert all(torch.equal(one, other) for one, other in zip(chunks, whole, strict=True))


def test_the_cpu_never_takes_a_kernel() -> None:
    assert not dense.supported(torch.zeros(3))
    keep = torch.full((2, 5), 0.5)
    replicas = torch.tensor([0, 1])
    assert torch.equal(dense.draw_masks(STREAM, keep, replicas, 3), STREAM.bernoulli(keep, replicas, 3))


# ---------------------------------------------------------------------------------------------- on a GPU

REPLICAS = [1, 3, 200]
COUNTS = [1, 7, 4096, 4 * 1024 + 1, 262_144]


@pytest.mark.gpu
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_masks_on_a_gpu_are_those_of_the_twin(replicas: int, count: int) -> None:
    numbers = torch.arange(replicas) * 5
    keep = torch.rand(replicas, count)
    for probability in (keep, keep[:, :1].expand(replicas, count)):
        wanted = STREAM.bernoulli(probability, numbers, 9, 1)
        on_device = probability.cuda() if probability is keep else keep[:, :1].cuda().expand(replicas, count)
        for _ in range(3):
            for step in (9, torch.tensor(9, device="cuda")):
                assert torch.equal(dense.draw_masks(STREAM, on_device, numbers.cuda(), step, 1).cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_scores_on_a_gpu_are_those_of_the_twin(replicas: int, count: int) -> None:
    logit, mask = 4 * torch.randn(replicas, count), torch.rand(replicas, count) < 0.5
    coefficient, kl_scale = torch.randn(replicas), torch.rand(replicas)
    wanted = dense.score_pass(logit.double(), mask, coefficient.double(), kl_scale.double())
    first = None
    for _ in range(3):
        found = dense.score_pass(logit.cuda(), mask.cuda(), coefficient.cuda(), kl_scale.cuda())
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=2e-5, atol=2e-6)
        first = found if first is None else first
        assert torch.equal(first[0], found[0]), "the same every time"
