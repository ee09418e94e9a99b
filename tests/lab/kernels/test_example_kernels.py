"""A product with a mask for each example: against a plain loop, and its kernels, interpreted, against their twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dropconnectpp.lab.kernels.examples import LEVELS, example_mask, example_product
from dropconnectpp.lab.philox import Stream

# Launched by hand: the package takes CUDA tensors alone.
INTERPRETED = """
import torch
from dropconnectpp.lab.kernels import examples
from dropconnectpp.lab.philox import Stream

torch.manual_seed(0)
replicas, step, stream = torch.tensor([3, 11]), torch.tensor(7), Stream(1, "mask:weight")
bounds = (torch.tensor([0.25, 0.8], dtype=torch.float64) * examples.LEVELS).round().to(torch.int32)
keep = torch.tensor([0.25, 0.8])
examples.HEIGHT, examples.WIDTH = 4, 16
for batch, units, inputs in ((3, 5, 21), (2, 4, 16), (1, 1, 3)):
    x, weight = torch.randn(2, batch, inputs), torch.randn(2, units, inputs)
    grad = torch.randn(2, batch, units)
    x.requires_grad_(), weight.requires_grad_()
    wanted = examples.example_product(x, weight, keep, stream, replicas, step)
    wanted_x, wanted_weight = torch.autograd.grad(wanted, (x, weight), grad)
    a, b = x.detach(), weight.detach()
    found = examples._forward_kernel(a, b, bounds, stream, replicas, step)
    found_x, found_weight = examples._backward_kernels(a, b, grad, bounds, stream, replicas, step)
    for one, other in ((found, wanted), (found_x, wanted_x), (found_weight, wanted_weight)):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), (batch, units, inputs)
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twin(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


def made(batch: int = 4, units: int = 3, inputs: int = 10) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(2, batch, inputs, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, units, inputs, dtype=torch.float64, requires_grad=True)
    return x, weight, torch.tensor([0.3, 0.7]), torch.tensor([0, 5])


STREAM = Stream(3, "mask:weight")


def masks_of(
    weight: torch.Tensor, keep: torch.Tensor, replicas: torch.Tensor, count: int, step: int = 2
) -> torch.Tensor:
    bounds = (keep.double() * LEVELS).round().to(torch.int32)
    each = [example_mask(weight.shape, bounds, STREAM, replicas, step, b) for b in range(count)]
    return torch.stack(each, 1)  # (R, B, O, I)


def test_each_example_has_its_own_mask_of_the_weight() -> None:
    x, weight, keep, replicas = made()
    masks = masks_of(weight, keep, replicas, 4)
    assert len({masks[0, b].numpy().tobytes() for b in range(4)}) == 4
    found = example_product(x, weight, keep, STREAM, replicas, 2)
    torch.testing.assert_close(found, torch.einsum("rboi,roi,rbi->rbo", masks.double(), weight, x))


def test_its_gradients_are_those_of_the_masked_product() -> None:
    x, weight, keep, replicas = made()
    grad = torch.randn(2, 4, 3, dtype=torch.float64)
    found = torch.autograd.grad(example_product(x, weight, keep, STREAM, replicas, 2), (x, weight), grad)
    masks = masks_of(weight, keep, replicas, 4).double()
    wanted = torch.autograd.grad(torch.einsum("rboi,roi,rbi->rbo", masks, weight, x), (x, weight), grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_replica_draws_what_it_draws_alone_and_keeps_its_share() -> None:
    weight, keep = torch.zeros(2, 40, 50), torch.tensor([0.3, 0.7])
    both = masks_of(weight, keep, torch.tensor([0, 5]), 20)
    alone = masks_of(weight[1:], keep[1:], torch.tensor([5]), 20)
    assert torch.equal(both[1:], alone)
    # 40,000 draws: five standard deviations are 0.0115
    torch.testing.assert_close(both.float().mean((1, 2, 3)), keep, rtol=0, atol=0.0115)
    assert not torch.equal(both, masks_of(weight, keep, torch.tensor([0, 5]), 20, step=3))


def test_the_step_may_be_counted_up_before_backward() -> None:
    x, weight, keep, replicas = made()
    step = torch.tensor(2)
    out = example_product(x, weight, keep, STREAM, replicas, step)
    step += 1
    (found,) = torch.autograd.grad(out.sum(), weight)
    (wanted,) = torch.autograd.grad(example_product(x, weight, keep, STREAM, replicas, 2).sum(), weight)
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "units", "inputs"), [(5, 7, 21), (16, 64, 256)])
def test_the_compiled_kernels_are_their_twin(batch: int, units: int, inputs: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, batch, inputs), torch.randn(2, units, inputs)
    grad, keep, replicas = torch.randn(2, batch, units), torch.tensor([0.3, 0.7]), torch.tensor([0, 5])
    found = []
    for device in ("cpu", "cuda"):
        leaves = [one.to(device).requires_grad_() for one in (x, weight)]
        step = torch.tensor(2, device=device)
        out = example_product(*leaves, keep.to(device), STREAM, replicas.to(device), step)
        found.append([out.detach().cpu(), *(one.cpu() for one in torch.autograd.grad(out, leaves, grad.to(device)))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
