"""Steps whose masks the kernels draw and redraw, against steps that are given those masks; what kernels may touch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused_cases import (
    compare_bounds,
    compare_ends,
    compare_launches,
    compare_moments,
    compare_programs,
    compare_steps,
    many,
)

STEPS = """
import torch
from dropconnectpp.ops import gpu, gpu_gates
from fused_cases import FEW, compare_ends, compare_launches, compare_steps

gpu.WORDS, gpu.WIDE_WORDS, gpu_gates.WORDS = 16, 16, 16
for estimator, options in FEW:
    compare_steps(torch.device("cpu"), estimator, **options)
compare_launches(torch.device("cpu"))
compare_ends(torch.device("cpu"))
print("all well")
"""

NUMBERS = """
import torch
from dropconnectpp.ops import gpu, gpu_gates
from fused_cases import compare_bounds, compare_moments, compare_programs

cpu = torch.device("cpu")
gpu.WORDS, gpu.WIDE_WORDS, gpu_gates.WORDS = 16, 16, 16
for count in (1, 63, 64, 65, 200):
    compare_bounds(count, cpu)
for count in (1, 777):
    compare_programs(count, cpu)
gpu.WORDS = 4096
compare_moments(100_000, cpu)
print("all well")
"""


@pytest.mark.triton
def test_interpreted_steps_are_the_plain_steps_on_the_same_masks(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(STEPS)


@pytest.mark.triton
def test_interpreted_numbers_are_right_and_stay_within_their_tensors(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(NUMBERS)


@pytest.mark.gpu
@pytest.mark.triton
def test_steps_on_a_gpu_are_the_plain_steps_on_the_same_masks() -> None:
    for estimator, options in many():
        compare_steps(torch.device("cuda"), estimator, **options)
    compare_launches(torch.device("cuda"))
    compare_ends(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.triton
def test_numbers_on_a_gpu_are_right_and_stay_within_their_tensors() -> None:
    device = torch.device("cuda")
    for count in (1, 1000, 2**20 + 3):
        compare_bounds(count, device)
        compare_programs(count, device)
    compare_moments(2**22, device)
