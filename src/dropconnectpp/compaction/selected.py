"""Layers that read a part of their input: for models whose inputs are not all connected.

Shapes: O out, I in (what is read), C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropconnectpp.errors import ShapeError


class Selection(nn.Module):
    """The buffer that says which inputs are read, checked when it is loaded."""

    columns: Tensor
    total: int
    """How many inputs there are, read or not."""

    def _set_up_selection(self, count: int, total: int, device: Any) -> None:
        self.total = total
        # int32: half the bytes of the usual index, and torch and ONNX both take it.
        self.register_buffer("columns", torch.arange(count, dtype=torch.int32, device=device))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}columns"
        columns = state_dict.get(key)
        if columns is not None and columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < self.total:
            error_msgs.append(f"{key} must lie in 0..{self.total - 1}; the file is damaged, save the model again")
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class SelectedLinear(Selection, nn.Linear):
    """`nn.Linear` on some of its inputs: y = W x[columns] + b. The others have no connection.

    >>> layer = SelectedLinear(2, 3, total=5)
    >>> layer(torch.zeros(1, 5)).shape
    torch.Size([1, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        total: int,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up_selection(in_features, total, device)

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1] != self.total:
            raise ShapeError(f"{type(self).__name__} reads from {self.total} inputs, got {tuple(input.shape)}.")
        return F.linear(input.index_select(-1, self.columns), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, total={self.total}"


class _SelectedConv(Selection):
    def __init__(self, *arguments: Any, total: int, device: Any = None, **options: Any) -> None:
        super().__init__(*arguments, device=device, **options)
        convolution: Any = self
        self._set_up_selection(convolution.in_channels, total, device)

    def forward(self, input: Tensor) -> Tensor:
        convolution: Any = self
        axis = -len(convolution.kernel_size) - 1
        if input.ndim < -axis or input.shape[axis] != self.total:
            raise ShapeError(f"{type(self).__name__} reads from {self.total} channels, got {tuple(input.shape)}.")
        output: Tensor = super().forward(input.index_select(axis, self.columns))
        return output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, total={self.total}"


class SelectedConv1d(_SelectedConv, nn.Conv1d):
    """`nn.Conv1d` on some of its channels."""


class SelectedConv2d(_SelectedConv, nn.Conv2d):
    """`nn.Conv2d` on some of its channels."""


class SelectedConv3d(_SelectedConv, nn.Conv3d):
    """`nn.Conv3d` on some of its channels."""


SELECTED: dict[type[nn.Module], type[Any]] = {
    nn.Linear: SelectedLinear,
    nn.Conv1d: SelectedConv1d,
    nn.Conv2d: SelectedConv2d,
    nn.Conv3d: SelectedConv3d,
}
"""What reads a part, by what reads all."""
