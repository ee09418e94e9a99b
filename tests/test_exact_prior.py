"""The KL with pi summed out and with one pi for a group: against 40 digits, distributions and integrals over pi."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import mpmath
import pytest
import torch
from hypothesis import given
from torch.distributions import Bernoulli, Beta, kl_divergence

from dropconnectpp import functional

PRIORS = [(1.0, 1.0), (0.5, 0.5), (2.0, 0.7), (0.1, 3.0), (30.0, 5.0), (1000.0, 1000.0), (1.0, 999.0)]
LOGITS = sorted({sign * v for sign in (-1.0, 1.0) for v in [1e-12, 1e-6, 1e-3, *(0.25 * k for k in range(121))]})
numbers = st.floats(min_value=0.05, max_value=50.0)
logits = st.floats(min_value=-20.0, max_value=20.0)


@pytest.fixture(autouse=True)
def _forty_digits():
    with mpmath.workdps(40):
        yield


def double(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def exact_pi(logit):
    """pi~ and 1 - pi~ of a float's exact value."""
    return 1 / (1 + mpmath.exp(-mpmath.mpf(logit))), 1 / (1 + mpmath.exp(mpmath.mpf(logit)))


def exact_marginal_kl(logit, alpha, beta):
    pi, rest = exact_pi(logit)
    mean = mpmath.mpf(alpha) / (mpmath.mpf(alpha) + beta)
    return pi * mpmath.log(pi / mean) + rest * mpmath.log(rest / (1 - mean))


def exact_marginal_slope(logit, alpha, beta):
    pi, rest = exact_pi(logit)
    return pi * rest * (mpmath.mpf(logit) - mpmath.log(mpmath.mpf(alpha) / beta))


# ------------------------------------------------------------------------------- pi summed out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_marginal_kl_and_its_gradient_to_rounding(alpha, beta, dtype):
    logit = torch.tensor(LOGITS, dtype=dtype)
    eps = 8 * torch.finfo(dtype).eps * (1 + abs(math.log(alpha / beta)) + math.log(2))
    value, slope = functional.marginal_kl(logit, alpha, beta), functional.marginal_kl_gradient(logit, alpha, beta)
    assert value.dtype == slope.dtype == dtype
    exact = torch.tensor([float(exact_marginal_kl(float(v), alpha, beta)) for v in logit], dtype=torch.float64)
    torch.testing.assert_close(value.double(), exact, rtol=0, atol=eps)
    exact = torch.tensor([float(exact_marginal_slope(float(v), alpha, beta)) for v in logit], dtype=torch.float64)
    torch.testing.assert_close(slope.double(), exact, rtol=eps, atol=eps / 4)
    if alpha == beta:  # relative, however small
        torch.testing.assert_close(slope.double(), exact, rtol=eps, atol=0)


@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_marginal_kl_is_that_of_two_bernoullis(alpha, beta):
    logit = torch.linspace(-12, 12, 97, dtype=torch.float64)
    prior = Beta(*double(alpha, beta))
    reference = kl_divergence(Bernoulli(logits=logit), Bernoulli(prior.mean))
    torch.testing.assert_close(functional.marginal_kl(logit, alpha, beta), reference, rtol=1e-10, atol=1e-13)
    at_the_mean = functional.marginal_kl(torch.logit(prior.mean), alpha, beta)
    assert abs(float(at_the_mean)) < 1e-14
    torch.testing.assert_close(
        functional.negative_entropy(logit), -Bernoulli(logits=logit).entropy(), rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_marginal_kl_under_autograd_and_vmap(alpha, beta):
    logit = torch.linspace(-6, 6, 12, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: functional.marginal_kl(v, alpha, beta), logit)
    (slope,) = torch.autograd.grad(functional.marginal_kl(logit, alpha, beta).sum(), logit)
    expected = functional.marginal_kl_gradient(logit.detach(), alpha, beta)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-13)
    rows = logit.detach().view(3, 4)
    batched = torch.vmap(lambda v: functional.marginal_kl(v, alpha, beta))(rows)
    torch.testing.assert_close(batched, functional.marginal_kl(rows, alpha, beta))


