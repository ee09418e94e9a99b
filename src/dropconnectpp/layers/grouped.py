"""Layers whose synapses may share gates: drawn and scored once for a group, spread over its weights.

A unit's gate is its bias's too, so that a unit that is off gives nothing. In any other granularity each bias has a gate
of its own.

Shapes: S a parameter's, G its gates', B batch, O out.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.granularity import Granularity, Tiling, check_granularity, tiling_of
from dropconnectpp.layers.passes import BinaryGates, DrawnGates, ForcedGates, Gates, RelaxedGates
from dropconnectpp.layers.per_example import ExampleGates, Members
from dropconnectpp.ops.drawn import Draw, Synapses, transformed
from dropconnectpp.ops.noise import noise_dtype


class GroupedLayer(MaskedLayer):
    """A masked layer with one gate for each synapse or for each group of them."""

    granularity: Granularity = "synapse"
    tiling: Tiling | None = None
    """How the weight falls into groups; None where each synapse has a gate of its own."""

    def _set_up_groups(self, granularity: Granularity) -> None:
        self.granularity = check_granularity(granularity)
        self.retile()

    def retile(self) -> None:
        """Lay the groups anew, for a weight of another size."""
        groups = int(self.arguments().get("groups", 1))
        self.tiling = tiling_of(self.weight.shape, self.granularity, groups, type(self).__name__)

    @abstractmethod
    def gate_logit(self, name: str) -> Tensor:
        """Log-odds of a parameter's gates, of their shape or one number for all, differentiable."""

    # ------------------------------------------------------------------------- whose gate is whose

    def gate_of(self, name: str) -> str:
        """The parameter whose gates a parameter's synapses have."""
        return "weight" if self.granularity == "unit" else name

    @property
    def gate_names(self) -> tuple[str, ...]:
        if self.tiling is None:
            return self.synapse_names
        return tuple(name for name in self.synapse_names if self.gate_of(name) == name)

    def gate_shape(self, name: str) -> torch.Size:
        if self.tiling is None or self.gate_of(name) != "weight":
            return super().gate_shape(name)
        return self.tiling.gates

    def gate_size(self, name: str) -> int:
        return 1 if self.tiling is None or self.gate_of(name) != "weight" else self.tiling.size

    def gate_kept(self, name: str) -> Tensor | None:
        if self.tiling is None or self.gate_of(name) != "weight":
            return super().gate_kept(name)
        kept = self.kept("weight")
        if kept is None:
            return None
        kept = self.tiling.any(kept)
        if self.granularity != "unit" or self.bias is None:
            return kept
        biases = self.kept("bias")
        return None if biases is None else kept | biases.view_as(kept)

    def spread(self, name: str, gate: Tensor) -> Tensor:
        if self.tiling is None or self.gate_of(name) != "weight":
            return gate
        if name == "weight":
            return self.tiling.spread(gate)
        return gate if gate.ndim == 0 else gate.flatten(gate.ndim - self.weight.ndim)

    def tie(self, name: str) -> Hashable:
        own = super().tie(self.gate_of(name))
        return own if self.tiling is None else (own, self.granularity)

    def logit(self, name: str) -> Tensor:
        if self.tiling is None:
            return self.gate_logit(name)
        return self.spread(name, self.gate_logit(self.gate_of(name)))

    # ---------------------------------------------------------------------------------- the passes

    def synapses(self, name: str, gates: DrawnGates) -> Synapses:
        if self.tiling is None:
            return super().synapses(name, gates)
        owner = self.gate_of(name)
        return Synapses(self.gate_logit(owner), self.gate_kept(owner), gates.streams[owner])

    def gate_mask(self, name: str, gates: BinaryGates | ForcedGates) -> Tensor:
        if self.tiling is None or self.gate_of(name) != "weight" or isinstance(gates, BinaryGates):
            return super().gate_mask(name, gates)
        mask = self.tiling.any(gates.weight)
        if self.granularity != "unit" or gates.bias is None:
            return mask
        return mask | gates.bias.view_as(mask)

    def mask_of(self, name: str, draw: Draw, stream: int) -> Tensor:
        if self.tiling is None:
            return super().mask_of(name, draw, stream)
        owner, kept = self.gate_of(name), self.kept(name)
        gates = Synapses(self.gate_logit(owner), self.gate_kept(owner), stream)
        mask = self.spread(name, draw.mask(self.gate_shape(owner), gates))
        return mask if kept is None else mask & kept

    def mask_fault(self, masks: Mapping[str, Tensor]) -> str | None:
        if self.tiling is None:
            return None
        mask = masks["weight"]
        gate = self.tiling.any(mask)
        if not torch.equal(self.tiling.spread(gate), mask):
            return f"granularity={self.granularity!r} has one gate for a block of {self.tiling.block}"
        if self.granularity == "unit" and "bias" in masks and not torch.equal(self.spread("bias", gate), masks["bias"]):
            return "granularity='unit' has one gate for a unit's weights and its bias"
        return None

    def _gated(self, gates: Gates, again: bool) -> tuple[Tensor, ...]:
        if self.tiling is None or not isinstance(gates, BinaryGates):
            return super()._gated(gates, again)
        drawn = {name: self._through(name, self._drawn(name, gates)) for name in self.gate_names}
        return tuple(self._switched(name, drawn[self.gate_of(name)]) for name in self.synapse_names)

    def _drawn(self, name: str, gates: BinaryGates) -> Tensor:
        """The mask of a parameter's gates."""
        if torch.compiler.is_compiling() or not transformed():
            return self.gate_mask(name, gates)
        one = self.synapses(name, gates)
        noise = gates.draw.uniform(self.gate_shape(name), one.stream, noise_dtype(one.logit.dtype), one.logit.device)
        draw = functional.draw_antithetic_mask if gates.mirrored else functional.draw_mask
        return draw(one.logit.detach(), noise)

    def _through(self, name: str, mask: Tensor) -> Tensor:
        """The gates as numbers; straight through, with the gradient of the keep probability behind them."""
        gate = mask.to(self.weight.dtype)
        if not self.straight_through:
            return gate
        pi = torch.sigmoid(self.gate_logit(name))
        return gate + (pi - pi.detach()).to(gate.dtype)

    def _switched(self, name: str, gate: Tensor) -> Tensor:
        """A parameter times its gates, what was pruned left out."""
        parameter, kept = getattr(self, name), self.kept(name)
        if name == "weight" and self.tiling is not None:
            product = self.tiling.multiply(parameter, gate)
        else:
            product = parameter * self.spread(name, gate)
        return product if kept is None else product * kept

    def _masked(self, name: str, mask: Tensor) -> Tensor:
        if self.tiling is None:
            return super()._masked(name, mask)
        gate = self.tiling.any(mask) if name == "weight" else mask
        if name == "bias" and self.granularity == "unit":
            gate = mask.view(self.gate_shape("weight"))
        return self._switched(name, self._through(self.gate_of(name), gate))

    def _relaxed(self, name: str, gates: RelaxedGates) -> Tensor:
        if self.tiling is None:
            return super()._relaxed(name, gates)
        owner, dtype = self.gate_of(name), noise_dtype(self.weight.dtype)
        noise = gates.draw.uniform(self.gate_shape(owner), gates.streams[owner], dtype, self.weight.device)
        gate = functional.relax_mask(self.gate_logit(owner), noise, gates.temperature)
        return self._switched(name, gate.to(self.weight.dtype))

    def example_gates(self, gates: Gates) -> ExampleGates:
        if self.tiling is None:
            return super().example_gates(gates)
        names = self.gate_names
        drawn = gates if isinstance(gates, BinaryGates | RelaxedGates) else None
        given = {name: self.gate_mask(name, gates) for name in names} if isinstance(gates, ForcedGates) else None
        return ExampleGates(
            logits={name: self.gate_logit(name) for name in names},
            shapes={name: self.gate_shape(name) for name in names},
            kept={name: self.gate_kept(name) for name in names},
            device=self.weight.device,
            given=given,
            draw=None if drawn is None else drawn.draw,
            streams={} if drawn is None else drawn.streams,
            mirrored=isinstance(gates, BinaryGates) and gates.mirrored,
            temperature=gates.temperature if isinstance(gates, RelaxedGates) else None,
            through=self.straight_through,
            pathwise=self.pathwise,
            members=Members(self.tiling, self.granularity == "unit", {n: self.kept(n) for n in self.synapse_names}),
        )

    # --------------------------------------------------------------------------- Gaussian moments

    def gaussian_moments(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Of a sum of groups: each has variance pi~ (1 - pi~) times the square of what it gives as a whole."""
        if self.tiling is None:
            return super().gaussian_moments(input)
        mean = self.operate(input, *self.mean_parameters())
        weight, bias = (self._left(name) for name in ("weight", "bias"))
        assert weight is not None
        spreads = {name: self._variance(name) for name in self.gate_names}
        if self.granularity == "unit":
            variance = self.by_unit(spreads["weight"].flatten()) * self.operate(input, weight, bias).square()
        else:
            variance = self._variance_of_blocks(input, weight, spreads["weight"])
            if bias is not None:
                variance = variance + self.by_unit(spreads["bias"] * bias.square())
        return mean, torch.sqrt(variance.clamp_min(0.0) + 1e-12)

    def _left(self, name: str) -> Tensor | None:
        """A parameter with what was pruned at zero."""
        if name not in self.synapse_names:
            return None
        value, kept = getattr(self, name), self.kept(name)
        left: Tensor = value if kept is None else value * kept
        return left

    def _variance(self, name: str) -> Tensor:
        logit = self.gate_logit(name)
        return (torch.sigmoid(logit) * torch.sigmoid(-logit)).expand(self.gate_shape(name))

    def _variance_of_blocks(self, input: Tensor, weight: Tensor, spread: Tensor) -> Tensor:
        """Sum over the blocks that an output reads; one product a block, or one for all if each is one synapse."""
        assert self.tiling is not None
        _, *columns = self.tiling.block
        if all(size == 1 for size in columns):
            return self.operate(input.square(), self.tiling.multiply(weight.square(), spread), None)
        total: Tensor | None = None
        _, *counts = self.tiling.gates
        for number, column in enumerate(itertools.product(*map(range, counts))):
            part = weight[:, column[0] * columns[0] : (column[0] + 1) * columns[0]]
            if counts[1:] != [1] * len(counts[1:]):
                part = part * self._inside_kernel(column[1:], columns[1:], part)
            given = self.some_inputs(input, column[0] * columns[0], columns[0])
            gates = spread.flatten(1)[:, number].repeat_interleave(self.tiling.block[0])
            found = self.by_unit(gates) * self.operate(given, part, None).square()
            total = found if total is None else total + found
        assert total is not None
        return total

    @staticmethod
    def _inside_kernel(place: tuple[int, ...], sizes: list[int], like: Tensor) -> Tensor:
        """One inside a part of the kernel, zero outside."""
        inside = torch.zeros(like.shape[2:], dtype=like.dtype, device=like.device)
        inside[tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, sizes, strict=True))] = 1.0
        return inside

    def options(self) -> dict[str, Any]:
        return {**super().options(), "granularity": self.granularity}
