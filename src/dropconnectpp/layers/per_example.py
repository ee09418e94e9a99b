"""One mask per example, in blocks of bounded memory: the gates, drawn again whenever they are asked for.

Shapes: B examples, b examples of one block, K weightings, S the shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dropconnectpp.functional import draw_antithetic_mask, draw_mask, relax_mask
from dropconnectpp.layers.granularity import Tiling
from dropconnectpp.ops import gpu_examples
from dropconnectpp.ops.drawn import Draw, transformed
from dropconnectpp.ops.noise import Blocks, noise_dtype

BLOCK_ELEMENTS = {"cpu": 2**18}
"""The most mask elements that are worked on at a time (one example's, if its masks are larger): what fits a cache."""
OTHER_BLOCK_ELEMENTS = 2**23
KEPT_ELEMENTS = 2**27
"""On the CPU, where drawing costs more than memory, up to this many of a pass's masks are kept until backward."""


@dataclass(frozen=True, eq=False)
class Members:
    """What groups' gates switch: blocks of a weight, and biases by themselves or with their unit."""

    tiling: Tiling
    units: bool
    """Whether a bias has its unit's gate."""
    kept: Mapping[str, Tensor | None]
    """What pruning left of each parameter."""

    def spread(self, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """From the gates to the synapses, what was pruned at zero: (b, *G) -> (b, *S) for each parameter."""
        found = {"weight": self.tiling.spread(gates["weight"])}
        if "bias" in self.kept:
            found["bias"] = gates["weight"].flatten(1) if self.units else gates["bias"]
        return {n: v if (kept := self.kept[n]) is None else v * kept for n, v in found.items()}

    def gather(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over the synapses of each gate, without those that were pruned: (b, *S) -> (b, *G)."""
        left = {n: v if (kept := self.kept[n]) is None else v * kept for n, v in values.items()}
        found = {"weight": self.tiling.sum(left["weight"])}
        if "bias" in left and self.units:
            found["weight"] = found["weight"] + left["bias"].view_as(found["weight"])
        return found if self.units or "bias" not in left else {**found, "bias": left["bias"]}


@dataclass(frozen=True, eq=False)
class ExampleGates:
    """The gates of a layer for each example in turn: the same ones whenever they are asked for."""

    logits: Mapping[str, Tensor]
    shapes: Mapping[str, torch.Size]
    kept: Mapping[str, Tensor | None]
    device: torch.device
    given: Mapping[str, Tensor | None] | None
    """Masks from the user; None: ``draw`` says what they are."""
    draw: Draw | None
    streams: Mapping[str, int]
    mirrored: bool
    temperature: float | None
    through: bool
    pathwise: bool
    members: Members | None = None
    """What each gate switches; None: one synapse."""
    keep: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """pi~ of each parameter, once a block has asked for it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that have gates."""
        return tuple(self.logits)

    def spread(self, gates: dict[str, Tensor]) -> dict[str, Tensor]:
        """From gates to synapses."""
        return gates if self.members is None else self.members.spread(gates)

    def gather(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum over each gate's synapses."""
        return values if self.members is None else self.members.gather(values)

    def blocks(self, batch: int) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Slices of the batch with their gates (b, *S) for each parameter."""
        if transformed():  # plain operations alone: one block of everything
            yield slice(0, batch), {name: self._whole(name, batch) for name in self.names}
            return
        yield from self.blocks_of(batch, self._step())

    def blocks_of(self, batch: int, step: int) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """`blocks` of ``step`` examples."""
        keep = self.device.type == "cpu" and batch * self.shapes["weight"].numel() <= KEPT_ELEMENTS
        # A stream for each parameter: layers may share one and not the other.
        streams = {name: self._stream(name) for name in self.names}
        for start in range(0, batch, step):
            part = slice(start, min(start + step, batch))
            yield part, {name: self._block(name, part, stream, keep) for name, stream in streams.items()}

    def _step(self) -> int:
        """How many examples there are in a block."""
        most = BLOCK_ELEMENTS.get(self.device.type, OTHER_BLOCK_ELEMENTS)
        weights = self.shapes["weight"].numel() * (1 if self.members is None else self.members.tiling.size)
        return max(1, most // weights)

    def _whole(self, name: str, batch: int) -> Tensor:
        """The gates of all examples."""
        if self.given is not None:
            gate = self.given[name]
            assert gate is not None
        else:
            gate = self.gate(name, self.noise(name, batch))
        kept = self.kept[name]
        return gate if kept is None else gate * kept

    def noise(self, name: str, batch: int) -> Tensor:
        """The noise of all examples: that of their blocks."""
        assert self.draw is not None
        shape = torch.Size((batch, *self.shapes[name]))
        dtype = noise_dtype(self.logits[name].dtype)
        return self.draw.example_noise(shape, self.streams[name], dtype, self.device, self._step())

    def _stream(self, name: str) -> Blocks | None:
        if self.draw is None:
            return None
        seed = self.draw.seed_on(self.device)
        return Blocks(seed, self.streams[name], noise_dtype(self.logits[name].dtype), self.device)

    def _block(self, name: str, part: slice, stream: Blocks | None, keep: bool) -> Tensor:
        kept = self.kept[name]
        if stream is None or self.draw is None:
            assert self.given is not None
            given = self.given[name]
            assert given is not None
            gate = given[part]
            return gate if kept is None else gate * kept
        shape = torch.Size((part.stop - part.start, *self.shapes[name]))
        key = (self.streams[name], self.mirrored, self.temperature, part.start, part.stop)
        known = self.draw.masks.get(key)
        if known is not None:
            stream.skip(shape)
            return known
        noise = stream.next(shape)
        plain = self.temperature is None and not self.mirrored
        gate = noise < self._pi(name) if plain else self.gate(name, noise)
        if kept is not None:
            gate = gate * kept
        if keep and gate.dtype == torch.bool:
            self.draw.masks[key] = gate
        return gate

    def _pi(self, name: str) -> Tensor:
        """pi~, worked out once for all blocks."""
        if name not in self.keep:
            self.keep[name] = torch.sigmoid(self.logits[name].detach())
        return self.keep[name]

    def gate(self, name: str, noise: Tensor) -> Tensor:
        """The gates that noise makes, pruning aside."""
        logit = self.logits[name].detach()
        if self.temperature is not None:
            return relax_mask(logit, noise, self.temperature)
        return (draw_antithetic_mask if self.mirrored else draw_mask)(logit, noise)

    def in_registers(self, name: str) -> gpu_examples.Masks | None:
        """The masks of a parameter for the kernels that never write them; None where those cannot take it."""
        ready = self.draw is not None and self.draw.seed is not None and self.members is None
        if not ready or self.temperature is not None or transformed():
            return None
        assert self.draw is not None
        seed, logit = self.draw.seed_on(self.device), self.logits[name]
        masks = gpu_examples.Masks(logit.detach(), self.kept[name], seed, self.streams[name], self.mirrored)
        return masks if gpu_examples.supported(masks) else None

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """sum_n c_kn z_n for K weightings (K, B) of the examples: (K, *S) for each parameter."""
        masks = self.in_registers("weight")
        if masks is None:
            return self._summed(weights)
        others = {name: self.logits[name] for name in self.names if name != "weight"}
        return {"weight": gpu_examples.weighted_sum(weights, masks), **replace(self, logits=others)._summed(weights)}

    def _summed(self, weights: Tensor) -> dict[str, Tensor]:
        totals = {
            name: torch.zeros((weights.shape[0], *self.shapes[name]), device=self.device, dtype=weights.dtype)
            for name in self.names
        }
        for part, gates in self.blocks(weights.shape[1]):
            for name, gate in gates.items():
                flat = gate.reshape(gate.shape[0], -1).to(weights.dtype)
                totals[name] += (weights[:, part] @ flat).view_as(totals[name])
        return totals

    def grad_gate(self, name: str, gate: Tensor) -> Tensor | None:
        """d gate / d logit as the layer's estimator has it; None where it takes the score instead."""
        if self.temperature is not None:
            return gate * (1.0 - gate) / self.temperature
        if self.through:
            kept, logit = self.kept[name], self.logits[name].detach()
            gradient = torch.sigmoid(logit) * torch.sigmoid(-logit)
            return gradient if kept is None else gradient * kept
        return None
