"""Choosing step sizes and rates as the paper says, by trainings that are stored like any others.

"Adagrad's global stepsize is chosen from the set {0.005, 0.01, 0.05}, based on the network performance on the
training set in the first few iterations"; "The Dropout and DropConnect rates are selected on the grounds of
performance maximization": here on training data held out for it, never on the test set.

`Selection(together=True)` goes beyond the paper: step sizes and rates are tried with each other, on held-out data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dropconnectpp.lab.config.notes import PAPERS_WAY, TOGETHER
from dropconnectpp.lab.config.protocol import Evaluation, Protocol
from dropconnectpp.lab.config.selection import Selection
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Row

PROVISIONAL_RATE = 0.5
"""The rate at which step sizes are compared while the rate is open."""
QUICK = Evaluation(curve_samples=0, samples=(), shares=(), predictive_samples=0, every=10**6)
WAIT_S = 5.0
"""Seconds between looks at trials that another process trains."""


def choose_hyperparameters(
    protocols: Sequence[Protocol], runner: Runner, settings: Selection
) -> dict[str, Protocol] | None:
    """Complete protocols by the digest of the incomplete ones; None if time ran out meanwhile."""
    first = [p for p in protocols if p.training.step_size is None and not settings.together]
    steps = _choose_steps(first, runner, settings)
    if steps is None:
        return None
    with_steps = {p.digest: _with_step(p, steps.get(p.digest, {}).get("step_size")) for p in protocols}
    held_out = _choose_held_out({d: p for d, p in with_steps.items() if not p.complete}, runner, settings)
    if held_out is None:
        return None
    complete = {}
    with runner.store() as store:
        for protocol in protocols:
            found = held_out.get(protocol.digest)
            chosen = with_steps[protocol.digest] if found is None else found.protocol
            complete[protocol.digest] = chosen
            store.add(protocol)
            store.add(chosen)
            evidence = {
                "resolved": chosen.digest,
                "step_size": chosen.training.step_size,
                "rate": chosen.method.rate,
                "step_trials": steps.get(protocol.digest, {}).get("trials", []),
                "rate_trials": [],
            }
            if found is not None:
                evidence |= found.evidence
            store.write_note(protocol.digest, TOGETHER if settings.together else PAPERS_WAY, evidence)
    return complete


def _with_step(protocol: Protocol, step_size: float | None) -> Protocol:
    return (
        protocol if step_size is None else replace(protocol, training=replace(protocol.training, step_size=step_size))
    )


def _choose_steps(
    protocols: Sequence[Protocol], runner: Runner, settings: Selection
) -> dict[str, dict[str, Any]] | None:
    trials: dict[str, dict[float, Protocol]] = {}
    for protocol in protocols:
        method = protocol.method
        if method.has_rate and method.rate is None:
            method = replace(method, rate=PROVISIONAL_RATE)
        if method.logit_step is None:
            method = replace(method, logit_step=1.0)
        training = replace(protocol.training, epochs=min(settings.step_epochs, protocol.training.epochs))
        base = replace(protocol, method=method, training=training, evaluation=QUICK)
        trials[protocol.digest] = {step: _with_step(base, step) for step in settings.step_sizes}
    rows = run_trials(trials, runner, settings.step_replicas)
    if rows is None:
        return None
    found = {}
    for digest, candidates in trials.items():
        measured = [
            {
                "step_size": step,
                "loss": _mean(rows[trial.digest], lambda row: row.results["losses"][-1]),
                "n": len(rows[trial.digest]),
            }
            for step, trial in candidates.items()
        ]
        # What diverged has an infinite loss and comes last.
        best = min(measured, key=lambda one: one["loss"] if math.isfinite(one["loss"]) else math.inf)
        if not math.isfinite(best["loss"]):
            runner.display.note(f"Every step size diverged, {best['step_size']} is taken. Try smaller ones.")
        found[digest] = {"step_size": best["step_size"], "trials": measured}
    return found


@dataclass(frozen=True)
class _Chosen:
    protocol: Protocol
    evidence: dict[str, Any]


Values = tuple[tuple[str, float], ...]
"""Names and values of settings that are tried with each other."""


def _candidates(protocol: Protocol, settings: Selection) -> dict[Values, Protocol]:
    """The protocol with each value, or each combination of values, of what is open in it."""
    method = protocol.method
    found: dict[Values, Protocol] = {(): protocol}
    if protocol.training.step_size is None:
        found = {(("step_size", step),): _with_step(protocol, step) for step in settings.step_sizes}
    if method.complete:
        return found
    name, values = ("rate", settings.rates) if method.has_rate else ("logit_step", settings.logit_steps)
    if not values:
        raise ProtocolError(f"{method.label}: logit_step is open. Give it, or logit_steps to choose from.")
    methods: dict[float, Any] = {value: {name: value} for value in values}
    return {
        (*others, (name, value)): replace(one, method=replace(method, **change))
        for others, one in found.items()
        for value, change in methods.items()
    }


@dataclass
class _Trials:
    """What is tried on held-out training data for one protocol."""

    protocol: Protocol
    holdout: int
    epochs: int
    candidates: dict[Values, Protocol] = field(default_factory=dict)
    trained: dict[Values, Protocol] = field(default_factory=dict)
    """The candidates as they are trained for that: without the held-out examples."""

    def add(self, settings: Selection) -> None:
        """Add what the settings offer."""
        for values, one in _candidates(self.protocol, settings).items():
            training = replace(one.training, holdout=self.holdout, epochs=self.epochs)
            self.candidates[values] = one
            self.trained[values] = replace(one, training=training, evaluation=QUICK)

    def measured(self, rows: Mapping[str, Sequence[Row]]) -> dict[Values, float]:
        """Mean accuracy of each candidate; not finite where a replica diverged."""
        return {
            values: _mean(rows[trial.digest], lambda row: row.results.get("accuracy", math.nan))
            for values, trial in self.trained.items()
        }

    def next_rate(self, rows: Mapping[str, Sequence[Row]], settings: Selection) -> float | None:
        """A higher rate, where the highest rate tried is the best."""
        measured = self.measured(rows)
        best = _best(measured)
        rate = dict(best).get("rate")
        if rate is None or not math.isfinite(measured[best]):
            return None
        farther = settings.after(rate)
        known = {dict(values)["rate"] for values in measured}
        return None if farther in known else farther


def _choose_held_out(protocols: dict[str, Protocol], runner: Runner, settings: Selection) -> dict[str, _Chosen] | None:
    """Choose what is open by the accuracy on held-out training data; by digest. None if time ran out meanwhile."""
    trials: dict[str, _Trials] = {}
    for digest, protocol in protocols.items():
        if protocol.training.holdout:
            missing = " and ".join(name.replace("_", " ") for name, _ in next(iter(_candidates(protocol, settings))))
            raise ProtocolError(
                f"a protocol with a holdout of its own would choose its {missing} on examples it is evaluated on. "
                f"Give the {missing}, or leave out the holdout."
            )
        holdout = max(1, round(settings.holdout_share * len(runner.dataset(protocol.data).train)))
        trials[digest] = _Trials(protocol, holdout, settings.rate_epochs or protocol.training.epochs)
        trials[digest].add(settings)
    rows: dict[str, list[Row]] = {}
    growing = trials
    while growing:
        wanted = {digest: one.trained for digest, one in growing.items()}
        found = run_trials(wanted, runner, settings.rate_replicas)
        if found is None:
            return None
        rows |= found
        growing = _go_on(growing, rows, runner, settings)
    return {digest: _chosen(one, rows, runner) for digest, one in trials.items()}


def _go_on(
    trials: Mapping[str, _Trials], rows: Mapping[str, Sequence[Row]], runner: Runner, settings: Selection
) -> dict[str, _Trials]:
    """Add a higher rate to the trials of which the highest rate is the best, and return these."""
    growing = {}
    for digest, one in trials.items():
        rate = one.next_rate(rows, settings)
        if rate is not None:
            runner.display.note(f"{one.protocol.label}: the highest rate is the best so far, {rate} is tried.")
            one.add(replace(settings, rates=(rate,), farther=()))
            growing[digest] = one
    return growing


def _best(measured: Mapping[Values, float]) -> Values:
    return max(measured, key=lambda one: measured[one] if math.isfinite(measured[one]) else -math.inf)


def _chosen(trials: _Trials, rows: Mapping[str, Sequence[Row]], runner: Runner) -> _Chosen:
    measured = trials.measured(rows)
    best = _best(measured)
    names = [name for name, _ in best]
    if not math.isfinite(measured[best]):
        taken = " and ".join(str(value) for _, value in best)
        advice = "Try smaller ones." if "step_size" in names else "Try a smaller step size."
        runner.display.note(f"Every {' and '.join(names)} diverged, {taken} is taken. {advice}")
    evidence = [
        {**dict(values), "accuracy": accuracy, "n": len(rows[trials.trained[values].digest])}
        for values, accuracy in measured.items()
    ]
    kind = "together" if "step_size" in names else names[0]
    return _Chosen(trials.candidates[best], dict(best) | {f"{kind}_trials": evidence})


def run_trials(
    trials: Mapping[str, Mapping[Any, Protocol]], runner: Runner, replicas: int
) -> dict[str, list[Row]] | None:
    """Train all candidates side by side, and wait for those of other processes; the rows of each by digest."""
    protocols = {p.digest: p for candidates in trials.values() for p in candidates.values()}
    units = [Unit(protocol, replica) for protocol in protocols.values() for replica in range(replicas)]
    if not units:
        return {}
    with runner.store() as store:
        for protocol in protocols.values():
            store.add(protocol)
            store.write_note(protocol.digest, "trial", True)
    waiting = False
    while (outcome := runner.run(units)).left:
        if outcome.stopped or (runner.deadline is not None and time.monotonic() + WAIT_S > runner.deadline):
            return None
        if not waiting:
            runner.display.note(f"Waiting for trials that other processes train: {outcome.left} left.")
        waiting = True
        _wait()
    with runner.store(read_only=True) as store:
        return {digest: [row for row in store.rows(digest) if row.key.replica < replicas] for digest in protocols}


def _wait() -> None:
    time.sleep(WAIT_S)


def _mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return sum(value(row) for row in rows) / len(rows)
