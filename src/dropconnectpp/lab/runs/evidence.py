"""What made the numbers of a row: versions, the commit, and choices of the device that can move last digits."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

import dropconnectpp
from dropconnectpp.lab.kernels import launch_config
from dropconnectpp.lab.replicas.layered_stack import LayeredStack
from dropconnectpp.lab.replicas.stack import Stack


def versions() -> dict[str, str]:
    """Versions of what made the numbers."""
    names = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        names["cuda"] = torch.version.cuda
    with suppress(ImportError):
        import triton

        names["triton"] = triton.__version__
    names["dropconnectpp"] = dropconnectpp.__version__
    return names


def how(stack: Stack | LayeredStack) -> dict[str, str]:
    """What of the device's own choices can move the last digits."""
    tuned = launch_config.evidence(stack.device) if stack.fused else {}
    return {"convolutions": str(stack.input_dtype).removeprefix("torch."), **tuned}


@cache
def commit() -> str:
    """The source's commit, where it is a checkout of this project."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"
