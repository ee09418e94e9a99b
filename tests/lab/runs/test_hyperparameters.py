"""Choosing step sizes and rates: by which numbers, on which examples, stored, stopped and gone on with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_cases import Diary
from tiny_cases import EVALUATION, ONE_LAYER

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Protocol, Training
from dropconnectpp.lab.config.selection import Selection
from dropconnectpp.lab.config.settings import ProtocolError, from_dict
from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack
from dropconnectpp.lab.runs import hyperparameters as module
from dropconnectpp.lab.runs.hyperparameters import PROVISIONAL_RATE, QUICK, choose_hyperparameters
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.runner import Outcome, Runner
from dropconnectpp.lab.runs.store import Row

CPU = torch.device("cpu")
OPEN = Protocol(
    data="tiny",
    method=Method(kind="dropconnect"),
    architecture=ONE_LAYER,
    training=Training(batch_size=16, epochs=3),
    evaluation=EVALUATION,
)
PLAIN = replace(OPEN, method=Method(kind="none"))
SETTINGS = Selection(step_sizes=(0.001, 0.05), step_replicas=2, rates=(0.2, 0.6), rate_replicas=2, rate_epochs=1)


class Untouchable:
    """A split that must not be looked at."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the test set was touched: {name}")


def marked(test_seed: int = 1, count: int = 80) -> Dataset:
    def split(seed: int, count: int) -> Split:
        images = np.random.default_rng(seed).integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
        labels = np.random.default_rng(seed + 100).integers(0, 3, count)
        images[np.arange(count), 0, labels] = 255  # something to learn
        return Split(images, labels)

    train, test = split(0, count), split(test_seed, 20)
    return Dataset("tiny", train, test, ("a", "b", "c"), "", "", Provenance("made up", verified=False))


class Scripted(Runner):
    """Writes down what it is told instead of training."""

    script: Callable[[Unit], dict[str, Any]]

    def run(self, units: Sequence[Unit]) -> Outcome:
        with self.store() as store:
            for unit in units:
                store.add(unit.protocol)
                if store.claim([unit.key], self.owner):
                    results = self.script(unit)
                    status = "diverged" if "diverged_at" in results else "done"
                    store.finish(unit.key, self.owner, status, results=results, seconds=0.0, device="none")
        return Outcome(len(units), 0, False)


def make(out: Path, dataset: Dataset | None = None, **options: Any) -> Runner:
    found = marked() if dataset is None else dataset
    return Runner(out, CPU, lambda _: found, Diary(), **options)


def scripted(out: Path, script: Callable[[Unit], dict[str, Any]], count: int = 80) -> Scripted:
    runner = Scripted(out, CPU, lambda _: marked(count=count), Diary())
    runner.script = script
    return runner


def chosen(protocol: Protocol, runner: Runner, settings: Selection = SETTINGS) -> Protocol:
    found = choose_hyperparameters([protocol], runner, settings)
    assert found is not None
    return found[protocol.digest]


def evidence(runner: Runner, protocol: Protocol, way: str = "selection") -> dict[str, Any]:
    with runner.store(read_only=True) as store:
        note: dict[str, Any] = store.notes()[(protocol.digest, way)]
        return note


def rows(runner: Runner) -> list[Row]:
    with runner.store(read_only=True) as store:
        return store.rows()


def groups(runner: Runner) -> list[int]:
    assert isinstance(runner.display, Diary)
    return [replicas for replicas, _ in runner.display.groups]


# ------------------------------------------------------------------------------------- what is chosen


def test_the_step_size_with_the_smallest_mean_training_loss_is_chosen(tmp_path):
    losses = {0.005: (1.0, 1.0, 1.3), 0.01: (0.9, 1.0, 1.1), 0.05: (0.1, 1.5, 1.5)}
    runner = scripted(tmp_path, lambda u: {"losses": [9.0, losses[u.protocol.training.step_size or 0.0][u.replica]]})
    found = chosen(PLAIN, runner, Selection())
    assert found == replace(PLAIN, training=replace(PLAIN.training, step_size=0.01))


