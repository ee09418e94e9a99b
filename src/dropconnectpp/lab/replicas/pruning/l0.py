"""L0 regularisation by hard concrete gates (Louizos et al. 2018): the expected number of open gates is paid for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropconnectpp.lab.config.pruning import L0
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.replicas.pruning.gating import Gating, Table, sigmoid
from dropconnectpp.lab.replicas.pruning.sparse_vd import by_rank, rising


class HardConcreteGates(Gating):
    """A hard concrete gate for each weight."""

    kind = "hard-concrete"
    settings: tuple[L0, ...]

    def prepare(self) -> None:
        self.add_gates([math.log(one.keep_probability / (1.0 - one.keep_probability)) for one in self.settings])
        self.kl_weights.copy_(torch.tensor([one.weight for one in self.settings], dtype=self.kl_weights.dtype))

    def columns(self, first: int, count: int, table: Table) -> None:
        for row, one in enumerate(self.settings):
            table[:, row, kernels.GATE_LR] = table[:, row, kernels.LR] * one.gate_step
            table[:, row, kernels.KL] = rising(first, count, one.warmup * self.steps)
            table[:, row, kernels.TEMPERATURE] = one.temperature
            table[:, row, kernels.STRETCH] = one.stretch

    def gate(self, number: int) -> Tensor:
        """The gates that predict, without noise."""
        log_alpha = self.synapses[number].gates()[0]
        stretch = self._per_replica([one.stretch for one in self.settings], log_alpha)
        return (sigmoid(log_alpha) * (1 + 2 * stretch) - stretch).clamp(0.0, 1.0)

    def support(self, number: int) -> Tensor:
        kept = self.gate(number) > 0
        rows = [row for row, one in enumerate(self.settings) if one.keep is not None]
        if rows:
            scores = [synapses.gates()[0][rows] for synapses in self.synapses]
            kept[rows] &= by_rank(self, scores, rows)[number]
        return kept

    def whole_weight(self, number: int) -> Tensor:
        return self.synapses[number].weight * self.gate(number)

    def kl(self) -> Tensor:
        """The expected number of open gates."""
        total = super().kl()
        for synapses in self.synapses:
            log_alpha = synapses.gates()[0].double()
            for row, one in enumerate(self.settings):
                total[row] += kernels.open_probability(log_alpha[row], one.temperature, one.stretch).sum()
        return total

    def prices(self) -> list[float | None]:
        return [one.weight for one in self.settings]
