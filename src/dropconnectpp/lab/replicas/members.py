"""The members of a population: their settings by epoch, how they were judged, and who takes over from whom.

All of it lies on the CPU and comes from the root seed, so the same population comes out of a resumed training.
Shapes: S settings, R members, E epochs, J judgements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.pruning import Plan
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.network import Unit

HIGHEST_NOISE = 0.5
"""Of a sparsity plan."""


@dataclass(frozen=True)
class Takeover:
    """Whose weights each member has after a judgement, and which members have them only now."""

    parents: list[int]
    losers: list[int]

    @property
    def winners(self) -> list[int]:
        """From whom the losers take over."""
        return [self.parents[loser] for loser in self.losers]


class Members:
    """Settings and histories of the networks of one stack."""

    def __init__(self, units: Sequence[Unit]) -> None:
        protocol = units[0].protocol
        assert protocol.population is not None
        self.population, self.root_seed = protocol.population, protocol.root_seed
        if [unit.replica for unit in units] != list(range(self.population.members)):
            raise ProtocolError(f"a population of {self.population.members} is trained as one stack, in order.")
        self.units, self.epochs = tuple(units), protocol.training.epochs
        plan = isinstance(protocol.pruning, Plan)
        self.ranges = self.population.ranges(protocol.method, plan)
        self.highest = HIGHEST_NOISE if plan else 1.0
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
        stream = Stream(self.root_seed, "population:start")
        order = stream.permutation(torch.arange(len(self.ranges)), 0, members)
        rows = []
        for (name, (low, high)), places in zip(self.ranges.items(), order.tolist(), strict=True):
            first, last = _scale(name, low), _scale(name, high)
            rows.append([self._value(name, first + (last - first) * (place + 0.5) / members) for place in places])
        return torch.tensor(rows, dtype=torch.float64)

    def _value(self, name: str, scaled: float) -> float:
        """A setting from where it is disturbed, to six digits, so that a schedule can be read."""
        value = min(1.0 / (1.0 + math.exp(-scaled)), self.highest) if name == "rate" else math.exp(scaled)
        return float(f"{value:.6g}")

    def protocols(self, values: Tensor) -> list[Protocol]:
        """Each member's protocol with such settings, (S, R)."""
        columns = zip(*values.tolist(), strict=True)
        return [
            unit.protocol.with_settings(dict(zip(self.ranges, column, strict=True)))
            for unit, column in zip(self.units, columns, strict=True)
        ]

    def begin_epoch(self, epoch: int) -> None:
        """Note what the members train with."""
        self.paths[:, :, epoch] = self.values
        self.lines[:, :, epoch] = self.values

    def judge(self, epoch: int, points: Sequence[Mapping[str, Any]]) -> Takeover:
        """Let the worst take over from the best by their scores, once ``epoch`` epochs are over.

        Of equal scores the lower NLL is the better; a member that diverged is the worst. In the first epochs, between
        judgements, and after the last, nobody takes over.
        """
        parents = list(range(len(points)))
        if not self.population.judges(epoch, self.epochs):
            return Takeover(parents, [])
        place = -(-epoch // self.population.every) - 1
        scores = [float(point["score"]) for point in points]
        self.scores[place] = torch.tensor(scores, dtype=torch.float64)
        losers: list[int] = []
        if self.population.replaces(epoch, self.epochs):
            ranks = sorted(parents, key=lambda r: _rank(scores[r], float(points[r]["nll"])), reverse=True)
            losers = ranks[-self.population.replaced :]
            self._replace(epoch, ranks, losers, parents)
        self.parents[place] = torch.tensor(parents)
        return Takeover(parents, losers)

    def _replace(self, epoch: int, ranks: Sequence[int], losers: Sequence[int], parents: list[int]) -> None:
        """Give the losers the settings of some of the best, disturbed; ``parents`` is changed in place."""
        stream = Stream(self.root_seed, "population:turn")
        noise = stream.uniform(torch.tensor(losers), epoch, 1 + len(self.ranges), dtype=torch.float64).tolist()
        for loser, (pick, *shifts) in zip(losers, noise, strict=True):
            parents[loser] = winner = ranks[int(pick * len(losers))]
            for number, (name, shift) in enumerate(zip(self.ranges, shifts, strict=True)):
                moved = _scale(name, float(self.values[number, winner]))
                moved += self.population.disturbance * (2.0 * shift - 1.0)
                self.values[number, loser] = self._value(name, moved)
            self.lines[:, loser] = self.lines[:, winner]

    def told(self, r: int) -> dict[str, Any]:
        """A member's history as plain numbers, for its row."""
        return {
            "path": dict(zip(self.ranges, _plain(self.paths[:, r]), strict=True)),
            "line": dict(zip(self.ranges, _plain(self.lines[:, r]), strict=True)),
            "scores": _plain(self.scores[:, r]),
            "parents": self.parents[:, r].tolist(),
        }

    def _tensors(self) -> dict[str, Tensor]:
        found = {"values": self.values, "paths": self.paths, "lines": self.lines}
        return found | {"scores": self.scores, "parents": self.parents}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint stores."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])


def _scale(name: str, value: float) -> float:
    """A setting where it is disturbed: its logarithm, of a rate that of its odds."""
    return math.log(value / (1.0 - value)) if name == "rate" else math.log(value)


def _rank(score: float, nll: float) -> tuple[float, float]:
    return (score if math.isfinite(score) else -math.inf, -nll if math.isfinite(nll) else -math.inf)


def _plain(tensor: Tensor) -> Any:
    """Lists of numbers, with None where there is none."""
    if tensor.ndim > 1:
        return [_plain(row) for row in tensor]
    return [None if math.isnan(value) else value for value in tensor.tolist()]
