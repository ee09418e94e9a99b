"""The paper's maths on tensors: masks, scores, KL divergences and their gradients.

Every function works element by element, so any leading axes are welcome: one layer, or a stack of
replicas. `logit` is the log-odds of a synapse's posterior keep probability, pi~ = sigmoid(logit);
`alpha`, `beta` are the prior's Beta parameters, numbers above zero; `posterior_alpha`,
`posterior_beta` are the hyper-posterior's, tensors shaped like `logit`. Divergences are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dropconnectpp._polynomials import GRADIENT_POLYNOMIAL, VALUE_POLYNOMIAL, prior_polynomial, prior_value_polynomial

PROBABILITY_MARGIN = 1e-6
"""How near to 0 and 1 a keep probability may come when it is optimised directly."""


# ------------------------------------------------------------------------------ gates and scores


def draw_mask(logit: Tensor, noise: Tensor) -> Tensor:
    """Turn uniform noise in [0, 1) into on/off variables: z ~ Bernoulli(pi~), Eq. (13).

    >>> draw_mask(torch.tensor([0.0, 0.0, 30.0]), torch.tensor([0.2, 0.7, 0.99]))
    tensor([ True, False,  True])
    """
    return noise < torch.sigmoid(logit)


def draw_antithetic_mask(logit: Tensor, noise: Tensor) -> Tensor:
    """The mask of the mirrored noise 1 - u: the second half of an antithetic pair.

    >>> draw_antithetic_mask(torch.tensor([0.0, 0.0]), torch.tensor([0.2, 0.7]))
    tensor([False,  True])
    """
    return (1.0 - noise) < torch.sigmoid(logit)


def relax_mask(logit: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """A binary concrete gate in (0, 1) that tends to `draw_mask` as the temperature goes to 0.

    >>> relax_mask(torch.tensor(0.0), torch.tensor(0.5), 0.5)
    tensor(0.5000)
    """
    margin = torch.finfo(noise.dtype).eps
    return torch.sigmoid((logit - torch.logit(noise, eps=margin)) / temperature)


def log_bernoulli(mask: Tensor, logit: Tensor) -> Tensor:
    """log q(z) of Eq. (13), in nats.

    >>> log_bernoulli(torch.tensor(True), torch.tensor(0.0))
    tensor(-0.6931)
    """
    on = mask.to(logit.dtype)
    return -torch.nn.functional.softplus((1.0 - 2.0 * on) * logit)


def bernoulli_score(mask: Tensor, logit: Tensor) -> Tensor:
    """h(z) = d log q(z) / d logit = z - pi~: Eq. (9) for the posterior of Eq. (13).

    >>> bernoulli_score(torch.tensor([True, False]), torch.zeros(2))
    tensor([ 0.5000, -0.5000])
    """
    return mask.to(logit.dtype) - torch.sigmoid(logit)


def beta_score(pi: Tensor, posterior_alpha: Tensor, posterior_beta: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. (9) for the hyper-posterior of Eq. (14): d log q(pi) / d alpha~ and / d beta~."""
    tiny = torch.finfo(pi.dtype).tiny
    log_pi = torch.log(pi.clamp_min(tiny))
    log_rest = torch.log1p(-pi.clamp_max(1.0 - torch.finfo(pi.dtype).eps))
    return (
        log_pi - expected_log_pi(posterior_alpha, posterior_beta),
        log_rest - expected_log_one_minus_pi(posterior_alpha, posterior_beta),
    )


def control_weight(covariance: Tensor, variance: Tensor) -> Tensor:
    """The control variate's weight of Eq. (10), Cov(f, h) / Var(h); 0 where nothing was seen yet.

    >>> control_weight(torch.tensor([-1.0, 0.0]), torch.tensor([2.0, 0.0]))
    tensor([-0.5000,  0.0000])
    """
    return torch.where(variance > 0, covariance / variance, 0.0)


