"""The running baseline: its twins against the estimators' formulas, its kernels, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from baseline_cases import SHAPES, make

from dropconnectpp.lab.kernels import baseline


@pytest.mark.parametrize("shape", SHAPES)
def test_the_twins_are_the_formulas(shape: tuple[int, int, int, int]) -> None:
    moments, rewards, squared = make(shape)
    moments, rewards, squared = moments.double(), rewards.double(), [piece.double() for piece in squared]
    varpi = moments[0] / moments[1]
    wanted = torch.where(moments[1] > 0, rewards - varpi, 0.0) / len(rewards)
    torch.testing.assert_close(baseline.weigh(rewards, moments), wanted)
    totals = squared[0].sum(2) + squared[1].sum(2)
    fresh = torch.stack([(rewards * totals).mean(0), totals.mean(0)])
    before = moments.clone()
    baseline.fold_in_(moments, rewards, squared, 0.9)
    torch.testing.assert_close(moments, 0.9 * before + 0.1 * fresh)
    again = before.clone()
    baseline.fold_in_(again, rewards, [torch.cat(squared, 2)], 0.9)
    torch.testing.assert_close(again, moments)


def test_the_cpu_never_takes_a_kernel() -> None:
    assert not baseline.supported(torch.zeros(1))


INTERPRETED = """
import torch
from baseline_cases import SHAPES, make
from dropconnectpp.lab.kernels import baseline

def run(shape, kernels, rows=slice(None)):
    baseline.supported = lambda *_: kernels
    moments, rewards, squared = make(shape)
    moments, rewards = moments[:, rows].contiguous(), rewards[:, rows].contiguous()
    weighed = baseline.weigh(rewards, moments)
    baseline.fold_in_(moments, rewards, [piece[:, rows].contiguous() for piece in squared], 0.9)
    return weighed, moments

for shape in SHAPES[:3]:
    found, alone = run(shape, True), run(shape, True, slice(0, 1))
    for one, other in zip(found, run(shape, False)):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7), shape
    assert all(torch.equal(one[:, :1], other) for one, other in zip(found, alone)), shape
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twins(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_the_baseline_on_a_gpu_is_its_twin(shape: tuple[int, int, int, int]) -> None:
    moments, rewards, squared = make(shape)
    wanted = baseline.weigh(rewards.double(), moments.double())
    wide = moments.double()
    baseline.fold_in_(wide, rewards.double(), [piece.double() for piece in squared], 0.9)
    first = None
    for _ in range(3):
        own, given = moments.cuda(), rewards.cuda()
        assert baseline.supported(own, given)
        weighed = baseline.weigh(given, own)
        torch.testing.assert_close(weighed.cpu().double(), wanted, rtol=1e-5, atol=1e-7)
        baseline.fold_in_(own, given, [piece.cuda() for piece in squared], 0.9)
        torch.testing.assert_close(own.cpu().double(), wide, rtol=1e-5, atol=1e-7)
        first = own if first is None else first
        assert torch.equal(first, own), "the same every time"
