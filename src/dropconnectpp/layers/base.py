"""What every masked layer shares: which gates a pass uses, and what it computes with them.

Shapes: B batch, O out, I in, S the shape of a parameter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError, check_choice
from dropconnectpp.layers.affine import Operation
from dropconnectpp.layers.per_example import run_per_example
from dropconnectpp.layers.sampling import MEAN, ForcedMasks, Gates, NoiseSource, Sample, fresh_gates, transformed
from dropconnectpp.ops import gated_weight

Activation = Callable[[Tensor], Tensor]


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
        self, shape: torch.Size, bias: bool, activation: Activation | None, mask: str, factory: dict[str, Any]
    ) -> None:
        self.mask = check_choice("mask", mask, ("batch", "example"))
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
        self._gates: Gates | None = None
        self._replayed: Gates | None = None
        self._forced: ForcedMasks | None = None
        self._examples: int | None = None  # how many examples the last pass with a mask each had

    def reset_parameters(self) -> None:
        """Start weights and biases as the `nn` counterpart does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in = self.weight[0].numel()
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    @property
    def synapse_names(self) -> tuple[str, ...]:
        """The masked parameters: "weight" and, where there is one, "bias"."""
        return ("weight",) if self.bias is None else ("weight", "bias")

    def kept(self, name: str) -> Tensor | None:
        """The boolean buffer of what pruning left of a parameter; None before any pruning."""
        kept: Tensor | None = getattr(self, f"{name}_kept")
        return kept

    def keep_only(self, name: str, kept: Tensor | None) -> None:
        """Switch off for good the synapses of a parameter where ``kept`` is False; None: keep all."""
        setattr(self, f"{name}_kept", kept)

    # ------------------------------------------------------------- what a kind of masking supplies

    @abstractmethod
    def logit(self, name: str) -> Tensor:
        """Log-odds of the keep probability, broadcastable to the parameter, differentiable."""

    def tie(self, name: str) -> Hashable:
        """Equal for parameters that share one mask."""
        return id(getattr(self, name))

    def gate_kind(self, relaxed: bool) -> str:
        """Which `Gates.kind` a pass draws."""
        return "example" if self.mask == "example" else "mask"

    def keep_probability(self, name: str = "weight") -> Tensor:
        """pi~ of each synapse, 0 where it was pruned; shaped like the parameter."""
        pi = torch.sigmoid(self.logit(name)).expand_as(getattr(self, name))
        kept = self.kept(name)
        return pi if kept is None else pi * kept

    def options(self) -> dict[str, Any]:
        """The masking's settings as plain data, as the constructor takes them."""
        return {"mask": self.mask, "activation": self.activation}

    # ------------------------------------------------------------------------------- the passes

    def forward(self, input: Tensor) -> Tensor:
        """a((Z * W) v) with this pass's masks, Eq. (1), or with their mean, Eq. (19)."""
        gates = self._current_gates()
        batched = gates.kind in ("example", "average") and self.mask == "example"
        self.check_input(input, batched or (gates.weight is not None and gates.weight.ndim > self.weight.ndim))
        if gates.kind == "average":
            return self._average(input, gates)
        if gates.kind == "mean":
            return self._mean_pass(input)
        return self._activate(self._sampled(input, gates))

    def _current_gates(self) -> Gates:
        if self._replayed is not None:
            if torch._C._current_graph_task_id() != -1:  # inside backward: gradient checkpointing
                return self._replayed
            self._replayed = None  # left by a backward that failed
        return self._own_gates() if self._gates is None else self._gates

    def _own_gates(self) -> Gates:
        if self._forced is not None:
            return self._forced.gates(self)
        return fresh_gates(self) if self.training else MEAN

    def draw_mask(self, name: str, source: NoiseSource) -> Tensor:
        logit, parameter = self.logit(name).detach(), getattr(self, name)
        mask = gated_weight.draw_mask(logit, parameter.shape, source.for_device(parameter.device))
        kept = self.kept(name)
        return mask if kept is None else mask & kept

    def mask_from_noise(self, name: str, noise: Tensor, mirrored: bool) -> Tensor:
        draw = functional.draw_antithetic_mask if mirrored else functional.draw_mask
        mask = draw(self.logit(name).detach(), noise)
        kept = self.kept(name)
        return mask if kept is None else mask & kept

    def mean_parameters(self) -> tuple[Tensor, Tensor | None]:
        """pi~ W and pi~ b: the weights of Eq. (19)."""
        means = [self.keep_probability(name) * getattr(self, name) for name in self.synapse_names]
        return means[0], means[1] if len(means) > 1 else None

    def _mean_pass(self, input: Tensor) -> Tensor:
        return self._activate(self.operate(input, *self.mean_parameters()))

    def _sampled(self, input: Tensor, gates: Gates) -> Tensor:
        """One sample of what goes into the activation: Eq. (1)."""
        if gates.kind == "gaussian":
            return self._gaussian(input, gates.seed)
        given = gates.weight
        if gates.kind == "example" or (given is not None and given.ndim > self.weight.ndim):
            output: Tensor = run_per_example(self, input, gates)
            return output
        gated = [self._gate(name, getattr(gates, name)) for name in self.synapse_names]
        return self.operate(input, gated[0], gated[1] if len(gated) > 1 else None)

    def _gate(self, name: str, gate: Tensor) -> Tensor:
        parameter: Tensor = getattr(self, name)
        return parameter * gate if transformed() else gated_weight.masked(parameter, gate)

    def _gaussian(self, input: Tensor, seed: int | None) -> Tensor:
        mean, deviation = self.gaussian_moments(input)
        return mean + deviation * (torch.randn_like(mean) if seed is None else _seeded_normal(mean, seed))

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
        # The margin keeps the slope of the root finite where every input is zero.
        return mean, torch.sqrt(variance.clamp_min(0.0) + 1e-12)

    def _average(self, input: Tensor, gates: Gates) -> Tensor:
        """Eq. (18): the activation averaged over masks, one mask in memory at a time."""
        if gates.seed is None:
            raise ArgumentError("Gates of kind 'average' need a seed.")
        source = NoiseSource(torch.Generator().manual_seed(gates.seed))
        total: Tensor | None = None
        for _ in range(gates.count):
            drawn = Sample([self], source, relaxed=False).arms[0][self]
            output = self._activate(self._sampled(input, drawn))
            total = output if total is None else total + output
        assert total is not None
        return total / gates.count

    def _activate(self, output: Tensor) -> Tensor:
        return output if self.activation is None else self.activation(output)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any) -> None:
        for name in self.synapse_names:  # make room for the pruning that a saved state carries
            if f"{prefix}{name}_kept" in state_dict and self.kept(name) is None:
                self.keep_only(name, torch.ones_like(getattr(self, name), dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _seeded_normal(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, device=like.device, dtype=like.dtype, generator=generator)
