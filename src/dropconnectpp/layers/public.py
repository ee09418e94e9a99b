"""The layers a user puts in a model: linear and convolutional, with learned rates or one fixed rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Unpack

import torch

from dropconnectpp.errors import ArgumentError
from dropconnectpp.layers.affine import (
    Conv1dOperation,
    Conv2dOperation,
    Conv3dOperation,
    ConvOperation,
    LinearOperation,
)
from dropconnectpp.layers.base import Activation, Mask
from dropconnectpp.layers.dropconnect import DropConnectLayer, Evaluation
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer, PosteriorArguments, PosteriorOptions
from dropconnectpp.layers.granularity import Granularity

Size = int | tuple[int, ...]


def _options(kind: type, given: Mapping[str, Any]) -> PosteriorOptions:
    """The posterior's options, checked; an unknown one is an error that names the nearest."""
    known = [field.name for field in fields(PosteriorOptions)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, [*known, "mask", "activation", "bias", "device", "dtype"], 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(known)}."
            raise ArgumentError(f"{kind.__name__} has no option {name!r}.{hint}")
    return PosteriorOptions(**given)


class DropConnectPPLinear(DropConnectPPLayer, LinearOperation):
    """`nn.Linear` whose connections are inferred: r = a((Z * W) v), Eq. (1), Z ~ q, Eq. (13).

    Input (..., in_features), output (..., out_features). ``activation`` is a(.), applied inside the
    layer. ``mask="example"`` draws one mask per example instead of one per minibatch. The other
    options are `PosteriorOptions`' own:

    ``alpha`` and ``beta`` are the hyper-prior's; ``keep_probability`` is where every pi~ starts.
    ``hyper="marginal"`` sums pi out exactly, which the paper's hierarchy allows; "learned" trains
    alpha~ and beta~ as in the paper, and "optimal" sets them to their best value, which is known.
    With "optimal" ``sharing`` may be "layer", "unit" or "input": one pi for a whole group of
    synapses. ``estimator`` is a name or an instance, see `dropconnectpp.estimators`.
    ``parameterisation`` says whether pi~ or its log-odds is optimised.

    ``granularity`` says what has one gate, and one pi~: each "synapse"; all weights of an "input", of a "unit" or
    of a "kernel" (in a convolution those from one channel to another); or each block of a shape, (outputs, inputs).
    A unit's gate is its bias's too; otherwise each bias has its own.

    ``kl_weight`` multiplies this layer's KL in the loss, on top of `ELBO`'s own: below 1 a
    connection's price is lower, so that more are kept for sure (a tempered ELBO). ``logit_step`` is
    the posterior's step size as a multiple of the weights'. `parameter_groups` applies it; it does
    nothing for an optimiser whose groups you build yourself.

    >>> layer = DropConnectPPLinear(4096, 64, activation=torch.nn.ReLU())
    >>> layer(torch.randn(128, 4096)).shape
    torch.Size([128, 64])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation | None = None,
        mask: Mask = "batch",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **posterior: Unpack[PosteriorArguments],
    ) -> None:
        super().__init__()
        options = _options(type(self), posterior)
        factory = {"device": device, "dtype": dtype}
        self.in_features, self.out_features = in_features, out_features
        self._set_up(torch.Size((out_features, in_features)), bias, activation, mask, factory)
        self._set_up_posterior(options, factory)


class DropConnectLinear(DropConnectLayer, LinearOperation):
    """`nn.Linear` with DropConnect: each synapse kept with one fixed probability, Eq. (1), (2).

    ``granularity`` is `DropConnectPPLinear`'s: "input" and "unit" are Dropout of inputs and of units, not rescaled.

    >>> DropConnectLinear(8, 2, keep_probability=0.3).eval()(torch.zeros(1, 8)).shape
    torch.Size([1, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation | None = None,
        keep_probability: float = 0.5,
        mask: Mask = "batch",
        evaluation: Evaluation = "mean",
        granularity: Granularity = "synapse",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        shape = torch.Size((out_features, in_features))
        self._set_up(shape, bias, activation, mask, {"device": device, "dtype": dtype})
        self._set_up_rate(keep_probability, evaluation, granularity)


class _DropConnectPPConv(DropConnectPPLayer, ConvOperation):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        activation: Activation | None = None,
        mask: Mask = "batch",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **posterior: Unpack[PosteriorArguments],
    ) -> None:
        super().__init__()
        options = _options(type(self), posterior)
        factory = {"device": device, "dtype": dtype}
        geometry = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        shape = self.adopt_geometry(*geometry, padding_mode=padding_mode)
        self._set_up(shape, bias, activation, mask, factory)
        self._set_up_posterior(options, factory)


class _DropConnectConv(DropConnectLayer, ConvOperation):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        activation: Activation | None = None,
        keep_probability: float = 0.5,
        mask: Mask = "batch",
        evaluation: Evaluation = "mean",
        granularity: Granularity = "synapse",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        geometry = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        shape = self.adopt_geometry(*geometry, padding_mode=padding_mode)
        self._set_up(shape, bias, activation, mask, {"device": device, "dtype": dtype})
        self._set_up_rate(keep_probability, evaluation, granularity)


class DropConnectPPConv1d(_DropConnectPPConv, Conv1dOperation):
    """`nn.Conv1d` whose kernel entries and biases are inferred connections; see `DropConnectPPLinear`."""


class DropConnectPPConv2d(_DropConnectPPConv, Conv2dOperation):
    """`nn.Conv2d` whose kernel entries and biases are inferred connections; see `DropConnectPPLinear`."""


class DropConnectPPConv3d(_DropConnectPPConv, Conv3dOperation):
    """`nn.Conv3d` whose kernel entries and biases are inferred connections; see `DropConnectPPLinear`."""


class DropConnectConv1d(_DropConnectConv, Conv1dOperation):
    """`nn.Conv1d` with DropConnect at one fixed rate; see `DropConnectLinear`."""


class DropConnectConv2d(_DropConnectConv, Conv2dOperation):
    """`nn.Conv2d` with DropConnect at one fixed rate; see `DropConnectLinear`."""


class DropConnectConv3d(_DropConnectConv, Conv3dOperation):
    """`nn.Conv3d` with DropConnect at one fixed rate; see `DropConnectLinear`."""
