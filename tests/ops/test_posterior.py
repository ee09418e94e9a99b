"""The pass over a posterior's synapses, streamed and plain: the KL, the scores and their gradient by definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dropconnectpp as dcpp
from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError
from dropconnectpp.ops import noise, posterior, posterior_cpu, posterior_groups
from dropconnectpp.ops.posterior import GatePosterior, Likelihood
from dropconnectpp.ops.prior import HYPERS, SHARINGS, Prior

PRIORS = [
    Prior(1.0, 1.0, "optimal"),
    Prior(1.0, 9.0, "optimal"),
    Prior(0.5, 0.5, "optimal"),
    Prior(2.0, 98.0, "optimal"),
    Prior(1.0, 1.0, "marginal"),
    Prior(2.0, 98.0, "marginal"),
    Prior(0.1, 0.3, "marginal"),
]
STREAMED = [(torch.float32, prior) for prior in PRIORS] + [
    (torch.float64, prior) for prior in PRIORS if prior.hyper == "marginal" or prior.uniform
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posterior_cpu, "CHUNK", 64)
    monkeypatch.setattr(noise, "CHUNK", 64)
    monkeypatch.setattr(posterior, "CPU_CHUNK", 50)


def close(found: Tensor, expected: Tensor) -> bool:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(found.dtype, 4e-3)
    return torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)


def by_definition(prior: Prior, logit: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """KL of each synapse and its gradient, in float64."""
    wide = logit.double()
    if prior.sharing != "synapse":
        return functional.shared_kl(wide, prior.alpha, prior.beta, prior.group_axes(wide.ndim), kept)
    if prior.hyper == "marginal":
        value = functional.marginal_kl(wide, prior.alpha, prior.beta)
        slope = functional.marginal_kl_gradient(wide, prior.alpha, prior.beta)
    else:
        found = functional.collapsed_kl(wide, prior.alpha, prior.beta)
        assert found[0] is not None
        assert found[1] is not None
        value, slope = found
    return (value, slope) if kept is None else (value * kept, slope * kept)


@pytest.mark.parametrize(("dtype", "prior"), STREAMED, ids=str)
@pytest.mark.parametrize("count", [1, 64, 333])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_streamed_pass_is_its_definition(
    dtype: torch.dtype, prior: Prior, count: int, mirrored: bool, pruned: bool
) -> None:
    logit = 4 * torch.randn(count, dtype=dtype)
    kept = (torch.rand(count) < 0.6) if pruned else None
    left = torch.ones(count) if kept is None else kept.double()
    masks = [torch.rand(count) < 0.5 for _ in range(2)]
    mirrors = [torch.rand(count) < 0.5 for _ in range(2)] if mirrored else []
    coefficients = torch.tensor([0.7, -1.3], dtype=dtype)
    terms = posterior_cpu.Terms(0.3, masks, mirrors, coefficients, None, prior)
    kl, squared, gradient = posterior_cpu.pruned_pass(logit, kept, terms, gradient=True)
    wide = logit.double()
    value, slope = by_definition(prior, logit, kept)
    expected = 0.3 * slope
    for index, mask in enumerate(masks):
        c = coefficients[index].double()
        if mirrored:
            drawn = functional.disarm_gradient(wide, c * (mask.double() - mirrors[index].double()))
            expected = expected - drawn * left
        else:
            score = functional.bernoulli_score(mask, wide) * left
            expected = expected - c * score
            assert close(squared[index], score.square().sum())
    assert close(kl, value.sum())
    assert close(posterior_cpu.pruned_pass(logit, kept, terms, gradient=False)[0], value.sum())
    assert gradient is not None
    assert close(gradient, expected)


@pytest.mark.parametrize(("dtype", "prior"), STREAMED, ids=str)
def test_the_streamed_pass_takes_a_gradient_ready_made(dtype: torch.dtype, prior: Prior) -> None:
    logit, ready = 4 * torch.randn(333, dtype=dtype), torch.randn(333, dtype=dtype)
    terms = posterior_cpu.Terms(0.3, (), (), torch.ones(2, dtype=dtype), ready, prior)
    _, _, gradient = posterior_cpu.posterior_pass(logit, terms, gradient=True)
    assert gradient is not None
    assert close(gradient, 0.3 * by_definition(prior, logit)[1] - ready.double())


@pytest.mark.parametrize("prior", [Prior(2.0, 98.0, "marginal"), Prior(1.0, 1.0, "optimal")], ids=str)
def test_squared_scores_without_a_gradient_where_they_are_wanted(prior: Prior) -> None:
    logit, masks = torch.randn(200), [torch.rand(200) < 0.5 for _ in range(2)]
    terms = posterior_cpu.Terms(0.3, masks, (), torch.ones(2), None, prior, scores=True)
    _, squared, gradient = posterior_cpu.posterior_pass(logit, terms, gradient=False)
    assert gradient is None
    expected = [functional.bernoulli_score(mask, logit.double()).square().sum() for mask in masks]
    assert close(squared, torch.stack(expected))


@pytest.mark.parametrize(
    ("options", "dtype", "streamed"),
    [
        ({"hyper": "optimal"}, torch.float32, True),
        ({"hyper": "optimal"}, torch.float64, True),
        ({"hyper": "optimal", "alpha": 2.0, "beta": 98.0}, torch.float32, True),
        ({"hyper": "optimal", "alpha": 2.0, "beta": 98.0}, torch.float64, False),
        ({"hyper": "optimal", "alpha": 0.3}, torch.float32, False),
        ({"hyper": "marginal"}, torch.float32, True),
        ({"hyper": "marginal", "alpha": 2.0, "beta": 98.0}, torch.float64, True),
        ({"hyper": "marginal", "alpha": 0.3}, torch.float32, True),
        ({"hyper": "marginal"}, torch.bfloat16, False),
        ({"hyper": "optimal", "sharing": "layer"}, torch.float32, False),
        ({"hyper": "optimal", "sharing": "unit", "alpha": 2.0, "beta": 98.0}, torch.float64, False),
        ({"hyper": "optimal", "sharing": "input"}, torch.float64, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("pruned", [False, True])
def test_every_pass_is_its_definition_streamed_where_the_prior_has_polynomials(
    options: dict[str, Any], dtype: torch.dtype, streamed: bool, pruned: bool
) -> None:
    layer = dcpp.DropConnectPPLinear(50, 4, dtype=dtype, **options)
    torch.nn.init.normal_(layer.weight_logit)
    kept = (torch.rand(4, 50) < 0.6) if pruned else None
    layer.keep_only("weight", kept)
    logit = layer.weight_logit.detach()
    prior = layer.posterior_of("weight").prior
    assert posterior_cpu.supported(logit, prior) is streamed
    mask, coefficients = torch.rand(4, 50) < 0.5, torch.tensor([0.7], dtype=dtype)
    left = torch.ones(4, 50) if kept is None else kept.double()
    found = posterior.posterior_pass(
        layer.posterior_of("weight"), kl_scale=0.3, likelihood=Likelihood([mask], coefficients=coefficients)
    )
    value, slope = by_definition(prior, logit, kept)
    score = functional.bernoulli_score(mask, logit.double()) * left
    assert close(found.kl, value.sum())
    assert close(found.squared_score, score.square().sum()[None])
    assert close(found.gradients["weight_logit"], 0.3 * slope - coefficients.double() * score)
    with torch.no_grad():
        torch.testing.assert_close(layer.kl("weight").double(), value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("hyper", "sharing"), [(h, s) for h in HYPERS for s in SHARINGS if s == "synapse" or h == "optimal"]
)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_divergence_is_the_layers_under_autograd(hyper: Any, sharing: Any, direct: bool, pruned: bool) -> None:
    """`kl_divergence`, whose gradient comes from the pass, against `layer.kl` and its gradient by autograd."""
    options = {"parameterisation": "probability" if direct else "logit", "alpha": 1.7, "beta": 0.6}
    layer = dcpp.DropConnectPPConv2d(3, 4, 2, hyper=hyper, sharing=sharing, dtype=torch.float64, **options)
    with torch.no_grad():
        for key in layer.posterior_names:
            layer.get_parameter(key).copy_(0.1 + 0.8 * torch.rand(layer.get_parameter(key).shape))
    if pruned:
        layer.keep_only("weight", torch.rand(4, 3, 2, 2) < 0.6)
        layer.keep_only("bias", torch.tensor([True, False, True, True]))
    value = dcpp.kl_divergence(layer)
    wanted = [layer.get_parameter(key) for key in layer.posterior_names]
    found = torch.autograd.grad(value, wanted)
    plain = layer.kl("weight").sum() + layer.kl("bias").sum()
    torch.testing.assert_close(value, plain)
    for ours, theirs in zip(found, torch.autograd.grad(plain, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_gradient_joins_the_loss_once_and_scaled() -> None:
    logit = torch.randn(300, requires_grad=True)
    found = GatePosterior({"logit": logit}, Prior(2.0, 5.0))
    value = posterior.kl_sum(found)
    expected = by_definition(found.prior, logit.detach())[1].float()
    (3.0 * value).backward(retain_graph=True)
    torch.testing.assert_close(logit.grad, 3 * expected)
    value.backward()
    torch.testing.assert_close(logit.grad, 4 * expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("prior", [Prior(1.0, 1.0, "optimal"), Prior(3.0, 5.0, "marginal")], ids=str)
def test_small_parameters_together_are_each_by_itself(dtype: torch.dtype, prior: Prior) -> None:
    gates = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((9, 20), (9,), (300,))]
    parts = [GatePosterior({"logit": gate}, prior) for gate in gates]
    assert all(posterior_groups.groupable(part) for part in parts)
    value, kl, _ = posterior_groups.group_pass(parts)
    found = torch.autograd.grad(2.0 * value, gates)
    assert close(kl.detach(), sum(by_definition(prior, gate.detach())[0].sum() for gate in gates))
    assert torch.equal(value.detach(), kl)
    for gate, gradient in zip(gates, found, strict=True):
        assert close(gradient, 2.0 * by_definition(prior, gate.detach())[1])
    assert not posterior_groups.groupable(GatePosterior({"logit": gates[0]}, prior, kept=gates[0] > 0))
    assert not posterior_groups.groupable(GatePosterior({"p": gates[0]}, prior, direct=True))
    assert not posterior_groups.groupable(GatePosterior({"logit": gates[0].detach()}, prior))
    large = torch.zeros(posterior_groups.GROUPED + 1, requires_grad=True)
    assert not posterior_groups.groupable(GatePosterior({"logit": large}, prior))


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "disarm"])
@pytest.mark.parametrize("hyper", ["marginal", "optimal"])
def test_a_steps_gradient_does_not_depend_on_what_is_taken_together(
    estimator: str, hyper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for grouped in (posterior_groups.GROUPED, 10, 0):
        monkeypatch.setattr(posterior_groups, "GROUPED", grouped)
        torch.manual_seed(2)
        options: dict[str, Any] = {"estimator": estimator, "hyper": hyper, "beta": 3.0, "dtype": torch.float64}
        model = torch.nn.Sequential(
            dcpp.DropConnectPPLinear(6, 9, activation=torch.nn.Tanh(), kl_weight=0.3, **options),
            dcpp.DropConnectPPLinear(9, 3, **options),
            dcpp.DropConnectPPLinear(3, 3, kl_weight=0.3, **options),
        )
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=10, generator=torch.Generator().manual_seed(1))
        x, y = torch.randn(5, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
        for _ in range(2):
            model.zero_grad()
            terms = elbo(x, y)
            terms.loss.backward()
        found.append([terms.loss.detach(), terms.kl, *(p.grad for p in model.parameters())])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


# ------------------------------------------------------------------------------- the prior


@pytest.mark.parametrize("sharing", ["layer", "unit", "input"])
@pytest.mark.parametrize(
    ("hyper", "why"),
    [
        ("marginal", "summing pi out synapse by synapse leaves nothing to share"),
        ("learned", "a shared pi has its best q(pi) in closed form"),
    ],
)
def test_a_shared_pi_is_the_best_one(sharing: Any, hyper: Any, why: str) -> None:
    words = f"sharing='{sharing}' needs hyper='optimal', got hyper='{hyper}': {why}. Use hyper='optimal', or sharing="
    with pytest.raises(ArgumentError) as caught:
        Prior(1.0, 1.0, hyper, sharing)
    assert str(caught.value) == words + "'synapse'."
    for make in (
        lambda: dcpp.DropConnectPPLinear(3, 2, hyper=hyper, sharing=sharing),
        lambda: dcpp.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), hyper=hyper, sharing=sharing),
    ):
        with pytest.raises(ArgumentError) as again:
            make()
        assert str(caught.value) in str(again.value)


@pytest.mark.parametrize("prior", PRIORS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_polynomials_of_a_prior_give_its_kl_and_gradient(prior: Prior, dtype: torch.dtype) -> None:
    parts = prior.parts(dtype)
    if parts is None:
        assert prior.hyper == "optimal"
        return
    logit = torch.linspace(-12, 12, 401, dtype=torch.float64)
    t = torch.tanh(logit / 2)

    def at(both: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
        even, odd = (sum(c * t ** (2 * k) for k, c in enumerate(reversed(part))) for part in both)
        return even + t * odd

    pi = torch.sigmoid(logit)
    value, slope = by_definition(prior, logit)
    entropy = -functional.negative_entropy(logit)
    torch.testing.assert_close(at(parts.value) - entropy, value, rtol=0, atol=1e-6)
    torch.testing.assert_close(pi * (1 - pi) * (logit - at(parts.gradient)), slope, rtol=0, atol=1e-6)


def test_groups_are_rows_columns_or_all() -> None:
    for sharing, expected in (("layer", (0, 1, 2, 3)), ("unit", (1, 2, 3)), ("input", (0, 2, 3))):
        prior = Prior(1.0, 1.0, "optimal", sharing)  # type: ignore[arg-type]
        assert prior.group_axes(4) == expected
        assert prior.group_axes(1) == (0,)  # the biases of a layer are one group
        assert not prior.uniform
        assert prior.streamed == ()


def test_summed_out_is_below_the_best_and_the_best_below_all_others() -> None:
    logit = torch.linspace(-6, 6, 50, dtype=torch.float64)
    for alpha, beta in ((1.0, 1.0), (0.5, 3.0)):
        marginal, optimal = functional.marginal_kl(logit, alpha, beta), functional.beta_bernoulli_kl(logit, alpha, beta)
        a, b = functional.optimal_hyper_posterior(logit, alpha, beta)
        best = functional.learned_kl(logit, a, b, alpha, beta)[0]
        torch.testing.assert_close(best, optimal)
        elsewhere = functional.learned_kl(logit, a + 0.5, b, alpha, beta)[0]
        assert bool((elsewhere > optimal).all())
        assert bool((marginal < optimal).all())
