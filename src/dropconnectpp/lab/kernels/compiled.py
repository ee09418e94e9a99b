"""The Triton kernels of this package, where Triton is installed."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def compiled() -> Any:
    """The module of kernels, or None without Triton."""
    try:
        from dropconnectpp.lab.kernels import _triton
    except ImportError:
        return None
    return _triton
