"""The chunked mask arithmetic of the CPU: the same numbers as its definition, and nobody's gradient harmed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dropconnectpp as dcpp
from dropconnectpp import functional
from dropconnectpp.ops import gated_weight, posterior, posterior_cpu


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_weight, "CHUNK", 64)
    monkeypatch.setattr(posterior_cpu, "CHUNK", 64)
    monkeypatch.setattr(gated_weight, "_WORTH_SEEDING", 1)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_a_mask_is_that_of_its_noise(count: int) -> None:
    logit = torch.randn(count)
    noise = gated_weight.uniform(logit.shape, torch.float32, logit.device, torch.Generator().manual_seed(3))
    mask = gated_weight.draw_mask(logit, logit.shape, torch.Generator().manual_seed(3))
    assert torch.equal(mask, functional.draw_mask(logit, noise))
    assert bool(((noise >= 0) & (noise < 1)).all())


def test_noise_is_uniform_to_24_bits() -> None:
    noise = gated_weight.uniform(
        torch.Size([200_000]), torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0)
    )
    z = (noise.double().mean() - 0.5) / (1 / 12 / noise.numel()) ** 0.5
    assert abs(z) < 5
    levels = (noise.double() * 2**24).round()
    assert torch.equal(levels / 2**24, noise.double())
    assert len(torch.unique(levels % 1024)) == 1024  # the lowest bits vary too
    halves = noise.view(-1, 2) - 0.5  # both halves of a 64-bit word, and not the same number twice
    correlation = (halves[:, 0] * halves[:, 1]).double().mean() * 12
    assert abs(correlation) < 5 / 100_000**0.5


@pytest.mark.parametrize("shape", [(7,), (9, 17), (3, 4, 5, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_masked_products_and_their_gradients(shape: tuple[int, ...], transposed: bool) -> None:
    weight, logit, upstream = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    if transposed:
        weight, upstream = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (weight, upstream))
    mask = torch.rand(shape) < 0.5
    weight.requires_grad_()
    logit.requires_grad_()
    expected = (upstream * mask).clone()
    slope = functional.straight_through_gradient(logit.detach(), weight.detach(), upstream)
    (found,) = torch.autograd.grad(gated_weight.masked(weight, mask), weight, upstream.clone())
    assert torch.equal(found, expected)
    both = torch.autograd.grad(
        gated_weight.straight_through(weight, logit, mask, None), [weight, logit], upstream.clone()
    )
    assert torch.equal(both[0], expected)
    assert torch.allclose(both[1], slope, atol=1e-15)


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through"])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_a_layers_gradients_are_those_of_plain_torch(estimator: str, shape: tuple[int, ...]) -> None:
    """Inputs without a batch axis hand the output's own gradient to the bias: it must not be overwritten."""
    layer = dcpp.DropConnectPPLinear(5, 3, estimator=estimator, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    masks = {"weight": torch.rand(3, 5) < 0.5, "bias": torch.tensor([True, False, True])}
    with dcpp.forced_masks(layer, masks):
        output = layer(x)
    upstream = torch.randn_like(output)
    wanted = [x, layer.weight, layer.bias]
    found = torch.autograd.grad(output, wanted, upstream)
    plain = torch.nn.functional.linear(x, layer.weight * masks["weight"], layer.bias * masks["bias"])
    for ours, theirs in zip(found, torch.autograd.grad(plain, wanted, upstream), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "prior"),
    [(torch.float64, (1.0, 1.0))] + [(torch.float32, p) for p in [(1.0, 1.0), (1.0, 9.0), (0.5, 0.5), (2.0, 98.0)]],
)
@pytest.mark.parametrize("count", [1, 64, 333])
@pytest.mark.parametrize("mirrored", [False, True])
def test_the_streamed_pass_is_its_definition(
    dtype: torch.dtype, count: int, mirrored: bool, prior: tuple[float, float]
) -> None:
    logit = 4 * torch.randn(count, dtype=dtype)
    masks = [torch.rand(count) < 0.5 for _ in range(2)]
    mirrors = [torch.rand(count) < 0.5 for _ in range(2)] if mirrored else []
    coefficients = torch.tensor([0.7, -1.3], dtype=dtype)
    terms = posterior_cpu.Terms(0.3, masks, mirrors, coefficients, None, prior)
    kl, squared, gradient = posterior_cpu.posterior_pass(logit, terms, gradient=True)
    wide = logit.double()
    value, slope = functional.collapsed_kl(wide, *prior)
    expected = 0.3 * slope
    for index, mask in enumerate(masks):
        c = coefficients[index].double()
        if mirrored:
            expected = expected - functional.disarm_gradient(wide, c * (mask.double() - mirrors[index].double()))
        else:
            score = functional.bernoulli_score(mask, wide)
            expected = expected - c * score
            assert close(squared[index], score.square().sum())
    assert close(kl, value.sum())
    assert close(posterior_cpu.posterior_pass(logit, terms, gradient=False)[0], value.sum())
    assert gradient is not None
    assert close(gradient, expected)


@pytest.mark.parametrize(
    ("alpha", "beta", "dtype", "streamed"),
    [
        (1.0, 1.0, torch.float32, True),
        (1.0, 1.0, torch.float64, True),
        (2.0, 98.0, torch.float32, True),
        (2.0, 98.0, torch.float64, False),
        (0.3, 1.0, torch.float32, False),
    ],
)
def test_a_pass_is_streamed_where_the_prior_has_polynomials(
    alpha: float, beta: float, dtype: torch.dtype, streamed: bool
) -> None:
    layer = dcpp.DropConnectPPLinear(50, 4, alpha=alpha, beta=beta, dtype=dtype)
    torch.nn.init.normal_(layer.weight_logit)
    logit = layer.weight_logit.detach()
    assert posterior_cpu.covers(layer, logit, None) is streamed
    mask, coefficients = torch.rand(4, 50) < 0.5, torch.tensor([0.7], dtype=dtype)
    found = posterior.posterior_pass(layer, "weight", kl_scale=0.3, masks=[mask], coefficients=coefficients)
    value, slope = functional.collapsed_kl(logit.double(), alpha, beta)
    score = functional.bernoulli_score(mask, logit.double())
    assert close(found.kl, value.sum())
    assert close(found.squared_score, score.square().sum()[None])
    assert close(found.gradients["weight_logit"], 0.3 * slope - 0.7 * score)


def close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 2e-6 if found.dtype == torch.float32 else 1e-12
    return torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
