"""Weights and gates through a training step: kernels against their twin, the twin against autograd."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import synapses_cases as cases
import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.bits import pack, unpack

# Launched by hand: the package takes CUDA tensors alone.
INTERPRETED = """
import torch
import synapses_cases as cases
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.synapses_triton import draw_kernel, update_kernel

kernels.BLOCK = 4
torch.manual_seed(0)
for case in cases.CASES:
    ours, theirs = cases.make(*case), cases.make(*case)
    now, replicas, step = cases.table(), torch.tensor([0, 3, 9]), torch.tensor(7)
    found, right = torch.full_like(ours.weight, 9.0), torch.empty_like(ours.weight)
    kernels._launch_draw(ours, now, replicas, step, found)
    kernels.draw(theirs, now, replicas, step, right)
    torch.testing.assert_close(found, right, rtol=2e-6, atol=1e-7)
    grad, variance = torch.randn_like(right), torch.randn_like(right)
    kernels._launch_update(ours, now, replicas, step, grad, variance)
    kernels.update(theirs, now, replicas, step, grad, variance)
    for name in ("weight", "first", "second", "gate", "gate_first", "gate_second"):
        one, other = getattr(ours, name), getattr(theirs, name)
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6, msg=lambda text: f"{case} {name}: {text}")
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twin(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.triton
def test_the_kernels_compile_for_a_card(run_compiled: Callable[..., str]) -> None:
    assert run_compiled("import synapses_cases as cases; cases.compile_all()").split() == ["all", "well"]


def loss(synapses: kernels.Synapses, now: Tensor, noise: Tensor, grad: Tensor, variance: Tensor) -> Tensor:
    """What a step minimises, by the definition of each kind; the noise of the unit interval is given."""
    weight, kind, gate = synapses.weight, synapses.kind, synapses.gate
    if kind == "plain":
        return (grad * weight).sum()
    if kind == "mask":
        on = 1.0 if synapses.mask is None else unpack(synapses.mask, weight.shape[1:]).double()
        return (grad * weight * on * (noise < kernels.beside(now, kernels.KEEP, weight))).sum()
    assert gate is not None
    price = kernels.beside(now, kernels.KL, weight)
    if kind == "bernoulli":
        p = torch.sigmoid(gate)
        on = (noise < kernels.bernoulli_keep(gate, now)).double()
        z = on + p - p.detach()
        alpha, beta = (kernels.beside(now, column, gate) for column in (kernels.ALPHA, kernels.BETA))
        return (grad * weight * z + price * kernels.gate_kl(gate, alpha, beta)).sum()
    if kind == "variance":
        log_alpha = kernels.log_alpha_of(weight, gate)
        used = grad * weight + variance * kernels.local_variance(weight, gate)
        return (used + price * kernels.log_uniform_kl(log_alpha)).sum()
    temperature, stretch = (kernels.beside(now, c, gate) for c in (kernels.TEMPERATURE, kernels.STRETCH))
    z = kernels.hard_concrete(gate, noise, temperature, stretch)
    return (grad * weight * z + price * kernels.open_probability(gate, temperature, stretch)).sum()


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_gradients_are_those_of_the_definition(case: tuple) -> None:
    synapses, now = cases.make(*case, dtype=torch.float64), cases.table(torch.float64)
    now[:, kernels.FIXED] = 0.0
    noise, grad, variance = (torch.rand_like(synapses.weight) for _ in range(3))
    leaves = [one.requires_grad_() for one in (synapses.weight, synapses.gate) if one is not None]
    expected = torch.autograd.grad(loss(synapses, now, noise, grad, variance), leaves)
    with torch.no_grad():
        found = kernels.gradients(synapses, now, noise, grad, variance)
    for one, right in zip(found, expected, strict=False):
        torch.testing.assert_close(one, right)


@pytest.mark.parametrize(("name", "optimiser"), [("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)])
def test_steps_are_those_of_torch(name: str, optimiser: type) -> None:
    synapses, now = cases.make("plain", name, dtype=torch.float64), cases.table(torch.float64)
    synapses.first.zero_()
    synapses.second.zero_()
    now[:, kernels.LR] = 0.01
    twin = synapses.weight.clone().requires_grad_()
    options = {"lr": 0.01} | ({"momentum": 0.9} if name == "sgd" else {})
    theirs = optimiser([twin], **options)
    for step in range(1, 6):
        twin.grad = torch.randn_like(twin)
        now[:, kernels.CORRECTION1], now[:, kernels.CORRECTION2] = 1 - 0.9**step, 1 - 0.999**step
        kernels.update(synapses, now, torch.arange(3), torch.tensor(step), twin.grad)
        theirs.step()
    torch.testing.assert_close(synapses.weight, twin.detach())


@pytest.mark.parametrize("count", [1, 7, 8, 35, 64])
def test_a_mask_takes_a_bit_each_and_comes_back(count: int) -> None:
    mask = torch.rand(3, count) < 0.5
    bits = pack(mask)
    assert bits.shape == (3, -(-count // 8))
    assert bits.dtype == torch.uint8
    assert torch.equal(unpack(bits, (count,)), mask)
    assert torch.equal(pack(mask)[1:2], pack(mask[1:2])), "a replica's bytes are its own"


def test_nothing_of_a_gate_moves_once_the_support_is_fixed() -> None:
    synapses, now = cases.make("bernoulli"), cases.table()
    now[:, kernels.FIXED] = torch.tensor([0.0, 1.0, 1.0])
    before = [one.clone() for one in synapses.gates()]
    out = torch.empty_like(synapses.weight)
    kernels.draw(synapses, now, torch.arange(3), torch.tensor(1), out)
    kernels.update(synapses, now, torch.arange(3), torch.tensor(1), torch.ones_like(out))
    for one, other in zip(before, synapses.gates(), strict=True):
        assert torch.equal(one[1:], other[1:])
        assert not torch.equal(one[0], other[0])
    assert bool((out[1:][synapses.gates()[0][1:] <= now[1:, kernels.LEAST, None, None]] == 0).all())


def test_no_gate_passes_its_ceiling() -> None:
    synapses, now = cases.make("bernoulli"), cases.table()
    now[:, kernels.FIXED], now[:, kernels.GATE_LR], now[:, kernels.CEILING] = 0.0, 5.0, 1.5
    kernels.draw(synapses, now, torch.arange(3), torch.tensor(1), torch.empty_like(synapses.weight))
    kernels.update(synapses, now, torch.arange(3), torch.tensor(1), torch.randn_like(synapses.weight))
    assert float(synapses.gates()[0].max()) == 1.5


# ------------------------------------------------------------------------- the published approximations


def test_the_kl_of_sparse_vd_is_near_the_integral() -> None:
    """-KL + const = 1/2 log alpha - E log |1 + sqrt(alpha) eps|; the approximation is published as off by some 0.01."""
    log_alpha = torch.linspace(-7.5, 7.5, 31, dtype=torch.float64)
    eps = np.linspace(-12, 12, 400_001) + 1e-7  # the logarithm's pole is integrable, and between two points
    density = np.exp(-0.5 * eps**2) / np.sqrt(2 * np.pi)
    width = eps[1] - eps[0]
    expected = [
        float((density * np.log(np.abs(1 + np.exp(0.5 * value) * eps))).sum() * width) - 0.5 * value
        for value in log_alpha.tolist()
    ]
    # The constant: the KL goes to 0 as alpha grows.
    limit = float((density * np.log(np.abs(eps))).sum() * width)
    found = kernels.log_uniform_kl(log_alpha)
    assert float((found - (torch.tensor(expected) - limit)).abs().max()) < 0.015


def test_open_probability_and_mean_of_hard_concrete_gates() -> None:
    """By numbers from the middle of equal intervals: the share that is not 0 is the probability."""
    noise = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for log_alpha in (-2.0, 0.3, 3.0):
        gate = torch.full_like(noise, log_alpha)
        z = kernels.hard_concrete(gate, noise, torch.tensor(2 / 3), torch.tensor(0.1))
        right = kernels.open_probability(gate[:1].double(), 2 / 3, 0.1)
        assert float((z > 0).double().mean()) == pytest.approx(float(right), abs=1e-4)


def test_the_kl_of_a_gate_is_the_librarys() -> None:
    logit = torch.linspace(-6, 6, 25, dtype=torch.float64)
    two = [torch.full((), value, dtype=torch.float64) for value in (1.0, 99.0)]
    right, _ = functional.collapsed_kl(logit, 1.0, 99.0, grad=False)
    torch.testing.assert_close(kernels.gate_kl(logit, *two), right)
    p, prior = torch.sigmoid(logit), 0.01
    by_hand = p * torch.log(p / prior) + (1 - p) * torch.log((1 - p) / (1 - prior))
    odds = torch.log(torch.tensor(1.0 / 99.0, dtype=torch.float64))
    torch.testing.assert_close(kernels.gate_kl(logit, odds, torch.zeros((), dtype=torch.float64)), by_hand)
