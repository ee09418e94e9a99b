"""Which device to use, what it can do, and arrays on it."""

from __future__ import annotations

import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from dropconnectpp.errors import DropConnectError


class DeviceError(DropConnectError, ValueError):
    """A device that does not exist here was asked for; the message says which there are."""


def choose(name: str) -> torch.device:
    """A device by name; "auto" takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda' was asked for and torch sees no GPU. Use --device cpu, or look at nvidia-smi.")
    if device.index is not None and device.type == "cuda":
        count = torch.cuda.device_count()
        if device.index >= count:
            raise DeviceError(f"device {name!r} was asked for and torch sees {count} GPU{'s' * (count != 1)}.")
        torch.cuda.set_device(device)  # kernels are launched on the current one
    return device


def tensor_cores(device: torch.device) -> bool:
    """Whether bf16 products are fast there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def describe(device: torch.device) -> str:
    """The device's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown CPU'}, {torch.get_num_threads()} threads"


def as_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device; on a CPU a memory-mapped file stays mapped and is shared with other processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes to it
        return torch.from_numpy(array).to(device)
