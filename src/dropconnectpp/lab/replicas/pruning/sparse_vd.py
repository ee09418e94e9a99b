"""Sparse variational dropout (Molchanov et al. 2017): Gaussian weights, whose noise says which can go.

The posterior of a weight is N(w, sigma^2), the prior log-uniform, log alpha = log sigma^2 - log w^2. The noise is drawn
where it arrives, at the units: their mean is that of the weights, their variance the sum of x^2 sigma^2.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropconnectpp.lab.config.pruning import SparseVD
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.noise import draw_normal
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.pruning.gating import Gating, Table, largest, split_layers

MARGIN = 1e-8
"""Added to a variance before its root is taken."""


class NoisyWeights(Gating):
    """Gaussian weights with local noise."""

    kind = "variance"
    settings: tuple[SparseVD, ...]

    def prepare(self) -> None:
        self.add_gates([one.log_variance for one in self.settings])
        self.kl_weights.copy_(torch.tensor([one.kl_weight for one in self.settings], dtype=self.kl_weights.dtype))

    def columns(self, first: int, count: int, table: Table) -> None:
        for row, one in enumerate(self.settings):
            table[:, row, kernels.GATE_LR] = table[:, row, kernels.LR] * one.variance_step
            table[:, row, kernels.KL] = rising(first, count, one.warmup * self.steps)

    def add_noise(self, number: int, mean: Tensor, variance: Tensor, step: Tensor) -> Tensor:
        """What reaches the units of a layer: its mean, with noise of its variance."""
        stream = Stream(self.root_seed, f"local:{self.layers[number].name}")
        exact = torch.promote_types(mean.dtype, self.synapses[number].weight.dtype)
        noise = draw_normal(stream, mean.detach().to(exact).contiguous(), self.replicas, step)
        return mean + (torch.sqrt(variance.to(exact).clamp_min(0.0) + MARGIN) * noise).to(mean.dtype)

    def _log_alpha(self, number: int) -> Tensor:
        synapses = self.synapses[number]
        return kernels.log_alpha_of(synapses.weight, synapses.gates()[0])

    def support(self, number: int) -> Tensor:
        thresholds = [one.threshold for one in self.settings]
        below = self._log_alpha(number)
        kept = below < self._per_replica(thresholds, below)
        rows = [row for row, one in enumerate(self.settings) if one.keep is not None]
        if rows:
            kept[rows] = by_rank(self, [-self._log_alpha(n)[rows] for n in range(len(self.layers))], rows)[number]
        return kept

    def whole_weight(self, number: int) -> Tensor:
        return self.synapses[number].weight

    def kl(self) -> Tensor:
        parts = [kernels.log_uniform_kl(self._log_alpha(n).double()).flatten(1).sum(1) for n in range(len(self.layers))]
        return torch.stack(parts).sum(0)

    def prices(self) -> list[float | None]:
        return [one.kl_weight for one in self.settings]


def rising(first: int, count: int, warmup: float) -> NDArray[np.float64]:
    """From 0 to 1 in a line over the warmup, for some steps."""
    steps = np.arange(first, first + count, dtype=np.float64)
    return np.minimum(1.0, steps / warmup) if warmup else np.ones_like(steps)


def by_rank(gating: Gating, scores: list[Tensor], rows: list[int]) -> list[Tensor]:
    """The `keep` highest scores of all layers together, for some replicas."""
    shares = [gating.settings[row].keep for row in rows]
    counts = torch.tensor([max(1, round(share * gating.total)) for share in shares], device=scores[0].device)
    return split_layers(largest(torch.cat([one.flatten(1) for one in scores], 1), counts), scores)
