"""What all Triton kernels ask: that Triton is installed, and that tensors are as they take them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed. It is asked for GPUs alone: its import takes a quarter of a second or more."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def supported(*tensors: Tensor | None) -> bool:
    """Whether kernels can take the tensors: float32, in one piece, on a GPU with Triton. None is no tensor."""
    given = (t for t in tensors if t is not None)
    return all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in given) and has_triton()


def step_tensor(step: Tensor | int, device: torch.device) -> Tensor:
    """A step as kernels read it."""
    return step if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64, device=device)
