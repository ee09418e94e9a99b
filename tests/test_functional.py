"""The paper's maths against 40-digit arithmetic, torch.distributions and autograd."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import mpmath
import pytest
import scipy.special
import torch
from hypothesis import given
from torch.distributions import Bernoulli, Beta, kl_divergence

from dropconnectpp import _polynomials as polynomials
from dropconnectpp import functional

PRIORS = [(1.0, 1.0), (0.5, 0.5), (2.0, 0.7), (0.1, 3.0), (30.0, 5.0), (1000.0, 1000.0)]
TINY = [1e-12, 1e-6, 1e-4, 1e-3, 1e-2]
LOGITS = sorted({sign * v for sign in (-1.0, 1.0) for v in [*TINY, *(0.25 * k for k in range(121))]})
positive_numbers = st.floats(min_value=0.05, max_value=50.0)
logits = st.floats(min_value=-20.0, max_value=20.0)


@pytest.fixture(autouse=True)
def _forty_digits():
    with mpmath.workdps(40):
        yield


def double(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def to_float64(values):
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def exact_pi(logit):
    """pi~ and 1 - pi~ of a float's exact value."""
    return 1 / (1 + mpmath.exp(-mpmath.mpf(logit))), 1 / (1 + mpmath.exp(mpmath.mpf(logit)))


def exact_bernoulli_kl(logit, a, b):
    pi, rest = exact_pi(logit)
    log_pi = mpmath.psi(0, a) - mpmath.psi(0, a + b)
    log_rest = mpmath.psi(0, b) - mpmath.psi(0, a + b)
    return pi * mpmath.log(pi) + rest * mpmath.log(rest) - pi * log_pi - rest * log_rest


def exact_beta_kl(a, b, alpha, beta):
    """KL between two Beta distributions, from log B and the digamma function."""
    log_b = mpmath.log(mpmath.beta(alpha, beta)) - mpmath.log(mpmath.beta(a, b))
    spread = (alpha - a + beta - b) * mpmath.psi(0, a + b)
    return log_b + (a - alpha) * mpmath.psi(0, a) + (b - beta) * mpmath.psi(0, b) + spread


def exact_collapsed_kl(logit, alpha, beta):
    pi, rest = exact_pi(logit)
    a, b = alpha + pi, beta + rest
    return exact_bernoulli_kl(logit, a, b) + exact_beta_kl(a, b, alpha, beta)


def exact_collapsed_slope(logit, alpha, beta):
    """By the envelope theorem: only Eq. (20)'s direct dependence on pi~ is left."""
    pi, rest = exact_pi(logit)
    return pi * rest * (mpmath.mpf(logit) - mpmath.psi(0, alpha + pi) + mpmath.psi(0, beta + rest))


# ------------------------------------------------------------------------------- divergences


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 2.5), (7.0, 0.05), (400.0, 900.0)])
def test_expectations_of_eq_22_and_23(a, b):
    found = functional.expected_log_pi(*double(a, b)), functional.expected_log_one_minus_pi(*double(a, b))
    for value, own in zip(found, (a, b), strict=True):
        exact = mpmath.psi(0, mpmath.mpf(own)) - mpmath.psi(0, mpmath.mpf(a) + b)
        assert float(value) == pytest.approx(float(exact), rel=1e-12)
        assert float(value) == pytest.approx(scipy.special.psi(own) - scipy.special.psi(a + b), rel=1e-12)


@pytest.mark.parametrize("logit", [-25.0, -3.0, -1e-6, 0.0, 0.4, 12.0])
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 2.5), (7.0, 0.05), (40.0, 90.0)])
def test_bernoulli_kl_is_eq_20(logit, a, b):
    value = functional.bernoulli_kl(*double(logit, a, b))
    assert float(value) == pytest.approx(float(exact_bernoulli_kl(logit, a, b)), rel=1e-12, abs=1e-14)


def test_bernoulli_kl_averages_the_divergence_over_q_of_pi():
    logit, a, b = double(0.7, 2.0, 3.5)
    nodes, weights = scipy.special.roots_sh_jacobi(60, float(a + b - 1), float(a))  # the density of Beta(a, b)
    nodes, weights = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    average = (weights * kl_divergence(Bernoulli(logits=logit.expand(60)), Bernoulli(nodes))).sum()
    torch.testing.assert_close(functional.bernoulli_kl(logit, a, b), average, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 2.5), (7.0, 0.05), (40.0, 90.0)])
