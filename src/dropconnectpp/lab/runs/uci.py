"""The UCI benchmark: choose within each training split, train again on all of it, measure on its test half."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dropconnectpp.lab.config.uci import PARTS, Regression, Setting
from dropconnectpp.lab.data.dataset import RegressionSet
from dropconnectpp.lab.replicas.regression import Networks, Problem, Settings, train
from dropconnectpp.lab.runs.store import Store

INTERVAL = 0.9
"""Of which the coverage is measured."""
Rows = NDArray[np.int64]
Told = Callable[[str, int, int], None]
"""Called with what is trained, steps done and steps in all."""


@dataclass(frozen=True)
class Choice:
    """What held-out data chose for a split."""

    setting: Setting
    factor: float
    """What the learned noise is multiplied by."""
    held_out: float
    """The log likelihood by which both were chosen."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """What drawn networks, or an ensemble's members, say of targets (C, N): C independent cases of N targets."""

    outputs: Tensor
    """(T, C, N)."""
    scales: Tensor
    """The noise's standard deviation, (T or 1, C, 1)."""
    y: Tensor

    def log_likelihood(self, factors: Sequence[float]) -> Tensor:
        """The mean log of the density averaged over draws, with the noise times each factor: (factors, C)."""
        squares = ((self.y - self.outputs) / self.scales).square_().mul_(-0.5)
        offset = -self.scales.log() - 0.5 * math.log(2 * math.pi) - math.log(len(self.outputs))
        found = [(torch.logsumexp(squares / factor**2 + offset, 0) - math.log(factor)).mean(-1) for factor in factors]
        return torch.stack(found)

    def coverage(self, factor: Tensor) -> Tensor:
        """The share of targets inside the central interval, (C,); ``factor`` is (C,)."""
        below = torch.special.ndtr((self.y - self.outputs) / (self.scales * factor.unsqueeze(-1))).mean(0)
        edge = 0.5 * (1.0 - INTERVAL)
        inside: Tensor = ((below > edge) & (below < 1.0 - edge)).double().mean(-1)
        return inside

    @property
    def rmse(self) -> Tensor:
        """Of the mean over draws, (C,)."""
        found: Tensor = (self.outputs.mean(0) - self.y).square().mean(-1).sqrt()
        return found


def plain_of(experiment: Regression) -> Regression:
    """The plain network beside an ensemble of them."""
    return replace(experiment, kind="plain")


def plain_choices(experiment: Regression, store: Store, splits: Sequence[int]) -> list[Setting] | None:
    """What held-out data chose for plain networks, where all these splits have been run."""
    plain = plain_of(experiment)
    rows = {row.key.replica: row.results for row in store.rows(store.add(plain), "done")}
    if not set(splits) <= rows.keys():
        return None
    return [Setting(rows[split]["rate"], rows[split]["precision"]) for split in splits]


def measure(
    experiment: Regression,
    data: RegressionSet,
    splits: Sequence[int],
    chosen: Sequence[Setting] | None = None,
    told: Told = lambda *_: None,
) -> list[dict[str, float]]:
    """What is stored of some splits. ``chosen`` are settings of an ensemble's members that are known already."""
    if experiment.kind == "ensemble":
        choices = _choose_for_ensembles(experiment, data, splits, chosen, told)
    else:
        choices = choose(experiment, data, splits, told)
    kind, training = experiment.members_kind, experiment.training
    members = training.members if experiment.kind == "ensemble" else 1
    problems = [_whole(experiment, data, split, member) for split in splits for member in range(members)]
    settings = [[choice.setting for choice in choices for _ in range(members)]]
    told("the chosen setting", 0, training.steps)
    networks = train(kind, settings, problems, training, lambda s: told("the chosen setting", s, training.steps))
    halves = [data.splits[k] for k in splits]
    x, y = _stacked([(data.x[test], data.y[test]) for _, test in halves])
    mixture = _mixture(networks, 0, x, y, training.draws, members)
    likelihoods = mixture.log_likelihood(experiment.factors)
    factors = torch.tensor([choice.factor for choice in choices], dtype=torch.float64)
    coverage, rmse = mixture.coverage(factors), mixture.rmse
    noise = networks.noise[0].view(-1, members).mean(1)
    found = []
    for p, (choice, half) in enumerate(zip(choices, halves, strict=True)):
        result = {
            "log_likelihood": float(likelihoods[experiment.factors.index(choice.factor), p]),
            "rmse": float(rmse[p]),
            "coverage": float(coverage[p]),
            "rate": choice.setting.rate,
            "precision": choice.setting.precision,
            "factor": choice.factor,
            "noise": float(noise[p]) * choice.factor,
            "held_out": choice.held_out,
            "train": len(half[0]),
            "test": len(half[1]),
        }
        if networks.logits is not None:
            weights = torch.sigmoid(networks.logits[p].double())[networks.shape.decayed > 0]
            result["keep_probability"] = float(weights.mean())
        found.append(result)
    return found