@given(logits, numbers, numbers)
def test_marginal_kl_is_never_above_the_bound_and_the_gap_is_what_pi_still_tells(logit, alpha, beta):
    """The chain rule: the bound over (z, pi) is KL[q(z) || p(z)] + E_q(z) KL[q(pi) || p(pi | z)]."""
    (logit,) = double(logit)
    marginal, bound = functional.marginal_kl(logit, alpha, beta), functional.beta_bernoulli_kl(logit, alpha, beta)
    assert float(marginal) <= float(bound)
    pi = torch.sigmoid(logit)
    q = Beta(*functional.optimal_hyper_posterior(logit, alpha, beta))
    given_on, given_off = Beta(*double(alpha + 1, beta)), Beta(*double(alpha, beta + 1))
    gap = pi * kl_divergence(q, given_on) + (1 - pi) * kl_divergence(q, given_off)
    torch.testing.assert_close(bound - marginal, gap, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_as_float32(dtype):
    logit = torch.linspace(-4, 4, 9).to(dtype).requires_grad_()
    for function in (
        functional.negative_entropy,
        lambda v: functional.marginal_kl(v, 2.0, 9.0),
        lambda v: functional.marginal_kl_gradient(v, 2.0, 9.0),
        lambda v: functional.shared_kl(v, 2.0, 9.0, (0,))[0],
        lambda v: functional.shared_kl(v, 2.0, 9.0, (0,))[1],
    ):
        value = function(logit)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, function(logit.float()), rtol=0, atol=0)
    (slope,) = torch.autograd.grad(functional.marginal_kl(logit, 2.0, 9.0).sum(), logit)
    assert slope.dtype == dtype


# ------------------------------------------------------------------------------- one pi for a group


def integrated_kl(logit, alpha, beta, a, b):
    """KL[q(z) q(pi) || p(z | pi) p(pi)] for q(pi) = Beta(a, b): a sum over every z of an integral over pi."""
    pairs = [exact_pi(value) for value in logit]
    log_q_norm, log_p_norm = mpmath.log(mpmath.beta(a, b)), mpmath.log(mpmath.beta(alpha, beta))
    choices = []
    for z in itertools.product((0, 1), repeat=len(pairs)):
        q = mpmath.fprod(pi if bit else rest for bit, (pi, rest) in zip(z, pairs, strict=True))
        choices.append((sum(z), q))

    def density(pi):
        log_pi, log_rest = mpmath.log(pi), mpmath.log(1 - pi)
        log_q = (a - 1) * log_pi + (b - 1) * log_rest - log_q_norm
        log_p = (alpha - 1) * log_pi + (beta - 1) * log_rest - log_p_norm
        inner = sum(q * (mpmath.log(q) - on * log_pi - (len(pairs) - on) * log_rest) for on, q in choices)
        return mpmath.exp(log_q) * (inner + log_q - log_p)

    with mpmath.workdps(25):
        return mpmath.quad(density, [0, mpmath.mpf("0.01"), mpmath.mpf("0.5"), mpmath.mpf("0.99"), 1])


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2.0, 0.7), (1.0, 9.0)])
@pytest.mark.parametrize("logit", [[0.3], [0.0, 0.0], [-2.0, 0.5, 1.7], [4.0, -4.0, 0.1, 2.0]], ids=len)
def test_shared_kl_is_the_divergence_over_gates_and_pi(logit, alpha, beta):
    pis = [exact_pi(value) for value in logit]
    a, b = alpha + sum(pi for pi, _ in pis), beta + sum(rest for _, rest in pis)
    value, _ = functional.shared_kl(torch.tensor(logit, dtype=torch.float64), alpha, beta, (0,))
    assert float(value.sum()) == pytest.approx(float(integrated_kl(logit, alpha, beta, a, b)), rel=1e-9)
    share = value - functional.negative_entropy(torch.tensor(logit, dtype=torch.float64))
    torch.testing.assert_close(share, share[:1].expand(len(logit)))  # the group's part is spread evenly


