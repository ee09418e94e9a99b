"""Where the biased estimators err, and by how much: by enumeration, quadrature or one frozen draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import dropconnectpp as dcpp
from dropconnectpp.estimators import Concrete
from dropconnectpp.layers.passes import GaussianGates, running
from dropconnectpp.ops.drawn import Draw
from dropconnectpp.ops.noise import generator_of
from exact_cases import (
    DIRECT,
    EXAMPLE,
    LEARNED,
    MARGINAL,
    NUM_DATA,
    OPTIMAL,
    Case,
    assert_gradients,
    assert_unbiased,
    gate_names,
    linear_likelihood,
    others,
    quadratic_likelihood,
    relative_bias,
)

# --------------------------------------------------------------------------- biased estimators


@pytest.mark.parametrize("options", [OPTIMAL, MARGINAL, EXAMPLE, LEARNED, DIRECT])
def test_straight_through_is_exact_where_the_likelihood_is_linear_in_each_gate(options):
    assert_unbiased(Case("multilinear", "straight-through", likelihood=linear_likelihood, options=options))


@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_straight_through_errs_by_the_curvature_in_the_gates(network):
    biases = {}
    for scale in (1.0, 0.1, 0.01):
        case = Case(network, "straight-through")
        case.model[0].weight.data *= scale
        case.model[0].bias.data *= scale
        biases[scale] = relative_bias(case, case.expectation()[1])
    assert 0.5 < biases[1.0] < 2.0  # 1.44 and 0.69 of the gradient itself, where tanh saturates
    assert biases[0.1] < 0.2  # 0.049 and 0.18
    assert biases[0.01] < 0.15 * biases[0.1]  # of first order in the weights


@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_straight_through_is_the_slope_in_each_gate(network):
    case = Case(network, "straight-through")
    _, found = case.expectation()
    exact = case.gradients(case.exact_loss())
    assert_gradients(found, others(case, exact))
    expected = case.gradients(case.kl() / NUM_DATA)
    for probability, (masks,) in case.draws():  # the slope in each gate at the masks, times d pi~ / d logit
        gates = {keys[0]: masks[keys[0]].double().requires_grad_() for keys, _, _ in case.synapses()}
        slopes = torch.autograd.grad(case.log_likelihood(gates), list(gates.values()))
        for (keys, layer, name), slope in zip(case.synapses(), slopes, strict=True):
            pi = layer.keep_probability(name).detach()
            expected[f"{keys[0]}_logit"] = expected[f"{keys[0]}_logit"] - probability * slope * pi * (1 - pi)
    assert_gradients(found, {name: expected[name] for name in gate_names(case)})


def constant_noise(monkeypatch, value):
    monkeypatch.setattr(torch, "randn", lambda shape, *, dtype, **_: torch.full(shape, value, dtype=dtype))


def quadrature(monkeypatch, case, order):
    """The gradient's mean over the noise of `local`, the same for all outputs: so outputs must not interact."""
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(order))
    total = {name: torch.zeros_like(p) for name, p in case.parameters.items()}
    for node, weight in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True):
        constant_noise(monkeypatch, node)
        for name, gradient in case.gradients(case.elbo(case.x, target=case.y).loss).items():
            total[name] += weight * gradient
    return total


@pytest.mark.parametrize("network", ["linear", "conv2d"])
def test_local_has_the_moments_of_every_mask(network):
    case = Case(network, "local")
    layer = case.model[0]
    mean, deviation = layer.gaussian_moments(case.x)
    outputs, weights = [], []
    with torch.no_grad():
        for probability, (masks,) in case.draws():
            with dcpp.forced_masks(case.model, masks):
                outputs.append(layer(case.x))
            weights.append(probability)
    outputs, weights = torch.stack(outputs), torch.tensor(weights, dtype=torch.float64)
    average = torch.tensordot(weights, outputs, 1)
    torch.testing.assert_close(mean, average, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        deviation.square(), torch.tensordot(weights, (outputs - average) ** 2, 1), rtol=0, atol=1e-10
    )
    seed = torch.tensor(4)
    with running({layer: GaussianGates(Draw(seed), {"weight": 2})}):  # its own noise for each example and output
        noise = torch.randn(mean.shape, dtype=torch.float64, generator=generator_of(seed, 2, mean.device))
        torch.testing.assert_close(layer(case.x), mean + deviation * noise)


@pytest.mark.parametrize("options", [OPTIMAL, MARGINAL, LEARNED, DIRECT])
def test_local_is_exact_where_the_likelihood_is_quadratic_in_the_outputs(monkeypatch, options):
    case = Case("one layer", "local", likelihood=quadratic_likelihood, options=options)
    assert_gradients(quadrature(monkeypatch, case, 2), case.gradients(case.exact_loss()))


def test_local_errs_where_the_gated_sum_is_not_gaussian(monkeypatch):
    case = Case("two gates", "local")
    assert 0.01 < relative_bias(case, quadrature(monkeypatch, case, 60)) < 0.05  # 0.024


def relaxed_loss(case: Case, noise: list[Tensor], temperature: float) -> Tensor:
    gates = {
        keys[0]: torch.sigmoid((layer.logit(name) + torch.log1p(-u) - torch.log(u)) / temperature)
        for (keys, layer, name), u in zip(case.synapses(), noise, strict=True)
    }
    return -case.log_likelihood(gates)


@pytest.mark.parametrize("options", [OPTIMAL, MARGINAL, LEARNED, DIRECT])
@pytest.mark.parametrize("temperature", [2 / 3, 0.1])
def test_concrete_is_the_relaxed_gradient_for_one_draw_of_noise(options, temperature):
    case = Case("linear", Concrete(temperature=temperature), options=options)
    case.elbo.generator = torch.Generator().manual_seed(8)
    found = case.gradients(case.elbo(case.x, target=case.y).loss)
    seed = torch.randint(2**62, (), generator=torch.Generator().manual_seed(8))
    noise = [
        torch.rand(shape, dtype=torch.float64, generator=generator_of(seed, stream, seed.device))
        for stream, shape in enumerate([(2, 2), (2,)])
    ]
    assert_gradients(found, case.gradients(relaxed_loss(case, noise, temperature) + case.kl() / NUM_DATA))


def test_concrete_tends_to_the_mask_as_it_cools():
    gaps = []
    for temperature in (1.0, 0.1, 0.01, 1e-4):
        case = Case("linear", Concrete(temperature=temperature))
        case.elbo.generator = torch.Generator().manual_seed(8)
        relaxed = case.elbo(case.x, target=case.y).output
        case.elbo.eval()  # binary masks from the same noise
        case.elbo.generator.manual_seed(8)
        gaps.append(float((relaxed - case.elbo(case.x, target=case.y).output).detach().abs().max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.1
    assert gaps[-1] < 1e-9


def test_concrete_errs_less_as_it_cools():
    case = Case("two gates", "concrete")
    points = (torch.arange(30, dtype=torch.float64) + 0.5) / 30
    biases = []
    for temperature in (2 / 3, 0.3):
        grid = [relaxed_loss(case, [torch.stack([u, v]).view(1, 2)], temperature) for u in points for v in points]
        found = case.gradients(torch.stack(grid).mean() + case.kl() / NUM_DATA)
        biases.append(relative_bias(case, found))
    assert 0.2 < biases[0] < 0.3  # 0.250
    assert biases[1] < 0.5 * biases[0]  # 0.100
