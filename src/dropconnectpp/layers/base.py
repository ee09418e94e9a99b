"""What every masked layer shares: which gates a pass uses, and what it computes with them.

Shapes: B batch, O out, I in, S the shape of a parameter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError, check_choice
from dropconnectpp.layers.affine import Operation
from dropconnectpp.layers.example_passes import run_each
from dropconnectpp.layers.passes import (
    MEAN,
    AverageGates,
    BinaryGates,
    DrawnGates,
    ForcedGates,
    Gates,
    GaussianGates,
    MeanGates,
    RelaxedGates,
    assigned,
    replayed,
)
from dropconnectpp.layers.per_example import ExampleGates
from dropconnectpp.layers.seeds import fresh_draws
from dropconnectpp.ops import gated_weight
from dropconnectpp.ops.drawn import Draw, Gating, Synapses, draw_gated, gated_plainly, transformed
from dropconnectpp.ops.noise import noise_dtype

Activation = Callable[[Tensor], Tensor]
Mask = Literal["batch", "example"]
"""Whether a minibatch shares one mask or each example has its own."""


class MaskedLayer(Operation):
    """A linear operation whose synapses, weights and biases alike, are switched by a mask: Eq. (1).

    Train mode samples, eval mode is one pass with the mean, Eq. (19). Pruned synapses, the False
    entries of the buffers `weight_kept` and `bias_kept`, are off in both.
    """

    @property
    def pathwise(self) -> bool:
        """Whether the likelihood's gradient reaches the logits by backpropagation."""
        return False

    @property
    def straight_through(self) -> bool:
        """Whether backpropagation treats the mask as though it were the keep probability."""
        return False

    @property
    def antithetic(self) -> bool:
        """Whether a sample is a pair of mirrored masks."""
        return False

    @property
    def temperature(self) -> float | None:
        """The temperature of relaxed gates; None where training gates are binary."""
        return None

    def _set_up(
        self, shape: torch.Size, bias: bool, activation: Activation | None, mask: Mask, factory: dict[str, Any]
    ) -> None:
        self.mask = check_choice("mask", mask, get_args(Mask))
        if activation is not None and not callable(activation):
            raise ArgumentError(f"activation must be a module or function such as nn.ReLU(), got {activation!r}.")
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        if bias:
            self.bias = nn.Parameter(torch.empty(shape[0], **factory))
        else:
            self.register_parameter("bias", None)
        self.register_buffer("weight_kept", None)
        self.register_buffer("bias_kept", None)

    def reset_parameters(self) -> None:
        """Start weights and biases as the `nn` counterpart does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in = self.weight[0].numel()
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    @property
    def synapse_names(self) -> tuple[str, ...]:
        """The masked parameters: "weight" and, where there is one, "bias"."""
        without = "bias" in self._parameters and self._parameters["bias"] is None
        return ("weight",) if without else ("weight", "bias")

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The masked parameters that pruning ranks unless it is asked for biases too."""
        return ("weight",)

    def kept(self, name: str) -> Tensor | None:
        """The boolean buffer of what pruning left of a parameter; None before any pruning."""
        return self._buffers[f"{name}_kept"]

    def parameter(self, name: str) -> Tensor:
        """A parameter by name, or what a parametrisation makes of it."""
        found = self._parameters.get(name)  # a tenth of what `nn.Module`'s look-up takes
        return getattr(self, name) if found is None else found

    def keep_only(self, name: str, kept: Tensor | None) -> None:
        """Switch off for good the synapses of a parameter where ``kept`` is False; None: keep all."""
        setattr(self, f"{name}_kept", kept)

    # ------------------------------------------------------------- what a kind of masking supplies

    @abstractmethod
    def logit(self, name: str) -> Tensor:
        """Log-odds of the keep probability, broadcastable to the parameter, differentiable."""

    def tie(self, name: str) -> Hashable:
        """Equal for parameters that share one mask."""
        parameter = self._parameters.get(name)
        return (id(self), name) if parameter is None else id(parameter)  # a parametrised weight is made anew each time

    def gates(self, draw: Draw, streams: Mapping[str, int], *, relaxed: bool, mirrored: bool) -> Gates:
        """What a draw gives this layer; ``relaxed`` asks for the gates its estimator trains with."""
        return BinaryGates(draw, streams, each_example=self.mask == "example", mirrored=mirrored)

    def keep_probability(self, name: str = "weight") -> Tensor:
        """pi~ of each synapse, 0 where it was pruned; shaped like the parameter."""
        pi = torch.sigmoid(self.logit(name)).expand_as(getattr(self, name))
        kept = self.kept(name)
        return pi if kept is None else pi * kept

    def options(self) -> dict[str, Any]:
        """The masking's settings as plain data, as the constructor takes them."""
        return {"mask": self.mask, "activation": self.activation}

    # --------------------------------------------- gates: one a synapse, unless a layer has groups

    @property
    def gate_names(self) -> tuple[str, ...]:
        """The parameters that have gates of their own."""
        return self.synapse_names

    def gate_shape(self, name: str) -> torch.Size:
        """The shape of a parameter's gates."""
        shape: torch.Size = getattr(self, name).shape
        return shape

    def gate_size(self, name: str) -> int:
        """How many weights each of a parameter's gates has."""
        return 1

    def gate_logit(self, name: str) -> Tensor:
        """`logit`, of the gates' shape."""
        return self.logit(name)

    def gate_kept(self, name: str) -> Tensor | None:
        """Which gates have any synapse left; None before any pruning."""
        return self.kept(name)

    def spread(self, name: str, gate: Tensor) -> Tensor:
        """From a parameter's gates, with any axes before them, to its synapses."""
        return gate

    def gate_mask(self, name: str, gates: BinaryGates | ForcedGates) -> Tensor:
        """The mask of a parameter's gates in a pass."""
        if isinstance(gates, ForcedGates):
            mask = gates.weight if name == "weight" else gates.bias
            assert mask is not None
            return mask
        return gates.draw.mask(self.gate_shape(name), self.synapses(name, gates), gates.mirrored)

    def mask_of(self, name: str, draw: Draw, stream: int) -> Tensor:
        """The mask of a parameter's synapses in one draw."""
        return draw.mask(getattr(self, name).shape, Synapses(self.logit(name), self.kept(name), stream))

    def mask_fault(self, masks: Mapping[str, Tensor]) -> str | None:
        """Why masks that a user gives cannot be this layer's, shapes aside; None if they can."""
        return None

    # ------------------------------------------------------------------------------- the passes

    def forward(self, input: Tensor) -> Tensor:
        """a((Z * W) v) with this pass's masks, Eq. (1), or with their mean, Eq. (19)."""
        gates, again = self._gates_of_pass()
        self.check_input(input, self._one_mask_each(gates))
        if isinstance(gates, MeanGates):
            return self._mean_pass(input)
        if isinstance(gates, AverageGates):
            return self._average(input, gates)
        return self._activate(self._sampled(input, gates, again))

    def _gates_of_pass(self) -> tuple[Gates, bool]:
        """This pass's gates, and whether it is a recomputation within a backward pass."""
        gates = replayed(self)
        if gates is not None:
            return gates, True
        gates = assigned(self)
        if gates is None:
            gates = self._gates_of_own() if self.training else MEAN
        return gates, False

    def _gates_of_own(self) -> Gates:
        """Gates for a training call outside every context: drawn for this call alone."""
        draw = fresh_draws(1, self.weight.device)[0]
        streams = {name: index for index, name in enumerate(self.synapse_names)}
        return self.gates(draw, streams, relaxed=True, mirrored=False)

    def _one_mask_each(self, gates: Gates) -> bool:
        """Whether a pass needs the examples on the input's first axis."""
        if isinstance(gates, ForcedGates):
            return gates.weight.ndim > self.weight.ndim
        if isinstance(gates, AverageGates):
            return any(self._one_mask_each(drawn) for drawn in gates.drawn)
        return isinstance(gates, BinaryGates | RelaxedGates) and gates.each_example

    def _sampled(self, input: Tensor, gates: Gates, again: bool = False) -> Tensor:
        """One sample of what goes into the activation: Eq. (1)."""
        if isinstance(gates, GaussianGates):
            return self._gaussian(input, gates)
        if self._one_mask_each(gates):
            return run_each(self, self.example_gates(gates), input)
        gated = self._gated(gates, again)
        return self.operate(input, gated[0], gated[1] if len(gated) > 1 else None)

    def _gated(self, gates: Gates, again: bool) -> tuple[Tensor, ...]:
        """The masked parameters, one mask for the whole batch."""
        names = self.synapse_names
        if isinstance(gates, ForcedGates):
            given = {"weight": gates.weight, "bias": gates.bias}
            return tuple(self._masked(name, mask) for name in names if (mask := given[name]) is not None)
        if isinstance(gates, RelaxedGates):
            return tuple(self._relaxed(name, gates) for name in names)
        assert isinstance(gates, BinaryGates)
        parameters = tuple(self.parameter(name) for name in names)
        tally = gates.tally
        if tally is not None and (again or tally.used or not torch.is_grad_enabled()):
            tally = None  # once in a step, where a gradient can pass
        gating = Gating(
            gates.draw,
            tuple(self.synapses(name, gates) for name in names),
            gates.mirrored,
            self.straight_through,
            _product_dtype(parameters[0]),
            tally,
        )
        if transformed():
            return gated_plainly(parameters, gating)
        return draw_gated(parameters, gating)

    def synapses(self, name: str, gates: DrawnGates) -> Synapses:
        """What gates one parameter in a pass."""
        return Synapses(self.logit(name), self.kept(name), gates.streams[name])

    def _masked(self, name: str, mask: Tensor) -> Tensor:
        """The parameter under a mask that is given."""
        parameter: Tensor = getattr(self, name)
        if not self.straight_through:
            return parameter * mask if transformed() else gated_weight.masked(parameter, mask)
        kept = self.kept(name)
        if not transformed():
            return gated_weight.straight_through(parameter, self.logit(name), mask, kept)
        pi = torch.sigmoid(self.logit(name))
        learned = pi - pi.detach()
        return parameter * (mask + (learned if kept is None else learned * kept))

    def _relaxed(self, name: str, gates: RelaxedGates) -> Tensor:
        """The parameter under gates between 0 and 1."""
        parameter, kept = getattr(self, name), self.kept(name)
        dtype = noise_dtype(parameter.dtype)
        noise = gates.draw.uniform(parameter.shape, gates.streams[name], dtype, parameter.device)
        gate = functional.relax_mask(self.logit(name), noise, gates.temperature).to(parameter.dtype)
        product: Tensor = parameter * gate if kept is None else parameter * gate * kept
        return product

    def example_gates(self, gates: Gates) -> ExampleGates:
        """The gates of each example in turn."""
        names = self.synapse_names
        given = {"weight": gates.weight, "bias": gates.bias} if isinstance(gates, ForcedGates) else None
        drawn = gates if isinstance(gates, BinaryGates | RelaxedGates) else None
        return ExampleGates(
            logits={name: self.logit(name) for name in names},
            shapes={name: getattr(self, name).shape for name in names},
            kept={name: self.kept(name) for name in names},
            device=self.weight.device,
            given=given,
            draw=None if drawn is None else drawn.draw,
            streams={} if drawn is None else drawn.streams,
            mirrored=isinstance(gates, BinaryGates) and gates.mirrored,
            temperature=gates.temperature if isinstance(gates, RelaxedGates) else None,
            through=self.straight_through,
            pathwise=self.pathwise,
        )

    def mean_parameters(self) -> tuple[Tensor, Tensor | None]:
        """pi~ W and pi~ b: the weights of Eq. (19)."""
        means = [self.keep_probability(name) * getattr(self, name) for name in self.synapse_names]
        return means[0], means[1] if len(means) > 1 else None

    def _mean_pass(self, input: Tensor) -> Tensor:
        return self._activate(self.operate(input, *self.mean_parameters()))

    def _gaussian(self, input: Tensor, gates: GaussianGates) -> Tensor:
        mean, deviation = self.gaussian_moments(input)
        return mean + deviation * gates.draw.normal(mean.shape, gates.streams["weight"], mean.dtype, mean.device)

    def gaussian_moments(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the pre-activation over masks, example by example."""
        means: list[Tensor | None] = []
        variances: list[Tensor | None] = []
        for name in self.synapse_names:
            mean, variance = functional.gaussian_gate_moments(self.logit(name), getattr(self, name))
            kept = self.kept(name)
            means.append(mean if kept is None else mean * kept)
            variances.append(variance if kept is None else variance * kept)
        means, variances = [*means, None], [*variances, None]
        assert means[0] is not None
        assert variances[0] is not None
        mean = self.operate(input, means[0], means[1])
        variance = self.operate(input.square(), variances[0], variances[1])
        # The margin keeps the gradient of the root finite where every input is zero.
        return mean, torch.sqrt(variance.clamp_min(0.0) + 1e-12)

    def _average(self, input: Tensor, gates: AverageGates) -> Tensor:
        """Eq. (18): the activation averaged over masks, one mask in memory at a time."""
        total: Tensor | None = None
        for drawn in gates.drawn:
            if isinstance(drawn, BinaryGates):
                drawn = self.gates(drawn.draw.anew(), drawn.streams, relaxed=False, mirrored=False)
            output = self._activate(self._sampled(input, drawn))
            total = output if total is None else total + output
        assert total is not None
        return total / len(gates.drawn)

    def _activate(self, output: Tensor) -> Tensor:
        return output if self.activation is None else self.activation(output)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any) -> None:
        for name in self.synapse_names:  # make room for the pruning that a saved state carries
            if f"{prefix}{name}_kept" in state_dict and self.kept(name) is None:
                self.keep_only(name, torch.ones_like(getattr(self, name), dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


def masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    """Every DropConnect and DropConnect++ layer of a model, once each, by its qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MaskedLayer)}


def _product_dtype(parameter: Tensor) -> torch.dtype | None:
    """What autocast will have a product of this parameter in; None: as it is."""
    device = parameter.device.type
    if not torch.is_autocast_enabled(device) or parameter.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)