def test_the_last_loss_counts_not_the_first(tmp_path):
    def script(unit: Unit) -> dict[str, Any]:
        return {"losses": [0.1, 2.0] if unit.protocol.training.step_size == 0.001 else [5.0, 1.0]}

    assert chosen(PLAIN, scripted(tmp_path, script)).training.step_size == 0.05


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_size_at_which_one_replica_diverges_is_never_chosen(tmp_path, bad):
    def script(unit: Unit) -> dict[str, Any]:
        if unit.protocol.training.step_size == 0.001:
            return {"losses": [100.0]}
        return {"losses": [bad], "diverged_at": 1} if unit.replica else {"losses": [0.01]}

    runner = scripted(tmp_path, script)
    assert chosen(PLAIN, runner).training.step_size == 0.001
    assert not math.isfinite(evidence(runner, PLAIN)["step_trials"][1]["loss"])


def test_where_all_diverge_the_first_is_taken_and_the_evidence_says_so(tmp_path):
    runner = scripted(tmp_path, lambda _: {"losses": [math.nan], "diverged_at": 1})
    assert chosen(PLAIN, runner).training.step_size == 0.001
    assert all(math.isnan(trial["loss"]) for trial in evidence(runner, PLAIN)["step_trials"])


def test_the_rate_with_the_best_held_out_accuracy_is_chosen(tmp_path):
    accuracies = {0.2: (60.0, 70.0), 0.6: (90.0, 41.0)}

    def script(unit: Unit) -> dict[str, Any]:
        by_replica = accuracies.get(unit.protocol.method.rate or 0.0, (0.0, 0.0))
        return {"losses": [1.0], "accuracy": by_replica[unit.replica]}

    runner = scripted(tmp_path, script)
    assert chosen(OPEN, runner).method.rate == 0.6
    assert [trial["accuracy"] for trial in evidence(runner, OPEN)["rate_trials"]] == [65.0, 65.5]


def by_rate(accuracies: dict[float, float]) -> Callable[[Unit], dict[str, Any]]:
    return lambda unit: {"losses": [1.0], "accuracy": accuracies[unit.protocol.method.rate or 0.0]}


FARTHER = replace(SETTINGS, farther=(0.8, 0.9, 0.95), step_sizes=(0.01,), rate_replicas=1)


@pytest.mark.parametrize(
    ("accuracies", "tried", "best"),
    [
        ({0.5: 0.0, 0.2: 60.0, 0.6: 59.0}, [0.2, 0.6], 0.2),
        ({0.5: 0.0, 0.2: 60.0, 0.6: 61.0, 0.8: 60.5}, [0.2, 0.6, 0.8], 0.6),
        ({0.5: 0.0, 0.2: 60.0, 0.6: 61.0, 0.8: 62.0, 0.9: 61.5}, [0.2, 0.6, 0.8, 0.9], 0.8),
        ({0.5: 0.0, 0.2: 1.0, 0.6: 2.0, 0.8: 3.0, 0.9: 4.0, 0.95: 5.0}, [0.2, 0.6, 0.8, 0.9, 0.95], 0.95),
    ],
)
def test_where_the_highest_rate_is_the_best_a_higher_one_is_tried(tmp_path, accuracies, tried, best):
    runner = scripted(tmp_path, by_rate(accuracies))
    assert chosen(OPEN, runner, FARTHER).method.rate == best
    found = evidence(runner, OPEN)
    assert found["rate"] == best
    assert [one["rate"] for one in found["rate_trials"]] == tried
    assert [one["accuracy"] for one in found["rate_trials"]] == [accuracies[rate] for rate in tried]
    notes = [f"DropConnect: the highest rate is the best so far, {rate} is tried." for rate in tried[2:]]
    assert isinstance(runner.display, Diary)
    assert runner.display.notes == notes


def test_rates_of_ones_own_are_not_gone_beyond_unless_asked(tmp_path):
    accuracies = {0.2: 1.0, 0.5: 0.0, 0.6: 2.0}
    assert chosen(OPEN, scripted(tmp_path, by_rate(accuracies))).method.rate == 0.6
    assert Selection(rates=(0.2, 0.6)).after(0.6) is None
    assert Selection(farther=()).after(0.8) is None


