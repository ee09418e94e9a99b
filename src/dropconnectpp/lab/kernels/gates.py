"""The gates of a stack's dense layer, weights' and biases', and the steps of those that learn without a product.

On a GPU with Triton a step is one launch, with masks drawn inside. Elsewhere, and for what the kernel does not
support, the twin runs, with the same result: masks bit for bit, the rest to rounding. Shapes: L samples, that is masks
of one step, R replicas, O units, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials
from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError, check_count
from dropconnectpp.lab.kernels import launch_config
from dropconnectpp.lab.kernels.adagrad import adagrad_all_
from dropconnectpp.lab.kernels.arguments import Draws, GateState, Terms, Trained, constants
from dropconnectpp.lab.kernels.dense import beside, draw_masks
from dropconnectpp.lab.kernels.support import step_tensor, supported
from dropconnectpp.lab.philox import Stream

Kind = Literal["score", "straight-through"]
Given = TypeVar("Given")


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

    ``kl_scale`` (R,) weighs the KL, and for kind "score" ``coefficient`` (L, R) each sample's score in the backward
    pass. ``alpha`` and ``beta`` are the raw parameters of a free q(pi), which `functional.positive` maps; None stands
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
    """A step of `adagrad_all_`: sums of squared gradients of all it trains, step sizes (R,) of weight and gate."""

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
    """The probability that a gate is on, in a shape that multiplies what it gates, (R, ...)."""
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

    Returns the squared scores (z - pi~)^2 as partial sums (L, R, any number). ``weight`` is what they gate, as it was
    before its own step: a slab needs it.
    """
    if gate.kind != "score":
        raise ArgumentError("a straight-through gate's gradient is the product's: use gated_product_backward_.")
    if _step_supported(gate, update, weight):
        return _given(_gate_by_kernel_(gate, replicas, step, update, weight))
    return _update_gate_(gate, _masks(gate, torch.sigmoid(gate.logit), replicas, step), update, weight)


@torch.no_grad()
def step_gate_(gate: LearnedGate, grad_logit: Tensor, weight: Tensor | None, update: Adagrad) -> None:
    """A step on gates of any shape (R, ...), given the likelihood's gradient by the logit."""
    if _step_supported(gate, update, weight, grad_logit):
        _gate_by_kernel_(gate, None, None, update, weight, grad_logit)
    else:
        _step_gate_(gate, grad_logit, weight, update)


def _step_supported(
    gate: LearnedGate, update: Adagrad, weight: Tensor | None, grad_logit: Tensor | None = None
) -> bool:
    """Whether the kernel can step a gate; raises where something is missing that the twin needs too."""
    check_update(gate, update)
    if gate.slab_scale and (weight is None or weight.shape != gate.logit.shape):
        raise ArgumentError(f"a slab needs the weight before the step, of shape {tuple(gate.logit.shape)}.")
    given = gate.logit, gate.alpha, gate.beta, update.logit, update.alpha, update.beta, weight, grad_logit
    return supported(*given) and prior_supported(gate)


def check_update(gate: LearnedGate, update: Adagrad) -> None:
    """Raise ArgumentError where something is missing that the gate's step needs."""
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
        grad_kl = functional.beta_bernoulli_kl_gradient(logit, gate.prior_alpha, gate.prior_beta)
    else:
        alpha, beta = functional.positive(gate.alpha), functional.positive(gate.beta)
        _, grad_kl, *others = functional.learned_kl(logit, alpha, beta, gate.prior_alpha, gate.prior_beta)
        for name, raw, gradient in zip(("alpha", "beta"), (gate.alpha, gate.beta), others, strict=True):
            found[name] = gradient * kl_scale * torch.sigmoid(raw)
    found["logit"] = grad_kl * kl_scale + likelihood
    if gate.slab_scale:
        grad_gate = 0.5 * gate.slab_scale * _given(weight)
        found["logit"] += functional.straight_through_gradient(logit, _given(weight), grad_gate)
    values, sums = ([getattr(of, name) for name in found] for of in (gate, update))
    sizes = [_given(update.gate_sizes)] * len(found)
    adagrad_all_(values, list(found.values()), sums, sizes, update.epsilon, update.inside)


