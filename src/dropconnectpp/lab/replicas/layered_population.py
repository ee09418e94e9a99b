"""A population of networks given as layers: sparsity plans whose step size and noise change, judged as deployed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Evaluation, Protocol
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas import layered_evaluation
from dropconnectpp.lab.replicas.layered_stack import LayeredStack
from dropconnectpp.lab.replicas.members import Members
from dropconnectpp.lab.replicas.network import Unit


class LayeredPopulation(LayeredStack):
    """Networks that take over weights, gates, prices, the optimiser's state and settings from each other."""

    def __init__(self, units: Sequence[Unit], dataset: Dataset, device: torch.device, *, graph: bool = True) -> None:
        self.members = Members(units)
        super().__init__(units, dataset, device, graph=graph)

    def protocols_in(self, epoch: int) -> list[Protocol]:
        return self.members.protocols(self.members.values)

    def train_epoch(self) -> Tensor:
        self.members.begin_epoch(self.epoch)
        return super().train_epoch()

    def judge(self, points: Sequence[Mapping[str, Any]]) -> list[int]:
        """Let the worst take over from the best by their scores; whose weights each member has now."""
        found = self.members.judge(self.epoch, points)
        if found.losers:
            self._take_over(torch.tensor(found.losers), torch.tensor(found.winners))
        return found.parents

    @torch.no_grad()
    def _take_over(self, losers: Tensor, winners: Tensor) -> None:
        """Copy all that training changes, in place: a CUDA graph reads the same memory."""
        here, there = losers.to(self.device), winners.to(self.device)
        for value in (*self.weights, *self.biases, *itertools.chain.from_iterable(self.moments)):
            value.data[here] = value.data[there]
        (segment,) = self.segments  # one method, so one segment
        segment.take_over(here, there)

    def state(self) -> dict[str, Any]:
        return super().state() | {"population": self.members.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.members.load_state(state["population"])
        if not self.batch and self.epoch:
            self._follow(self.members.protocols(self.members.paths[:, :, self.epoch - 1]))  # measured as trained


def judged_as_deployed(stack: LayeredPopulation, settings: Evaluation) -> list[dict[str, Any]]:
    """What each member would be if its support were fixed now, with the score by which it is judged."""
    points = layered_evaluation.along_the_way(stack, settings)
    return [point | {"score": point["accuracy"]} for point in points]
