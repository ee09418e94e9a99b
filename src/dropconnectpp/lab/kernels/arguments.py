"""What Triton kernels are given, in records whose fields a kernel reads by name.

Shapes: R replicas.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Record = TypeVar("Record", bound=tuple[Any, ...])


class Trained(NamedTuple):
    """A parameter and Adagrad's sums of its squared gradients."""

    value: Tensor | None
    squares: Tensor | None


class Stepped(NamedTuple):
    """A parameter and both moments that an optimiser may remember of it."""

    value: Tensor
    first: Tensor
    second: Tensor


class Rule(NamedTuple):
    """The numbers of an optimiser's step; gates take Adam's, with an epsilon of their own."""

    momentum: float
    epsilon: float
    gate_epsilon: float


class Draws(NamedTuple):
    """Where a stream's numbers are found: its seed, the replicas' numbers (R,), the step."""

    seed: int
    replica: Tensor
    step: Tensor


class GateState(NamedTuple):
    """What a gate's step takes: all that is trained, step sizes (R,), the terms of the loss, Adagrad's epsilon.

    ``even`` and ``odd`` are the coefficients of `polynomials.prior_polynomial`. Pairs of numbers are loaded together.
    """

    logit: Trained
    alpha: Trained
    beta: Trained
    size: Tensor | None
    kl_scale: Tensor | None
    prior_alpha: float
    prior_beta: float
    slab_scale: float
    epsilon: float
    even: tuple[float, ...]
    odd: tuple[float, ...]


class Sizes(NamedTuple):
    """Of one replica's layer, or of a tile of it."""

    batch: int
    units: int
    inputs: int


class Terms(NamedTuple):
    """What a gate's step has besides the likelihood: see `gates_triton`. ``inside`` is where Adagrad's epsilon goes."""

    hyper: bool
    skewed: bool
    slab: bool
    inside: bool


class HeadInputs(NamedTuple):
    """What both kernels of the head read; ``unit_seed`` is that of the units which are dropped."""

    sums: Tensor
    noise: Tensor | None
    bias: Tensor
    logit: Tensor | None
    keep: Tensor | None
    unit_keep: Tensor | None
    weight: Tensor
    draws: Draws
    unit_seed: int


class HeadSizes(NamedTuple):
    """Of one replica's head, or of a tile of it."""

    batch: int
    units: int
    classes: int


def constants(record: Record) -> Record:
    """The record as constants: a kernel is compiled for its numbers."""
    import triton.language as tl

    return type(record)(*map(tl.constexpr, record))
