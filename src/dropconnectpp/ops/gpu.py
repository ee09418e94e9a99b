"""Launches of the library's GPU kernels, used where Triton and CUDA are there.

Each kernel computes in one pass over the synapses what functions of `functional` define in many, and draws the masks it
needs by `noise`'s rule: a function of seed, stream and index.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials
from dropconnectpp.ops.prior import Prior

WORDS = 256
"""Philox blocks of a program: 1,024 synapses."""
WIDE_WORDS = 1024
"""The same where a program leaves partial sums behind: fewer of them."""

_DTYPES = (torch.float32, torch.bool, torch.bfloat16, torch.float16)


@cache
def installed() -> bool:
    """Whether Triton is there."""
    return find_spec("triton") is not None


def supported(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors: on a GPU, each in one piece, in single or half precision."""
    if not tensors[0].is_cuda:  # the common answer on a CPU, at once
        return False
    return all(t.is_cuda and t.is_contiguous() and t.dtype in _DTYPES for t in tensors) and installed()


@cache
def _kernels() -> Any:
    from dropconnectpp.ops import gpu_triton  # Triton takes a while to import, and a CPU does not need it

    return gpu_triton


_compiled: dict[Any, Any] = {}


def _launch(name: str, grid: tuple[int], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Start a kernel; all that Triton looks at to choose a compiled one is looked at here, in a tenth of the time.

    ``constants`` come last in a kernel, in this order.
    """
    device = arguments[0].device.index
    if arguments[0].is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(name, grid, arguments, **constants)
    key = (name, device, *constants.values(), *map(_kind, arguments))
    known = _compiled.get(key)
    if known is not None:
        known[(*grid, 1, 1)](*arguments, *constants.values())
        return None
    found = getattr(_kernels(), name)[grid](*arguments, **constants)
    if found is not None:  # the interpreter compiles nothing
        _compiled[key] = found
    return None


def _kind(argument: Any) -> Any:
    """What Triton compiles a kernel anew for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return len(argument) if isinstance(argument, tuple) else float


def _grid(count: int, words: int) -> tuple[int]:
    return (-(-count // (4 * words)),)


# ------------------------------------------------------------------------------------------ random numbers


def uniform(shape: torch.Size, seed: Tensor, stream: int, row: int = 0) -> Tensor:
    """The noise behind the masks; ``row`` is the first of a block of examples."""
    out = torch.empty(shape, device=seed.device)
    _launch("uniform_kernel", _grid(out.numel(), WORDS), (out, seed, stream, row, out.numel()), WORDS=WORDS)
    return out


def normal(shape: torch.Size, seed: Tensor, stream: int) -> Tensor:
    """Standard normal numbers."""
    out = torch.empty(shape, device=seed.device)
    _launch("normal_kernel", _grid(out.numel(), WORDS), (out, seed, stream, out.numel()), WORDS=WORDS)
    return out


def binary(logit: Tensor, shape: torch.Size, seed: Tensor, stream: int, mirrored: bool) -> Tensor:
    """The masks themselves."""
    out = torch.empty(shape, device=logit.device, dtype=torch.bool)
    _launch(
        "binary_kernel",
        _grid(out.numel(), WORDS),
        (logit, out.view(torch.uint8), seed, stream, out.numel()),
        SCALAR=logit.ndim == 0,
        MIRRORED=mirrored,
        WORDS=WORDS,
    )
    return out


# ------------------------------------------------------------------------------------------ the masked weight


def _bytes(kept: Tensor | None, other: Tensor) -> Tensor:
    """``kept`` as a kernel reads it, or something that it will not read."""
    return other if kept is None else kept.view(torch.uint8)


def gated(
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    """W z, written once, in the dtype asked for."""
    out = torch.empty_like(weight, dtype=dtype or weight.dtype)
    _launch(
        "gated_kernel",
        _grid(out.numel(), WORDS),
        (weight, logit, _bytes(kept, logit), out, seed, stream, out.numel()),
        SCALAR=logit.ndim == 0,
        KEPT=kept is not None,
        MIRRORED=mirrored,
        WORDS=WORDS,
    )
    return out


def gated_backward(
    grad: Tensor,
    weight: Tensor,
    logit: Tensor,
    kept: Tensor | None,
    seed: Tensor,
    stream: int,
    mirrored: bool,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """z G and, straight through, G W pi~ (1 - pi~): what is wanted of both, in one launch."""
    grad = grad.contiguous()
    grad_weight = torch.empty_like(weight) if wanted[0] else None
    grad_logit = torch.empty_like(logit) if wanted[1] else None
    if any(wanted):
        _launch(
            "gated_backward_kernel",
            _grid(weight.numel(), WORDS),
            (
                grad,
                weight,
                logit,
                _bytes(kept, logit),
                weight if grad_weight is None else grad_weight,
                logit if grad_logit is None else grad_logit,
                seed,
                stream,
                weight.numel(),
            ),
            WEIGHT=wanted[0],
            LOGIT=wanted[1],
            SCALAR=logit.ndim == 0,
            KEPT=kept is not None,
            MIRRORED=mirrored,
            WORDS=WORDS,
        )
    return grad_weight, grad_logit


def multiply(tensor: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    """tensor * mask into ``out``, which may be ``tensor`` itself."""
    count = tensor.numel()
    _launch("masking_kernel", _grid(count, WORDS), (tensor, mask.view(torch.uint8), out, count), WORDS=WORDS)
    return out


# ------------------------------------------------------------------------------------------ the posterior


@cache
def kl_numbers(prior: Prior) -> tuple[str, tuple[float, ...]] | None:
    """Which form of the KL a kernel takes for a prior, and its coefficients; None where it has none."""
    if prior.uniform:
        short = polynomials.VALUE_POLYNOMIAL[torch.float32], polynomials.GRADIENT_POLYNOMIAL[torch.float32]
        return "uniform", (*short[0], *short[1])
    parts = prior.parts(torch.float32)
    if parts is None:
        return None
    if prior.hyper == "marginal":
        (even, odd), (level, _) = parts.value, parts.gradient
        return "marginal", (even[-1] + odd[-1], even[-1] - odd[-1], level[-1])
    return "any", (*parts.value[0], *parts.value[1], *parts.gradient[0], *parts.gradient[1])


def posterior(
    logit: Tensor, kept: Tensor | None, prior: Prior, seeds: Tensor | None = None, stream: int = 0
) -> tuple[Tensor, Tensor]:
    """KL sum () and, for the masks of each seed (L,), the sum of squared scores (L,)."""
    found = kl_numbers(prior)
    assert found is not None
    kind, numbers = found
    samples = 0 if seeds is None else seeds.numel()
    grid = _grid(logit.numel(), WIDE_WORDS)
    partial = torch.empty((1 + samples, *grid), device=logit.device)
    _launch(
        "posterior_kernel",
        grid,
        (logit, _bytes(kept, logit), logit if seeds is None else seeds, stream, partial, logit.numel(), numbers),
        KIND=kind,
        KEPT=kept is not None,
        SAMPLES=samples,
        WORDS=WIDE_WORDS,
    )
    totals = partial.sum(1)
    return totals[0], totals[1:]


def posterior_backward(
    logit: Tensor,
    kept: Tensor | None,
    prior: Prior,
    upstream: Tensor,
    incoming: Tensor | None = None,
    *,
    kl_scale: Tensor | float = 1.0,
    seeds: Tensor | None = None,
    coefficients: Tensor | None = None,
    stream: int = 0,
    paired: bool = False,
) -> Tensor:
    """upstream * (kl_scale dKL - sum_l c_l h_l) + incoming, in one pass over the logits."""
    found = kl_numbers(prior)
    assert found is not None
    kind, numbers = found
    out = torch.empty_like(logit)
    _launch(
        "posterior_backward_kernel",
        _grid(logit.numel(), WORDS),
        (
            logit,
            _bytes(kept, logit),
            logit if incoming is None else incoming.contiguous(),
            upstream,
            logit if seeds is None else seeds,
            logit if coefficients is None else coefficients,
            stream,
            out,
            kl_scale.float() if isinstance(kl_scale, Tensor) else kl_scale,
            logit.numel(),
            numbers,
        ),
        KIND=kind,
        SCALE_IS_POINTER=isinstance(kl_scale, Tensor),
        KEPT=kept is not None,
        INCOMING=incoming is not None,
        SAMPLES=0 if seeds is None else seeds.numel(),
        PAIRED=paired,
        WORDS=WORDS,
    )
    return out
