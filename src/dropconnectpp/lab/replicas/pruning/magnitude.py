"""Masks that are given or follow the weights' size: none, DropConnect, Dropout, magnitude pruning, a random support."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.pruning import FixedSupport, GradualMagnitude, OneShot
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.bits import pack, unpack
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.pruning.gating import Gating, Table, largest, split_layers

MaskSettings = Method | GradualMagnitude | OneShot | FixedSupport


class Masks(Gating):
    """Weights are on or off; those that are on may have DropConnect noise, inputs may have Dropout noise."""

    kind = "mask"
    settings: tuple[MaskSettings, ...]

    def prepare(self) -> None:
        noisy = any(rate > 0 for rate in self._rates("dropconnect"))
        removes = any(not isinstance(one, Method) for one in self.settings)
        for synapses in self.synapses:
            synapses.noisy = noisy
            if removes:
                synapses.mask = pack(torch.ones_like(synapses.weight, dtype=torch.bool))
        for row, one in enumerate(self.settings):
            if isinstance(one, FixedSupport):
                self._fix_random(row, one)

    def _fix_random(self, row: int, settings: FixedSupport) -> None:
        if len(settings.shares) != len(self.layers):
            raise ProtocolError(f"shares must be {len(self.layers)}, one for each gated layer, got {settings.shares}.")
        for one, synapses, share in zip(self.layers, self.synapses, settings.shares, strict=True):
            assert synapses.mask is not None
            noise = Stream(self.root_seed, f"support:{one.name}").uniform(self.replicas[row : row + 1], 0, one.weights)
            kept = largest(noise, torch.tensor([round(share * one.weights)], device=noise.device))
            synapses.mask[row] = pack(kept)[0]

    def _rates(self, kind: str) -> list[float]:
        """Shares dropped by one kind of noise."""
        return [(one.rate or 0.0) if noise_of(one) == kind else 0.0 for one in self.settings]

    @property
    def dropout_rates(self) -> list[float]:
        return self._rates("dropout")

    def columns(self, first: int, count: int, table: Table) -> None:
        table[:, :, kernels.KEEP] = [1.0 - rate for rate in self._rates("dropconnect")]

    # ------------------------------------------------------------------------------------------- removing

    @property
    def event_steps(self) -> set[int]:
        return {step for one in self.settings for step in removal_steps(one, self.steps)}

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        rows = [row for row, one in enumerate(self.settings) if step in removal_steps(one, self.steps)]
        if not rows:
            return
        weights = [synapses.weight[rows] for synapses in self.synapses]
        chosen = [self.settings[row] for row in rows]
        kept = magnitude_support(weights, chosen, [share_at(one, step / self.steps) for one in chosen])
        for synapses, layer in zip(self.synapses, kept, strict=True):
            assert synapses.mask is not None
            synapses.mask[rows] = pack(layer)

    def support(self, number: int) -> Tensor:
        synapses = self.synapses[number]
        if synapses.mask is None:
            return torch.ones_like(synapses.weight, dtype=torch.bool)
        return unpack(synapses.mask, synapses.weight.shape[1:])

    def whole_weight(self, number: int) -> Tensor:
        """The mean network: what is on, times the share that noise keeps."""
        weight = self.synapses[number].weight
        keep = self._per_replica([1.0 - rate for rate in self._rates("dropconnect")], weight)
        return torch.where(self.support(number), weight * keep, 0.0)


def noise_of(settings: MaskSettings) -> str:
    """Which noise settings ask for."""
    if isinstance(settings, Method):
        return settings.kind
    return settings.noise


def removal_steps(settings: MaskSettings, steps: int) -> range | tuple[int, ...]:
    """Before which steps weights are removed."""
    if isinstance(settings, OneShot):
        return (round(settings.at * steps),)
    if not isinstance(settings, GradualMagnitude):
        return ()
    first, last = math.ceil(settings.begin * steps), round(settings.end * steps)
    return range(last, first, -settings.every)  # counted from the end, where the share must be met


def share_at(settings: MaskSettings, share: float) -> float:
    """The share kept when a share of the steps is over."""
    if isinstance(settings, GradualMagnitude):
        return settings.keep_at(share)
    assert isinstance(settings, OneShot)
    return settings.keep


def magnitude_support(
    weights: Sequence[Tensor], settings: Sequence[MaskSettings], shares: Sequence[float]
) -> list[Tensor]:
    """The largest weights of some replicas, by layers: of all layers together, or of each."""
    device = weights[0].device
    together = torch.cat([weight.flatten(1).abs() for weight in weights], 1)
    boosted = together.clone()
    alone = torch.zeros_like(together, dtype=torch.bool)
    first = 0
    for weight in weights:
        size = weight[0].numel()
        part = together[:, first : first + size]
        counts = [_layer_count(one, share, size) for one, share in zip(settings, shares, strict=True)]
        if any(counts):
            own = largest(part, torch.tensor(counts, device=device))
            alone[:, first : first + size] = own
            boosted[:, first : first + size] = torch.where(own, torch.inf, part)  # the floor comes first
        first += size
    totals = [_global_count(one, share, together.shape[1]) for one, share in zip(settings, shares, strict=True)]
    kept = largest(boosted, torch.tensor(totals, device=device)) if any(totals) else torch.zeros_like(alone)
    ranked = torch.tensor([_ranking(one) == "layer" for one in settings], device=device)
    return split_layers(torch.where(ranked[:, None], alone, kept), weights)


def _ranking(settings: MaskSettings) -> str:
    return settings.ranking if isinstance(settings, GradualMagnitude | OneShot) else "global"


def _layer_count(settings: MaskSettings, share: float, size: int) -> int:
    """Weights that a layer keeps for itself."""
    assert isinstance(settings, GradualMagnitude | OneShot)
    return max(1, round(share * size)) if settings.ranking == "layer" else math.ceil(settings.floor * size)


def _global_count(settings: MaskSettings, share: float, size: int) -> int:
    return max(1, round(share * size)) if _ranking(settings) == "global" else 0