def test_where_the_highest_rates_diverge_none_higher_is_tried(tmp_path):
    def script(unit: Unit) -> dict[str, Any]:
        if unit.protocol.method.rate == PROVISIONAL_RATE:
            return {"losses": [1.0], "accuracy": 0.0}
        return {"losses": [math.nan], "diverged_at": 1}

    runner = scripted(tmp_path, script)
    chosen(OPEN, runner, FARTHER)
    assert [one["rate"] for one in evidence(runner, OPEN)["rate_trials"]] == [0.2, 0.6]


def test_together_a_higher_rate_is_tried_with_every_step_size(tmp_path):
    def script(unit: Unit) -> dict[str, Any]:
        training, method = unit.protocol.training, unit.protocol.method
        return {"losses": [1.0], "accuracy": 100 * (method.rate or 0.0) + (training.step_size == 0.05)}

    runner = scripted(tmp_path, script)
    found = chosen(OPEN, runner, replace(TOGETHER, farther=(0.7,)))
    assert (found.training.step_size, found.method.rate) == (0.05, 0.7)
    tried = [(one["step_size"], one["rate"]) for one in evidence(runner, OPEN, "selection together")["together_trials"]]
    assert tried[-2:] == [(0.001, 0.7), (0.05, 0.7)]


def test_a_stop_before_a_higher_rate_keeps_the_trials_and_the_next_call_goes_on(tmp_path):
    made: list[float] = []

    def script(unit: Unit) -> dict[str, Any]:
        made.append(unit.protocol.method.rate or 0.0)
        return {"losses": [1.0], "accuracy": made[-1]}

    class Stops(Scripted):
        def run(self, units: Sequence[Unit]) -> Outcome:
            if any(unit.protocol.method.rate == 0.8 for unit in units):
                return Outcome(0, 1, True)
            return super().run(units)

    runner = scripted(tmp_path, script)
    stopped = Stops(tmp_path, CPU, lambda _: marked(), Diary())
    stopped.script = script
    assert choose_hyperparameters([OPEN], stopped, FARTHER) is None
    assert chosen(OPEN, runner, FARTHER).method.rate == 0.95
    assert made == [PROVISIONAL_RATE, PROVISIONAL_RATE, 0.2, 0.6, 0.8, 0.9, 0.95]  # two replicas for the step size


def test_a_rate_at_which_one_replica_diverges_is_never_chosen(tmp_path):
    def script(unit: Unit) -> dict[str, Any]:
        if unit.protocol.method.rate == 0.2 and unit.replica:
            return {"losses": [math.nan], "diverged_at": 1}
        return {"losses": [1.0], "accuracy": 99.0 if unit.protocol.method.rate == 0.2 else 10.0}

    assert chosen(OPEN, scripted(tmp_path, script)).method.rate == 0.6


def test_real_trainings_prefer_a_step_size_that_learns(tmp_path):
    runner = make(tmp_path)
    found = chosen(PLAIN, runner, replace(SETTINGS, step_sizes=(1e-7, 0.05)))
    assert found.training.step_size == 0.05
    slow, fast = evidence(runner, PLAIN)["step_trials"]
    assert fast["loss"] < slow["loss"]


# ----------------------------------------------------------------------------------- how it is tried


def trials(runner: Runner) -> list[Protocol]:
    return [from_dict(Protocol, row.protocol.settings) for row in rows(runner) if row.key.replica == 0]


def measured(_: Unit) -> dict[str, Any]:
    return {"losses": [1.0], "accuracy": 50.0}


def test_step_sizes_are_tried_for_a_few_epochs_at_a_provisional_rate(tmp_path):
    runner = scripted(tmp_path, measured)
    chosen(OPEN, runner, replace(SETTINGS, step_epochs=2))
    steps = [p for p in trials(runner) if not p.training.holdout]
    assert sorted(p.training.step_size or 0.0 for p in steps) == [0.001, 0.05]
    assert {(p.training.epochs, p.method.rate, p.evaluation) for p in steps} == {(2, PROVISIONAL_RATE, QUICK)}


def test_a_short_experiment_has_no_longer_trials(tmp_path):
    runner = scripted(tmp_path, measured)
    chosen(PLAIN, runner, replace(SETTINGS, step_epochs=50))
    assert {p.training.epochs for p in trials(runner)} == {3}


