"""Polynomials that stand for the Gamma functions of the KL at the best q(pi); fitted on the host, once for each prior.

`functional` says what the KL is; `logit`, pi~, `alpha` and `beta` are named as there. Coefficients come highest power
first.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

_Floats = np.ndarray[Any, np.dtype[np.float64]]

# For alpha = beta = 1 the Gamma functions are elementary. With t = tanh(|logit| / 2) = |2 pi~ - 1| and
# the lambda sums below, partial fractions of pi cot(pi x) give power series that converge like
# 9^-k and have nothing to cancel near 0, 1/2 or 1:
#     KL    = log 2 - H(pi~) + h,      h = sum_k lambda_k / (k + 1) (1 - t^(2k+2))
#     gradient = sign(logit) (|logit| - t G), G = sum_k 4 lambda_k t^2k
# where lambda_k = sum_{n>=1} (2n + 1)^-(2k+2).


def _lambda_sums(count: int) -> _Floats:
    odd = 2.0 * np.arange(1, 4000) + 1.0
    sums = np.array([np.sum(odd ** -(2.0 * k + 2.0)) for k in range(count)])
    sums[0], sums[1] = math.pi**2 / 8 - 1, math.pi**4 / 96 - 1  # these two converge slowly
    return sums


def economise(series: _Floats, degree: int) -> tuple[float, ...]:
    """Shorten a power series on [0, 1] by Chebyshev interpolation; highest power first."""
    nodes = np.polynomial.Chebyshev.interpolate(
        lambda s: np.polynomial.polynomial.polyval(s, series), degree, domain=[0.0, 1.0]
    )
    power = nodes.convert(kind=np.polynomial.Polynomial, domain=[0, 1], window=[0, 1])
    return tuple(float(c) for c in power.coef[::-1])


_LAMBDA = _lambda_sums(26)
GRADIENT_SERIES = 4.0 * _LAMBDA
# h = (1 - t^2) sum_j t^2j (tail sum of lambda_k / (k + 1) from k = j): exact zero at t = 1.
VALUE_SERIES = np.cumsum((_LAMBDA / np.arange(1, 27))[::-1])[::-1].copy()
# Largest error over [0, 1]: 6.5e-10 for degree 5, below 1e-15 for degree 13.
GRADIENT_POLYNOMIAL = {torch.float32: economise(GRADIENT_SERIES, 5), torch.float64: economise(GRADIENT_SERIES, 13)}
VALUE_POLYNOMIAL = {torch.float32: economise(VALUE_SERIES, 4), torch.float64: economise(VALUE_SERIES, 13)}


# Any other prior's gradient needs psi(alpha + pi~) - psi(beta + 1 - pi~), which is smooth on [0, 1]: a polynomial in
# the signed t = 2 pi~ - 1 = tanh(logit / 2). Its even part vanishes for alpha = beta. So does the odd part of its
# integral, the value's log B(alpha, beta) - log B(alpha + pi~, beta + 1 - pi~).
PRIOR_DEGREE = 11
PRIOR_ERROR = 1e-6
"""Largest error of `prior_polynomial` and `prior_value_polynomial` on [0, 1] that is put up with."""


def _digamma(x: _Floats) -> _Floats:
    """psi(x) for x > 0, to 1e-14: torch's own would be seen by whatever transform or mode is on."""
    low = sum(1.0 / (x + k) for k in range(10))
    inverse = 1.0 / (x + 10.0)
    tail = np.polynomial.polynomial.polyval(
        inverse**2, [0.0, 1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760]
    )
    found: _Floats = np.log(x + 10.0) - inverse / 2.0 - tail - low
    return found


def _prior_term(t: _Floats, alpha: float, beta: float) -> _Floats:
    """psi(alpha + pi~) - psi(beta + 1 - pi~) at t = 2 pi~ - 1."""
    return _digamma(alpha + (1.0 + t) / 2.0) - _digamma(beta + (1.0 - t) / 2.0)


@cache
def prior_polynomial(alpha: float, beta: float) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """psi(alpha + pi~) - psi(beta + 1 - pi~) = even(t^2) + t odd(t^2), t = 2 pi~ - 1; highest powers first.

    For kernels in float32: d KL / d logit = pi~ (1 - pi~) (logit - this) at the best q(pi). None where it would be off
    by more than `PRIOR_ERROR`: a small alpha or beta brings a pole near.

    >>> even, odd = prior_polynomial(1.0, 1.0)
    >>> any(even), odd == GRADIENT_POLYNOMIAL[torch.float32]
    (False, True)
    >>> prior_polynomial(0.1, 1.0)
    """
    count = (PRIOR_DEGREE + 1) // 2
    if alpha == beta == 1.0:
        return (0.0,) * count, GRADIENT_POLYNOMIAL[torch.float32]
    nodes = np.polynomial.Chebyshev.interpolate(lambda t: _prior_term(t, alpha, beta), PRIOR_DEGREE, domain=[-1.0, 1.0])
    power = nodes.convert(kind=np.polynomial.Polynomial).coef
    power = np.pad(power, (0, PRIOR_DEGREE + 1 - len(power)))  # zeros at the end are left out
    if alpha == beta:
        power[::2] = 0.0
    places = np.linspace(-1.0, 1.0, 2001)
    error = np.abs(np.polynomial.polynomial.polyval(places, power) - _prior_term(places, alpha, beta)).max()
    if error > PRIOR_ERROR:
        return None
    return _even_and_odd(power)


@cache
def prior_value_polynomial(alpha: float, beta: float) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """log B(alpha, beta) - log B(alpha + pi~, beta + 1 - pi~), in the form and on the terms of `prior_polynomial`.

    KL = this - H(pi~) at the best q(pi). It is made as an integral from pi~ = 0, where it is log(1 + alpha / beta): log
    Gamma itself would cancel for a large prior.

    >>> even, odd = prior_value_polynomial(1.0, 3.0)
    >>> bool(np.isclose(sum(even) + sum(odd), np.log(4.0)))
    True
    """
    if prior_polynomial(alpha, beta) is None:
        return None
    gradient = np.polynomial.Chebyshev.interpolate(lambda t: _prior_term(t, alpha, beta), 40)
    exact = math.log1p(alpha / beta) - gradient.integ(lbnd=-1.0) / 2.0
    power = np.polynomial.Chebyshev.interpolate(exact, PRIOR_DEGREE).convert(kind=np.polynomial.Polynomial).coef
    power = np.pad(power, (0, PRIOR_DEGREE + 1 - len(power)))
    if alpha == beta:
        power[1::2] = 0.0
    places = np.linspace(-1.0, 1.0, 2001)
    error = np.abs(np.polynomial.polynomial.polyval(places, power) - exact(places)).max()
    return None if error > PRIOR_ERROR else _even_and_odd(power)


def _even_and_odd(power: np.ndarray[Any, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    even, odd = (tuple(float(c) for c in power[first::2][::-1]) for first in (0, 1))
    return even, odd
