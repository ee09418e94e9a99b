"""DropConnect: one fixed keep probability, evaluated at the mean or by Gaussian moment matching."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, check_choice, check_probability
from dropconnectpp.functional import expected_activation
from dropconnectpp.layers.granularity import Granularity
from dropconnectpp.layers.grouped import GroupedLayer

Evaluation = Literal["mean", "gaussian"]
"""What eval mode gives: one pass with the mean weights, or DropConnect's Gaussian moment matching."""


class DropConnectLayer(GroupedLayer):
    """A masked layer with one fixed keep probability: Eq. (1), (2).

    ``evaluation`` is the rule in eval mode: "mean", or "gaussian", DropConnect's own: the activation
    averaged over a Gaussian with the moments that the masks give its input. The average is taken by
    closed form for ReLU and otherwise by quadrature, the limit of DropConnect's many draws.
    """

    def _set_up_rate(
        self, keep_probability: float, evaluation: Evaluation, granularity: Granularity = "synapse"
    ) -> None:
        self._set_up_groups(granularity)
        self.fixed_keep_probability = check_probability("keep_probability", keep_probability)
        self.evaluation = check_choice("evaluation", evaluation, get_args(Evaluation))
        if evaluation == "gaussian" and self.activation is None:
            raise ArgumentError(
                "evaluation='gaussian' averages the activation, and this layer has none. "
                "Give activation=nn.ReLU() to the layer, or use evaluation='mean'."
            )
        self.reset_parameters()

    def gate_logit(self, name: str) -> Tensor:
        value = math.log(self.fixed_keep_probability) - math.log1p(-self.fixed_keep_probability)
        return torch.full((), value, device=self.weight.device, dtype=self.weight.dtype)

    def _mean_pass(self, input: Tensor) -> Tensor:
        if self.training or self.evaluation == "mean" or self.activation is None:
            return super()._mean_pass(input)
        return expected_activation(self.activation, *self.gaussian_moments(input))

    def options(self) -> dict[str, Any]:
        return {**super().options(), "keep_probability": self.fixed_keep_probability, "evaluation": self.evaluation}

    def extra_repr(self) -> str:
        shown = {**self.arguments(), "keep_probability": self.fixed_keep_probability, "mask": self.mask}
        shown |= {} if self.tiling is None else {"granularity": self.granularity}
        return ", ".join(f"{key}={value!r}" for key, value in shown.items())