@pytest.mark.parametrize(("rate_epochs", "expected"), [(None, 3), (1, 1)])
def test_rates_are_tried_at_the_chosen_step_size_on_held_out_examples(tmp_path, rate_epochs, expected):
    runner = scripted(tmp_path, measured)
    chosen(OPEN, runner, replace(SETTINGS, rate_epochs=rate_epochs, holdout_share=0.25))
    found = [p for p in trials(runner) if p.training.holdout]
    assert sorted(p.method.rate or 0.0 for p in found) == [0.2, 0.6]
    assert {(p.training.epochs, p.training.holdout, p.training.step_size) for p in found} == {(expected, 20, 0.001)}


def test_a_fixed_rate_is_kept_and_used_in_the_trials(tmp_path):
    fixed = replace(OPEN, method=replace(OPEN.method, rate=0.3))
    runner = scripted(tmp_path, measured)
    assert chosen(fixed, runner).method.rate == 0.3
    assert {(p.method.rate, p.training.holdout) for p in trials(runner)} == {(0.3, 0)}
    assert evidence(runner, fixed)["rate_trials"] == []


def test_an_open_logit_step_is_chosen_as_a_rate_is(tmp_path):
    open_step = replace(PLAIN, method=Method(logit_step=None, hyper="optimal"))
    accuracies = {1.0: (70.0, 71.0), 10.0: (72.0, 73.0), 100.0: (75.0, 60.0)}

    def script(unit: Unit) -> dict[str, Any]:
        step = unit.protocol.method.gate_step
        return {"losses": [1.0], "accuracy": accuracies[step][unit.replica]}

    runner = scripted(tmp_path, script)
    settings = replace(SETTINGS, logit_steps=(1.0, 10.0, 100.0), rate_replicas=2)
    found = chosen(open_step, runner, settings)
    assert found.method == Method(logit_step=10.0, hyper="optimal")
    assert found.complete
    note = evidence(runner, open_step)
    assert note["logit_step"] == 10.0
    assert [(one["logit_step"], one["accuracy"]) for one in note["logit_step_trials"]] == [
        (1.0, 70.5), (10.0, 72.5), (100.0, 67.5),
    ]  # fmt: skip
    tried = {(p.method.logit_step, bool(p.training.holdout)) for p in trials(runner)}
    assert tried == {(1.0, False), (1.0, True), (10.0, True), (100.0, True)}  # step sizes first, at a logit step of 1


def test_an_open_logit_step_needs_values_to_try(tmp_path):
    open_step = replace(PLAIN, method=Method(logit_step=None))
    with pytest.raises(ProtocolError, match="logit_step is open"):
        chosen(open_step, scripted(tmp_path, measured))
    with pytest.raises(ProtocolError, match="logit_steps must be positive"):
        Selection(logit_steps=(0.0,))


TOGETHER = replace(SETTINGS, together=True, holdout_share=0.25)


def test_step_size_and_rate_may_be_chosen_together_on_held_out_examples(tmp_path):
    accuracies = {(0.001, 0.2): 60.0, (0.001, 0.6): 50.0, (0.05, 0.2): 40.0, (0.05, 0.6): 61.0}

    def script(unit: Unit) -> dict[str, Any]:
        training, method = unit.protocol.training, unit.protocol.method
        found = accuracies.get((training.step_size or 0.0, method.rate or 0.0), 0.0)
        return {"losses": [training.step_size], "accuracy": found + unit.replica}

    runner = scripted(tmp_path, script)
    found = chosen(OPEN, runner, TOGETHER)
    assert (found.training.step_size, found.method.rate) == (0.05, 0.6)
    assert found == replace(
        OPEN, training=replace(OPEN.training, step_size=0.05), method=replace(OPEN.method, rate=0.6)
    )
    note = evidence(runner, OPEN, "selection together")
    assert (note["resolved"], note["step_size"], note["rate"]) == (found.digest, 0.05, 0.6)
    assert (note["step_trials"], note["rate_trials"]) == ([], [])
    tried = {(one["step_size"], one["rate"]): one["accuracy"] - 0.5 for one in note["together_trials"]}
    assert tried == accuracies
    assert {(p.training.holdout, p.training.epochs) for p in trials(runner)} == {(20, 1)}
    assert chosen(OPEN, runner).training.step_size == 0.001  # the paper's way is another choice, and noted apart
    assert evidence(runner, OPEN, "selection together") == note


