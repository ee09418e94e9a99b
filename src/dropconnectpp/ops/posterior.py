"""One pass over a parameter's synapses: KL, score and their gradient together, in bounded memory.

This is where the step's extra time and memory go, so nothing of the weight's size is made but the gradient itself: the
arithmetic runs in chunks, or in one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropconnectpp import _compat, functional
from dropconnectpp.ops import gpu, posterior_cpu, registered
from dropconnectpp.ops.drawn import Draw, Synapses, transformed
from dropconnectpp.ops.prior import Prior

CPU_CHUNK = 2**18
"""Elements worked on at a time: a dozen temporaries of them fit a core's cache."""
GPU_CHUNK = 2**24


@dataclass(frozen=True, eq=False)
class GatePosterior:
    """q(z) and q(pi) of one parameter's synapses, as the passes over them take it."""

    parameters: Mapping[str, Tensor]
    """By name: what is behind pi~ and, where q(pi) is learned, what is behind alpha~ and beta~."""
    prior: Prior
    kept: Tensor | None = None
    direct: bool = False
    """pi~ itself is the parameter, not its log-odds."""
    scores_pi: bool = False
    """The data's part of the gradient scores a draw of pi, Eq. (16), where q(pi) is learned."""

    @property
    def gate(self) -> Tensor:
        """What is behind pi~: its log-odds, or pi~ itself."""
        return next(iter(self.parameters.values()))


@dataclass
class Pass:
    """What `posterior_pass` found for one parameter of one layer."""

    kl: Tensor  # () nats
    squared_score: Tensor  # (L,) sum of h^2 over the synapses, for each mask given
    gradients: dict[str, Tensor]  # of the loss, by parameter name


@dataclass(frozen=True, eq=False)
class Likelihood:
    """The data's part of a pass: masks with what multiplies their scores, or its gradient ready made."""

    masks: Sequence[Tensor] = ()
    mirrored: Sequence[Tensor] = ()
    coefficients: Tensor | None = None  # (L,), the mean over samples already taken
    gradient: Tensor | None = None  # by the logit
    generator: torch.Generator | None = None


NOTHING = Likelihood()


def posterior_pass(
    posterior: GatePosterior, *, kl_scale: Tensor | float, likelihood: Likelihood = NOTHING, gradients: bool = True
) -> Pass:
    """Sum Eq. (20) + Eq. (21) and make the gradient of ``kl_scale * KL - log-likelihood``.

    The likelihood's gradient is sum_l c_l (z_l - pi~), Eq. (8), or with mirrored masks the antithetic pair's.
    """
    known = posterior.parameters
    wanted = [key for key, value in known.items() if value.requires_grad] if gradients else []
    gate = posterior.gate.detach()
    if supported(posterior) and posterior_cpu.supported(gate, posterior.prior):
        terms = posterior_cpu.Terms(
            float(kl_scale),
            likelihood.masks,
            likelihood.mirrored,
            likelihood.coefficients,
            likelihood.gradient,
            posterior.prior,
        )
        total, scores, gradient = posterior_cpu.pruned_pass(gate, posterior.kept, terms, bool(wanted))
        return Pass(total, scores, {} if gradient is None else {wanted[0]: gradient})
    if posterior.prior.sharing != "synapse":
        pieces = [gate, posterior.kept, likelihood.gradient, *likelihood.masks, *likelihood.mirrored]
        return _chunk(posterior, pieces, likelihood, kl_scale, wanted)
    outputs = {key: torch.empty_like(gate, memory_format=torch.contiguous_format) for key in wanted}
    flat_outputs = {key: value.view(-1) for key, value in outputs.items()}
    kl = torch.zeros((), device=gate.device, dtype=functional.widen(gate[..., :0]).dtype)
    squared = torch.zeros(max(len(likelihood.masks), 1), device=gate.device, dtype=kl.dtype)
    chunk = CPU_CHUNK if gate.device.type == "cpu" else GPU_CHUNK
    sources = [gate, posterior.kept, likelihood.gradient, *likelihood.masks, *likelihood.mirrored]
    sources += [value.detach() for value in list(known.values())[1:]]
    flat = [None if t is None else t.reshape(-1) for t in sources]
    for start in range(0, gate.numel(), chunk):
        part = slice(start, start + chunk)
        found = _chunk(posterior, [None if t is None else t[part] for t in flat], likelihood, kl_scale, wanted)
        kl += found.kl
        squared += found.squared_score
        for key, gradient in found.gradients.items():
            flat_outputs[key][part] = gradient
    return Pass(kl, squared, outputs)


