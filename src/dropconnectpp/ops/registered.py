"""The operations as torch knows them: what a compiled graph calls, with a fake version and a gradient each.

Eager code calls the functions behind them directly, which costs less. A registered operation takes tensors and plain
values alone, so a prior comes as its three settings.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dropconnectpp.ops import gpu, noise, posterior_cpu
from dropconnectpp.ops.gated_weight import masked_by_draw, masked_by_draw_backward
from dropconnectpp.ops.prior import Hyper, Prior

LIBRARY = "dropconnectpp"


def _operation(name: str) -> Any:
    return torch.library.custom_op(f"{LIBRARY}::{name}", mutates_args=())


def _laid_out_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A result in the memory layout that its fake version promised: a convolution's gradient may be channels last."""
    promised = torch.empty_like(like, device="meta").stride()
    return tensor if tensor.stride() == promised else torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


# ------------------------------------------------------------------------------------------ what changes


@_operation("held")  # type: ignore[untyped-decorator]
def held(tensor: Tensor) -> Tensor:
    """A tensor as it is now, for a backward pass that comes after it was changed in place.

    A compiled backward pass computes again what it can rather than keep it, and torch (2.13) does so from buffers
    that the forward pass has updated meanwhile. It does not compute this operation again.
    """
    return tensor.clone()


@held.register_fake  # type: ignore[untyped-decorator]
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


# ------------------------------------------------------------------------------------------ random numbers


@_operation("uniform")  # type: ignore[untyped-decorator]
def uniform(shape: list[int], seed: Tensor, stream: int, double: bool) -> Tensor:
    """`noise.uniform`."""
    return noise.uniform(torch.Size(shape), seed, stream, torch.float64 if double else torch.float32, seed.device)


@uniform.register_fake  # type: ignore[untyped-decorator]
def _(shape: list[int], seed: Tensor, stream: int, double: bool) -> Tensor:
    return seed.new_empty(shape, dtype=torch.float64 if double else torch.float32)


@_operation("examples")  # type: ignore[untyped-decorator]
def examples(shape: list[int], seed: Tensor, stream: int, double: bool, step: int) -> Tensor:
    """`noise.examples`."""
    dtype = torch.float64 if double else torch.float32
    return noise.examples(torch.Size(shape), seed, stream, dtype, seed.device, step)


@examples.register_fake  # type: ignore[untyped-decorator]
def _(shape: list[int], seed: Tensor, stream: int, double: bool, step: int) -> Tensor:
    return seed.new_empty(shape, dtype=torch.float64 if double else torch.float32)


@_operation("normal")  # type: ignore[untyped-decorator]
def normal(shape: list[int], seed: Tensor, stream: int, double: bool) -> Tensor:
    """`noise.normal`."""
    return noise.normal(torch.Size(shape), seed, stream, torch.float64 if double else torch.float32, seed.device)


@normal.register_fake  # type: ignore[untyped-decorator]
def _(shape: list[int], seed: Tensor, stream: int, double: bool) -> Tensor:
    return seed.new_empty(shape, dtype=torch.float64 if double else torch.float32)


@_operation("binary")  # type: ignore[untyped-decorator]
def binary(logit: Tensor, shape: list[int], seed: Tensor, stream: int, mirrored: bool) -> Tensor:
    """`noise.binary`."""
    return noise.binary(logit, torch.Size(shape), seed, stream, mirrored).contiguous()


@binary.register_fake  # type: ignore[untyped-decorator]
def _(logit: Tensor, shape: list[int], seed: Tensor, stream: int, mirrored: bool) -> Tensor:
    return logit.new_empty(shape, dtype=torch.bool)


# ------------------------------------------------------------------------------------------ the masked weight


@_operation("gated")  # type: ignore[untyped-decorator]
def gated(
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    through: bool,
    dtype: torch.dtype,
) -> Tensor:
    """W z for one draw, in the dtype given; ``through`` sends the gradient on to the logits."""
    return masked_by_draw(weight, logit, kept, seed, stream, mirrored, dtype)