def test_beta_kl_is_eq_21_with_its_constant(alpha, beta, a, b):
    value = functional.beta_kl(*double(a, b), alpha, beta)
    assert float(value) == pytest.approx(float(exact_beta_kl(*map(mpmath.mpf, (a, b, alpha, beta)))), rel=1e-10)
    reference = kl_divergence(Beta(*double(a, b)), Beta(*double(alpha, beta)))
    torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-10)


@given(positive_numbers, positive_numbers, positive_numbers, positive_numbers)
def test_beta_kl_is_never_negative_and_zero_at_the_prior(a, b, alpha, beta):
    assert float(functional.beta_kl(*double(a, b), alpha, beta)) >= -1e-11
    assert float(functional.beta_kl(*double(alpha, beta), alpha, beta)) == pytest.approx(0.0, abs=1e-11)


@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_collapsed_kl_is_the_separate_terms_at_the_best_hyper_posterior(alpha, beta):
    logit = torch.tensor(LOGITS, dtype=torch.float64)
    posterior = functional.optimal_hyper_posterior(logit, alpha, beta)
    torch.testing.assert_close(posterior[0] - alpha, torch.sigmoid(logit), rtol=0, atol=1e-12)
    torch.testing.assert_close(posterior[1] - beta, 1 - torch.sigmoid(logit), rtol=0, atol=1e-12)
    separate = functional.bernoulli_kl(logit, *posterior) + functional.beta_kl(*posterior, alpha, beta)
    torch.testing.assert_close(functional.beta_bernoulli_kl(logit, alpha, beta), separate, rtol=0, atol=1e-10)


@given(logits, positive_numbers, positive_numbers, positive_numbers, positive_numbers)
def test_collapsed_kl_is_below_the_separate_terms_elsewhere(logit, a, b, alpha, beta):
    logit, a, b = double(logit, a, b)
    separate = functional.bernoulli_kl(logit, a, b) + functional.beta_kl(a, b, alpha, beta)
    assert float(functional.beta_bernoulli_kl(logit, alpha, beta)) <= float(separate) + 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_collapsed_kl_and_slope_to_rounding(alpha, beta, dtype):
    logit = torch.tensor(LOGITS, dtype=dtype)
    exact = to_float64(exact_collapsed_kl(float(v), alpha, beta) for v in logit)
    exact_slope = to_float64(exact_collapsed_slope(float(v), alpha, beta) for v in logit)
    value, slope = functional.collapsed_kl(logit, alpha, beta)
    assert value.dtype == slope.dtype == dtype
    if alpha == beta == 1.0:  # the elementary form: relative, however small
        eps = {torch.float32: 8, torch.float64: 32}[dtype] * torch.finfo(dtype).eps
        torch.testing.assert_close(value.double(), exact, rtol=eps, atol=0)
        torch.testing.assert_close(slope.double(), exact_slope, rtol=eps, atol=1e-35)  # 0 at logit 0
    elif dtype == torch.float64:  # log Gamma of a large prior cancels
        torch.testing.assert_close(value.double(), exact, rtol=0, atol=2e-11)
        torch.testing.assert_close(slope.double(), exact_slope, rtol=0, atol=1e-13)
    else:
        atol = 0.0 if polynomials.prior_value_polynomial(alpha, beta) is None else polynomials.PRIOR_ERROR
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(value.double(), exact, rtol=eps, atol=atol + 2e-11)
        torch.testing.assert_close(slope.double(), exact_slope, rtol=eps, atol=atol / 4 + 1e-13)


@pytest.mark.parametrize(
    ("alpha", "beta"), [(1.0, 1.0), (0.5, 0.5), (2.0, 0.7), (0.6, 20.0), (30.0, 5.0), (1000.0, 1000.0), (1e16, 1e16)]
)
def test_the_polynomial_of_a_prior_gives_the_slope(alpha, beta):
    logit = torch.tensor(LOGITS, dtype=torch.float64)
    pi, rest, t = torch.sigmoid(logit), torch.sigmoid(-logit), torch.tanh(logit / 2)
    even, odd = polynomials.prior_polynomial(alpha, beta)
    assert len(even) == len(odd) == 6
    parts = [sum(c * t.square() ** (5 - k) for k, c in enumerate(part)) for part in (even, odd)]
    assert any(even) == (alpha != beta)
    exact = to_float64(mpmath.psi(0, alpha + exact_pi(v)[0]) - mpmath.psi(0, beta + exact_pi(v)[1]) for v in LOGITS)
    torch.testing.assert_close(parts[0] + t * parts[1], exact, rtol=0, atol=polynomials.PRIOR_ERROR)
    slope = pi * rest * (logit - parts[0] - t * parts[1])
    exact_slope = to_float64(exact_collapsed_slope(v, alpha, beta) for v in LOGITS)
    torch.testing.assert_close(slope, exact_slope, rtol=0, atol=polynomials.PRIOR_ERROR / 4)


