"""A layer's gates on a GPU: weight and bias in one launch forward and one backward, KL and score with them.

What a launch works out for the bound lies in a `Tally`; `settle` makes the bound of all layers' tallies in one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.ops import gpu
from dropconnectpp.ops.prior import Prior

Part = tuple[Tensor, Tensor, Tensor | None, int]
"""A parameter, its log-odds (of its shape, or one number for all), what pruning left, and its stream."""

WORDS = 512
"""Philox blocks of a program that leaves partial sums: fewer of them, and registers for the rest."""
BLOCK = 1024
"""Partial sums that `settle` reads at a time."""


@dataclass(eq=False)
class Tally:
    """What the launches of one layer work out beside its masks, in one step of training."""

    prior: Prior
    scored: bool
    """Whether the logits' gradient is the score's; else it comes by backpropagation."""
    kl_scale: float
    partial: Tensor
    """Partial sums of all layers: for each launch KL by program, then squared scores by program."""
    place: int
    """Where this layer's start."""
    programs: int
    """How many programs its launch has."""
    coefficients: Tensor
    """What multiplies each layer's score, once the rewards are known."""
    index: int
    """This layer's place there."""
    anchor: Tensor | None = None
    """What ties the layer's launch to the bound, once a pass has made it and until the bound takes it."""
    used: bool = False
    """Whether a pass has made the anchor."""


def one_launch(parts: Sequence[Part]) -> bool:
    """Whether parameters can go together: at most a weight and a bias, alike in type."""
    if len(parts) == 1:
        return True
    (weight, logit, *_), (bias, bias_logit, *_) = parts[0], parts[1]
    return len(parts) == 2 and weight.dtype == bias.dtype and logit.dtype == bias_logit.dtype


