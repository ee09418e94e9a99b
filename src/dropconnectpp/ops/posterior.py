"""One pass over a layer's synapses: KL, score and their gradient together, in bounded memory.

This is where the step's extra time and memory go, so nothing of the weight's size is made but the
gradient itself: the arithmetic runs in chunks, or in one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.estimators import Eq16
from dropconnectpp.ops import gpu, posterior_cpu

if TYPE_CHECKING:
    from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer

CPU_CHUNK = 2**18
"""Elements worked on at a time: a dozen temporaries of them fit a core's cache."""
GPU_CHUNK = 2**24


@dataclass
class Pass:
    """What `posterior_pass` found for one parameter of one layer."""

    kl: Tensor  # () nats
    squared_score: Tensor  # (L,) sum of h^2 over the synapses, for each mask given
    gradients: dict[str, Tensor]  # of the loss, by parameter name


def posterior_pass(
    layer: DropConnectPPLayer,
    name: str,
    *,
    kl_scale: Tensor | float,
    masks: Sequence[Tensor] = (),
    mirrored: Sequence[Tensor] = (),
    coefficients: Tensor | None = None,  # (L,), the mean over samples already taken
    likelihood: Tensor | None = None,  # the likelihood's gradient by logit, where it is known
    generator: torch.Generator | None = None,
    gradients: bool = True,
) -> Pass:
    """Sum Eq. (20) + Eq. (21) and make the gradient of ``kl_scale * KL - likelihood``.

    The likelihood's gradient is sum_l c_l (z_l - pi~), Eq. (8), or with ``mirrored`` masks the
    antithetic pair's; ``likelihood`` gives it ready made.
    """
    keys = layer.posterior_names_of(name)
    known = {key: getattr(layer, key) for key in keys}
    gate = known[keys[0]].detach()
    kept = layer.kept(name)
    wanted = [key for key in keys if known[key].requires_grad] if gradients else []
    if gpu.covers(layer, gate, kept, masks, mirrored, likelihood):
        mask, prior = masks[0] if masks else None, (layer.alpha, layer.beta)
        kl, score, slope = gpu.posterior_pass(gate, mask, coefficients, kl_scale, bool(wanted), prior)
        return Pass(kl, score.view(1), {} if slope is None else {f"{name}_logit": slope})
    if posterior_cpu.covers(layer, gate, kept):
        terms = posterior_cpu.Terms(
            float(kl_scale), masks, mirrored, coefficients, likelihood, (layer.alpha, layer.beta)
        )
        kl, squared, gradient = posterior_cpu.posterior_pass(gate, terms, bool(wanted))
        return Pass(kl, squared, {} if gradient is None else {wanted[0]: gradient})
    outputs = {key: torch.empty_like(gate, memory_format=torch.contiguous_format) for key in wanted}
    flat_outputs = {key: value.view(-1) for key, value in outputs.items()}
    kl = torch.zeros((), device=gate.device, dtype=functional.widen(gate[..., :0]).dtype)
    squared = torch.zeros(max(len(masks), 1), device=gate.device, dtype=kl.dtype)
    chunk = CPU_CHUNK if gate.device.type == "cpu" else GPU_CHUNK
    sources = [gate, kept, likelihood, *masks, *mirrored]
    if layer.hyper == "learned":
        sources += [known[key].detach() for key in keys[1:]]
    flat = [None if t is None else t.reshape(-1) for t in sources]
    for start in range(0, gate.numel(), chunk):
        part = slice(start, start + chunk)
        pieces = [None if t is None else t[part] for t in flat]
        found = _chunk(layer, name, pieces, len(masks), len(mirrored), kl_scale, coefficients, generator, wanted)
        kl += found.kl
        squared += found.squared_score
        for key, gradient in found.gradients.items():
            flat_outputs[key][part] = gradient
    return Pass(kl, squared, outputs)


def _chunk(
    layer: DropConnectPPLayer,
    name: str,
    pieces: list[Tensor | None],
    num_masks: int,
    num_mirrored: int,
    kl_scale: Tensor | float,
    coefficients: Tensor | None,
    generator: torch.Generator | None,
    wanted: list[str],
) -> Pass:
    gate, kept, likelihood, *rest = pieces
    assert gate is not None
    masks = [m for m in rest[:num_masks] if m is not None]
    mirrored = [m for m in rest[num_masks : num_masks + num_mirrored] if m is not None]
    gate = functional.widen(gate)
    direct = layer.parameterisation == "probability"
    logit = functional.probability_to_logit(gate) if direct else gate
    beta_slopes: dict[str, Tensor] = {}
    if layer.hyper == "optimal":
        kl, slope = functional.collapsed_kl(logit, layer.alpha, layer.beta, slope=bool(wanted))
    else:
        kl, slope, beta_slopes = _learned_chunk(layer, name, logit, rest[-2:], kl_scale, coefficients, generator)
    assert kl is not None
    squared = torch.zeros(max(num_masks, 1), device=gate.device, dtype=kl.dtype)
    gradients: dict[str, Tensor] = {}
    if kept is not None:
        kl = kl * kept
    if wanted:
        assert slope is not None
        gradient = slope.mul_(kl_scale)
        if likelihood is not None:
            gradient.sub_(likelihood)
        elif coefficients is not None:
            gradient.sub_(_streamed(logit, kept, masks, mirrored, coefficients, squared))
        if direct:
            gradient.div_(torch.sigmoid(logit).mul_(torch.sigmoid(-logit)))
        gradients = {f"{name}_{layer.parameterisation}": gradient, **beta_slopes}
        gradients = {key: gradients[key] if kept is None else gradients[key] * kept for key in wanted}
    return Pass(kl.sum(), squared, gradients)


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
    layer: DropConnectPPLayer,
    name: str,
    logit: Tensor,
    raw: list[Tensor | None],
    kl_scale: Tensor | float,
    coefficients: Tensor | None,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Eq. (20), (21) with free alpha~, beta~, and for `eq16` the score of a draw of pi, Eq. (16)."""
    raw_alpha, raw_beta = (functional.widen(t) for t in raw if t is not None)
    alpha, beta = functional.positive(raw_alpha), functional.positive(raw_beta)
    kl, slope, slope_alpha, slope_beta = functional.learned_kl(logit, alpha, beta, layer.alpha, layer.beta)
    slope_alpha, slope_beta = slope_alpha * kl_scale, slope_beta * kl_scale
    if isinstance(layer.estimator, Eq16) and coefficients is not None:
        heads = torch._standard_gamma(alpha, generator=generator)
        tails = torch._standard_gamma(beta, generator=generator)
        score_alpha, score_beta = functional.beta_score(heads / (heads + tails), alpha, beta)
        slope_alpha = slope_alpha - coefficients.sum() * score_alpha
        slope_beta = slope_beta - coefficients.sum() * score_beta
    slopes = {
        f"{name}_alpha": slope_alpha * torch.sigmoid(raw_alpha),
        f"{name}_beta": slope_beta * torch.sigmoid(raw_beta),
    }
    return kl, slope, slopes


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
        if torch._C._autograd._get_current_graph_task_keep_graph():
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


def kl_sum(layer: DropConnectPPLayer, name: str) -> Tensor:
    """KL of all synapses of a parameter, in nats, differentiable.

    Its slope is worked out with it: they share most of their arithmetic, and while a backward pass
    runs there is less memory to spare for the pass over the synapses than before it.
    """
    found = posterior_pass(layer, name, kl_scale=1.0, gradients=torch.is_grad_enabled())
    return inject(found.kl, [getattr(layer, key) for key in found.gradients], list(found.gradients.values()))