def test_together_a_method_without_a_rate_chooses_its_step_size_on_held_out_examples_too(tmp_path):
    def script(unit: Unit) -> dict[str, Any]:
        fast = unit.protocol.training.step_size == 0.05
        return {"losses": [0.1 if fast else 1.0], "accuracy": 50.0 if fast else 60.0}

    runner = scripted(tmp_path, script)
    assert chosen(PLAIN, runner, TOGETHER).training.step_size == 0.001
    assert [one["step_size"] for one in evidence(runner, PLAIN, "selection together")["together_trials"]] == [
        0.001,
        0.05,
    ]
    assert chosen(PLAIN, runner).training.step_size == 0.05


def test_together_what_is_given_is_not_tried(tmp_path):
    fixed = replace(OPEN, training=replace(OPEN.training, step_size=0.02))
    runner = scripted(tmp_path, measured)
    assert chosen(fixed, runner, TOGETHER).method.rate == 0.2
    assert [one["rate"] for one in evidence(runner, fixed, "selection together")["rate_trials"]] == [0.2, 0.6]
    open_step = replace(PLAIN, method=Method(logit_step=None))
    chosen(open_step, runner, replace(TOGETHER, logit_steps=(1.0, 10.0)))
    note = evidence(runner, open_step, "selection together")
    assert [(one["step_size"], one["logit_step"]) for one in note["together_trials"]] == [
        (0.001, 1.0), (0.001, 10.0), (0.05, 1.0), (0.05, 10.0),
    ]  # fmt: skip


def test_where_all_together_diverge_the_first_is_taken_and_it_is_said(tmp_path):
    runner = scripted(tmp_path, lambda _: {"losses": [math.nan], "diverged_at": 1})
    found = chosen(OPEN, runner, TOGETHER)
    assert (found.training.step_size, found.method.rate) == (0.001, 0.2)
    assert isinstance(runner.display, Diary)
    assert runner.display.notes == ["Every step_size and rate diverged, 0.001 and 0.2 is taken. Try smaller ones."]


def test_real_trainings_are_chosen_together(tmp_path):
    runner = make(tmp_path)
    found = chosen(OPEN, runner, replace(TOGETHER, step_sizes=(1e-7, 0.05), rates=(0.2,), rate_epochs=12))
    assert found.training.step_size == 0.05
    slow, fast = evidence(runner, OPEN, "selection together")["together_trials"]
    assert fast["accuracy"] > slow["accuracy"]


def test_a_fixed_step_size_is_kept_and_only_the_rate_tried(tmp_path):
    fixed = replace(OPEN, training=replace(OPEN.training, step_size=0.02))
    runner = scripted(tmp_path, measured)
    assert chosen(fixed, runner).training.step_size == 0.02
    assert all(p.training.holdout and p.training.step_size == 0.02 for p in trials(runner))


def test_complete_protocols_pass_through_and_train_nothing(tmp_path):
    complete = replace(PLAIN, training=replace(PLAIN.training, step_size=0.01))
    runner = make(tmp_path)
    assert choose_hyperparameters([complete], runner, SETTINGS) == {complete.digest: complete}
    assert (groups(runner), rows(runner)) == ([], [])
    note = evidence(runner, complete)
    assert (note["resolved"], note["step_trials"], note["rate_trials"]) == (complete.digest, [], [])


def test_several_protocols_are_chosen_for_side_by_side(tmp_path):
    runner = make(tmp_path)
    found = choose_hyperparameters([PLAIN, OPEN], runner, SETTINGS)
    assert found is not None
    assert list(found) == [PLAIN.digest, OPEN.digest]
    assert all(protocol.complete for protocol in found.values())
    assert found[PLAIN.digest].method == PLAIN.method
    assert groups(runner) == [8, 4]  # two methods x two step sizes x two replicas, then two rates x two


def test_of_a_tiny_data_set_at_least_one_example_is_held_out(tmp_path):
    runner = scripted(tmp_path, measured, count=17)
    chosen(OPEN, runner, replace(SETTINGS, holdout_share=0.01))
    assert {p.training.holdout for p in trials(runner)} == {0, 1}


