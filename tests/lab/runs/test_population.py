"""Populations as runs: trained whole, resumed after kill -9 bit for bit, replayed, and never split."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layered_cases import PROTOCOL
from run_cases import Diary
from tiny_cases import EVALUATION, TINY, TWO_LAYERS, tiny

from dropconnectpp.lab.config.experiments import Experiment, from_file, population
from dropconnectpp.lab.config.method import METHODS, Method
from dropconnectpp.lab.config.notes import POPULATION
from dropconnectpp.lab.config.population import Population
from dropconnectpp.lab.config.protocol import Protocol, Training
from dropconnectpp.lab.config.pruning import Plan
from dropconnectpp.lab.config.settings import ProtocolError, from_dict
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.report import text
from dropconnectpp.lab.report.selection import select_experiments
from dropconnectpp.lab.runs import execution
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.population import find, with_population
from dropconnectpp.lab.runs.runner import Outcome, Runner
from dropconnectpp.lab.runs.store import Store
from scripts import ROOT

CPU = torch.device("cpu")
SETTINGS = Population(members=4, every=2, step_sizes=(0.01, 0.2), keep=0.1)
FILE = """
repeats = 2

[population]
members = 3
every = 1

[protocol]
data = "cifar10"

[[methods]]
kind = "dropout"

