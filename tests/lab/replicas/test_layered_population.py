"""A population of sparsity plans: settings by epoch, takeovers of gates and prices, and resuming bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layered_cases import PROTOCOL, stack_of, train
from tiny_cases import tiny

from dropconnectpp.lab.config.by_epoch import ByEpoch
from dropconnectpp.lab.config.population import Population
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.pruning import GradualMagnitude, Plan
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.replicas.layered_population import LayeredPopulation, judged_as_deployed
from dropconnectpp.lab.replicas.network import Unit

CPU = torch.device("cpu")
PLAN = Plan(keep=0.3, logit_lr=0.3)
MEMBERS = 4
RISE = ByEpoch(at=(0, 3), rate=(0.1, 0.4), step_size=(0.01, 0.02), between="linear")


def rising(**changes: Any) -> Protocol:
    bare = replace(PROTOCOL, pruning=PLAN, training=replace(PROTOCOL.training, step_size=None))
    return replace(bare, by_epoch=RISE, **changes)


def protocol_of(**changes: Any) -> Protocol:
    population = Population(
        **{"members": MEMBERS, "every": 1, "wait": 0.0, "step_sizes": (0.003, 0.03), "rates": (0.05, 0.4), **changes}
    )
    training = replace(PROTOCOL.training, step_size=None, holdout=16, epochs=4)
    evaluation = replace(PROTOCOL.evaluation, every=population.every)
    return replace(PROTOCOL, pruning=PLAN, training=training, evaluation=evaluation, population=population)


def population_of(protocol: Protocol) -> LayeredPopulation:
    return LayeredPopulation([Unit(protocol, replica) for replica in range(protocol.population.members)], tiny(), CPU)


def points(*scores: float) -> list[dict[str, float]]:
    return [{"score": score, "nll": 1.0} for score in scores]


def row_of(stack: Any, row: int) -> list[torch.Tensor]:
    """All that is trained of one member."""
    found = [value[row] for value in (*stack.weights, *stack.biases, *(m for pair in stack.moments for m in pair))]
    for synapses in stack.segments[0].synapses:
        found += [getattr(synapses, name)[row] for name in ("gate", "gate_first", "gate_second")]
    return [one.detach().clone() for one in found]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_each_epoch_of_a_plan_has_its_own_step_size_and_noise():
    stack = stack_of(Unit(rising(), 0))
    ceilings, sizes = [], []
    for _ in range(5):
        stack.train_epoch()
        ceilings.append(stack.segments[0].schedules[0].ceiling)
        sizes.append(stack.protocols_in(stack.epoch - 1)[0].training.step_size)
    assert ceilings == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.6])
    assert sizes == pytest.approx([0.01, 0.01 + 0.01 / 3, 0.01 + 0.02 / 3, 0.02, 0.02])
    fixed = train(stack_of(Unit(replace(PROTOCOL, pruning=PLAN), 0)))
    assert not torch.equal(fixed.weights[0], stack.weights[0])


def test_a_plan_by_epoch_resumes_bit_for_bit_and_is_measured_as_it_was_trained():
    whole, first, second = (stack_of(Unit(rising(), 0)) for _ in range(3))
    train(whole), train(first, 2)
    second.load_state(first.state())
    train(second, 3)
    assert_same(row_of(second, 0), row_of(whole, 0))
    resumed = stack_of(Unit(rising(), 0))
    resumed.load_state(whole.state())
    for number in range(2):
        assert torch.equal(resumed.segments[0].whole_weight(number), whole.segments[0].whole_weight(number))


def test_the_worst_takes_over_weights_gates_moments_and_price():
    stack = population_of(protocol_of())
    stack.train_epoch()
    stack.segments[0].steerings = [
        one._replace(price=float(row)) for row, one in enumerate(stack.segments[0].steerings)
    ]
    before = [row_of(stack, row) for row in range(MEMBERS)]
    assert stack.judge(points(50.0, 10.0, 70.0, 60.0)) == [0, 2, 2, 3]
    for row, parent in enumerate([0, 2, 2, 3]):
        assert_same(row_of(stack, row), before[parent])
    assert [one.price for one in stack.segments[0].steerings] == [0.0, 2.0, 2.0, 3.0]
    assert stack.members.values[0, 1] != stack.members.values[0, 2]
    stack.train_epoch()
    assert not torch.equal(stack.weights[0][1], stack.weights[0][2])


def test_a_member_trains_as_a_network_with_its_schedule_does():
    protocol = protocol_of(disturbance=0.0)
    stack = population_of(protocol)
    for _ in range(4):
        stack.train_epoch()
        stack.judge(points(4.0, 3.0, 2.0, 1.0))
    line = stack.members.told(0)["line"]
    schedule = ByEpoch(at=(0, 1, 2, 3), **{name: tuple(values) for name, values in line.items()})
    alone = train(stack_of(Unit(replace(protocol, population=None, by_epoch=schedule), 0)))
    assert_same(row_of(stack, 0), row_of(alone, 0))


def test_a_resumed_population_is_the_one_that_was_never_stopped():
    whole, first, second = (population_of(protocol_of()) for _ in range(3))

    def go_on(stack: LayeredPopulation, epochs: int) -> None:
        for _ in range(epochs):
            stack.train_epoch()
            stack.judge(judged_as_deployed(stack, stack.protocol.evaluation))

    go_on(whole, 4)
    go_on(first, 2)
    second.load_state(first.state())
    go_on(second, 2)
    for row in range(MEMBERS):
        assert_same(row_of(second, row), row_of(whole, row))
        assert second.members.told(row) == whole.members.told(row)


def test_noise_is_at_most_a_half_however_it_is_disturbed():
    stack = population_of(protocol_of(rates=(0.45, 0.5), disturbance=3.0))
    for _ in range(4):
        stack.train_epoch()
        stack.judge(points(1.0, 2.0, 3.0, 4.0))
        assert stack.members.values[1].max() <= 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pruning": GradualMagnitude()}, "for sparsity plans that learn each synapse"),
        ({"pruning": Plan(keep=0.3, granularity="unit")}, "for sparsity plans that learn each synapse"),
        ({"pruning": Plan(keep=0.3, noise=0.2)}, "leave step_size, rate, noise and by_epoch out"),
        ({"population": Population(every=1)}, "the noise of a sparsity plan is at most 0.5"),
    ],
)
def test_what_is_no_population_of_plans_is_refused(changes, message):
    with pytest.raises(ProtocolError, match=message):
        replace(protocol_of(), **changes)


@pytest.mark.gpu
def test_a_graph_goes_on_after_a_takeover_of_plans():
    units = [Unit(replace(protocol_of(), precision="float32"), replica) for replica in range(MEMBERS)]
    graph, eager = (LayeredPopulation(units, tiny(), torch.device("cuda"), graph=graph) for graph in (True, False))
    for scores in ((4.0, 1.0, 3.0, 2.0), (1.0, 3.0, 4.0, 2.0), (1.0, 2.0, 3.0, 4.0)):
        for stack in (graph, eager):
            stack.train_epoch()
            stack.judge(points(*scores))
    assert graph._graph is not None
    for row in range(MEMBERS):
        assert graph.members.told(row) == eager.members.told(row)
        for one, other in zip(row_of(graph, row)[:2], row_of(eager, row)[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=5e-3, atol=5e-3)