def _gate_by_kernel_(
    gate: LearnedGate,
    replicas: Tensor | None,
    step: Tensor | int | None,
    update: Adagrad,
    weight: Tensor | None,
    grad_logit: Tensor | None = None,
) -> Tensor | None:
    """By the score, with partial sums of its squares, or by the likelihood's gradient by the logit where given."""
    from dropconnectpp.lab.kernels.gates_triton import gate_kernel

    stack, count = len(gate.logit), gate.logit[0].numel()
    chosen = launch_config.of(gate.logit.device)
    launch = chosen.gates if gate.alpha is None else chosen.gates_learned
    programs = -(-count // launch.block)
    partial, where = None, None
    if grad_logit is None:
        assert replicas is not None
        assert step is not None
        partial = torch.empty((gate.samples, stack, programs), device=gate.logit.device, dtype=torch.float32)
        where = draws(gate, gate.logit, replicas, step)
    gate_kernel[(programs, stack)](
        gate_state(gate, update),
        weight if gate.slab_scale else None,
        grad_logit,
        row(gate.coefficient),
        partial,
        where,
        count,
        constants(terms(gate, update)),
        SAMPLES=gate.samples,
        SCORED=grad_logit is None,
        COMPILED=gate.logit.is_cuda,
        BLOCK=launch.block,
        **launch.options,
    )
    return partial


# -------------------------------------------------------------------------------- the kernels' arguments


def prior_supported(gate: LearnedGate) -> bool:
    """Whether the kernels have the gradient of the KL: for the best q(pi) not with every prior."""
    return gate.alpha is not None or polynomials.prior_polynomial(gate.prior_alpha, gate.prior_beta) is not None


def _given(value: Given | None) -> Given:
    assert value is not None
    return value


def row(values: Tensor | None) -> Tensor | None:
    """One number for each replica, as kernels read it."""
    return None if values is None else values.float().contiguous()


def draws(gate: Gate, x: Tensor, replicas: Tensor, step: Tensor | int) -> Draws:
    """Where a gate's numbers are found; an open gate draws none."""
    return Draws(0 if isinstance(gate, OpenGate) else gate.stream.seed, replicas, step_tensor(step, x.device))


def gate_number(gate: Gate) -> int:
    """What the kernels call GATE."""
    if isinstance(gate, LearnedGate):
        return 2 if gate.kind == "score" else 3
    return 1 if isinstance(gate, FixedGate) else 0


def terms(gate: Gate, update: Adagrad) -> Terms:
    """The terms of the loss besides the likelihood, and where Adagrad's epsilon goes."""
    learned = gate if isinstance(gate, LearnedGate) else None
    hyper = learned is not None and learned.alpha is not None
    return Terms(
        hyper=hyper,
        skewed=learned is not None and not hyper and learned.prior_alpha != learned.prior_beta,
        slab=not isinstance(gate, OpenGate) and gate.slab_scale > 0,
        inside=update.inside,
    )


def gate_state(gate: Gate, update: Adagrad) -> GateState:
    """All that a kernel needs to step a gate; a gate that does not learn has the slab and epsilon alone."""
    learned = gate if isinstance(gate, LearnedGate) else None
    free = learned is None or learned.alpha is not None
    prior = (1.0, 1.0) if learned is None else (learned.prior_alpha, learned.prior_beta)
    even, odd = _given(polynomials.prior_polynomial(*((1.0, 1.0) if free else prior)))  # of any prior where unused
    return GateState(
        logit=Trained(learned.logit if learned else None, update.logit),
        alpha=Trained(learned.alpha if learned else None, update.alpha),
        beta=Trained(learned.beta if learned else None, update.beta),
        size=row(update.gate_sizes),
        kl_scale=row(learned.kl_scale) if learned else None,
        prior_alpha=prior[0],
        prior_beta=prior[1],
        slab_scale=0.0 if isinstance(gate, OpenGate) else gate.slab_scale,
        epsilon=update.epsilon,
        even=even,
        odd=odd,
    )
