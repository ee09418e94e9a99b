"""Population-based training: schedules found on held-out training data, and replayed with fresh networks on all of it.

A population is rows like any others, so it resumes, merges and shows its evidence like everything else. The images that
judged it are training images; no network of it goes to the test set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dropconnectpp.lab.config.by_epoch import from_path
from dropconnectpp.lab.config.experiments import Experiment
from dropconnectpp.lab.config.notes import POPULATION
from dropconnectpp.lab.config.population import Population, keeps_few
from dropconnectpp.lab.config.protocol import Evaluation, Protocol
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.hyperparameters import run_trials
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Row


@dataclass(frozen=True)
class Found:
    """What a population came to."""

    best: Row
    """Of its members, the one whose schedule is replayed."""
    replay: Protocol
    """The experiment with that schedule, on all training images."""


def train_populations(experiment: Experiment, runner: Runner) -> bool:
    """Train a population for each method, then its schedule with fresh networks. Return whether all is finished."""
    assert experiment.population is not None
    share = experiment.selection.holdout_share
    tried = {one.digest: with_population(one, experiment.population, share, runner) for one in experiment.protocols}
    rows = run_trials({"population": tried}, runner, experiment.population.members)
    if rows is None:
        return False
    units = []
    for protocol in experiment.protocols:
        population = tried[protocol.digest]
        found = find(protocol, population, rows[population.digest])
        if found is None:
            runner.display.note(f"{protocol.label}: every member of the population diverged. Try smaller step sizes.")
            continue
        with runner.store() as store:
            note = told(found, population, rows[population.digest])
            store.write_note(store.add(found.replay), POPULATION, note)
        units += [Unit(found.replay, replica) for replica in experiment.replicas]
    outcome = runner.run(units)
    if outcome.left and not outcome.stopped:
        runner.display.note(f"Other processes train the rest: {outcome.left} left.")
    return not outcome.left


def with_population(protocol: Protocol, population: Population, holdout_share: float, runner: Runner) -> Protocol:
    """The protocol as its population trains: judged on training images that it does not learn from."""
    holdout = max(1, round(holdout_share * len(runner.dataset(protocol.data).train)))
    keep = population.keep if keeps_few(protocol.method) else None
    measured = Evaluation(
        every=population.every, curve_samples=0, samples=(), shares=(keep,) if keep else (), predictive_samples=0
    )
    return replace(
        protocol,
        population=replace(population, keep=keep),
        training=replace(protocol.training, holdout=holdout),
        evaluation=measured,
    )


def find(protocol: Protocol, population: Protocol, rows: Sequence[Row]) -> Found | None:
    """The schedule behind the weights of the member with the best score; of equals, with the lowest NLL."""
    done = [row for row in rows if row.status == "done" and math.isfinite(_score(row))]
    if not done:
        return None
    best = max(done, key=lambda row: (_score(row), -row.results["nll"], -row.key.replica))
    assert population.population is not None
    name = f"found by a population of {population.population.members}"
    schedule = from_path(best.results["population"]["line"], name)
    return Found(best, replace(protocol, by_epoch=schedule))


def told(found: Found, population: Protocol, rows: Sequence[Row]) -> dict[str, Any]:
    """What a report needs of a population, besides the replay's rows."""
    settings = population.population
    assert settings is not None
    members = [row.results.get("population", {}) for row in rows]
    return {
        "data": population.data,
        "method": population.label,
        "population": population.digest,
        "resolved": found.replay.digest,
        "members": settings.members,
        "every": settings.every,
        "epochs": population.training.epochs,
        "keep": settings.keep,
        "holdout": population.training.holdout,
        "best": found.best.key.replica,
        "score": _score(found.best),
        "seconds": sum(row.seconds or 0.0 for row in rows),
        "line": found.best.results["population"]["line"],
        "paths": [one.get("path", {}) for one in members],
        "scores": [one.get("scores", []) for one in members],
        "parents": [one.get("parents", []) for one in members],
    }


def _score(row: Row) -> float:
    """What the judge saw last; not a number where there is none."""
    scores = row.results.get("population", {}).get("scores", [])
    return scores[-1] if scores and scores[-1] is not None else math.nan
