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
def _kernel(name: str) -> Any:
    # Triton takes a while to import, and a CPU needs none of it.
    from dropconnectpp.ops import gpu_examples_triton, gpu_gates_triton, gpu_triton

    return next(
        found for home in (gpu_gates_triton, gpu_triton, gpu_examples_triton) if (found := vars(home).get(name))
    )


_compiled: dict[Any, Any] = {}


def launch(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Start a kernel; all that Triton looks at to choose a compiled one is looked at here, in a tenth of the time.

    ``constants`` come last in a kernel, in this order.
    """
    device = arguments[0].device.index
    if arguments[0].is_cuda and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(name, grid, arguments, **constants)
    values = tuple(constants.values())
    key = (name, device, values, *_kinds(arguments))
    known = _compiled.get(key)
    if known is not None:
        known[(*grid, 1, 1)[:3]](*arguments, *values)
        return None
    found = _kernel(name)[grid](*arguments, **constants)
    if found is not None:  # the interpreter compiles nothing
        _compiled[key] = found
    return None


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton compiles a kernel anew for."""
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            kinds.append(argument.dtype)
            kinds.append(argument.data_ptr() % 16 == 0)
        elif isinstance(argument, int):
            kinds.append((argument == 1) + 2 * (argument % 16 == 0) + 4 * (argument >= 2**31))
        else:
            kinds.append(len(argument) if isinstance(argument, tuple) else 0)
    return kinds


def _grid(count: int, words: int) -> tuple[int]:
    return (-(-count // (4 * words)),)


# ------------------------------------------------------------------------------------------ random numbers


def uniform(shape: torch.Size, seed: Tensor, stream: int, row: int = 0) -> Tensor:
    """The noise behind the masks; ``row`` is the first of a block of examples."""
    out = torch.empty(shape, device=seed.device)
    launch("uniform_kernel", _grid(out.numel(), WORDS), (out, seed, stream, row, out.numel()), WORDS=WORDS)
    return out


def normal(shape: torch.Size, seed: Tensor, stream: int) -> Tensor:
    """Standard normal numbers."""
    out = torch.empty(shape, device=seed.device)
    launch("normal_kernel", _grid(out.numel(), WORDS), (out, seed, stream, out.numel()), WORDS=WORDS)
    return out


def binary(logit: Tensor, shape: torch.Size, seed: Tensor, stream: int, mirrored: bool) -> Tensor:
    """The masks themselves."""
    out = torch.empty(shape, device=logit.device, dtype=torch.bool)
    launch(
        "binary_kernel",
        _grid(out.numel(), WORDS),
        (logit, out.view(torch.uint8), seed, stream, out.numel()),
        SCALAR=logit.ndim == 0,
        MIRRORED=mirrored,
        WORDS=WORDS,
    )
    return out


# ------------------------------------------------------------------------------------------ masks that are given


def multiply(tensor: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    """tensor * mask into ``out``, which may be ``tensor`` itself."""
    count = tensor.numel()
    launch("masking_kernel", _grid(count, WORDS), (tensor, mask.view(torch.uint8), out, count), WORDS=WORDS)
    return out


# ------------------------------------------------------------------------------------------ the posterior


def as_bytes(kept: Tensor | None, other: Tensor) -> Tensor:
    """``kept`` as a kernel reads it, or something that it will not read."""
    return other if kept is None else kept.view(torch.uint8)


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
    launch(
        "posterior_kernel",
        grid,
        (logit, as_bytes(kept, logit), logit if seeds is None else seeds, stream, partial, logit.numel(), numbers),
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
    *,
    kl_scale: Tensor | float = 1.0,
    seeds: Tensor | None = None,
    coefficients: Tensor | None = None,
    stream: int = 0,
    paired: bool = False,
) -> Tensor:
    """upstream * (kl_scale dKL - sum_l c_l h_l), in one pass over the logits."""
    found = kl_numbers(prior)
    assert found is not None
    kind, numbers = found
    out = torch.empty_like(logit)
    launch(
        "posterior_backward_kernel",
        _grid(logit.numel(), WORDS),
        (
            logit,
            as_bytes(kept, logit),
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
        SAMPLES=0 if seeds is None else seeds.numel(),
        PAIRED=paired,
        WORDS=WORDS,
    )
    return out
