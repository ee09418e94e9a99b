"""The dense layer of a stack with fixed rates: none, Dropout, DropConnect; `dropconnectpp` has the same verbs.

Shapes: R replicas of one segment of the stack, B batch, I inputs, O units, P passes of a step, L samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dropconnectpp.functional import expected_activation
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.kernels.dense import beside, draw_masks, linear
from dropconnectpp.lab.kernels.examples import example_product
from dropconnectpp.lab.kernels.gates import FixedGate, Gate, OpenGate
from dropconnectpp.lab.philox import Stream
from dropconnectpp.ops import gated_weight

SYNAPSES = ("weight", "bias")


class Regulariser(ABC):
    """What the dense layer of neighbouring replicas does in training and in prediction.

    Each replica has its own method. The methods may differ in what `rates` (the shares dropped), `kl_scale` (the KL's
    weight over ``num_data``) and `gate_step`, all (R,), come from; for all else `method`, the first, stands for all.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        replicas: Tensor,
        shape: tuple[int, int],
        num_data: int,
        root_seed: int,
        dtype: torch.dtype,
    ) -> None:
        self.methods, self.method, self.replicas = tuple(methods), methods[0], replicas
        self.num_data, self.root_seed, self.dtype = num_data, root_seed, dtype
        self.shapes = {"weight": shape, "bias": shape[:1]}
        self.parameters: dict[str, Tensor] = {}
        self.moments: Tensor | None = None
        self.rates = self._row([m.rate or 0.0 for m in methods])
        self.keep = 1.0 - self.rates
        self.kl_scale, self.gate_step = torch.empty_like(self.rates), torch.empty_like(self.rates)
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int, methods: Sequence[Method] | None = None) -> None:
        """Set what depends on the epoch, counted from 0. In place: a CUDA graph reads the same memory.

        ``methods`` is what the replicas' methods are in this epoch, where rates or KL weights change.
        """
        methods = self.methods if methods is None else methods
        self.rates.copy_(self._row([m.rate or 0.0 for m in methods]))
        self.keep.copy_(1.0 - self.rates)
        self.kl_scale.copy_(self._row([m.kl_weight_in(epoch) / self.num_data for m in methods]))
        self.gate_step.copy_(self._row([m.gate_step_in(epoch) for m in methods]))

    def _row(self, values: Sequence[float]) -> Tensor:
        """One number a replica, (R,)."""
        return torch.tensor(values, device=self.replicas.device, dtype=self.dtype)

    @property
    def passes(self) -> int:
        """Random passes of one training step."""
        return 1

    @property
    def random(self) -> bool:
        """Whether sampled passes differ from each other."""
        return True

    @property
    def needs_mean_network(self) -> bool:
        """Whether `gradients` needs the mean network's reward."""
        return False

    @abstractmethod
    def train_pass(self, x: Tensor, weight: Tensor, bias: Tensor, step: Tensor, index: int) -> Tensor:
        """Activation (R, B, O) of random pass ``index`` of a step."""

    def mean_pass(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The activation that predicts: Eq. (19) and its like."""
        return torch.relu(linear(x, weight, bias))

    @abstractmethod
    def sampler(self, x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[int], Tensor]:
        """Activations for Monte Carlo prediction, by the mask's number; masks are the same for every batch."""

    def gradients(self, rewards: Tensor, mean_reward: Tensor | None) -> dict[str, Tensor]:
        """Gradients of the loss with respect to `parameters`, besides backpropagation's; updates the moments."""
        return {}

    def slab_loss(self, name: str, value: Tensor) -> Tensor | None:
        """Loss of a Gaussian prior on the weights or biases that are on, summed over replicas; None without one."""
        return None

    # What `fused_step` asks for, where the weights go through kernels.

    def gate(self, name: str = "weight") -> Gate | None:
        """How kernels gate weights or biases; None where they cannot."""
        return OpenGate()

    def unit_gate(self) -> FixedGate | None:
        """How kernels drop units; None where they do not."""
        return None

    @property
    def training_scale(self) -> Tensor | None:
        """What multiplies weights and biases in training, (R,); None for 1."""
        return None

    def kl(self) -> Tensor:
        """KL of the posterior from the prior in nats, (R,)."""
        return torch.zeros(len(self.replicas), device=self.replicas.device)

    def keep_probability(self, name: str = "weight") -> Tensor:
        """(R, ...): 1 where nothing is dropped."""
        return torch.ones((), device=self.replicas.device).expand(len(self.replicas), *self.shapes[name])

    def after_step(self) -> None:  # noqa: B027 (most have nothing to do)
        """Bring parameters back into their range."""

    def _stream(self, purpose: str) -> Stream:
        return Stream(self.root_seed, purpose)


class NoRegularisation(Regulariser):
    """The plain layer: nothing is random, nothing is dropped."""

    @property
    def random(self) -> bool:
        return False

    def train_pass(self, x: Tensor, weight: Tensor, bias: Tensor, step: Tensor, index: int) -> Tensor:
        return torch.relu(linear(x, weight, bias))

    def sampler(self, x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[int], Tensor]:
        hidden = self.mean_pass(x, weight, bias)
        return lambda draw: hidden


class Dropout(Regulariser):
    """Units are dropped; what is kept is scaled up, so that prediction uses the network as it is."""

    def train_pass(self, x: Tensor, weight: Tensor, bias: Tensor, step: Tensor, index: int) -> Tensor:
        hidden, keep = torch.relu(linear(x, weight, bias)), self.keep[:, None, None]
        mask = draw_masks(self._stream("dropout"), keep.expand_as(hidden), self.replicas, step, index)
        return hidden * mask / keep

    def unit_gate(self) -> FixedGate | None:
        return FixedGate(self.keep, self._stream("dropout"))

    def sampler(self, x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[int], Tensor]:
        hidden = torch.relu(linear(x, weight, bias))
        keep = self.keep[:, None].expand(-1, hidden.shape[2])

        def sample(draw: int) -> Tensor:
            # One mask of units for all examples, as the other methods have one of synapses.
            mask = draw_masks(self._stream("evaluation:dropout"), keep, self.replicas, 0, draw)
            return hidden * mask[:, None, :] / self.keep[:, None, None]

        return sample


class DropConnect(Regulariser):
    """Each synapse is dropped at one fixed rate; prediction is by the mean or by a Gaussian."""

    @property
    def passes(self) -> int:
        return self.method.num_samples

    def train_pass(self, x: Tensor, weight: Tensor, bias: Tensor, step: Tensor, index: int) -> Tensor:
        weight, bias = self._scaled(weight, bias)
        if self.method.mask == "example":
            return self._example_pass(x, weight, bias, step)
        gates = [self._mask(name, step, index) for name in SYNAPSES]
        return torch.relu(linear(x, gated_weight.masked(weight, gates[0]), gated_weight.masked(bias, gates[1])))

    def _example_pass(self, x: Tensor, weight: Tensor, bias: Tensor, step: Tensor) -> Tensor:
        """A mask for each example, of weights and biases."""
        sums = example_product(x, weight, self.keep, self._stream("mask:weight"), self.replicas, step)
        keep = self.keep[:, None, None].expand_as(sums)
        mask = draw_masks(self._stream("mask:bias"), keep, self.replicas, step)
        return torch.relu(sums + bias[:, None, :] * mask)

    @property
    def training_scale(self) -> Tensor | None:
        return 1.0 / self.keep if self.method.scaling == "training" else None

    def _scaled(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """What masks multiply: W, or W / p where training makes up for the keep probability p."""
        scale = self.training_scale
        return (weight, bias) if scale is None else (weight * beside(scale, weight), bias * beside(scale, bias))

    def gate(self, name: str = "weight") -> Gate | None:
        if self.method.mask == "example":
            return None
        return FixedGate(self.keep, self._stream(f"mask:{name}"), self.method.num_samples, self._slab_scale)

    def slab_loss(self, name: str, value: Tensor) -> Tensor | None:
        """sum pi~ W^2 / (2 slab^2 N), differentiable by the weight and by the parameters of pi~."""
        scale = self._slab_scale
        return 0.5 * scale * (self._trained_keep(name) * value.square()).sum() if scale else None

    @property
    def _slab_scale(self) -> float:
        """1 / (slab^2 N); 0 without a slab."""
        return 0.0 if self.method.slab is None else 1.0 / (self.method.slab**2 * self.num_data)

    def _trained_keep(self, name: str) -> Tensor:
        """`keep_probability` with its gradient."""
        return self.keep_probability(name)

    def mean_pass(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        keep = self.keep
        weight, bias = self._scaled(weight, bias)
        mean = linear(x, weight * keep[:, None, None], bias * keep[:, None])
        if self.method.evaluation == "mean":
            return torch.relu(mean)
        spread = keep * self.rates
        variance = linear(x.square(), weight.square() * spread[:, None, None], bias.square() * spread[:, None])
        return expected_activation(nn.ReLU(), mean, torch.sqrt(variance + 1e-12))

    def sampler(self, x: Tensor, weight: Tensor, bias: Tensor) -> Callable[[int], Tensor]:
        weight, bias = self._scaled(weight, bias)
        keep = [self.keep_probability(name) for name in SYNAPSES]
        streams = [self._stream(f"evaluation:{name}") for name in SYNAPSES]

        def sample(draw: int) -> Tensor:
            gates = [draw_masks(s, k, self.replicas, 0, draw) for s, k in zip(streams, keep, strict=True)]
            return torch.relu(linear(x, gated_weight.masked(weight, gates[0]), gated_weight.masked(bias, gates[1])))

        return sample

    def keep_probability(self, name: str = "weight") -> Tensor:
        keep = self.keep.view(-1, *[1] * len(self.shapes[name]))
        return keep.expand(-1, *self.shapes[name])

    def _mask(self, name: str, step: Tensor | int, draw: int) -> Tensor:
        return draw_masks(self._stream(f"mask:{name}"), self.keep_probability(name), self.replicas, step, draw)
