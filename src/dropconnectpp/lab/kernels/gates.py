"""The gates of a stack's dense layer, weights' and biases', and the steps of those that learn without a product.

On a GPU with Triton a step is one launch, with masks drawn inside. Elsewhere, and for what the kernel does not cover,
the twin runs, with the same result: masks bit for bit, the rest to rounding. Shapes: L samples, that is masks of one
step, R replicas, O units, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials
from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError, check_count
from dropconnectpp.lab.kernels import launch_config
from dropconnectpp.lab.kernels.adagrad import adagrad_all_
from dropconnectpp.lab.kernels.compiled import as_kernels_take, compiled, counter
from dropconnectpp.lab.kernels.dense import beside, draw_masks
from dropconnectpp.lab.philox import Stream

Kind = Literal["score", "straight-through"]


@dataclass(frozen=True)
class OpenGate:
    """Every synapse is kept."""


@dataclass(frozen=True)
class FixedGate:
    """z = [u < keep], with one keep probability (R,) per replica: DropConnect. The rest is as for `LearnedGate`."""

    keep: Tensor
    stream: Stream
    samples: int = 1
    slab_scale: float = 0.0

    def __post_init__(self) -> None:
        check_count("samples", self.samples)


@dataclass(frozen=True)
class LearnedGate:
    """z = [u < sigmoid(logit)], logit (R, O, I): DropConnect++. Of the ``samples`` masks, l is draw l of the stream.

    The KL is weighted by ``kl_scale`` (R,), and for kind "score" going backward a sample's score by ``coefficient``
    (L, R). ``alpha`` and ``beta`` are the raw parameters of a free q(pi), which `functional.positive` maps; None stands
    for the best q(pi). The loss has a term slab_scale pi~ W^2 / 2 for every synapse, with the weight before the step.
    """

    logit: Tensor
    stream: Stream
    kl_scale: Tensor
    kind: Kind = "score"
    coefficient: Tensor | None = None
    alpha: Tensor | None = None
    beta: Tensor | None = None
    prior_alpha: float = 1.0
    prior_beta: float = 1.0
    samples: int = 1
    slab_scale: float = 0.0

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        if self.kind not in ("score", "straight-through"):
            raise ArgumentError(f"kind must be 'score' or 'straight-through', got {self.kind!r}.")
        if self.kl_scale.shape != self.logit.shape[:1]:
            raise ArgumentError(f"kl_scale must have shape ({len(self.logit)},), got {tuple(self.kl_scale.shape)}.")
        if (self.alpha is None) != (self.beta is None):
            raise ArgumentError("alpha and beta are learned together: give both or none.")


Gate = OpenGate | FixedGate | LearnedGate


@dataclass(frozen=True)
class Adagrad:
    """A step of `adagrad_all_`: sums of squares for all that is trained, step sizes (R,) for weight and gate."""

    weight: Tensor
    sizes: Tensor
    epsilon: float
    inside: bool
    logit: Tensor | None = None
    alpha: Tensor | None = None
    beta: Tensor | None = None
    gate_sizes: Tensor | None = None


def samples_of(gate: Gate) -> int:
    """Masks of one step, L."""
    return 1 if isinstance(gate, OpenGate) else gate.samples


def keep_of(gate: FixedGate | LearnedGate, weight: Tensor) -> Tensor:
    """Its probability of being on, so that it multiplies what it gates, (R, ...)."""
    return torch.sigmoid(gate.logit) if isinstance(gate, LearnedGate) else beside(gate.keep, weight)


def draw(gate: Gate, weight: Tensor, replicas: Tensor, step: Tensor | int) -> Iterator[Tensor | None]:
    """The samples' masks, one after the other."""
    if isinstance(gate, OpenGate):
        yield None
    else:
        yield from _masks(gate, keep_of(gate, weight).expand_as(weight), replicas, step)


def _masks(gate: FixedGate | LearnedGate, keep: Tensor, replicas: Tensor, step: Tensor | int) -> Iterator[Tensor]:
    for sample in range(gate.samples):
        yield draw_masks(gate.stream, keep, replicas, step, sample)


