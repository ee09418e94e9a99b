"""The Triton kernels of this package, where Triton is installed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def compiled(name: str) -> Any:
    """The module of kernels `_triton_NAME`, or None without Triton."""
    try:
        return importlib.import_module(f"dropconnectpp.lab.kernels._triton_{name}")
    except ImportError:
        return None