def gaussian_gate_moments(logit: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean pi~ W and variance pi~ (1 - pi~) W^2 of one gated synapse: what `local` propagates."""
    pi = torch.sigmoid(logit)
    return pi * weight, pi * torch.sigmoid(-logit) * weight.square()


# ---------------------------------------------------------------------------- parameterisations


def probability_to_logit(probability: Tensor) -> Tensor:
    """Log-odds of a probability, kept `PROBABILITY_MARGIN` away from 0 and 1."""
    return torch.logit(probability, eps=PROBABILITY_MARGIN)


def positive(raw: Tensor) -> Tensor:
    """The map from an unconstrained parameter to a Beta parameter: softplus."""
    return torch.nn.functional.softplus(raw)


def inverse_positive(value: float) -> float:
    """The unconstrained parameter that `positive` sends to ``value``.

    >>> round(float(positive(torch.tensor(inverse_positive(1.5)))), 6)
    1.5
    """
    return value + math.log(-math.expm1(-value))


# ------------------------------------------------------------------------- divergences, as printed


def expected_log_pi(posterior_alpha: Tensor, posterior_beta: Tensor) -> Tensor:
    """E_q[log pi], Eq. (22).

    >>> expected_log_pi(torch.tensor(1.0), torch.tensor(1.0))
    tensor(-1.0000)
    """
    return torch.digamma(posterior_alpha) - torch.digamma(posterior_alpha + posterior_beta)


def expected_log_one_minus_pi(posterior_alpha: Tensor, posterior_beta: Tensor) -> Tensor:
    """E_q[log(1 - pi)], Eq. (23)."""
    return torch.digamma(posterior_beta) - torch.digamma(posterior_alpha + posterior_beta)


def bernoulli_kl(logit: Tensor, posterior_alpha: Tensor, posterior_beta: Tensor) -> Tensor:
    """KL[q(z) || p(z | pi)] averaged over q(pi): Eq. (20), in nats.

    >>> bernoulli_kl(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0))
    tensor(0.3069)
    """
    softplus = torch.nn.functional.softplus
    pi, rest = torch.sigmoid(logit), torch.sigmoid(-logit)
    negative_entropy = -(pi * softplus(-logit) + rest * softplus(logit))
    return (
        negative_entropy
        - pi * expected_log_pi(posterior_alpha, posterior_beta)
        - rest * expected_log_one_minus_pi(posterior_alpha, posterior_beta)
    )


def beta_kl(posterior_alpha: Tensor, posterior_beta: Tensor, alpha: float, beta: float) -> Tensor:
    """KL[q(pi) || p(pi)]: Eq. (21) with the constant log B(alpha, beta) that the print leaves out.

    The constant is zero for alpha = beta = 1, the paper's own setting; without it the expression is
    not a KL divergence for any other prior.

    >>> beta_kl(torch.tensor(2.0), torch.tensor(3.0), 2.0, 3.0)
    tensor(0.)
    """
    log_beta_prior = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    log_beta_posterior = (
        torch.lgamma(posterior_alpha) + torch.lgamma(posterior_beta) - torch.lgamma(posterior_alpha + posterior_beta)
    )
    return (
        log_beta_prior
        - log_beta_posterior
        + (posterior_alpha - alpha) * expected_log_pi(posterior_alpha, posterior_beta)
        + (posterior_beta - beta) * expected_log_one_minus_pi(posterior_alpha, posterior_beta)
    )


def optimal_hyper_posterior(logit: Tensor, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """The q(pi) of Eq. (14) that is best for a given pi~: alpha + pi~, beta + 1 - pi~."""
    return alpha + torch.sigmoid(logit), beta + torch.sigmoid(-logit)


# ------------------------------------------------------------ the divergence at the best q(pi)
#
# At the optimum the expectations cancel and Eq. (20) + Eq. (21) is
#     KL = -H(pi~) + log B(alpha, beta) - log B(alpha + pi~, beta + 1 - pi~),
# with gradient, by the envelope theorem, d KL / d pi~ = logit - psi(alpha + pi~) + psi(beta + 1 - pi~).
#
# `polynomials` stands in for the Gamma functions wherever it can.


def _horner(coefficients: tuple[float, ...], s: Tensor) -> Tensor:
    total = s * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total.add_(coefficient).mul_(s)
    return total.add_(coefficients[-1])


def widen(logit: Tensor) -> Tensor:
    """Half precisions are widened to float32: a KL summed over millions of synapses needs it."""
    return logit if logit.dtype in GRADIENT_POLYNOMIAL else logit.float()


def _uniform_prior_kl(logit: Tensor, value: bool, grad: bool) -> tuple[Tensor | None, Tensor | None]:
    """KL and d KL / d logit for alpha = beta = 1, sharing what they can."""
    size = logit.abs()
    small = torch.sigmoid(-size)  # to full relative precision, however small
    large = 1.0 - small
    t = torch.expm1(-size).neg_().mul_(large)  # large - small would lose a small logit's digits
    s = t.square()
    kl = gradient = None
    if value:
        kl = _horner(VALUE_POLYNOMIAL[logit.dtype], s).mul_(1.0 - s)
        kl.add_(math.log(2.0)).add_(torch.log1p(-small)).sub_(size * small)  # addcmul_ has no batching rule
    if grad:
        gradient = _horner(GRADIENT_POLYNOMIAL[logit.dtype], s).mul_(t).neg_().add_(size)
        gradient.mul_(small).mul_(large).mul_(torch.sign(logit))
    return kl, gradient


def _polynomial_prior_kl(
    logit: Tensor, alpha: float, beta: float, value: bool, grad: bool
) -> tuple[Tensor | None, Tensor | None] | None:
    """KL and d KL / d logit in float32, by the prior's polynomials; None where it has none."""
    value_parts, grad_parts = prior_value_polynomial(alpha, beta), prior_polynomial(alpha, beta)
    if value_parts is None or grad_parts is None:
        return None
    t = torch.tanh(0.5 * logit)
    s = t.square()
    size = logit.abs()
    small = torch.sigmoid(-size)  # to full relative precision, however small
    kl = gradient = None
    if value:
        kl = _skewed(value_parts, t, s).add_(torch.log1p(-small)).sub_(size * small)
    if grad:
        gradient = _skewed(grad_parts, t, s).neg_().add_(logit).mul_(small).mul_(1.0 - small)
    return kl, gradient


