"""What a bound remembers between steps, as tensors that move with the model and keep their digits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class WideBuffers(nn.Module):
    """Buffers that stay at least float32 when the model goes to half precision: sums over a layer do not fit there."""

    def _apply(self, fn: Any, recurse: bool = True) -> WideBuffers:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            known = before[name]
            if buffer is not None and known is not None and buffer.dtype.itemsize < 4:
                self._buffers[name] = known.to(buffer.device)
        return self


class Weight(WideBuffers):
    """A number that may change between steps; compiled code reads it as a tensor, and is not compiled anew for it."""

    tensor: torch.Tensor

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("tensor", torch.tensor(value, dtype=dtype), persistent=False)
        self.set(value)

    def set(self, value: float) -> None:
        """Change the number, in the memory that it has."""
        self.value = value
        self.tensor.fill_(value)

    def _apply(self, fn: Any, recurse: bool = True) -> Weight:
        super()._apply(fn, recurse)
        self.tensor.fill_(self.value)  # to all digits of another precision
        return self