def supported(posterior: GatePosterior) -> bool:
    """Whether a posterior is the common one that the fast passes take: log-odds are its only parameter."""
    return not posterior.direct and posterior.prior.hyper != "learned" and not transformed()


def _chunk(
    posterior: GatePosterior,
    pieces: list[Tensor | None],
    likelihood: Likelihood,
    kl_scale: Tensor | float,
    wanted: list[str],
) -> Pass:
    prior, coefficients = posterior.prior, likelihood.coefficients
    gate, kept, ready, *rest = pieces
    assert gate is not None
    num_masks, num_mirrored = len(likelihood.masks), len(likelihood.mirrored)
    masks = [m for m in rest[:num_masks] if m is not None]
    mirrored = [m for m in rest[num_masks : num_masks + num_mirrored] if m is not None]
    gate = functional.widen(gate)
    logit = functional.probability_to_logit(gate) if posterior.direct else gate
    grad_beta: dict[str, Tensor] = {}
    grad_logit: Tensor | None
    if prior.hyper == "learned":
        kl, grad_logit, grad_beta = _learned_chunk(posterior, logit, rest[-2:], likelihood, kl_scale)
    else:
        kl, grad_logit = _known_chunk(prior, logit, kept, bool(wanted))
    squared = torch.zeros(max(num_masks, 1), device=gate.device, dtype=kl.dtype)
    gradients: dict[str, Tensor] = {}
    if kept is not None:
        kl = kl * kept
    if wanted:
        assert grad_logit is not None
        gradient = grad_logit.mul_(kl_scale)
        if ready is not None:
            gradient.sub_(ready)
        elif coefficients is not None:
            gradient.sub_(_streamed(logit, kept, masks, mirrored, coefficients, squared))
        if posterior.direct:
            gradient.div_(torch.sigmoid(logit).mul_(torch.sigmoid(-logit)))
        names = list(posterior.parameters)
        gradients = dict(zip(names, [gradient, *grad_beta.values()], strict=False))
        gradients = {key: gradients[key] if kept is None else gradients[key] * kept for key in wanted}
    return Pass(kl.sum(), squared, gradients)