def test_a_prior_with_a_pole_near_has_no_polynomial():
    assert polynomials.prior_polynomial(1.0, 1.0)[1] == polynomials.GRADIENT_POLYNOMIAL[torch.float32]
    for prior in ((0.3, 1.0), (1.0, 0.3), (0.1, 0.1)):
        assert polynomials.prior_polynomial(*prior) is None


SKEWED = [(1.0, 9.0), (10.0, 90.0), (0.5, 0.5), (3.0, 1.0), (2.0, 98.0), (1000.0, 1000.0)]


@pytest.mark.parametrize(("alpha", "beta"), [*SKEWED, (1e16, 1e16)])
def test_the_value_polynomial_of_a_prior_gives_the_value(alpha, beta):
    t = torch.tanh(torch.tensor(LOGITS, dtype=torch.float64) / 2)
    even, odd = polynomials.prior_value_polynomial(alpha, beta)
    assert len(even) == len(odd) == 6
    assert any(odd) == (alpha != beta)
    parts = [sum(c * t.square() ** (5 - k) for k, c in enumerate(part)) for part in (even, odd)]

    def log_beta(a, b):
        return mpmath.loggamma(a) + mpmath.loggamma(b) - mpmath.loggamma(mpmath.mpf(a) + b)

    pis = [exact_pi(v) for v in LOGITS]
    exact = to_float64(log_beta(alpha, beta) - log_beta(alpha + pi, beta + rest) for pi, rest in pis)
    torch.testing.assert_close(parts[0] + t * parts[1], exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("alpha", "beta"), SKEWED)
def test_float32_by_polynomials_is_float64_by_gamma_functions(alpha, beta):
    sizes = torch.cat([torch.logspace(-8, 1, 500), torch.linspace(0, 30, 5001), torch.tensor([100.0, 800.0])])
    logit = torch.cat([sizes, -sizes])
    value, slope = functional.collapsed_kl(logit, alpha, beta)
    exact, exact_slope = functional.collapsed_kl(logit.double(), alpha, beta)
    torch.testing.assert_close(value.double(), exact, rtol=2e-7, atol=polynomials.PRIOR_ERROR / 2)
    torch.testing.assert_close(slope.double(), exact_slope, rtol=2e-7, atol=polynomials.PRIOR_ERROR / 2)
    assert value.min() > -1e-6
    far = logit.abs() == 30.0  # a vanishing slope keeps its digits
    torch.testing.assert_close(slope[far].double(), exact_slope[far], rtol=1e-6, atol=0)
    assert (slope[logit.abs() == 800.0] == 0).all()
    found = functional.beta_bernoulli_kl(logit.requires_grad_(), alpha, beta)
    assert torch.equal(found, value)
    assert torch.equal(torch.autograd.grad(found.sum(), logit)[0], slope)


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 0.7), (0.3, 1.0)])  # with polynomials and without
def test_float32_under_transforms(alpha, beta):
    polynomials.prior_polynomial.cache_clear()
    polynomials.prior_value_polynomial.cache_clear()
    rows = torch.linspace(-6, 6, 12).view(3, 4)

    def total(v):
        return functional.beta_bernoulli_kl(v, alpha, beta).sum()

    slope = torch.vmap(torch.func.grad(total))(rows)
    torch.testing.assert_close(slope, functional.beta_bernoulli_kl_gradient(rows, alpha, beta), rtol=0, atol=1e-7)
    compiled = torch.compile(total, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows), total(rows), rtol=1e-6, atol=0)


def test_a_prior_without_polynomials_keeps_the_gamma_functions():
    assert polynomials.prior_value_polynomial(0.3, 1.0) is None
    logit = torch.linspace(-5, 5, 11)
    for ours, exact in zip(
        functional.collapsed_kl(logit, 0.3, 1.0), functional.collapsed_kl(logit.double(), 0.3, 1.0), strict=True
    ):
        assert torch.equal(ours, exact.float())


@given(st.floats(min_value=1e-3, max_value=1e17))
def test_digamma_of_the_fit(x):
    found = float(polynomials._digamma(torch.tensor([x], dtype=torch.float64).numpy())[0])
    assert found == pytest.approx(float(mpmath.psi(0, mpmath.mpf(x))), rel=1e-14, abs=1e-14)


