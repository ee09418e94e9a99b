"""Gates of one parameter of a module that keeps its own forward, whatever that computes."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError
from dropconnectpp.estimators import resolve
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnect import DropConnectLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer, PosteriorArguments, PosteriorOptions
from dropconnectpp.layers.passes import AverageGates, MeanGates


class ParameterGates(MaskedLayer):
    """The gates of one parameter of another module, its host, which reads what `value` gives in its place.

    They are a masked layer with one masked parameter, "weight", which is the host's own: it is neither kept nor saved
    a second time.
    """

    host: nn.Module
    """Not a submodule: the gates are one of the host's."""
    parameter_name: str

    def _attach(self, host: nn.Module, name: str) -> dict[str, Any]:
        """Become the gates of a host's parameter; return its device and dtype."""
        self.move_to(host)
        self.parameter_name = name
        self.mask, self.activation = "batch", None
        self.register_buffer("weight_kept", None)
        return {"device": self.weight.device, "dtype": self.weight.dtype}

    def move_to(self, host: nn.Module) -> None:
        """Be the gates of another module with the same parameter."""
        object.__setattr__(self, "host", host)

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The parameter itself, without its gates."""
        parameter = self.host._parameters[self.parameter_name]
        assert parameter is not None
        return parameter

    @property
    def synapse_names(self) -> tuple[str, ...]:
        return ("weight",)

    @property
    def weight_names(self) -> tuple[str, ...]:
        return ("weight",) if self.weight.ndim > 1 else ()

    def retile(self) -> None:
        """Each weight has a gate of its own."""

    def arguments(self) -> dict[str, Any]:
        return {}

    def value(self) -> Tensor:
        """The parameter under this pass's gates."""
        gates, again = self._gates_of_pass()
        if isinstance(gates, MeanGates):
            return self.mean_parameters()[0]
        if isinstance(gates, AverageGates):
            raise ArgumentError(
                f"{type(self.host).__name__} has gates on {self.parameter_name!r}, a parameter that it uses in its "
                "own way: there is no activation to average. Average whole networks instead, predict's default."
            )
        device = self.weight.device.type
        if torch.is_autocast_enabled(device):  # the host casts as its operations ask
            with torch.autocast(device, enabled=False):
                return self._gated(gates, again)[0]
        return self._gated(gates, again)[0]

    def forward(self, input: Tensor) -> Tensor:
        return self._uncallable()

    def _uncallable(self) -> NoReturn:
        raise ArgumentError(f"gates of a parameter are no layer: call their {type(self.host).__name__} instead.")

    def operate(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._uncallable()

    def operate_each(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._uncallable()

    def by_unit(self, values: Tensor) -> Tensor:
        return self._uncallable()

    def some_inputs(self, input: Tensor, start: int, count: int) -> Tensor:
        return self._uncallable()

    def check_input(self, input: Tensor, batched: bool) -> None:
        self._uncallable()


class DropConnectPPParameter(ParameterGates, DropConnectPPLayer):
    """A learned keep probability for each entry of a parameter."""

    def __init__(self, host: nn.Module, name: str, **options: Any) -> None:
        super().__init__()
        factory = self._attach(host, name)
        self._set_up_posterior(PosteriorOptions(**_of_gates(options)), factory)

    def reset_parameters(self) -> None:
        """Start the posterior; the parameter is the host's to start."""
        self.reset_posterior()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any) -> None:
        own = self.posterior_names
        if not any(key.startswith(prefix) for key in state_dict):
            # A plain model's state: the posterior keeps its start.
            state_dict.update({prefix + name: getattr(self, name) for name in own})
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


class DropConnectParameter(ParameterGates, DropConnectLayer):
    """One fixed keep probability for each entry of a parameter."""

    def __init__(self, host: nn.Module, name: str, *, keep_probability: float = 0.5, **options: Any) -> None:
        super().__init__()
        self._attach(host, name)
        self._set_up_rate(keep_probability, **{"evaluation": "mean", **_of_gates(options)})

    def reset_parameters(self) -> None:
        """Nothing: the parameter is the host's to start."""

    def tie(self, name: str) -> Any:
        return id(self.weight)


PARAMETER_GATES: dict[str, type[Any]] = {
    "dropconnect++": DropConnectPPParameter,
    "dropconnect": DropConnectParameter,
}
"""By kind of masking."""


def fault_of(options: PosteriorArguments | dict[str, Any]) -> str | None:
    """Why gates of a parameter cannot have the options that a layer may have; None if they can."""
    given = dict(options)
    if given.get("mask", "batch") != "batch":
        return "mask='example' needs a linear layer or a convolution that is called"
    if given.get("activation") is not None:
        return "activation= belongs to linear layers and convolutions"
    if given.get("granularity", "synapse") != "synapse":
        return f"granularity={given['granularity']!r} needs a linear layer or a convolution that is called"
    if given.get("evaluation", "mean") != "mean":
        return "evaluation='gaussian' needs a layer with an activation"
    if "estimator" in given and resolve(given["estimator"]).gate == "gaussian":
        return "estimator='local' needs a linear layer or a convolution that is called"
    return None


def _of_gates(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that `fault_of` has found at their usual values."""
    return {key: value for key, value in options.items() if key not in ("mask", "activation")}