def _known_chunk(prior: Prior, logit: Tensor, kept: Tensor | None, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """KL and its gradient where q(pi) is not learned."""
    if prior.sharing != "synapse":
        return functional.shared_kl(logit, prior.alpha, prior.beta, prior.group_axes(logit.ndim), kept)
    if prior.hyper == "marginal":
        gradient = functional.marginal_kl_gradient(logit, prior.alpha, prior.beta) if wanted else None
        return functional.marginal_kl(logit, prior.alpha, prior.beta), gradient
    kl, gradient = functional.collapsed_kl(logit, prior.alpha, prior.beta, grad=wanted)
    assert kl is not None
    return kl, gradient


def _streamed(
    logit: Tensor,
    kept: Tensor | None,
    masks: list[Tensor],
    mirrored: list[Tensor],
    coefficients: Tensor,
    squared: Tensor,
) -> Tensor:
    """The likelihood's gradient from the masks, one sample after another."""
    total = torch.zeros_like(logit)
    if mirrored:
        for mask, mirror, coefficient in zip(masks, mirrored, coefficients, strict=True):
            total.addcmul_(mask.to(logit.dtype).sub_(mirror.to(logit.dtype)), coefficient)
        return functional.disarm_gradient(logit, total)
    pi = torch.sigmoid(logit)
    for index, (mask, coefficient) in enumerate(zip(masks, coefficients, strict=True)):
        score = mask.to(logit.dtype).sub_(pi)
        if kept is not None:
            score.mul_(kept)
        squared[index] += score.square().sum()
        total.addcmul_(score, coefficient)
    return total


def _learned_chunk(
    posterior: GatePosterior,
    logit: Tensor,
    raw: list[Tensor | None],
    likelihood: Likelihood,
    kl_scale: Tensor | float,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Eq. (20), (21) with free alpha~, beta~, and for `eq16` the score of a draw of pi, Eq. (16)."""
    prior, coefficients = posterior.prior, likelihood.coefficients
    raw_alpha, raw_beta = (functional.widen(t) for t in raw if t is not None)
    alpha, beta = functional.positive(raw_alpha), functional.positive(raw_beta)
    kl, grad_logit, grad_alpha, grad_beta = functional.learned_kl(logit, alpha, beta, prior.alpha, prior.beta)
    grad_alpha, grad_beta = grad_alpha * kl_scale, grad_beta * kl_scale
    if posterior.scores_pi and coefficients is not None:
        heads = _compat.standard_gamma(alpha, generator=likelihood.generator)
        tails = _compat.standard_gamma(beta, generator=likelihood.generator)
        score_alpha, score_beta = functional.beta_score(heads / (heads + tails), alpha, beta)
        grad_alpha = grad_alpha - coefficients.sum() * score_alpha
        grad_beta = grad_beta - coefficients.sum() * score_beta
    found = {"alpha": grad_alpha * torch.sigmoid(raw_alpha), "beta": grad_beta * torch.sigmoid(raw_beta)}
    return kl, grad_logit, found


# ----------------------------------------------------------------------------- ways into autograd


class _Inject(torch.autograd.Function):
    """A value with given gradients: how an estimated gradient joins the loss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        # Scaled in place unless the graph is to be used again: one tensor of the weight's size less.
        if torch.compiler.is_compiling() or _compat.graph_is_kept():
            scaled = [gradient * upstream for gradient in gradients]
        else:
            scaled = [gradient.mul_(upstream) for gradient in gradients]
        return (None, None, *scaled, *(None for _ in gradients))


def inject(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """``value``, its gradient by each parameter being the one given, scaled as the loss is."""
    if not parameters:
        return value
    fitted = [g.to(p.dtype) for g, p in zip(gradients, parameters, strict=True)]
    carried: Tensor = _Inject.apply(value, len(fitted), *parameters, *fitted)  # type: ignore[no-untyped-call]
    return carried


class _Divergence(torch.autograd.Function):
    """The KL's sum, whose gradient a kernel works out when it is wanted."""

    @staticmethod
    def forward(ctx: Any, logit: Tensor, kept: Tensor | None, prior: Prior) -> Tensor:
        ctx.prior = prior
        ctx.save_for_backward(logit, kept)
        return gpu.posterior(logit, kept, prior)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        logit, kept = ctx.saved_tensors
        return gpu.posterior_backward(logit, kept, ctx.prior, upstream), None, None


class _Scored(torch.autograd.Function):
    """``kl_scale`` times the KL, whose gradient is the estimator's; masks are drawn again in backward."""

    @staticmethod
    def forward(ctx: Any, logit: Tensor, coefficients: Tensor, seeds: Tensor, drawn: DrawnScores) -> tuple[Tensor, ...]:
        ctx.drawn = drawn
        ctx.save_for_backward(logit, drawn.kept, coefficients, seeds)
        kl, squared = gpu.posterior(logit, drawn.kept, drawn.prior, seeds, drawn.stream)
        loss = kl * drawn.kl_scale
        ctx.mark_non_differentiable(kl, squared)
        return loss, kl, squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logit, kept, coefficients, seeds = ctx.saved_tensors
        drawn: DrawnScores = ctx.drawn
        gradient = gpu.posterior_backward(
            logit,
            kept,
            drawn.prior,
            upstream,
            kl_scale=drawn.kl_scale,
            seeds=seeds,
            coefficients=coefficients,
            stream=drawn.stream,
            paired=drawn.paired,
        )
        return gradient, None, None, None


@dataclass(frozen=True, eq=False)
class DrawnScores:
    """What a kernel needs to score masks that it draws again."""

    prior: Prior
    kept: Tensor | None
    stream: int
    kl_scale: float
    paired: bool


def drawn_scores_supported(posterior: GatePosterior, draws: Sequence[Draw]) -> bool:
    """Whether a kernel can draw the masks again and score them."""
    gate = posterior.gate
    if torch.compiler.is_compiling():
        return traceable(posterior)
    return (
        supported(posterior)
        and gate.dtype == torch.float32
        and gpu.supported(gate)
        and gpu.kl_numbers(posterior.prior) is not None
        and all(draw.seed is not None for draw in draws)
    )


def scored(
    posterior: GatePosterior,
    synapses: Synapses,
    draws: Sequence[Draw],
    coefficients: Tensor,
    kl_scale: Tensor | float,
    paired: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """kl_scale * KL with the estimator's gradient behind it, the KL, and each sample's squared scores (L,)."""
    logit = posterior.gate
    seeds = torch.stack([draw.seed_on(logit.device) for draw in draws])
    if torch.compiler.is_compiling():
        return _registered(posterior, kl_scale, seeds, coefficients, synapses.stream, paired)
    drawn = DrawnScores(posterior.prior, posterior.kept, synapses.stream, float(kl_scale), paired)
    found: tuple[Tensor, Tensor, Tensor] = _Scored.apply(logit, coefficients, seeds, drawn)  # type: ignore[no-untyped-call]
    return found


def traceable(posterior: GatePosterior) -> bool:
    """Whether the registered operation can take a posterior."""
    return (
        not posterior.direct and posterior.prior.hyper != "learned" and posterior.gate.dtype in posterior.prior.streamed
    )


def _registered(
    posterior: GatePosterior,
    kl_scale: Tensor | float,
    seeds: Tensor,
    coefficients: Tensor,
    stream: int = 0,
    paired: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    logit, prior = posterior.gate, posterior.prior
    scale = kl_scale.to(logit) if isinstance(kl_scale, Tensor) else logit.new_full((), kl_scale)
    loss, kl, squared = registered.posterior(
        logit,
        posterior.kept,
        seeds,
        coefficients,
        scale,
        prior.alpha,
        prior.beta,
        prior.hyper,
        stream,
        paired,
    )
    return loss, kl.detach(), squared.detach()


def kl_sum(posterior: GatePosterior) -> Tensor:
    """KL of all synapses of a parameter, in nats, differentiable.

    Where no kernel does, the gradient is worked out with the value: they share most of their arithmetic, and while a
    backward pass runs there is less memory to spare for the pass over the synapses than before it.
    """
    if torch.compiler.is_compiling() and traceable(posterior):
        none = posterior.gate.new_empty(0)
        return _registered(posterior, 1.0, none.to(torch.int64), none)[0]
    if drawn_scores_supported(posterior, ()) and torch.is_grad_enabled():
        kl: Tensor = _Divergence.apply(posterior.gate, posterior.kept, posterior.prior)  # type: ignore[no-untyped-call]
        return kl
    found = posterior_pass(posterior, kl_scale=1.0, gradients=torch.is_grad_enabled())
    parameters = [posterior.parameters[key] for key in found.gradients]
    return inject(found.kl, parameters, list(found.gradients.values()))