def test_known_values_of_the_uniform_prior():
    edges = torch.tensor([-0.0, 0.0, 40.0, -40.0, 800.0], dtype=torch.float64)
    value, slope = functional.collapsed_kl(edges, 1.0, 1.0)
    middle = math.log(4 / math.pi)
    assert round(middle, 4) == 0.2416
    expected = torch.tensor([middle] * 2 + [math.log(2)] * 3, dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)
    assert slope[0] == 0
    assert slope[1] == 0
    assert slope[4] == 0


def test_collapsed_kl_computes_only_what_is_asked_for():
    logit = torch.tensor([0.3])
    for prior in [(1.0, 1.0), (2.0, 0.7)]:
        value, slope = functional.collapsed_kl(logit, *prior)
        assert functional.collapsed_kl(logit, *prior, grad=False) == (value, None)
        assert functional.collapsed_kl(logit, *prior, value=False) == (None, slope)
        assert functional.beta_bernoulli_kl_gradient(logit, *prior) == slope


@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_collapsed_kl_under_autograd_and_vmap(alpha, beta):
    logit = torch.linspace(-6, 6, 12, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: functional.beta_bernoulli_kl(v, alpha, beta), logit)
    rows = logit.detach().view(3, 4)
    batched = torch.vmap(lambda v: functional.beta_bernoulli_kl(v, alpha, beta))(rows)
    torch.testing.assert_close(batched, functional.beta_bernoulli_kl(rows, alpha, beta))
    slope = torch.vmap(torch.func.grad(lambda v: functional.beta_bernoulli_kl(v, alpha, beta).sum()))(rows)
    torch.testing.assert_close(slope, functional.beta_bernoulli_kl_gradient(rows, alpha, beta))


