"""Networks with few connections: settings compared on held-out training data, and the chosen ones on the test set.

Trials are rows like any others, so a search resumes, merges and shows its evidence like everything else. Which setting
goes to the test set is decided by `choose`, whatever comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from dropconnectpp.lab.config.experiments import Experiment
from dropconnectpp.lab.config.notes import SPARSITY
from dropconnectpp.lab.config.protocol import Evaluation, Protocol
from dropconnectpp.lab.config.selection import SparsitySearch
from dropconnectpp.lab.config.sparsity import DENSE, OURS, controls_of, described, family
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.hyperparameters import run_trials
from dropconnectpp.lab.runs.rows import share_kept
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Row

AT_THE_END = Evaluation(curve_samples=0, samples=(), shares=(), predictive_samples=0, every=10**6)
"""What is measured of a trial: its error and what it keeps."""


@dataclass(frozen=True)
class Trial:
    """What a setting gave on held-out training data, means over its networks."""

    protocol: Protocol
    """The setting, as it would go to the test set."""
    digest: str
    """As it was tried."""
    share: float
    error: float
    """In percent; not a number where a network diverged."""
    nll: float
    n: int
    diverged: int

    @classmethod
    def of(cls, protocol: Protocol, tried: Protocol, rows: Sequence[Row]) -> Trial:
        """The mean of a setting's rows."""
        done = [row.results for row in rows if row.status == "done"]
        if not done or len(done) < len(rows):
            return cls(protocol, tried.digest, math.nan, math.nan, math.nan, len(rows), len(rows) - len(done))
        share = fmean(share_kept(one) or 0.0 for one in done)
        accuracy = fmean(one["accuracy"] for one in done)
        return cls(protocol, tried.digest, share, 100.0 - accuracy, fmean(one["nll"] for one in done), len(rows), 0)


def choose(trials: Sequence[Trial], keep: float, search: SparsitySearch) -> Trial | None:
    """The setting that goes to the test set at a share: the lowest error of those that keep it, then the lowest NLL.

    None if no setting keeps so few, or all that do have diverged.
    """
    offered = [one for one in trials if math.isfinite(one.error) and search.reached(one.share, keep)]
    return min(offered, key=lambda one: (one.error, one.nll), default=None)


def train_frontier(experiment: Experiment, runner: Runner) -> bool:
    """Search, choose, train the chosen settings and their controls. Return whether everything is finished."""
    search = experiment.sparsity
    assert search is not None
    tried = {one.digest: _held_out(one, search, runner) for one in experiment.protocols}
    rows = run_trials({"sparsity": tried}, runner, search.repeats)
    if rows is None:
        return False
    trials = [Trial.of(one, tried[one.digest], rows[tried[one.digest].digest]) for one in experiment.protocols]
    chosen = _choose_all(trials, search, runner)
    if not _run(list(chosen.values()), experiment, runner):
        return False
    return not search.controls or _run(_controls(chosen, search, runner), experiment, runner)


def _run(protocols: Sequence[Protocol], experiment: Experiment, runner: Runner) -> bool:
    wanted = {protocol.digest: protocol for protocol in protocols}
    units = [Unit(protocol, replica) for protocol in wanted.values() for replica in experiment.replicas]
    outcome = runner.run(units)
    if outcome.left and not outcome.stopped:
        runner.display.note(f"Other processes train the rest: {outcome.left} left.")
    return not outcome.left


def _held_out(protocol: Protocol, search: SparsitySearch, runner: Runner) -> Protocol:
    """The protocol as it is tried: without the examples on which it is compared."""
    holdout = max(1, round(search.holdout_share * len(runner.dataset(protocol.data).train)))
    training = replace(protocol.training, holdout=holdout)
    return replace(protocol, training=training, evaluation=AT_THE_END)


def _choose_all(trials: Sequence[Trial], search: SparsitySearch, runner: Runner) -> dict[tuple[str, float], Protocol]:
    """The chosen protocols by method and share; why they were chosen is noted beside them."""
    families: dict[str, list[Trial]] = {}
    for one in trials:
        families.setdefault(family(one.protocol.pruning), []).append(one)
    chosen: dict[tuple[str, float], Protocol] = {}
    with runner.store() as store:
        for name, members in families.items():
            settings = described([one.protocol for one in members])
            for keep in (1.0,) if name == DENSE else search.keep:
                offered = {
                    text: one
                    for text, one in zip(settings, members, strict=True)
                    if getattr(one.protocol.pruning, "keep", None) in (None, keep)
                }
                best = choose(list(offered.values()), keep, search)
                if best is None:
                    runner.display.note(f"{name}: no setting that was tried keeps {100 * keep:g}% or fewer.")
                else:
                    chosen[name, keep] = best.protocol
                note = {
                    "family": name,
                    "data": members[0].protocol.data,
                    "network": members[0].protocol.architecture.name,
                    "keep": keep,
                    "resolved": best.protocol.digest if best else None,
                    "trials": [_evidence(one, text, keep, one is best, search) for text, one in offered.items()],
                }
                place = store.add(best.protocol if best else members[0].protocol)
                store.write_note(place, f"{SPARSITY}{keep:g} {name}", note)
    return chosen


def _evidence(trial: Trial, setting: str, keep: float, chosen: bool, search: SparsitySearch) -> Mapping[str, object]:
    return {
        "setting": setting,
        "digest": trial.digest,
        "share": trial.share,
        "error": trial.error,
        "nll": trial.nll,
        "n": trial.n,
        "diverged": trial.diverged,
        "reached": search.reached(trial.share, keep),
        "chosen": chosen,
    }


def _controls(chosen: Mapping[tuple[str, float], Protocol], search: SparsitySearch, runner: Runner) -> list[Protocol]:
    """The controls of DropConnect++ at each share, with a note of the share each belongs to."""
    found = []
    with runner.store() as store:
        for (name, keep), protocol in chosen.items():
            if name != OURS:
                continue
            shares = layer_shares(store.rows(protocol.digest))
            for one in controls_of(protocol, search.controls, shares).values():
                title = family(one.pruning)
                note = {"family": title, "data": one.data, "network": one.architecture.name, "keep": keep}
                note |= {"resolved": one.digest, "trials": []}
                store.write_note(store.add(one), f"{SPARSITY}{keep:g} {title}", note)
                found.append(one)
    return found


def layer_shares(rows: Sequence[Row]) -> list[float]:
    """The share of each gated layer's weights that networks kept, means over them."""
    done = [row.results["layers"] for row in rows if row.status == "done"]
    layers: list[list[Mapping[str, Any]]] = [[one for one in layer if one.get("gated", True)] for layer in done]
    return [fmean(one["kept"] / one["weights"] for one in layer) for layer in zip(*layers, strict=True)]