# ------------------------------------------------------------------------------------------- their steps


@torch.no_grad()
def update_gate_(
    gate: LearnedGate, replicas: Tensor, step: Tensor | int, update: Adagrad, weight: Tensor | None = None
) -> Tensor:
    """A step on gates of any shape (R, ...) that learn by the score, which needs no product.

    Returned are the squared scores (z - pi~)^2 as partial sums (L, R, any number). ``weight`` is what the gates are of,
    as it was before its own step: a slab needs it.
    """
    if gate.kind != "score":
        raise ArgumentError("straight through a gate's gradient is the product's: use gated_product_backward_.")
    if _gate_is_ready(gate, update, weight):
        return _given(_gate_by_kernel_(gate, replicas, step, update, weight))
    return _update_gate_(gate, _masks(gate, torch.sigmoid(gate.logit), replicas, step), update, weight)


@torch.no_grad()
def step_gate_(gate: LearnedGate, by_logit: Tensor, weight: Tensor | None, update: Adagrad) -> None:
    """A step on gates of any shape (R, ...) for which the likelihood's gradient by the logit is known."""
    if _gate_is_ready(gate, update, weight, by_logit):
        _gate_by_kernel_(gate, None, None, update, weight, by_logit)
    else:
        _step_gate_(gate, by_logit, weight, update)


def _gate_is_ready(gate: LearnedGate, update: Adagrad, weight: Tensor | None, by_logit: Tensor | None = None) -> bool:
    """Whether the kernel can step a gate; raises where something is missing for either way."""
    check_update(gate, update)
    if gate.slab_scale and (weight is None or weight.shape != gate.logit.shape):
        raise ArgumentError(f"a slab needs the weight before the step, of shape {tuple(gate.logit.shape)}.")
    given = gate.logit, gate.alpha, gate.beta, update.logit, update.alpha, update.beta, weight, by_logit
    return ready(*given) and known(gate)


def check_update(gate: LearnedGate, update: Adagrad) -> None:
    """Raise where something is missing to step the gate."""
    if gate.kind == "score":
        shape = gate.samples, len(gate.logit)
        if gate.coefficient is None or gate.coefficient.shape != shape:
            raise ArgumentError(f"kind 'score' needs the scores' coefficient of shape {shape} to go backward.")
    learned = {"logit": gate.logit, "alpha": gate.alpha, "beta": gate.beta}
    missing = [name for name, value in learned.items() if value is not None and getattr(update, name) is None]
    if missing or update.gate_sizes is None:
        raise ArgumentError(f"Adagrad needs gate_sizes and a sum of squares for {', '.join(missing or ['logit'])}.")


def _update_gate_(gate: LearnedGate, masks: Iterable[Tensor], update: Adagrad, weight: Tensor | None) -> Tensor:
    likelihood, squared = torch.zeros_like(gate.logit), []
    for coefficient, mask in zip(_given(gate.coefficient), masks, strict=True):
        score = functional.bernoulli_score(mask, gate.logit)
        likelihood -= beside(coefficient, score) * score
        squared.append(score.square().flatten(1).sum(1, keepdim=True))
    _step_gate_(gate, likelihood, weight, update)
    return torch.stack(squared)


def _step_gate_(gate: LearnedGate, likelihood: Tensor, weight: Tensor | None, update: Adagrad) -> None:
    """The twin of `step_gate_`, and for gates by the score too."""
    logit, kl_scale = gate.logit, beside(gate.kl_scale, gate.logit)
    found: dict[str, Tensor] = {}
    if gate.alpha is None or gate.beta is None:
        slope = functional.beta_bernoulli_kl_gradient(logit, gate.prior_alpha, gate.prior_beta)
    else:
        alpha, beta = functional.positive(gate.alpha), functional.positive(gate.beta)
        _, slope, *slopes = functional.learned_kl(logit, alpha, beta, gate.prior_alpha, gate.prior_beta)
        for name, raw, by in zip(("alpha", "beta"), (gate.alpha, gate.beta), slopes, strict=True):
            found[name] = by * kl_scale * torch.sigmoid(raw)
    found["logit"] = slope * kl_scale + likelihood
    if gate.slab_scale:
        by_gate = 0.5 * gate.slab_scale * _given(weight)
        found["logit"] += functional.straight_through_gradient(logit, _given(weight), by_gate)
    values, sums = ([getattr(of, name) for name in found] for of in (gate, update))
    sizes = [_given(update.gate_sizes)] * len(found)
    adagrad_all_(values, list(found.values()), sums, sizes, update.epsilon, update.inside)