def choose(experiment: Regression, data: RegressionSet, splits: Sequence[int], told: Told) -> list[Choice]:
    """For each split the setting and the factor with the highest log likelihood of held-out training data."""
    spread = [[one] * (len(splits) * experiment.training.folds) for one in experiment.settings]
    found = _held_out(experiment, data, splits, spread, 1, told)
    choices = []
    for p in range(len(splits)):
        factor, setting = divmod(_best(found[..., p]), len(experiment.settings))
        held_out = float(found[factor, setting, p])
        choices.append(Choice(experiment.settings[setting], experiment.factors[factor], held_out))
    return choices


def _choose_for_ensembles(
    experiment: Regression, data: RegressionSet, splits: Sequence[int], chosen: Sequence[Setting] | None, told: Told
) -> list[Choice]:
    """The plain network's settings; the noise's factor by held-out data, for ensembles."""
    if chosen is None:
        plain = replace(experiment, kind="plain")
        chosen = [choice.setting for choice in choose(plain, data, splits, told)]
    repeats = experiment.training.folds * experiment.training.members
    spread = [[setting for setting in chosen for _ in range(repeats)]]
    found = _held_out(experiment, data, splits, spread, experiment.training.members, told)
    places = [_best(found[..., p]) for p in range(len(splits))]
    return [
        Choice(setting, experiment.factors[place], float(found[place, 0, p]))
        for p, (setting, place) in enumerate(zip(chosen, places, strict=True))
    ]


def _best(found: Tensor) -> int:
    """The place of the largest number; one that is not finite is none."""
    return int(torch.nan_to_num(found, nan=-math.inf, posinf=-math.inf).argmax())


def _held_out(
    experiment: Regression, data: RegressionSet, splits: Sequence[int], settings: Settings, members: int, told: Told
) -> Tensor:
    """Log likelihoods of held-out parts of training splits, averaged over folds: (factors, G, splits)."""
    training, problems, held = experiment.training, [], []
    for split in splits:
        for fold in range(training.folds):
            rest, out = parts(experiment, data, split, fold)
            held.append((data.x[out], data.y[out]))
            for member in range(members):
                key = (experiment.root_seed, split, fold + 1, member)
                problems.append(Problem(key, data.x[rest], data.y[rest]))
    told("settings, on held-out data", 0, training.steps)
    networks = train(
        experiment.members_kind,
        settings,
        problems,
        training,
        lambda step: told("settings, on held-out data", step, training.steps),
    )
    x, y = _stacked(held)
    found = [
        _mixture(networks, g, x, y, training.trial_draws, members).log_likelihood(experiment.factors)
        for g in range(len(settings))
    ]
    likelihoods: Tensor = torch.stack(found, 1).unflatten(-1, (len(splits), training.folds)).mean(-1)
    return likelihoods


def parts(experiment: Regression, data: RegressionSet, split: int, fold: int) -> tuple[Rows, Rows]:
    """Rows of a training split to learn from and to choose by; every part that is held out has the same length."""
    rows = data.splits[split][0]
    order = Problem((experiment.root_seed, split), data.x[:1], data.y[:1]).generator("folds").permutation(len(rows))
    each = max(1, len(order) // PARTS)
    out = order[fold * each : (fold + 1) * each]
    rest = np.concatenate([order[: fold * each], order[(fold + 1) * each :]])
    return rows[rest], rows[out]


def _mixture(networks: Networks, g: int, x: Tensor, y: Tensor, draws: int, members: int) -> Mixture:
    """Of the networks with setting g: inputs (C, N, D) and targets (C, N), a case for each problem or ensemble."""
    alone = networks.of_setting(g)
    outputs, scales = alone.draw(x.repeat_interleave(members, 0), draws)[:, 0], alone.noise[0]
    if members == 1:
        return Mixture(outputs, scales.view(1, -1, 1), y)
    # Members are draws of the mixture, each with its own noise.
    outputs = outputs.unflatten(1, (-1, members)).movedim(2, 1).flatten(0, 1)
    return Mixture(outputs, scales.view(-1, members).T.unsqueeze(-1).repeat(len(outputs) // members, 1, 1), y)


def _whole(experiment: Regression, data: RegressionSet, split: int, member: int) -> Problem:
    rows = data.splits[split][0]
    return Problem((experiment.root_seed, split, 0, member), data.x[rows], data.y[rows])


def _stacked(held: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.stack([x for x, _ in held])), torch.from_numpy(np.stack([y for _, y in held]))