[[methods]]
kind = "dropconnect"
"""


def experiment_of(*methods: Method, epochs: int = 6, repeats: int = 2) -> Experiment:
    base = replace(TINY, architecture=TWO_LAYERS, evaluation=EVALUATION)
    training = replace(TINY.training, epochs=epochs, step_size=None)
    protocols = tuple(replace(base, method=method, training=training) for method in methods)
    return Experiment(protocols=protocols, repeats=repeats, population=SETTINGS)


EXPERIMENT = experiment_of(Method(kind="dropconnect"), METHODS["sparse"])


def make(out: Path, **options: Any) -> Runner:
    return Runner(out, CPU, tiny, Diary(), **options)


def content(out: Path) -> tuple[list[Any], dict[str, Any]]:
    """Everything but times: rows, and what was noted of the populations."""
    with Store.open(out / "results.sqlite", read_only=True) as store:
        found = store.content()
    rows = [(*row.key, row.status, json.dumps(row.results, sort_keys=True)) for row in found.rows]
    notes = {
        digest: {name: value for name, value in note.items() if name != "seconds"}
        for (digest, name), note in found.notes.items()
        if name == POPULATION
    }
    return rows, notes


def notes_of(out: Path) -> list[dict[str, Any]]:
    return list(content(out)[1].values())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("population")
    assert execution.train(EXPERIMENT, make(out))
    return out


def test_each_method_has_a_population_and_fresh_networks_by_its_schedule(finished):
    with Store.open(finished / "results.sqlite", read_only=True) as store:
        found = store.content()
    shown = select_experiments(found.rows, found.notes)
    assert [len(one.rows) for one in shown.experiments] == [2, 2]
    assert all(one.label.endswith("found by a population of 4") for one in shown.experiments)
    assert len(shown.trials) == 2
    for note in notes_of(finished):
        replay = from_dict(Protocol, found.protocols[note["resolved"]].settings)
        trial = from_dict(Protocol, found.protocols[note["population"]].settings)
        assert replay.training.holdout == 0
        assert trial.training.holdout == 6
        assert replay.by_epoch is not None
        for epoch in range(6):
            assert replay.by_epoch.in_epoch(epoch) == {name: line[epoch] for name, line in note["line"].items()}


def test_the_note_tells_the_whole_history(finished):
    note = next(one for one in notes_of(finished) if one["method"] == "DropConnect")
    assert (note["members"], note["every"], note["epochs"], note["keep"]) == (4, 2, 6, None)
    assert [len(path["rate"]) for path in note["paths"]] == [6] * 4
    assert [len(scores) for scores in note["scores"]] == [3] * 4
    assert note["score"] == max(scores[-1] for scores in note["scores"])
    for judgement in (0, 1):
        parents = [members[judgement] for members in note["parents"]]
        assert len(set(parents)) == 3  # one of four takes over from one of four
        scores = [members[judgement] for members in note["scores"]]
        (loser,) = (r for r, parent in enumerate(parents) if parent != r)
        assert scores[loser] == min(scores)
        assert scores[parents[loser]] == max(scores)
    assert [members[2] for members in note["parents"]] == [0, 1, 2, 3]


def test_the_judge_of_the_sparse_preset_keeps_few_weights(finished):
    with Store.open(finished / "results.sqlite", read_only=True) as store:
        note = next(one for one in notes_of(finished) if one["keep"] is not None)
        rows = store.rows(note["population"])
    assert note["keep"] == 0.1
    assert set(note["line"]) == {"step_size", "kl_weight"}
    for row in rows:
        pruned = [one["accuracy"] for one in row.results["pruning"] if one["score"] == "product"]
        assert row.results["population"]["scores"][-1] == pruned[0]


def test_a_member_has_the_past_of_its_weights(finished):
    with Store.open(finished / "results.sqlite", read_only=True) as store:
        note = next(one for one in notes_of(finished) if one["method"] == "DropConnect")
        rows = {row.key.replica: row.results for row in store.rows(note["population"])}
    last = [members[1] for members in note["parents"]]
    (loser,) = (r for r, parent in enumerate(last) if parent != r)
    winner = last[loser]
    assert rows[loser]["losses"][:4] == rows[winner]["losses"][:4]
    assert rows[loser]["losses"][4:] != rows[winner]["losses"][4:]


def test_a_finished_run_does_nothing_more(finished):
    again = make(finished)
    before = content(finished)
    assert execution.train(EXPERIMENT, again)
    assert again.display.groups == []  # type: ignore[attr-defined]
    assert content(finished) == before


# -------------------------------------------------------------------------------------------- kill -9

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dropconnectpp.lab.runs.population"])


def work(out: Path) -> None:
    torch.set_num_threads(1)
    execution.train(EXPERIMENT, make(out, checkpoint_s=0.0))


def start(out: Path) -> Any:
    process = PROCESSES.Process(target=work, args=(out,))
    process.start()
    return process


def test_killed_at_random_moments_it_ends_with_the_same_history_and_rows(finished, tmp_path):
    begun = time.monotonic()
    execution.train(EXPERIMENT, make(tmp_path / "timed", checkpoint_s=0.0))
    whole = time.monotonic() - begun
    assert content(tmp_path / "timed") == content(finished)
    moments, kills = random.Random(1), 0
    for _ in range(12):
        process = start(tmp_path / "killed")
        process.join(moments.uniform(0.0, 0.7) * whole)  # by the machine's own speed
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills >= 3, "the work was over too soon for this to test anything"
    process = start(tmp_path / "killed")
    process.join()
    assert process.exitcode == 0
    assert content(tmp_path / "killed") == content(finished)


# ------------------------------------------------------------------------------------ whole or not at all


def members_of(runner: Runner) -> list[Unit]:
    trial = with_population(EXPERIMENT.protocols[0], SETTINGS, 0.1, runner)
    return [Unit(trial, replica) for replica in range(4)]


def test_a_population_is_one_stack_whatever_its_size(tmp_path):
    runner = make(tmp_path, group=2)
    assert runner.run(members_of(runner)).left == 0
    assert runner.display.groups == [(4, 0)]  # type: ignore[attr-defined]


def test_a_population_of_which_another_process_holds_a_part_is_left_to_it(tmp_path):
    runner = make(tmp_path)
    units = members_of(runner)
    with runner.store() as store:
        store.add(units[0].protocol)
        store.claim([units[2].key], Owner.here())
    assert runner.run(units) == Outcome(finished=0, left=4, stopped=False)
    with runner.store(read_only=True) as store:
        assert [row.key.replica for row in store.rows() if row.owner == runner.owner] in ([], [2])


def test_a_member_whose_row_is_gone_is_made_again_with_all_others(finished, tmp_path):
    runner = make(tmp_path)
    units = members_of(runner)
    runner.run(units)
    before = content(tmp_path)
    with runner.store() as store:
        store._connection.execute("delete from run where replica = 1")  # type: ignore[attr-defined]
    again = make(tmp_path)
    assert again.run(units).left == 0
    assert again.display.groups == [(4, 0)]  # type: ignore[attr-defined]
    assert content(tmp_path) == before


def test_a_population_that_diverged_whole_is_told_of_and_not_replayed(tmp_path):
    runner = make(tmp_path)
    experiment = experiment_of(Method(kind="none"))
    experiment = replace(experiment, population=replace(SETTINGS, step_sizes=(1e29, 1e30)))
    assert execution.train(experiment, runner)
    assert any("every member of the population diverged" in note for note in runner.display.notes)  # type: ignore[attr-defined]
    assert notes_of(tmp_path) == []


def test_sparsity_plans_find_step_size_and_noise_and_are_judged_as_deployed(tmp_path):
    training = replace(PROTOCOL.training, step_size=None, epochs=4)
    protocol = replace(PROTOCOL, pruning=Plan(keep=0.3, logit_lr=0.3), training=training)
    settings = Population(members=3, every=2, step_sizes=(0.003, 0.03), rates=(0.05, 0.4), keep=0.1)
    experiment = Experiment(protocols=(protocol,), repeats=2, population=settings)
    assert execution.train(experiment, make(tmp_path))
    (note,) = notes_of(tmp_path)
    assert (note["keep"], set(note["line"])) == (None, {"step_size", "rate"})
    with Store.open(tmp_path / "results.sqlite", read_only=True) as store:
        members, found = store.rows(note["population"]), store.content()
    assert [row.results["population"]["scores"][-1] for row in members] == [row.results["accuracy"] for row in members]
    replay = from_dict(Protocol, found.protocols[note["resolved"]].settings)
    assert isinstance(replay.pruning, Plan)
    assert replay.pruning.noise == note["line"]["rate"][-1]
    shown = text(tmp_path / "results.sqlite")
    assert "Populations: schedules found" in shown
    assert "found by a population of 3" in shown


def test_nothing_is_found_where_nothing_is_done():
    assert find(EXPERIMENT.protocols[0], EXPERIMENT.protocols[0], []) is None


# ------------------------------------------------------------------------------------------- what to run


def test_a_file_says_what_a_population_is(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    found = from_file(tmp_path / "mine.toml")
    assert found.population == Population(members=3, every=1)
    assert [one.method.kind for one in found.protocols] == ["dropout", "dropconnect"]


def test_the_usual_population_is_a_fifth_of_the_grid():
    found = population("cifar10")
    assert found.population == Population(members=14, every=5, keep=0.05)
    labels = [one.method.label for one in found.protocols]
    assert labels == ["Dropout", "DropConnect", "DropConnect++ (per-example)", "DropConnect++ (sparse)"]
    assert found.repeats == 50
    for name in ("cifar10", "cifar100", "svhn", "fashion_mnist"):
        written = from_file(ROOT / "experiments" / "population" / f"{name}.toml")
        assert written == population(written.protocols[0].data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[population]\nmembers = 1.5", "population.members must be of type int, got 1.5"),
        ("population = 3", "population must be a table, under [population], got 3"),
        ("[population]\nsize = 3", "population.size is no setting. Known: disturbance, "),
        ("[population]\n[[methods]]\nkind = 'dropout'\nrate = 0.5", "a population finds step size and rate"),
        ("[[methods]]\nkind = 'dropconnect'\nby_epoch = 3", "methods.by_epoch must be a table, got 3"),
        (
            "[[methods]]\nkind = 'dropconnect'\nby_epoch = {at = [0], rates = [0.5]}",
            "methods.by_epoch.rates is no setting",
        ),
        ("[[methods]]\nkind = 'dropconnect'\nby_epoch = {at = [0], rate = [nan]}", "rate is the share dropped"),
        ("[[methods]]\nkind = 'dropconnect'\nby_epoch = {at = [0, 0.5], rate = [0.1, 0.2]}", "methods.by_epoch.at"),
    ],
)
def test_a_mistake_in_a_file_is_told(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ProtocolError, match=re.escape(message)):
        from_file(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    "changes",
    [
        {"method": Method(kind="dropout", rate=0.5)},
        {"training": Training(step_size=0.1)},
        {"training": Training(holdout=10)},
    ],
)
def test_what_a_population_finds_may_not_be_given(changes):
    protocol = replace(Protocol(method=Method(kind="dropout")), **changes)
    with pytest.raises(ProtocolError, match="a population finds step size and rate"):
        Experiment(protocols=(protocol,), population=SETTINGS)
