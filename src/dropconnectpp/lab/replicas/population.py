"""A stack whose replicas are a population: each epoch with settings of its own, judged, and taken over from the best.

What a member does next depends on its neighbours, so a population is trained in one stack or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Evaluation, Protocol
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.members import Members
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

RANKED_BY = "product"
"""How weights are ranked where a member is judged with a share of them: by pi~ |W|."""


class PopulationStack(Stack):
    """Networks that take over weights, the optimiser's state, the posterior and settings from each other."""

    def __init__(self, units: Sequence[Unit], dataset: Dataset, device: torch.device, *, graph: bool = True) -> None:
        super().__init__(units, dataset, device, graph=graph)
        self.members = Members(units)

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
        for name, value in self._trained():
            for tensor in (value, self.accumulators[name], self.averages.get(name)):
                if tensor is not None:
                    tensor.data[here] = tensor.data[there]
        for segment in self.segments:
            moments = segment.regulariser.moments
            if moments is not None:
                moments[:, here] = moments[:, there]

    def state(self) -> dict[str, Any]:
        return super().state() | {"population": self.members.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.members.load_state(state["population"])
        if not self.batch and self.epoch:
            # Measured as trained: with the settings of the last epoch and not those of the next.
            now, self.members.values = self.members.values, self.members.paths[:, :, self.epoch - 1]
            self.epoch -= 1
            self.begin_epoch()
            self.members.values, self.epoch = now, self.epoch + 1


def judged_points(stack: PopulationStack, settings: Evaluation) -> list[dict[str, Any]]:
    """Accuracy and NLL of each member on the held-out images, with the score by which it is judged."""
    points = evaluation.along_the_way(stack, settings)
    keep = stack.members.population.keep
    if keep is None:
        return [point | {"score": point["accuracy"]} for point in points]
    alone = replace(settings, curve_samples=0, samples=(), shares=(keep,), predictive_samples=0)
    scores = [
        next(entry["accuracy"] for entry in found["pruning"] if entry["score"] == RANKED_BY)
        for found in evaluation.final(stack, alone)
    ]
    return [point | {"score": score} for point, score in zip(points, scores, strict=True)]
