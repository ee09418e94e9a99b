"""A stack whose replicas are a population: each epoch with settings of its own, judged, and taken over from the best.

What a member does next depends on its neighbours, so a population is trained in one stack or not at all. Settings,
histories and draws live on the CPU and come from the root seed: the same population comes out of a resumed training.
Shapes: S settings, R members, E epochs, J judgements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.population import Population
from dropconnectpp.lab.config.protocol import Evaluation, Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

RANKED_BY = "product"
"""How weights are ranked where a member is judged with a share of them: by pi~ |W|."""


class PopulationStack(Stack):
    """Networks that take over weights, the optimiser's state, the posterior and settings from each other."""

    def __init__(self, units: Sequence[Unit], dataset: Dataset, device: torch.device, *, graph: bool = True) -> None:
        super().__init__(units, dataset, device, graph=graph)
        protocol = units[0].protocol
        assert protocol.population is not None
        self.population: Population = protocol.population
        if [unit.replica for unit in units] != list(range(self.population.members)):
            raise ProtocolError(f"a population of {self.population.members} is trained as one stack, in order.")
        self.epochs = protocol.training.epochs
        self.ranges = self.population.ranges(protocol.method)
        members, judgements = len(units), self.population.judgements(self.epochs)
        self.values = self._start()  # (S, R): what each member trains with now
        nothing = torch.full((len(self.ranges), members, self.epochs), math.nan, dtype=torch.float64)
        self.paths = nothing.clone()  # (S, R, E): what each member trained with
        self.lines = nothing.clone()  # (S, R, E): what the weights that each member has now were trained with
        self.scores = torch.full((judgements, members), math.nan, dtype=torch.float64)
        self.parents = torch.full((judgements, members), -1, dtype=torch.int64)

    def _start(self) -> Tensor:
        """Values spread evenly over each range, in an order of its own for each setting."""
        members = self.population.members
        stream = Stream(self.protocol.root_seed, "population:start")
        order = stream.permutation(torch.arange(len(self.ranges)), 0, members)
        rows = []
        for (name, (low, high)), places in zip(self.ranges.items(), order.tolist(), strict=True):
            first, last = _scale(name, low), _scale(name, high)
            rows.append([_value(name, first + (last - first) * (place + 0.5) / members) for place in places])
        return torch.tensor(rows, dtype=torch.float64)

    def protocols_in(self, epoch: int) -> list[Protocol]:
        columns = zip(*self.values.tolist(), strict=True)
        return [
            unit.protocol.with_settings(dict(zip(self.ranges, column, strict=True)))
            for unit, column in zip(self.units, columns, strict=True)
        ]

    def train_epoch(self) -> Tensor:
        self.paths[:, :, self.epoch] = self.values
        self.lines[:, :, self.epoch] = self.values
        return super().train_epoch()

    def judge(self, points: Sequence[Mapping[str, Any]]) -> list[int]:
        """Let the worst take over from the best by their scores; whose weights each member has now.

        Of equal scores the lower NLL is the better; a member that diverged is the worst. Between judgements, and after
        the last epoch, nobody takes over.
        """
        if not self.population.judges(self.epoch, self.epochs):
            return list(range(len(points)))
        place = -(-self.epoch // self.population.every) - 1
        scores = [float(point["score"]) for point in points]
        self.scores[place] = torch.tensor(scores, dtype=torch.float64)
        parents = list(range(len(scores)))
        if self.epoch < self.epochs:
            ranks = sorted(parents, key=lambda r: _rank(scores[r], float(points[r]["nll"])), reverse=True)
            self._replace(ranks, parents)
        self.parents[place] = torch.tensor(parents)
        return parents

    def _replace(self, ranks: Sequence[int], parents: list[int]) -> None:
        """Let the last of the ranking take over from the first; ``parents`` is changed in place."""
        count = self.population.replaced
        losers = torch.tensor(ranks[-count:])
        stream = Stream(self.protocol.root_seed, "population:turn")
        noise = stream.uniform(losers, self.epoch, 1 + len(self.ranges), dtype=torch.float64).tolist()
        for loser, (pick, *shifts) in zip(losers.tolist(), noise, strict=True):
            parents[loser] = winner = ranks[int(pick * count)]
            for number, (name, shift) in enumerate(zip(self.ranges, shifts, strict=True)):
                moved = _scale(name, float(self.values[number, winner]))
                moved += self.population.disturbance * (2.0 * shift - 1.0)
                self.values[number, loser] = _value(name, moved)
            self.lines[:, loser] = self.lines[:, winner]
        self._take_over(losers, torch.tensor([parents[loser] for loser in losers.tolist()]))

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

    def told(self, r: int) -> dict[str, Any]:
        """A member's history as plain numbers, for its row."""
        return {
            "path": dict(zip(self.ranges, _plain(self.paths[:, r]), strict=True)),
            "line": dict(zip(self.ranges, _plain(self.lines[:, r]), strict=True)),
            "scores": _plain(self.scores[:, r]),
            "parents": self.parents[:, r].tolist(),
        }

    # ------------------------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        found = {"values": self.values, "paths": self.paths, "lines": self.lines}
        found |= {"scores": self.scores, "parents": self.parents}
        return super().state() | {"population": {name: tensor.clone() for name, tensor in found.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        for name, tensor in state["population"].items():
            getattr(self, name).copy_(tensor)
        if not self.batch and self.epoch:
            # Measured as trained: with the settings of the last epoch and not those of the next.
            self._set(self.paths[:, :, self.epoch - 1])

    def _set(self, values: Tensor) -> None:
        """Set rates and weights of the KL outside of an epoch."""
        now, self.values = self.values, values
        epoch, self.epoch = self.epoch, max(0, self.epoch - 1)
        self.begin_epoch()
        self.values, self.epoch = now, epoch


def judged_points(stack: PopulationStack, settings: Evaluation) -> list[dict[str, Any]]:
    """Accuracy and NLL of each member on the held-out images, with the score by which it is judged."""
    points = evaluation.along_the_way(stack, settings)
    keep = stack.population.keep
    if keep is None:
        return [point | {"score": point["accuracy"]} for point in points]
    alone = replace(settings, curve_samples=0, samples=(), shares=(keep,), predictive_samples=0)
    scores = [
        next(entry["accuracy"] for entry in found["pruning"] if entry["score"] == RANKED_BY)
        for found in evaluation.final(stack, alone)
    ]
    return [point | {"score": score} for point, score in zip(points, scores, strict=True)]


def _scale(name: str, value: float) -> float:
    """A setting where it is disturbed: its logarithm, of a rate that of its odds."""
    return math.log(value / (1.0 - value)) if name == "rate" else math.log(value)


def _value(name: str, scaled: float) -> float:
    """Back from there, to six digits, so that a schedule can be read."""
    value = 1.0 / (1.0 + math.exp(-scaled)) if name == "rate" else math.exp(scaled)
    return float(f"{value:.6g}")


def _rank(score: float, nll: float) -> tuple[float, float]:
    return (score if math.isfinite(score) else -math.inf, -nll if math.isfinite(nll) else -math.inf)


def _plain(tensor: Tensor) -> Any:
    """Lists of numbers, with None where there is none."""
    if tensor.ndim > 1:
        return [_plain(row) for row in tensor]
    return [None if math.isnan(value) else value for value in tensor.tolist()]