@gated.register_fake  # type: ignore[untyped-decorator]
def _(
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    through: bool,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(weight, dtype=dtype)


@_operation("gated_backward")  # type: ignore[untyped-decorator]
def gated_backward(
    grad: Tensor,
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    through: bool,
) -> tuple[Tensor, Tensor]:
    """z G and, straight through, G W pi~ (1 - pi~); otherwise the second is empty."""
    by_weight, by_logit = masked_by_draw_backward(grad, weight, logit, kept, seed, stream, mirrored, (True, through))
    assert by_weight is not None
    laid = logit.new_empty(0) if by_logit is None else _laid_out_like(by_logit, logit)
    return _laid_out_like(by_weight, weight), laid


@gated_backward.register_fake  # type: ignore[untyped-decorator]
def _(
    grad: Tensor,
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    through: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight), torch.empty_like(logit) if through else logit.new_empty(0)


def _keep_for_gated(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, logit, kept, seed, ctx.stream, ctx.mirrored, ctx.through, _ = inputs
    ctx.save_for_backward(weight, logit, kept, seed)


def _grad_gated(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    by_weight, by_logit = gated_backward(grad, *ctx.saved_tensors, ctx.stream, ctx.mirrored, ctx.through)
    return by_weight, by_logit if ctx.through else None, None, None, None, None, None, None


gated.register_autograd(_grad_gated, setup_context=_keep_for_gated)


# ------------------------------------------------------------------------------------------ the posterior


@_operation("posterior")  # type: ignore[untyped-decorator]
def posterior(
    logit: Tensor,
    kept: Tensor | None,
    seeds: Tensor,
    coefficients: Tensor,
    kl_scale: Tensor,
    alpha: float,
    beta: float,
    hyper: str,
    stream: int,
    paired: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """kl_scale * KL, the KL, and the sum of squared scores of each seed's mask (L,)."""
    prior = Prior(alpha, beta, cast(Hyper, hyper))
    if gpu.supported(logit) and logit.dtype == torch.float32:
        kl, squared = gpu.posterior(logit, kept, prior, seeds if seeds.numel() else None, stream)
        return kl * kl_scale, kl, squared.clone()
    kl, squared, _ = _on_cpu(logit, kept, seeds, coefficients, kl_scale, prior, stream, paired, False)
    return kl * kl_scale.to(kl.dtype), kl.clone(), squared[: seeds.numel()].clone()


@posterior.register_fake  # type: ignore[untyped-decorator]
def _(
    logit: Tensor,
    kept: Tensor | None,
    seeds: Tensor,
    coefficients: Tensor,
    kl_scale: Tensor,
    alpha: float,
    beta: float,
    hyper: str,
    stream: int,
    paired: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return logit.new_empty(()), logit.new_empty(()), logit.new_empty(seeds.shape)


@_operation("posterior_backward")  # type: ignore[untyped-decorator]
def posterior_backward(
    upstream: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seeds: Tensor,
    coefficients: Tensor,
    kl_scale: Tensor,
    alpha: float,
    beta: float,
    hyper: str,
    stream: int,
    paired: bool,
) -> Tensor:
    """upstream * (kl_scale dKL - sum_l c_l h_l)."""
    prior = Prior(alpha, beta, cast(Hyper, hyper))
    if gpu.supported(logit) and logit.dtype == torch.float32:
        drawn = {"seeds": seeds, "coefficients": coefficients} if seeds.numel() else {}
        return gpu.posterior_backward(
            logit, kept, prior, upstream, kl_scale=kl_scale, stream=stream, paired=paired, **drawn
        )
    gradient = _on_cpu(logit, kept, seeds, coefficients, kl_scale, prior, stream, paired, True)[2]
    assert gradient is not None
    return _laid_out_like(gradient.mul_(upstream), logit)


@posterior_backward.register_fake  # type: ignore[untyped-decorator]
def _(
    upstream: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seeds: Tensor,
    coefficients: Tensor,
    kl_scale: Tensor,
    alpha: float,
    beta: float,
    hyper: str,
    stream: int,
    paired: bool,
) -> Tensor:
    return torch.empty_like(logit)


def _on_cpu(
    logit: Tensor,
    kept: Tensor | None,
    seeds: Tensor,
    coefficients: Tensor,
    kl_scale: Tensor,
    prior: Prior,
    stream: int,
    paired: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    logit = logit.contiguous()  # it is read in chunks, in the order of its synapses
    masks = [noise.binary(logit, logit.shape, seed, stream) for seed in seeds.unbind()]
    mirrored = [noise.binary(logit, logit.shape, seed, stream, True) for seed in seeds.unbind()] if paired else []
    terms = posterior_cpu.Terms(
        float(kl_scale), masks, mirrored, coefficients if masks else None, None, prior, scores=True
    )
    return posterior_cpu.pruned_pass(logit, kept, terms, gradient)


def _keep_for_posterior(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _grad_posterior(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return posterior_backward(upstream, *ctx.saved_tensors, *ctx.settings), *(None,) * 9


posterior.register_autograd(_grad_posterior, setup_context=_keep_for_posterior)
