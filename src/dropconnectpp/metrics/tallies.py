"""What `evaluate` remembers of each batch: sums, and a few numbers an example for what needs all of them ranked."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, ShapeError
from dropconnectpp.likelihoods import Bernoulli, Categorical, Poisson
from dropconnectpp.metrics import classes, ranking
from dropconnectpp.metrics.parts import Figure, Panels
from dropconnectpp.prediction import Prediction
from dropconnectpp.prediction.mixture import cdf

PIT_BINS = 20


@dataclass
class Mean:
    """Mean and standard error of numbers that come batch by batch."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor) -> None:
        """More numbers."""
        values = values.detach().double().flatten()
        count, mean = values.numel(), float(values.mean())
        squares = float((values - mean).square().sum())
        step, total = mean - self.mean, self.count + count
        self.squares += squares + step * step * self.count * count / total
        self.mean += step * count / total
        self.count = total

    @property
    def error(self) -> float | None:
        """Of the mean; None for one number."""
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None

    def figure(self, unit: str = "", scale: float = 1.0) -> Figure:
        """As a line of the table."""
        return Figure(self.mean * scale, unit, None if self.error is None else self.error * scale)


class Tally:
    """The sums of one kind of target."""

    def __init__(self, bins: int, level: float) -> None:
        self.bins, self.level = bins, level
        self.count = 0
        self.nll = Mean()
        self.doubts: dict[str, list[Tensor]] = {}

    def add(self, found: Prediction, target: Tensor) -> None:
        """One batch."""
        self.count += len(found.mean)
        self.measure(found, target.to(found.mean.device))
        for name, value in doubts_of(found).items():
            self.doubts.setdefault(name, []).append(value)

    @abstractmethod
    def measure(self, found: Prediction, target: Tensor) -> None:
        """The kind's own sums."""

    @abstractmethod
    def figures(self) -> dict[str, Figure]:
        """The lines of the table."""

    @abstractmethod
    def panels(self) -> Panels:
        """What is drawn."""


def doubts_of(found: Prediction) -> dict[str, Tensor]:
    """How unsure a prediction is of each example, (B,), by each measure that it has."""
    if found.entropy is not None:
        named = {"entropy": found.entropy, "mutual information": found.mutual_information}
    else:
        named = {"standard deviation": found.standard_deviation, "model deviation": found.model_deviation}
    held = {name: value.detach().double().cpu() for name, value in named.items() if value is not None}
    return {name: value.flatten(1).mean(1) if value.ndim > 1 else value for name, value in held.items()}


class Classes(Tally):
    """Classes, and yes/no values; each position of an example counts."""

    def __init__(self, bins: int, level: float) -> None:
        super().__init__(bins, level)
        self.right, self.brier = Mean(), Mean()
        self.confidences: list[Tensor] = []
        self.agreements: list[Tensor] = []
        self.unsure: list[Tensor] = []
        self.wrong: list[Tensor] = []

    def measure(self, found: Prediction, target: Tensor) -> None:
        probabilities, classed = _as_classes(found, target)
        binary = isinstance(found.likelihood, Bernoulli)
        confidence, right = classes.top_label(probabilities, classed)
        self.nll.add(classes.nll(probabilities, classed))
        self.brier.add(classes.brier(probabilities, classed) * (0.5 if binary else 1.0))
        self.right.add(right)
        self.unsure.append(1.0 - confidence.cpu())
        self.wrong.append(1.0 - right.cpu())
        if binary:  # the probability of yes against how often it is yes
            confidence, right = probabilities[:, 1].double(), classed.double()
        self.confidences.append(confidence.cpu())
        self.agreements.append(right.cpu())

    def _reliability(self, adaptive: bool) -> classes.Reliability:
        binned = classes.equal_counts if adaptive else classes.equal_width
        return binned(torch.cat(self.confidences), torch.cat(self.agreements), self.bins)

    def figures(self) -> dict[str, Figure]:
        return {
            "accuracy": self.right.figure("%", 100.0),
            "nll": self.nll.figure("nats"),
            "brier": self.brier.figure(),
            "ece": Figure(100.0 * self._reliability(False).error, "%"),
            "adaptive_ece": Figure(100.0 * self._reliability(True).error, "%"),
            "aurc": Figure(100.0 * ranking.aurc(torch.cat(self.unsure), torch.cat(self.wrong)), "%"),
        }

    def panels(self) -> Panels:
        found = self._reliability(False)
        covered, risk = ranking.risk_coverage(torch.cat(self.unsure), torch.cat(self.wrong))
        return Panels(reliability=found, risk=(covered, risk))