def _gate_by_kernel_(
    gate: LearnedGate,
    replicas: Tensor | None,
    step: Tensor | int | None,
    update: Adagrad,
    weight: Tensor | None,
    by_logit: Tensor | None = None,
) -> Tensor | None:
    """By the score, with partial sums of its squares, or with the gradient by the logit where it is given."""
    stack, count = len(gate.logit), gate.logit[0].numel()
    chosen = launch_config.of(gate.logit.device)
    launch = chosen.gates if gate.alpha is None else chosen.gates_learned
    programs = -(-count // launch.block)
    partial, where = None, None
    if by_logit is None:
        assert replicas is not None
        assert step is not None
        partial = torch.empty((gate.samples, stack, programs), device=gate.logit.device, dtype=torch.float32)
        where = address(gate.logit, replicas, step)
    compiled("gates").gate_kernel[(programs, stack)](
        gate.logit,
        update.logit,
        gate.alpha,
        update.alpha,
        gate.beta,
        update.beta,
        weight if gate.slab_scale else None,
        by_logit,
        row(gate.coefficient),
        row(update.gate_sizes),
        row(gate.kl_scale),
        partial,
        *(where or (None, None)),
        gate.stream.seed,
        gate.slab_scale,
        gate.prior_alpha,
        gate.prior_beta,
        update.epsilon,
        *slope_polynomial(gate),
        count,
        SAMPLES=gate.samples,
        SCORED=by_logit is None,
        **loss_terms(gate),
        INSIDE=update.inside,
        COMPILED=gate.logit.is_cuda,
        BLOCK=launch.block,
        **launch.options,
    )
    return partial


# --------------------------------------------------------------------------------- what the kernels take


def ready(*parameters: Tensor | None) -> bool:
    """Whether the kernels can run on these."""
    return as_kernels_take("gates", *parameters)


def known(gate: LearnedGate) -> bool:
    """Whether the kernels know the slope of the KL: at the best q(pi) not for every prior."""
    return gate.alpha is not None or polynomials.prior_polynomial(gate.prior_alpha, gate.prior_beta) is not None


def _given(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def row(values: Tensor | None) -> Tensor | None:
    """One number a replica as the kernels read it."""
    return None if values is None else values.float().contiguous()


def address(x: Tensor, replicas: Tensor, step: Tensor | int) -> tuple[Tensor, Tensor]:
    """Replicas and step as the kernels read them."""
    return replicas, counter(step, x.device)


def gate_number(gate: Gate) -> int:
    """What the kernels call GATE."""
    if isinstance(gate, LearnedGate):
        return 2 if gate.kind == "score" else 3
    return 1 if isinstance(gate, FixedGate) else 0


def loss_terms(gate: Gate) -> dict[str, bool]:
    """What the loss has besides the likelihood, as the kernels' switches."""
    learned = gate if isinstance(gate, LearnedGate) else None
    hyper = learned is not None and learned.alpha is not None
    return {
        "HYPER": hyper,
        "SKEWED": learned is not None and not hyper and learned.prior_alpha != learned.prior_beta,
        "SLAB": not isinstance(gate, OpenGate) and gate.slab_scale > 0,
    }


def slope_polynomial(gate: LearnedGate | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Even and odd part of the KL's slope, `polynomials.prior_polynomial`; of any prior where it is not used."""
    prior = (1.0, 1.0) if gate is None or gate.alpha is not None else (gate.prior_alpha, gate.prior_beta)
    found = polynomials.prior_polynomial(*prior)
    assert found is not None
    return found