# -------------------------------------------------------------------------------- never the test set


def test_rates_are_chosen_without_a_look_at_the_test_set(tmp_path):
    fixed = replace(OPEN, training=replace(OPEN.training, step_size=0.05))
    runner = make(tmp_path, replace(marked(), test=Untouchable()))
    assert chosen(fixed, runner).complete
    assert all(0.0 <= row.results["accuracy"] <= 100.0 for row in rows(runner))


def test_held_out_examples_are_training_examples_that_are_not_trained_on():
    dataset = replace(marked(), test=Untouchable())
    training = replace(OPEN.training, step_size=0.05, holdout=8)
    stack = Stack([Unit(replace(PLAIN, training=training), 0)], dataset, CPU)
    images = torch.from_numpy(dataset.train.images)
    where = [int((images == image).flatten(1).all(1).nonzero()) for image in stack.examples.test_images]
    assert sorted([*where, *stack.examples.rows.tolist()]) == list(range(80))


def test_choice_and_evidence_do_not_depend_on_the_test_set(tmp_path):
    runners = [make(tmp_path / name, marked(test_seed=seed)) for name, seed in (("one", 1), ("two", 2))]
    one, two = (chosen(OPEN, runner) for runner in runners)
    assert one == two
    assert evidence(runners[0], OPEN) == evidence(runners[1], OPEN)


# ------------------------------------------------------------------- stored, reused, stopped, waited for


def test_the_evidence_names_choice_trials_and_numbers(tmp_path):
    runner = make(tmp_path)
    found = chosen(OPEN, runner)
    note = evidence(runner, OPEN)
    assert note["resolved"] == found.digest
    assert (note["step_size"], note["rate"]) == (found.training.step_size, found.method.rate)
    assert [(trial["step_size"], trial["n"]) for trial in note["step_trials"]] == [(0.001, 2), (0.05, 2)]
    assert [(trial["rate"], trial["n"]) for trial in note["rate_trials"]] == [(0.2, 2), (0.6, 2)]
    with runner.store(read_only=True) as store:
        assert {OPEN.digest, found.digest} <= {protocol.digest for protocol in store.protocols()}


def test_trials_are_stored_rows_and_serve_again(tmp_path):
    first, again = make(tmp_path), make(tmp_path)
    found = chosen(OPEN, first)
    before = rows(first)
    assert len(before) == 8
    assert all(row.status == "done" for row in before)
    assert chosen(OPEN, again) == found
    assert groups(again) == []
    assert rows(again) == before


def test_only_as_many_replicas_as_asked_for_are_counted(tmp_path):
    script = [1.0, 1.0, 100.0]
    runner = scripted(tmp_path, lambda u: {"losses": [script[u.replica]]})
    chosen(PLAIN, runner, replace(SETTINGS, step_replicas=3))
    chosen(PLAIN, runner, replace(SETTINGS, step_replicas=2))
    assert [(trial["loss"], trial["n"]) for trial in evidence(runner, PLAIN)["step_trials"]] == [(1.0, 2), (1.0, 2)]


def test_a_stop_by_the_time_limit_gives_none_and_the_next_call_goes_on(tmp_path):
    stopped = make(tmp_path, deadline=time.monotonic() - 1.0)
    assert choose_hyperparameters([OPEN], stopped, SETTINGS) is None
    with stopped.store(read_only=True) as store:
        assert {name for _, name in store.notes()} == {"trial"}
    assert chosen(OPEN, make(tmp_path)) == chosen(OPEN, make(tmp_path.with_name("at-once")))


def test_a_stop_between_step_sizes_and_rates_keeps_the_step_trials(tmp_path):
    class Alarm(Diary):
        def group_finished(self) -> None:
            runner.deadline = 0.0

    runner = make(tmp_path)
    runner.display = Alarm()
    assert choose_hyperparameters([OPEN], runner, SETTINGS) is None
    assert len(rows(runner)) == 4
    later = make(tmp_path)
    assert chosen(OPEN, later).complete
    assert groups(later) == [4]