@given(st.lists(logits, min_size=1, max_size=6), numbers, numbers, numbers, numbers)
def test_shared_kl_is_below_every_other_q_of_pi_and_above_the_exact_divergence(logit, alpha, beta, a, b):
    (logit,) = double(logit)
    pi, rest = torch.sigmoid(logit), torch.sigmoid(-logit)
    value = float(functional.shared_kl(logit, alpha, beta, (0,))[0].sum())
    other = functional.bernoulli_kl(logit, *double(a, b)).sum() + functional.beta_kl(*double(a, b), alpha, beta)
    assert value <= float(other) + 1e-9
    exact = 0.0  # KL[q(z) || p(z)], p(z) a Beta-binomial without its coefficient
    for z in itertools.product((0, 1), repeat=len(logit)):
        bits = torch.tensor(z, dtype=torch.float64)
        log_q = (bits * torch.log(pi) + (1 - bits) * torch.log(rest)).sum()
        on, off = alpha + bits.sum(), beta + (1 - bits).sum()
        log_p = torch.lgamma(on) + torch.lgamma(off) - torch.lgamma(on + off)
        log_p = log_p - math.lgamma(alpha) - math.lgamma(beta) + math.lgamma(alpha + beta)
        exact += float(torch.exp(log_q) * (log_q - log_p))
    assert value >= exact - 1e-9


@given(logits, numbers, numbers)
def test_a_group_of_one_is_a_synapse_by_itself(logit, alpha, beta):
    (logit,) = double([logit])
    value, slope = functional.shared_kl(logit, alpha, beta, (0,))
    expected = functional.collapsed_kl(logit, alpha, beta)
    torch.testing.assert_close(value, expected[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(slope, expected[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 2), (0, 2)])
def test_groups_do_not_know_each_other_and_pruned_synapses_are_no_part_of_one(axes):
    logit = torch.randn(3, 4, 2, dtype=torch.float64)
    kept = torch.rand(3, 4, 2) < 0.5
    kept[0], kept[:, 1] = False, False  # groups of which nothing is left
    value, slope = functional.shared_kl(logit, 2.0, 0.7, axes, kept)
    group = {(0, 1, 2): lambda o, i: 0, (1, 2): lambda o, i: o, (0, 2): lambda o, i: i}[axes]
    for number in range(4):
        inside = torch.tensor([[[group(o, i) == number] * 2 for i in range(4)] for o in range(3)]) & kept
        alone = functional.shared_kl(logit[inside], 2.0, 0.7, (0,))
        torch.testing.assert_close(value[inside], alone[0])
        torch.testing.assert_close(slope[inside], alone[1])
    assert not value[~kept].any()
    assert not slope[~kept].any()


@pytest.mark.parametrize("axes", [(0, 1), (1,), (0,)])
@pytest.mark.parametrize(("alpha", "beta"), PRIORS)
def test_shared_kls_gradient_is_autograds(alpha, beta, axes):
    logit = (2 * torch.randn(5, 7, dtype=torch.float64)).requires_grad_()
    kept = torch.rand(5, 7) < 0.7
    value, slope = functional.shared_kl(logit, alpha, beta, axes, kept)
    (found,) = torch.autograd.grad(value.sum(), logit)
    torch.testing.assert_close(slope.detach(), found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pi", [0.5, 0.1])
def test_the_kl_of_a_large_group_keeps_its_digits(pi):
    """A million synapses: log Gamma of a million, 1.3e7, cancels to a few nats."""
    count = 2**20
    logit = torch.full((1024, 1024), math.log(pi / (1 - pi)))
    value, _ = functional.shared_kl(logit, 1.0, 1.0, (0, 1))
    assert value.dtype == torch.float32
    exact_on, exact_off = exact_pi(float(logit[0, 0]))
    exact = count * (exact_on * mpmath.log(exact_on) + exact_off * mpmath.log(exact_off))
    exact -= mpmath.log(mpmath.beta(1 + count * exact_on, 1 + count * exact_off))
    assert 5 < exact < 9
    assert float(value.double().sum()) == pytest.approx(float(exact), rel=1e-5)