def programs(counts: Sequence[int]) -> int:
    """How many programs a launch with a tally has for parameters of these sizes."""
    return sum(-(-count // (4 * WORDS)) for count in counts)


def _grid(parts: Sequence[Part], words: int) -> tuple[int]:
    return (sum(-(-part[0].numel() // (4 * words)) for part in parts),)


def gated(
    parts: Sequence[Part], seed: Tensor, mirrored: bool, dtype: torch.dtype | None, tally: Tally | None = None
) -> list[Tensor]:
    """W z of a layer's parameters, written once, in the dtype asked for."""
    if not one_launch(parts):
        return [gated([part], seed, mirrored, dtype)[0] for part in parts]
    outs = [torch.empty_like(part[0], dtype=dtype or part[0].dtype) for part in parts]
    (weight, logit, kept, stream), (bias, bias_logit, bias_kept, bias_stream) = parts[0], parts[-1]
    kind, numbers = ("none", (0.0,)) if tally is None else _numbers(tally.prior)
    words = gpu.WORDS if tally is None else WORDS
    gpu.launch(
        "gates_kernel",
        _grid(parts, words),
        (
            weight,
            bias,
            logit,
            bias_logit,
            gpu.as_bytes(kept, logit),
            gpu.as_bytes(bias_kept, bias_logit),
            outs[0],
            outs[-1],
            seed,
            logit if tally is None else tally.partial,
            stream,
            bias_stream,
            weight.numel(),
            bias.numel(),
            0 if tally is None else tally.place,
            numbers,
        ),
        KIND=kind,
        SCORED=tally is not None and tally.scored,
        BIAS=len(parts) > 1,
        SCALAR=logit.ndim == 0,
        WEIGHT_KEPT=kept is not None,
        BIAS_KEPT=bias_kept is not None,
        MIRRORED=mirrored,
        WORDS=words,
    )
    return outs


def gated_backward(
    grads: Sequence[Tensor],
    parts: Sequence[Part],
    seed: Tensor,
    mirrored: bool,
    wanted: tuple[bool, bool],
    tally: Tally | None = None,
    upstream: Tensor | None = None,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """z G for the parameters and, straight through, G W pi~ (1 - pi~) for their logits: what is ``wanted`` of both.

    With a tally the logits' gradient has KL and score in it, times ``upstream``.
    """
    if not one_launch(parts):
        found = [gated_backward([g], [part], seed, mirrored, wanted) for g, part in zip(grads, parts, strict=True)]
        return [pair[0][0] for pair in found], [pair[1][0] for pair in found]
    (weight, logit, kept, stream), (bias, bias_logit, bias_kept, bias_stream) = parts[0], parts[-1]
    if logit.ndim == 0 and (wanted[1] or tally is not None):
        raise ValueError("One log-odds for all synapses has no gradient in these kernels.")
    by_weight = [torch.empty_like(part[0]) for part in parts] if wanted[0] else [part[0] for part in parts]
    logits = wanted[1] or tally is not None
    by_logit = [torch.empty_like(part[1]) for part in parts] if logits else [part[1] for part in parts]
    kind, numbers = ("none", (0.0,)) if tally is None else _numbers(tally.prior)
    scored = tally is not None and tally.scored
    if wanted[0] or logits:
        grads = [grad.contiguous() for grad in grads]
        gpu.launch(
            "gates_backward_kernel",
            _grid(parts, gpu.WORDS),
            (
                grads[0],
                grads[-1],
                weight,
                bias,
                logit,
                bias_logit,
                gpu.as_bytes(kept, logit),
                gpu.as_bytes(bias_kept, bias_logit),
                by_weight[0],
                by_weight[-1],
                by_logit[0],
                by_logit[-1],
                seed,
                logit if upstream is None else upstream,
                tally.coefficients if tally is not None and scored else logit,
                stream,
                bias_stream,
                weight.numel(),
                bias.numel(),
                0 if tally is None else tally.index,
                0.0 if tally is None else tally.kl_scale,
                numbers,
            ),
            WEIGHT=wanted[0],
            THROUGH=wanted[1],
            KIND=kind,
            SCORED=scored,
            BIAS=len(parts) > 1,
            SCALAR=logit.ndim == 0,
            WEIGHT_KEPT=kept is not None,
            BIAS_KEPT=bias_kept is not None,
            MIRRORED=mirrored,
            WORDS=gpu.WORDS,
        )
    nothing: list[Tensor | None] = [None] * len(parts)
    return [*by_weight] if wanted[0] else nothing, [*by_logit] if logits else nothing


def _numbers(prior: Prior) -> tuple[str, tuple[float, ...]]:
    found = gpu.kl_numbers(prior)
    assert found is not None
    return found


@dataclass(frozen=True, eq=False)
class Table:
    """Where `settle` finds what layers left in their tallies, on the device."""

    rows: Tensor  # (n, 4): first partial sum, how many, address of the moments or 0, place of the coefficient
    shares: Tensor  # (n, 2): weight of the layer's KL, decay of its moments


def settle(
    table: Table,
    partial: Tensor,
    reward: Tensor,
    coefficients: Tensor,
    *,
    scale: float,
    num_data: int,
    in_place: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Loss, ELBO, log-likelihood and KL of the mean reward and the layers' partial sums, and the moments (n, 2).

    The coefficients are written for the backward launches. The moments move ``in_place``, or into what is returned.
    """
    layers, device = table.rows.shape[0], partial.device
    loss, elbo, log_likelihood, kl = (torch.empty((), device=device) for _ in range(4))
    fresh = partial if in_place else torch.empty((layers, 2), device=device)
    arguments: tuple[Any, ...] = (
        partial,
        table.rows,
        table.shares,
        reward,
        coefficients,
        fresh,
        loss,
        elbo,
        log_likelihood,
        kl,
        layers,
        float(scale),
        float(num_data),
    )
    gpu.launch("settle_kernel", (1,), arguments, IN_PLACE=in_place, BLOCK=BLOCK)
    return (loss, elbo, log_likelihood, kl), fresh