def test_trials_of_other_processes_are_waited_for(tmp_path, monkeypatch):
    other = make(tmp_path)
    busy = Unit(replace(PLAIN, training=replace(PLAIN.training, step_size=0.001, epochs=2), evaluation=QUICK), 0)
    with other.store() as store:
        store.add(busy.protocol)
        store.claim([busy.key], Owner.here())
    waits: list[None] = []

    def wait() -> None:
        waits.append(None)
        if len(waits) == 2:
            with other.store() as store:
                for row in store.rows(status="running"):
                    assert row.owner is not None
                    store.finish(row.key, row.owner, "done", results={"losses": [0.0]}, seconds=0.0, device="none")

    monkeypatch.setattr(module, "_wait", wait)
    runner = make(tmp_path)
    assert chosen(PLAIN, runner).training.step_size in SETTINGS.step_sizes
    assert len(waits) == 2
    assert isinstance(runner.display, Diary)
    assert runner.display.notes == ["Waiting for trials that other processes train: 1 left."]


def test_nobody_waits_beyond_the_time_limit(tmp_path, monkeypatch):
    class Busy(Runner):
        def run(self, units: Sequence[Unit]) -> Outcome:
            return Outcome(0, len(units), False)

    monkeypatch.setattr(module, "_wait", lambda: pytest.fail("waited"))
    runner = Busy(tmp_path, CPU, lambda _: marked(), Diary(), deadline=time.monotonic() + 0.5 * module.WAIT_S)
    assert choose_hyperparameters([PLAIN], runner, SETTINGS) is None


# ------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step_sizes": ()}, "step_sizes must be one or more positive numbers, got ()."),
        ({"step_sizes": (0.0, 0.1)}, "step_sizes must be one or more positive numbers"),
        ({"step_sizes": (math.nan,)}, "step_sizes must be one or more positive numbers"),
        ({"rates": ()}, "rates must be one or more numbers in [0, 1), got ()."),
        ({"rates": (0.5, 1.0)}, "rates must be one or more numbers in [0, 1), got (0.5, 1.0)."),
        ({"rates": (-0.1,)}, "rates must be one or more numbers in [0, 1)"),
        ({"farther": (0.8,)}, "farther must be rising numbers between the highest rate and 1, got (0.8,)."),
        ({"farther": (0.95, 0.9)}, "farther must be rising numbers between the highest rate and 1"),
        ({"farther": (0.9, 1.0)}, "farther must be rising numbers between the highest rate and 1"),
        ({"step_epochs": 0}, "step_epochs must be at least 1, got 0."),
        ({"step_replicas": 0}, "step_replicas must be at least 1, got 0."),
        ({"rate_epochs": 0}, "rate_epochs must be at least 1, got 0."),
        ({"rate_replicas": -1}, "rate_replicas must be at least 1, got -1."),
        ({"holdout_share": 0.0}, "holdout_share must lie in (0, 1), got 0.0."),
        ({"holdout_share": 1.0}, "holdout_share must lie in (0, 1), got 1.0."),
    ],
)
def test_settings_that_break_a_rule_are_refused(wrong, message):
    with pytest.raises(ProtocolError) as error:
        Selection(**wrong)
    assert message in str(error.value)


def test_a_holdout_of_its_own_and_an_open_rate_do_not_go_together(tmp_path):
    held_out = replace(OPEN, training=replace(OPEN.training, step_size=0.01, holdout=10))
    with pytest.raises(ProtocolError, match="choose its rate on examples it is evaluated on"):
        choose_hyperparameters([held_out], make(tmp_path), SETTINGS)


def test_the_error_names_what_is_open(tmp_path):
    held_out = replace(PLAIN, training=replace(PLAIN.training, step_size=None, holdout=10))
    with pytest.raises(ProtocolError, match=r"choose its step size on examples.*Give the step size, or"):
        choose_hyperparameters([held_out], make(tmp_path), TOGETHER)


def test_a_note_says_that_every_step_size_diverged(tmp_path):
    runner = make(tmp_path)
    choose_hyperparameters([PLAIN], runner, replace(SETTINGS, step_sizes=(1e30, 1e31)))
    assert isinstance(runner.display, Diary)
    assert any(note.startswith("Every step size diverged, 1e+30 is taken.") for note in runner.display.notes)
