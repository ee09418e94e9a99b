"""The Triton kernels of this package, where Triton is installed, and what all of them ask of their tensors."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def compiled(name: str) -> Any:
    """The module of kernels `NAME_triton`, or None without Triton."""
    try:
        return importlib.import_module(f"dropconnectpp.lab.kernels.{name}_triton")
    except ImportError:
        return None


def as_kernels_take(name: str, *tensors: Tensor | None) -> bool:
    """Whether these kernels are there, and the tensors as they take them: float32, in one piece, on a GPU."""
    given = (t for t in tensors if t is not None)
    return all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in given) and bool(compiled(name))


def counter(step: Tensor | int, device: torch.device) -> Tensor:
    """A step as the kernels read it."""
    return step if isinstance(step, Tensor) else torch.full((), step, dtype=torch.int64, device=device)
