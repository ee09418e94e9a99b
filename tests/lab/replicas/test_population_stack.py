"""A population in a stack: where members start, who takes over from whom, and that it resumes bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from stack_cases import CPU, METHODS, assert_close, assert_equal, bright, settings, stack_of, tensors_of

from dropconnectpp.lab.config.by_epoch import ByEpoch
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.population import Population
from dropconnectpp.lab.config.protocol import Evaluation, Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.replicas import evaluation
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.population import PopulationStack, judged_points

DROPCONNECT = Method(kind="dropconnect")
MEMBERS = 4


def protocol_of(method: Method = DROPCONNECT, **changes: Any) -> Protocol:
    population = Population(**{"members": MEMBERS, "every": 1, "wait": 0.0, "step_sizes": (0.01, 0.1), **changes})
    base = settings(method, step_size=None, epochs=3, holdout=10)
    return replace(base, population=population, evaluation=Evaluation(every=population.every))


def population_of(protocol: Protocol) -> PopulationStack:
    units = [Unit(protocol, replica) for replica in range(protocol.population.members)]
    return PopulationStack(units, bright(), CPU)


def points(*scores: float, nlls: tuple[float, ...] = ()) -> list[dict[str, float]]:
    nlls = nlls or (1.0,) * len(scores)
    return [{"score": score, "nll": nll} for score, nll in zip(scores, nlls, strict=True)]


def test_members_start_evenly_over_the_ranges():
    stack = population_of(protocol_of(rates=(0.1, 0.9)))
    steps, rates = (sorted(row) for row in stack.members.values.tolist())
    width = math.log(10) / MEMBERS
    expected = [0.01 * math.exp(width * (place + 0.5)) for place in range(MEMBERS)]
    assert steps == pytest.approx(expected, rel=1e-5)
    odds = [math.log(rate / (1 - rate)) for rate in rates]
    assert [b - a for a, b in pairwise(odds)] == pytest.approx([2 * math.log(9) / MEMBERS] * 3, rel=1e-4)
    again = population_of(protocol_of(rates=(0.1, 0.9)))
    assert torch.equal(stack.members.values, again.members.values)


def test_a_member_that_is_left_alone_trains_as_a_network_with_its_settings_does():
    stack = population_of(protocol_of(Method(kind="dropout")))
    values = stack.members.values.clone()
    stack.train_epoch()
    for row in range(MEMBERS):
        step_size, rate = values[:, row].tolist()
        alone = stack_of(Unit(settings(Method(kind="dropout", rate=rate), step_size=step_size, holdout=10), row))
        alone.train_epoch()
        assert_equal(tensors_of(stack, row), tensors_of(alone, 0))


@pytest.mark.parametrize("name", ["dropconnect", "bbvi", "straight-through"])
def test_the_worst_takes_over_all_of_the_best_and_disturbs_its_settings(name):
    method = replace(METHODS[name], rate=None)
    stack = population_of(protocol_of(method, disturbance=0.3))
    stack.train_epoch()
    before, values = [tensors_of(stack, row) for row in range(MEMBERS)], stack.members.values.clone()
    parents = stack.judge(points(50.0, 10.0, 70.0, 60.0))
    assert parents == [0, 2, 2, 3]
    for row, parent in enumerate(parents):
        assert_equal(tensors_of(stack, row), {name: value.clone() for name, value in before[parent].items()})
    for total in stack.accumulators.values():
        assert torch.equal(total[1], total[2])
    for number, setting in enumerate(stack.members.ranges):
        old, new = values[number, 2].item(), stack.members.values[number, 1].item()
        scale = (lambda v: math.log(v / (1 - v))) if setting == "rate" else math.log
        assert 0 < abs(scale(new) - scale(old)) <= 0.3001
    unchanged = [0, 2, 3]
    assert torch.equal(stack.members.values[:, unchanged], values[:, unchanged])
    stack.train_epoch()
    assert not torch.equal(stack.parameters["dense.weight"][1], stack.parameters["dense.weight"][2])
    assert torch.equal(stack.members.lines[:, 1, 0], values[:, 2])  # what its weights were trained with
    assert torch.equal(stack.members.paths[:, 1, 0], values[:, 1])  # what it trained with itself


def test_of_equals_the_lower_nll_is_better_and_what_diverged_is_the_worst():
    stack = population_of(protocol_of())
    stack.train_epoch()
    assert stack.judge(points(50.0, 50.0, 50.0, math.nan, nlls=(1.0, 0.9, 1.1, 0.1))) == [0, 1, 2, 1]
    stack.train_epoch()
    assert stack.judge(points(50.0, 50.0, 50.0, 50.0, nlls=(1.0, 1.1, math.nan, 0.9))) == [0, 1, 3, 3]


def test_nobody_takes_over_after_the_last_epoch_or_between_judgements():
    stack = population_of(protocol_of(every=2))
    stack.train_epoch()
    assert stack.judge(points(1.0, 2.0, 3.0, 4.0)) == [0, 1, 2, 3]
    stack.train_epoch()
    assert stack.judge(points(1.0, 2.0, 3.0, 4.0)) == [3, 1, 2, 3]
    stack.train_epoch()
    assert stack.judge(points(1.0, 2.0, 3.0, 4.0)) == [0, 1, 2, 3]
    assert stack.members.parents.tolist() == [[3, 1, 2, 3], [0, 1, 2, 3]]


def test_a_schedule_replayed_gives_the_network_that_found_it():
    """Without a takeover in between: a line is then a path, and the replay sees the same images in the same order."""
    protocol = protocol_of(disturbance=0.0)
    stack = population_of(protocol)
    for score in ((4.0, 3.0, 2.0, 1.0), (4.0, 3.0, 2.0, 1.0)):
        stack.train_epoch()
        stack.judge(points(*score))
    stack.train_epoch()
    line = stack.members.told(0)["line"]
    at = ByEpoch(at=(0, 1, 2), **{name: tuple(values) for name, values in line.items()})
    base = replace(protocol, population=None, by_epoch=at)
    alone = stack_of(Unit(base, 0))
    for _ in range(3):
        alone.train_epoch()
    assert_equal(tensors_of(stack, 0), tensors_of(alone, 0))


def score_of(stack: PopulationStack) -> list[dict[str, float]]:
    return points(*(-stack.loss_sum).tolist())


@pytest.mark.parametrize("method", [DROPCONNECT, Method(estimator="straight-through", hyper="optimal")])
def test_a_resumed_population_is_the_one_that_was_never_stopped(method):
    whole, first = population_of(protocol_of(method)), population_of(protocol_of(method))
    for stack, epochs in ((whole, 3), (first, 1)):
        for _ in range(epochs):
            stack.train_epoch()
            stack.judge(score_of(stack))
    second = population_of(protocol_of(method))
    second.load_state(first.state())
    for _ in range(2):
        second.train_epoch()
        second.judge(score_of(second))
    for row in range(MEMBERS):
        assert_equal(tensors_of(second, row), tensors_of(whole, row))
        assert second.members.told(row) == whole.members.told(row)
    assert torch.equal(second.members.values, whole.members.values)


def test_a_resumed_member_is_measured_as_it_was_trained():
    stack = population_of(protocol_of())
    for _ in range(3):
        stack.train_epoch()
        stack.judge(score_of(stack))
    rates = stack.segments[0].regulariser.rates.clone()
    resumed = population_of(protocol_of())
    resumed.load_state(stack.state())
    assert torch.equal(resumed.segments[0].regulariser.rates, rates)
    assert torch.equal(resumed.members.values, stack.members.values)
    assert resumed.epoch == 3


def test_a_population_is_trained_whole():
    protocol = protocol_of()
    with pytest.raises(ProtocolError, match="a population of 4 is trained as one stack, in order"):
        PopulationStack([Unit(protocol, 1), Unit(protocol, 0)], bright(), CPU)


def test_the_judge_may_look_at_few_connections():
    protocol = protocol_of(Method(estimator="straight-through", hyper="optimal", logit_step=10.0), keep=0.1)
    stack = population_of(protocol)
    stack.train_epoch()
    found = judged_points(stack, protocol.evaluation)
    pruned = evaluation.final(stack, replace(protocol.evaluation, shares=(0.1,)))
    ranked = [next(e for e in one["pruning"] if e["score"] == "product")["accuracy"] for one in pruned]
    assert [point["score"] for point in found] == ranked
    assert ranked != [point["accuracy"] for point in found]


def test_nobody_takes_over_in_the_first_epochs_but_all_are_judged():
    stack = population_of(protocol_of(wait=0.5))
    found = []
    for _ in range(3):
        stack.train_epoch()
        found.append(stack.judge(points(1.0, 2.0, 3.0, 4.0)))
    assert found == [[0, 1, 2, 3], [3, 1, 2, 3], [0, 1, 2, 3]]
    assert stack.members.scores.tolist() == [[1.0, 2.0, 3.0, 4.0]] * 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method", [DROPCONNECT, Method(estimator="straight-through", hyper="optimal", logit_step=10.0)]
)
def test_a_graph_goes_on_after_a_takeover(method):
    """Captured once, it reads the weights, sums and settings that were copied into its memory."""
    protocol = replace(protocol_of(method), precision="mixed")
    units = [Unit(protocol, replica) for replica in range(MEMBERS)]
    graph, eager = (PopulationStack(units, bright(), torch.device("cuda"), graph=graph) for graph in (True, False))
    captured = []
    for scores in ((4.0, 1.0, 3.0, 2.0), (1.0, 3.0, 4.0, 2.0), (1.0, 2.0, 3.0, 4.0)):
        for stack in (graph, eager):
            stack.train_epoch()
            stack.judge(points(*scores))
        captured.append(graph._graph)
    assert graph.fused
    assert captured[0] is not None
    assert all(one is captured[0] for one in captured)
    for row in range(MEMBERS):
        assert graph.members.told(row) == eager.members.told(row)
        assert_close(tensors_of(graph, row), tensors_of(eager, row), 5e-2)