def _skewed(parts: tuple[tuple[float, ...], tuple[float, ...]], t: Tensor, s: Tensor) -> Tensor:
    """even(s) + t odd(s), for s = t^2."""
    even, odd = parts
    if not any(odd):
        return _horner(even, s)
    if not any(even):
        return _horner(odd, s).mul_(t)
    total = (t * odd[0]).add_(even[0])
    for slant, level in zip(odd[1:], even[1:], strict=True):
        total.mul_(s).add_(t, alpha=slant).add_(level)
    return total


def _general_prior_kl(
    logit: Tensor, alpha: float, beta: float, value: bool, grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """KL and d KL / d logit for any prior: in float64, since log Gamma of a large prior cancels."""
    wide = logit if logit.device.type == "mps" else logit.double()
    pi, rest = torch.sigmoid(wide), torch.sigmoid(-wide)
    kl = gradient = None
    if value:
        softplus = torch.nn.functional.softplus
        constant = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
        constant += math.lgamma(alpha + beta + 1.0)
        kl = constant - torch.lgamma(alpha + pi) - torch.lgamma(beta + rest)
        kl -= pi * softplus(-wide) + rest * softplus(wide)
        kl = kl.to(logit.dtype)
    if grad:
        gradient = pi * rest * (wide - torch.digamma(alpha + pi) + torch.digamma(beta + rest))
        gradient = gradient.to(logit.dtype)
    return kl, gradient


def collapsed_kl(
    logit: Tensor, alpha: float, beta: float, *, value: bool = True, grad: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """`beta_bernoulli_kl` and its derivative by the logit in one go; what is not asked for is None.

    The elementary form is used for alpha = beta = 1. Half precisions come back as float32. In
    float32 other priors go by their polynomials where they have them: right to `polynomials.PRIOR_ERROR`,
    several times as fast.
    """
    logit = widen(logit)
    if alpha == 1.0 and beta == 1.0:
        return _uniform_prior_kl(logit, value, grad)
    if logit.dtype == torch.float32 and not torch.compiler.is_compiling():  # the fit cannot be traced
        found = _polynomial_prior_kl(logit, alpha, beta, value, grad)
        if found is not None:
            return found
    return _general_prior_kl(logit, alpha, beta, value, grad)


class _CollapsedKL(torch.autograd.Function):
    """`collapsed_kl` under autograd: keeps the logits alone and computes the gradient when asked."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logit: Tensor, alpha: float, beta: float) -> Tensor:
        kl, _ = collapsed_kl(logit, alpha, beta, grad=False)
        assert kl is not None
        return kl

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.alpha, ctx.beta = inputs[1], inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (logit,) = ctx.saved_tensors
        _, grad = collapsed_kl(logit, ctx.alpha, ctx.beta, value=False)
        assert grad is not None
        return (grad * gradients[0]).to(logit.dtype), None, None


def beta_bernoulli_kl(logit: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """KL of one synapse's posterior from its prior, in nats: Eq. (20) + Eq. (21), at the best q(pi).

    Between 0.2416 (at pi~ = 1/2) and log 2 for alpha = beta = 1.

    >>> beta_bernoulli_kl(torch.zeros(()), 1.0, 1.0)
    tensor(0.2416)
    """
    kl: Tensor = _CollapsedKL.apply(logit, float(alpha), float(beta))  # type: ignore[no-untyped-call]
    return kl


def beta_bernoulli_kl_gradient(logit: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """d `beta_bernoulli_kl` / d logit, to the rounding of the logits' own precision or `polynomials.PRIOR_ERROR`.

    >>> beta_bernoulli_kl_gradient(torch.tensor([-30.0, 0.0, 1.0]))
    tensor([-2.7137e-12,  0.0000e+00,  1.1051e-01])
    """
    _, grad = collapsed_kl(logit, float(alpha), float(beta), value=False)
    assert grad is not None
    return grad


# ---------------------------------------------------------------- the divergence from the exact prior
#
# Each pi_ij of Eq. (11), (12) governs one z_ij, so p(z_ij) is Bernoulli with the prior's mean, exactly: the mean-field
# bound over (z, pi) only loosens it. Where a group of synapses shares one pi the hierarchy does say something.


def negative_entropy(logit: Tensor) -> Tensor:
    """pi~ log pi~ + (1 - pi~) log(1 - pi~) of each synapse, in nats.

    >>> negative_entropy(torch.zeros(()))
    tensor(-0.6931)
    """
    logit = widen(logit)
    softplus = torch.nn.functional.softplus
    return -(torch.sigmoid(logit) * softplus(-logit) + torch.sigmoid(-logit) * softplus(logit))


def marginal_kl(logit: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """KL[Bernoulli(pi~) || Bernoulli(alpha / (alpha + beta))] of each synapse, in nats: no hyper-posterior is needed.

    `beta_bernoulli_kl` is an upper bound of it; they differ by 0.2416 nats at pi~ = 1/2 for alpha = beta = 1.

    >>> marginal_kl(torch.zeros(()), 1.0, 1.0)
    tensor(0.)
    >>> marginal_kl(torch.tensor(-2.0), 1.0, 9.0) < beta_bernoulli_kl(torch.tensor(-2.0), 1.0, 9.0)
    tensor(True)
    """
    logit = widen(logit)
    on, off = -math.log(alpha / (alpha + beta)), -math.log(beta / (alpha + beta))
    return negative_entropy(logit) + torch.sigmoid(logit) * on + torch.sigmoid(-logit) * off


def marginal_kl_gradient(logit: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """d `marginal_kl` / d logit.

    >>> marginal_kl_gradient(torch.tensor([-30.0, 0.0, 1.0]))
    tensor([-2.8073e-12,  0.0000e+00,  1.9661e-01])
    """
    logit = widen(logit)
    return torch.sigmoid(logit) * torch.sigmoid(-logit) * (logit - math.log(alpha / beta))


def shared_kl(
    logit: Tensor, alpha: float, beta: float, axes: tuple[int, ...], kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """KL of the synapses that share one pi along ``axes``, at the best q(pi), and its gradient by the logit.

    q(pi_g) = Beta(alpha + sum pi~, beta + sum (1 - pi~)) in each group g, and
    KL_g = -sum H(pi~) + log B(alpha, beta) - log B(alpha + sum pi~, beta + sum (1 - pi~)).
    The first result has the shape of ``logit`` and spreads a group's share evenly over its synapses; both are 0
    where ``kept`` is False, and those synapses are no part of their group.

    >>> value, _ = shared_kl(torch.zeros(1, 4), 1.0, 1.0, (1,))
    >>> round(float(value.sum()), 4)
    0.6286
    """
    dtype = widen(logit).dtype
    wide = logit if logit.device.type == "mps" else logit.double()  # log Gamma of a large group cancels
    pi, rest = torch.sigmoid(wide), torch.sigmoid(-wide)
    part = torch.ones_like(wide) if kept is None else kept.to(wide.dtype)
    on, off = (pi * part).sum(axes, keepdim=True), (rest * part).sum(axes, keepdim=True)
    size = part.sum(axes, keepdim=True)
    constant = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    group = constant - torch.lgamma(alpha + on) - torch.lgamma(beta + off) + torch.lgamma(alpha + beta + size)
    value = (negative_entropy(wide) + group / size.clamp_min(1.0)) * part
    odds = torch.digamma(alpha + on) - torch.digamma(beta + off)
    return value.to(dtype), (pi * rest * (wide - odds) * part).to(dtype)


def learned_kl(
    logit: Tensor, posterior_alpha: Tensor, posterior_beta: Tensor, alpha: float, beta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Eq. (20) + Eq. (21) with a free hyper-posterior, and its gradients by logit, alpha~ and beta~.

    The gradients vanish together at `optimal_hyper_posterior`: (alpha~ - alpha - pi~) and
    (beta~ - beta - 1 + pi~) are their only factors besides trigammas.
    """
    softplus = torch.nn.functional.softplus
    pi, rest = torch.sigmoid(logit), torch.sigmoid(-logit)
    total = posterior_alpha + posterior_beta
    psi = torch.digamma(total)  # the Gamma functions are nearly all of the cost: each is taken once
    log_pi, log_rest = torch.digamma(posterior_alpha) - psi, torch.digamma(posterior_beta) - psi
    log_beta_prior = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    log_beta_posterior = torch.lgamma(posterior_alpha) + torch.lgamma(posterior_beta) - torch.lgamma(total)
    excess_alpha = posterior_alpha - alpha - pi
    excess_beta = posterior_beta - beta - rest
    kl = excess_alpha * log_pi + excess_beta * log_rest + (log_beta_prior - log_beta_posterior)
    kl = kl - (pi * softplus(-logit) + rest * softplus(logit))
    shared = (excess_alpha + excess_beta) * torch.polygamma(1, total)
    return (
        kl,
        pi * rest * (logit - log_pi + log_rest),
        excess_alpha * torch.polygamma(1, posterior_alpha) - shared,
        excess_beta * torch.polygamma(1, posterior_beta) - shared,
    )


# ------------------------------------------------------------------------ expected activations


def expected_activation(
    activation: Callable[[Tensor], Tensor], mean: Tensor, deviation: Tensor, nodes: int = 64
) -> Tensor:
    """Eq. (17), E[a(u)], for u ~ N(mean, deviation^2): closed form for ReLU, else Gauss-Hermite quadrature."""
    if isinstance(activation, nn.ReLU) or activation in (torch.relu, nn.functional.relu):
        ratio = mean / deviation
        density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
        rectified: Tensor = mean * torch.special.ndtr(ratio) + deviation * density
        return rectified
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    total = torch.zeros_like(mean)
    for point, weight in zip(points.tolist(), (weights / weights.sum()).tolist(), strict=True):
        total = total + weight * activation(mean + point * deviation)
    return total


# ------------------------------------------------------------------- gradients of the likelihood


def score_gradient(logit: Tensor, weighted_mask: Tensor, total: Tensor | float) -> Tensor:
    """sum_s c_s (z_s - pi~), given sum_s c_s z_s and sum_s c_s: Eq. (8) with f - varpi h = c h."""
    return weighted_mask - total * torch.sigmoid(logit)


def disarm_gradient(logit: Tensor, weighted_difference: Tensor) -> Tensor:
    """The antithetic pair's estimate, given sum_s c_s (z_s - z'_s) with c = (reward - reward') / 2."""
    return weighted_difference * torch.sigmoid(logit.abs())


def straight_through_gradient(logit: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """The masked weight's gradient passed on to the logit as though z were pi~."""
    return gradient * weight * torch.sigmoid(logit) * torch.sigmoid(-logit)
