"""The prior of a layer's gates and how its KL is worked out: what every pass over the synapses must know."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple, get_args

import torch

from dropconnectpp import _polynomials as polynomials
from dropconnectpp.errors import ArgumentError

Hyper = Literal["marginal", "optimal", "learned"]
"""What becomes of pi: summed out exactly, its best q(pi), or a q(pi) with parameters that are trained."""
Sharing = Literal["synapse", "layer", "unit", "input"]
"""Which synapses share one pi."""
HYPERS: tuple[Hyper, ...] = get_args(Hyper)
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)


class Parts(NamedTuple):
    """The KL beside the entropy as polynomials in t = 2 pi~ - 1: each even(t^2) + t odd(t^2), highest power first.

    KL = value(t) - H(pi~); d KL / d logit = pi~ (1 - pi~) (logit - gradient(t)).
    """

    value: tuple[tuple[float, ...], tuple[float, ...]]
    gradient: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Prior:
    """pi ~ Beta(alpha, beta), Eq. (12), what is done about q(pi), and which synapses share one pi."""

    alpha: float = 1.0
    beta: float = 1.0
    hyper: Hyper = "marginal"
    sharing: Sharing = "synapse"
    streamed: tuple[torch.dtype, ...] = field(init=False, compare=False, repr=False)
    """The precisions in which a fast pass over the synapses can work out the KL."""

    def __post_init__(self) -> None:
        if self.sharing != "synapse" and self.hyper != "optimal":
            why = {
                "marginal": "summing pi out synapse by synapse leaves nothing to share",
                "learned": "a shared pi has its best q(pi) in closed form",
            }[self.hyper]
            raise ArgumentError(
                f"sharing={self.sharing!r} needs hyper='optimal', got hyper={self.hyper!r}: {why}. "
                "Use hyper='optimal', or sharing='synapse'."
            )
        known = [d for d in (torch.float32, torch.float64) if self.uniform or self.parts(d) is not None]
        object.__setattr__(self, "streamed", tuple(known) if self.sharing == "synapse" else ())

    @property
    def uniform(self) -> bool:
        """Whether the KL is that of alpha = beta = 1 at the best q(pi), which has shorter polynomials."""
        return self.hyper == "optimal" and self.sharing == "synapse" and self.alpha == self.beta == 1.0

    def parts(self, dtype: torch.dtype) -> Parts | None:
        """The polynomials that a pass over the synapses can use, or None where it must take Gamma functions."""
        if self.sharing != "synapse" or self.hyper == "learned":
            return None
        return _parts(self.alpha, self.beta, self.hyper, dtype)

    def group_axes(self, ndim: int) -> tuple[int, ...]:
        """The axes of a parameter, (O, I, *) or (O,), along which synapses share one pi."""
        everything = tuple(range(ndim))
        if ndim == 1 or self.sharing == "layer":  # the biases of a layer are one group
            return everything
        return everything[1:] if self.sharing == "unit" else (0, *everything[2:])


@cache
def _parts(alpha: float, beta: float, hyper: Hyper, dtype: torch.dtype) -> Parts | None:
    if hyper == "marginal":
        return _marginal_parts(alpha, beta)
    if dtype != torch.float32:
        return None
    value, gradient = polynomials.prior_value_polynomial(alpha, beta), polynomials.prior_polynomial(alpha, beta)
    return None if value is None or gradient is None else Parts(value, gradient)


def _marginal_parts(alpha: float, beta: float) -> Parts:
    """-pi~ log m - (1 - pi~) log(1 - m) and logit(m) for the prior's mean m: straight lines in t."""
    on, off = -math.log(alpha / (alpha + beta)), -math.log(beta / (alpha + beta))
    zeros = (0.0,) * ((polynomials.PRIOR_DEGREE + 1) // 2)
    value = ((*zeros[1:], (on + off) / 2), (*zeros[1:], (on - off) / 2))
    return Parts(value, ((*zeros[1:], math.log(alpha / beta)), zeros))
