"""Adagrad's kernel: interpreted on the CPU everywhere, and on a GPU, against its plain-torch twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dropconnectpp.lab.kernels import adagrad

# Launched by hand: the package takes CUDA tensors alone. Values and sums lie in the middle of larger buffers, so that
# a write outside their range shows too.
INTERPRETED = """
import torch
from dropconnectpp.lab.kernels.adagrad import adagrad_all_
from dropconnectpp.lab.kernels.adagrad_triton import adagrad_kernel

torch.manual_seed(0)

def steps(shapes, block, inside):
    values, sums = ([draw(r + 2, n) for r, n in shapes] for draw in (torch.randn, torch.rand))
    gradients, sizes = ([draw(*shape) for shape in shapes] for draw in (torch.randn, lambda r, n: torch.rand(r)))
    gradients[0][0, 0] = 0.0
    wanted = [[t.clone() for t in group] for group in (values, sums)]
    middle = [tuple(t[1:-1] for t in group) for group in (values, sums, *wanted)]
    adagrad_all_(middle[2], gradients, middle[3], sizes, 1e-6, inside)
    rows, counts = zip(*shapes)
    adagrad_kernel[(sum(-(-n // block) for n in counts), max(rows))](
        middle[0], tuple(gradients), middle[1], tuple(sizes), rows, counts, 1e-6,
        NUMBER=len(shapes), INSIDE=inside, BLOCK=block,
    )
    for found, right in zip(values + sums, wanted[0] + wanted[1]):
        assert torch.allclose(found, right, rtol=1e-6, atol=1e-7), (shapes, block, inside)

for inside in (False, True):
    for count, block in ((1, 4), (5, 4), (16, 4), (130, 8)):
        steps([(3, count)], block, inside)
    steps([(3, 5), (3, 16), (1, 1), (2, 7), (4, 40)], 8, inside)
    steps([(1, 1)] * 3 + [(2, 3)] * 13, 4, inside)
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernel_is_its_twin(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


def some_tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], ...]:
    """Values, gradients, sums and step sizes."""
    draws = (torch.randn, torch.randn, torch.rand)
    tensors = [[draw(shape, dtype=dtype) for shape in shapes] for draw in draws]
    return *tensors, [0.01 + torch.rand(shape[0], dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("inside", [False, True])
def test_every_tensor_takes_the_step_of_its_formula(inside: bool) -> None:
    values, gradients, sums, sizes = some_tensors([(3, 4, 2), (2, 5), (3, 1)], torch.float64)
    gradients[0] = gradients[0].transpose(1, 2).contiguous().transpose(1, 2)
    wanted = []
    for value, gradient, total, steps in zip(values, gradients, sums, sizes, strict=True):
        squares = total + gradient**2
        root = (squares + 1e-2).sqrt() if inside else squares.sqrt() + 1e-2
        wanted.append((value - steps.view(-1, *[1] * (value.ndim - 1)) * gradient / root, squares))
    adagrad.adagrad_all_(values, gradients, sums, sizes, 1e-2, inside)
    for value, total, (right, squares) in zip(values, sums, wanted, strict=True):
        torch.testing.assert_close(value, right)
        torch.testing.assert_close(total, squares)


def test_nothing_to_train_is_no_step() -> None:
    adagrad.adagrad_all_([], [], [], [], 1e-6, True)


def test_the_cpu_never_takes_the_kernel() -> None:
    assert not adagrad.supported(torch.zeros(3))


# ---------------------------------------------------------------------------------------------- on a GPU

COUNTS = [1, 7, 4096, 4 * 1024 + 1, 262_144]
NETWORK = [(32, 3, 5, 5), (32,), (32, 32, 5, 5), (32,), (64, 32, 5, 5), (64,), (64, 4096), (64,), (10, 64), (10,)]
POSTERIOR = [(64, 4096), (64,)]


def on_a_gpu(shapes: list[tuple[int, ...]], inside: bool) -> None:
    tensors = some_tensors(shapes)
    on_device = [[t.cuda() for t in group] for group in tensors]
    # A filter's gradient is permuted.
    on_device[1] = [g.movedim(1, -1).contiguous().movedim(-1, 1) if g.ndim == 5 else g for g in on_device[1]]
    for _ in range(3):
        adagrad.adagrad_all_(*tensors, 1e-6, inside)
        adagrad.adagrad_all_(*on_device, 1e-6, inside)
    for found, wanted in zip(on_device[0], tensors[0], strict=True):
        # Some last places of a value near one: a step is as large as the value.
        torch.testing.assert_close(found.cpu(), wanted, rtol=2e-6, atol=1e-6)
    for found, wanted in zip(on_device[2], tensors[2], strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_one_tensor_on_a_gpu(count: int, inside: bool) -> None:
    on_a_gpu([(3, count)], inside)


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("replicas", [1, 50])
def test_a_whole_network_on_a_gpu(replicas: int, inside: bool) -> None:
    shapes = [(replicas, *shape) for shape in NETWORK] + [(max(1, replicas // 2), *shape) for shape in POSTERIOR]
    on_a_gpu(shapes, inside)


@pytest.mark.gpu
def test_more_tensors_than_a_launch_takes() -> None:
    on_a_gpu([(1 + k % 3, 1 + 100 * k) for k in range(2 * adagrad.MOST + 3)], True)


@pytest.mark.gpu
def test_a_cuda_graph_may_hold_the_step() -> None:
    tensors = some_tensors([(4, *shape) for shape in NETWORK])
    on_device = [[t.cuda() for t in group] for group in tensors]
    adagrad.adagrad_all_(*on_device, 1e-6, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adagrad.adagrad_all_(*on_device, 1e-6, True)
    graph.replay()
    graph.replay()
    for _ in range(3):  # the first outside the graph; capturing runs nothing
        adagrad.adagrad_all_(*tensors, 1e-6, True)
    for found, wanted in zip(on_device[0], tensors[0], strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=2e-6, atol=1e-6)
