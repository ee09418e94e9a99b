"""What a layer computes from given weights: the linear map and the convolutions, plain and per example.

Shapes: B batch, O out, I in, C channels, G groups; `*` are spatial or further axes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropconnectpp.errors import ShapeError


class Operation(nn.Module, ABC):
    """One linear operation; the layers mix it with a kind of masking."""

    plain_type: ClassVar[type[nn.Module]]
    argument_names: ClassVar[tuple[str, ...]]
    weight: nn.Parameter
    bias: nn.Parameter | None

    @abstractmethod
    def operate(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The batch through one weight."""

    @abstractmethod
    def operate_each(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Each example through its own weight (B, *S) and bias (B, O)."""

    @abstractmethod
    def by_unit(self, values: Tensor) -> Tensor:
        """Values of the units (O,) so that they multiply an output."""

    @abstractmethod
    def some_inputs(self, input: Tensor, start: int, count: int) -> Tensor:
        """The part of the input that ``count`` columns of the weight read, from ``start`` on."""

    @abstractmethod
    def check_input(self, input: Tensor, batched: bool) -> None:
        """Raise `ShapeError` if the input does not fit; ``batched`` asks for a batch axis."""

    def arguments(self) -> dict[str, Any]:
        """What the `nn` counterpart is constructed with, the factory arguments aside."""
        return construction_arguments(self, self.argument_names)


def construction_arguments(module: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """Read off a layer, ours or plain, what it was constructed with."""
    return {**{name: getattr(module, name) for name in names}, "bias": module._parameters["bias"] is not None}


class LinearOperation(Operation):
    """y = W x + b."""

    plain_type = nn.Linear
    argument_names = ("in_features", "out_features")
    in_features: int
    out_features: int

    def operate(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def operate_each(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = input.reshape(input.shape[0], -1, self.in_features)  # (B, *, I)
        output = torch.matmul(flat, weight.transpose(1, 2))
        output = output if bias is None else output + bias.unsqueeze(1).to(output.dtype)
        return output.reshape(*input.shape[:-1], self.out_features)

    def by_unit(self, values: Tensor) -> Tensor:
        return values

    def some_inputs(self, input: Tensor, start: int, count: int) -> Tensor:
        return input.narrow(-1, start, count)

    def check_input(self, input: Tensor, batched: bool) -> None:
        if input.ndim == 0 or input.shape[-1] != self.in_features or (batched and input.ndim < 2):
            raise ShapeError(
                f"{type(self).__name__}({self.in_features}, {self.out_features}) needs an input of shape "
                f"({'B, ' if batched else ''}..., {self.in_features}), got {tuple(input.shape)}."
            )


_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ConvOperation(Operation):
    """A convolution with the geometry of its `nn` counterpart."""

    argument_names = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )
    dimensions: ClassVar[int]
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str

    def adopt_geometry(self, *arguments: Any, **options: Any) -> torch.Size:
        """Check the geometry by building the `nn` layer without memory; return the weight's shape."""
        template: Any = self.plain_type(*arguments, **options, device="meta")
        for name in self.argument_names:
            setattr(self, name, getattr(template, name))
        self._edge = template._reversed_padding_repeated_twice
        shape: torch.Size = template.weight.shape
        return shape

    def operate(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._convolve(self._padded(input), weight, bias, self.groups)

    def operate_each(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # B convolutions of one example each are one convolution with B times the groups.
        padded = self._padded(input)
        batch = padded.shape[0]
        wide = padded.reshape(1, -1, *padded.shape[2:])
        flat_bias = None if bias is None else bias.flatten()
        output = self._convolve(wide, weight.flatten(0, 1), flat_bias, self.groups * batch)
        return output.reshape(batch, self.out_channels, *output.shape[2:])

    def by_unit(self, values: Tensor) -> Tensor:
        return values.view(-1, *[1] * self.dimensions)

    def some_inputs(self, input: Tensor, start: int, count: int) -> Tensor:
        axis = input.ndim - self.dimensions - 1
        apart = input.unflatten(axis, (self.groups, self.in_channels // self.groups))
        part: Tensor = apart.narrow(axis + 1, start, count).flatten(axis, axis + 1)
        return part

    def _padded(self, input: Tensor) -> Tensor:
        return input if self.padding_mode == "zeros" else F.pad(input, self._edge, mode=self.padding_mode)

    def _convolve(self, input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        padding = self.padding if self.padding_mode == "zeros" else 0
        convolve: Any = _CONVOLVE[self.dimensions]
        output: Tensor = convolve(input, weight, bias, self.stride, padding, self.dilation, groups)
        return output

    def check_input(self, input: Tensor, batched: bool) -> None:
        axes = (self.dimensions + 2,) if batched else (self.dimensions + 1, self.dimensions + 2)
        if input.ndim not in axes or input.shape[-self.dimensions - 1] != self.in_channels:
            sides = ("length", "height, width", "depth, height, width")[self.dimensions - 1]
            raise ShapeError(
                f"{type(self).__name__} with in_channels={self.in_channels} needs an input of shape "
                f"(B, {self.in_channels}, {sides}), got {tuple(input.shape)}."
            )


class Conv1dOperation(ConvOperation):
    """`nn.Conv1d`."""

    plain_type = nn.Conv1d
    dimensions = 1


class Conv2dOperation(ConvOperation):
    """`nn.Conv2d`."""

    plain_type = nn.Conv2d
    dimensions = 2


class Conv3dOperation(ConvOperation):
    """`nn.Conv3d`."""

    plain_type = nn.Conv3d
    dimensions = 3