def _as_classes(found: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (M, C) and classes (M,), with all positions in a row."""
    mean = found.mean
    if isinstance(found.likelihood, Bernoulli):
        if target.shape != mean.shape:
            raise ShapeError(f"evaluate needs targets of shape {tuple(mean.shape)}, got {tuple(target.shape)}.")
        if bool(((target != 0) & (target != 1)).any()):
            raise ArgumentError("evaluate: targets of yes/no values must be 0 or 1.")
        yes = mean.flatten()
        return torch.stack([1.0 - yes, yes], 1), target.flatten().long()
    if target.shape != (len(mean), *mean.shape[2:]):
        raise ShapeError(f"evaluate needs classes of shape {(len(mean), *mean.shape[2:])}, got {tuple(target.shape)}.")
    return mean.movedim(1, -1).flatten(0, -2), target.flatten()


class Values(Tally):
    """Real values and counts; log-likelihoods are of examples, everything else of single values."""

    def __init__(self, bins: int, level: float) -> None:
        super().__init__(bins, level)
        self.squares, self.crps, self.inside, self.width = Mean(), Mean(), Mean(), Mean()
        self.pit = torch.zeros(PIT_BINS, dtype=torch.float64)

    def measure(self, found: Prediction, target: Tensor) -> None:
        if target.shape != found.mean.shape:
            raise ShapeError(f"evaluate needs targets of shape {tuple(found.mean.shape)}, got {tuple(target.shape)}.")
        self.nll.add(-found.log_prob(target))
        self.squares.add((found.mean.double() - target).square())
        self.crps.add(found.crps(target))
        low, high = found.interval(self.level)
        self.inside.add(((target >= low) & (target <= high)).double())
        self.width.add(high.double() - low)
        assert found.outputs is not None
        outputs = found.outputs.double()
        below = cdf(found.likelihood, outputs, target.double())
        if isinstance(found.likelihood, Poisson):  # half of what the count itself has lies on either side
            below = 0.5 * (below + cdf(found.likelihood, outputs, target.double() - 1.0))
        self.pit += torch.histc(below.clamp(0.0, 1.0).cpu(), PIT_BINS, 0.0, 1.0)

    def figures(self) -> dict[str, Figure]:
        squares = self.squares
        rmse = math.sqrt(squares.mean)
        error = None if squares.error is None or not rmse else squares.error / (2.0 * rmse)
        return {
            "rmse": Figure(rmse, "", error),
            "nll": self.nll.figure("nats"),
            "crps": self.crps.figure(),
            "coverage": self.inside.figure("%", 100.0),
            "sharpness": self.width.figure(),
        }

    def panels(self) -> Panels:
        return Panels(pit=self.pit / self.pit.sum())


class Likelihoods(Tally):
    """A likelihood of the user's own says nothing but itself."""

    def measure(self, found: Prediction, target: Tensor) -> None:
        self.nll.add(-found.log_prob(target))

    def figures(self) -> dict[str, Figure]:
        return {"nll": self.nll.figure("nats")}

    def panels(self) -> Panels:
        return Panels()


def tally_for(likelihood: Any, bins: int, level: float) -> Tally:
    """What can be measured under a likelihood."""
    if isinstance(likelihood, Categorical | Bernoulli):
        return Classes(bins, level)
    return Values(bins, level) if hasattr(likelihood, "cdf") else Likelihoods(bins, level)


@dataclass
class Foreign:
    """Doubts of examples that the model was not made for."""

    count: int = 0
    doubts: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, found: Prediction) -> None:
        """One batch."""
        self.count += len(found.mean)
        for name, value in doubts_of(found).items():
            self.doubts.setdefault(name, []).append(value)

    def figures(self, known: Mapping[str, list[Tensor]]) -> dict[str, Figure]:
        """AUROC and FPR95 by each measure of doubt."""
        lines: dict[str, Figure] = {}
        for name, parts in self.doubts.items():
            pair = torch.cat(known[name]), torch.cat(parts)
            lines[f"auroc, {name}"] = Figure(ranking.auroc(*pair))
            lines[f"fpr95, {name}"] = Figure(100.0 * ranking.fpr95(*pair), "%")
        return lines