@pytest.mark.parametrize("prior", [(1.0, 1.0), (2.0, 0.7)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_as_float32(dtype, prior):
    logit = torch.linspace(-4, 4, 9).to(dtype).requires_grad_()
    value = functional.beta_bernoulli_kl(logit, *prior)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, functional.beta_bernoulli_kl(logit.float(), *prior), rtol=0, atol=0)
    (slope,) = torch.autograd.grad(value.sum(), logit)
    torch.testing.assert_close(slope, functional.beta_bernoulli_kl_gradient(logit, *prior).to(dtype))


def test_a_stack_equals_its_parts():
    logit, a, b, noise = torch.rand(4, 3, 2, 5, dtype=torch.float64)
    functions = [
        lambda part: functional.beta_bernoulli_kl(logit[part]),
        lambda part: functional.beta_bernoulli_kl(logit[part], 2.0, 0.7),
        lambda part: torch.stack(functional.learned_kl(logit[part], a[part], b[part], 2.0, 0.7), -1),
        lambda part: functional.draw_mask(logit[part], noise[part]),
        lambda part: functional.relax_mask(logit[part], noise[part], 0.4),
        lambda part: torch.stack(functional.gaussian_gate_moments(logit[part], a[part]), -1),
        lambda part: functional.control_weight(a[part], b[part]),
    ]
    for function in functions:
        torch.testing.assert_close(function(slice(None)), torch.stack([function(i) for i in range(3)]))


@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_learned_kl_slopes_against_autograd(alpha, beta):
    logit = torch.linspace(-8, 8, 30, dtype=torch.float64).requires_grad_()
    a = torch.linspace(0.2, 30, 30, dtype=torch.float64).requires_grad_()
    b = torch.linspace(9, 0.1, 30, dtype=torch.float64).requires_grad_()
    kl, *slopes = functional.learned_kl(logit, a, b, alpha, beta)
    prior = Beta(*double(alpha, beta))
    log_pi, log_rest = (torch.digamma(v) - torch.digamma(a + b) for v in (a, b))
    pi = torch.sigmoid(logit)
    reference = -Bernoulli(logits=logit).entropy() - pi * log_pi - (1 - pi) * log_rest
    reference = reference + kl_divergence(Beta(a, b), prior)
    torch.testing.assert_close(kl, reference, rtol=1e-9, atol=1e-9)
    for slope, exact in zip(slopes, torch.autograd.grad(reference.sum(), (logit, a, b)), strict=True):
        torch.testing.assert_close(slope, exact, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------ gates and scores


def test_draw_mask_at_the_edges_of_the_noise():
    below_one = 1 - torch.finfo(torch.float32).eps / 2
    infinity = float("inf")
    logit = torch.tensor([-infinity, -80.0, infinity, 40.0, 0.0, 0.0])
    noise = torch.tensor([0.0, 0.0, below_one, below_one, 0.5, 0.4999])
    assert functional.draw_mask(logit, noise).tolist() == [False, True, True, True, False, True]
    mirrored = functional.draw_antithetic_mask(logit, torch.tensor([0.0, 0.0, 0.5, below_one, 0.5, 0.5001]))
    assert mirrored.tolist() == [False, False, True, True, False, True]


def test_draws_have_the_right_rates_jointly():
    count, p = 200_000, torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    noise = torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    first = functional.draw_mask(torch.logit(p), noise).double()
    second = functional.draw_antithetic_mask(torch.logit(p), noise).double()

    def score(frequency, probability):
        return (frequency - probability) / torch.sqrt(probability * (1 - probability) / count)

    both = (2 * p - 1).clamp_min(1e-9)  # an antithetic pair is on together as rarely as can be
    for draws, probability in [(first, p), (second, p), (first * second, both)]:
        assert score(draws.mean(0), probability).abs().max() < 4.5
    assert score(first.mean(0), p + 0.01).abs().min() > 4.5  # a rate one hundredth off is noticed


def test_relaxed_gates_tend_to_the_mask():
    generator = torch.Generator().manual_seed(1)
    logit = torch.randn(1000, dtype=torch.float64, generator=generator)
    noise = torch.rand(1000, dtype=torch.float64, generator=generator)
    mask = functional.draw_mask(logit, noise).double()
    gaps = [(functional.relax_mask(logit, noise, t) - mask).abs() for t in (1.0, 0.1, 1e-2, 1e-5)]
    means = [float(gap.mean()) for gap in gaps]
    assert means == sorted(means, reverse=True)
    assert gaps[-1].max() < 1e-6
    edge = functional.relax_mask(torch.zeros(2), torch.tensor([0.0, 1.0]), 1.0)
    assert torch.isfinite(edge).all()
    assert ((edge >= 0) & (edge <= 1)).all()


def test_bernoulli_score_is_the_slope_of_log_q():
    logit = torch.linspace(-19, 19, 41, dtype=torch.float64).requires_grad_()
    for mask in (torch.zeros(41, dtype=torch.bool), torch.ones(41, dtype=torch.bool)):
        log_q = functional.log_bernoulli(mask, logit)
        torch.testing.assert_close(log_q, Bernoulli(logits=logit).log_prob(mask.double()), rtol=1e-12, atol=1e-12)
        (slope,) = torch.autograd.grad(log_q.sum(), logit)
        torch.testing.assert_close(functional.bernoulli_score(mask, logit), slope, rtol=0, atol=1e-12)


def test_beta_score_is_the_slope_of_log_q():
    a = torch.tensor([0.3, 1.0, 7.0], dtype=torch.float64).requires_grad_()
    b = torch.tensor([2.0, 1.0, 0.2], dtype=torch.float64).requires_grad_()
    pi = torch.tensor([0.01, 0.5, 0.999], dtype=torch.float64)
    slopes = torch.autograd.grad(Beta(a, b).log_prob(pi).sum(), (a, b))
    for score, slope in zip(functional.beta_score(pi, a, b), slopes, strict=True):
        torch.testing.assert_close(score, slope, rtol=1e-10, atol=1e-10)
    for score in functional.beta_score(torch.tensor([0.0, 1.0]), torch.ones(2), torch.ones(2)):
        assert torch.isfinite(score).all()


def test_gaussian_gate_moments_are_the_two_point_moments():
    logit, weight = torch.randn(2, 7, dtype=torch.float64)
    pi = torch.sigmoid(logit)
    mean, variance = functional.gaussian_gate_moments(logit, weight)
    torch.testing.assert_close(mean, pi * weight)
    torch.testing.assert_close(variance, pi * (weight - mean) ** 2 + (1 - pi) * mean**2)


# ---------------------------------------------------------------------------- parameterisations


@given(st.floats(min_value=1e-8, max_value=1e4))
def test_inverse_positive_inverts_positive(value):
    raw = torch.tensor(functional.inverse_positive(value), dtype=torch.float64)
    assert float(functional.positive(raw)) == pytest.approx(value, rel=1e-7)


def test_probability_to_logit_stays_finite():
    found = functional.probability_to_logit(torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64))
    edge = math.log(functional.PROBABILITY_MARGIN) - math.log1p(-functional.PROBABILITY_MARGIN)
    torch.testing.assert_close(found, torch.tensor([edge, -math.log(3), -edge], dtype=torch.float64))
