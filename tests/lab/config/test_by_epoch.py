"""Settings by epoch and populations as part of a protocol: what they say, what they refuse, and their digests."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dropconnectpp.lab.config.by_epoch import ByEpoch, from_path
from dropconnectpp.lab.config.method import METHODS, Method
from dropconnectpp.lab.config.population import Population
from dropconnectpp.lab.config.protocol import Evaluation, Protocol, Training
from dropconnectpp.lab.config.settings import ProtocolError, from_dict

RISE = ByEpoch(at=(0, 10), rate=(0.5, 0.9), between="linear")
DROPCONNECT = Method(kind="dropconnect")
RISING = Protocol(method=DROPCONNECT, by_epoch=RISE, training=Training(step_size=0.01))


def population_of(method: Method, **settings: Any) -> Protocol:
    return Protocol(
        method=method,
        training=Training(holdout=100),
        evaluation=Evaluation(every=5),
        population=Population(**settings),
    )


class TestByEpoch:
    def test_a_protocol_has_the_settings_of_its_last_epoch(self):
        both = replace(RISING, by_epoch=replace(RISE, step_size=(0.01, 0.02)), training=Training())
        assert RISING.method.rate == 0.9
        assert (both.training.step_size, both.method.rate) == (0.02, 0.9)
        assert RISING.complete
        assert not replace(RISING, training=Training()).complete

    def test_an_epoch_has_its_own_settings(self):
        early = RISING.in_epoch(5)
        assert early.method.rate == pytest.approx(0.7)
        assert early.by_epoch is None
        assert early.training == RISING.training
        assert RISING.in_epoch(99).method.rate == 0.9
        assert Protocol().in_epoch(3) == Protocol()

    def test_it_is_part_of_the_digest_and_comes_back_from_plain_data(self):
        plain = replace(RISING, by_epoch=None)
        slower = replace(RISING, by_epoch=replace(RISE, at=(0, 30)))
        assert len({plain.digest, RISING.digest, slower.digest}) == 3
        assert from_dict(Protocol, json.loads(json.dumps(RISING.to_dict()))) == RISING
        assert "by_epoch" not in plain.to_dict()

    def test_networks_of_several_schedules_share_a_stack(self):
        assert RISING.stackable(replace(RISING, by_epoch=None))
        assert not RISING.stackable(replace(RISING, root_seed=1))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"method": Method(kind="dropconnect", rate=0.5)}, "by_epoch ends with rate 0.9, and rate is 0.5"),
            ({"method": Method(kind="none")}, "by_epoch has a rate, and 'none' has none"),
            ({"training": Training(epochs=10)}, "by_epoch names epoch 10, and there are 10, counted from 0"),
            ({"by_epoch": ByEpoch(at=(0,), kl_weight=(2.0,))}, "by_epoch has a KL weight"),
            ({"by_epoch": ByEpoch(at=(0,), step_size=(0.5,))}, "ends with step_size 0.5, and step_size is 0.01"),
        ],
    )
    def test_what_contradicts_it_is_refused(self, changes, message):
        with pytest.raises(ProtocolError, match=message):
            replace(replace(RISING, by_epoch=None, method=DROPCONNECT), **{"by_epoch": RISE, **changes})

    def test_its_values_are_checked(self):
        with pytest.raises(ProtocolError, match=r"by_epoch: at must be epochs that rise from 0, got \[1\]"):
            ByEpoch(at=(1,), rate=(0.5,))

    def test_names(self):
        assert RISING.label == "DropConnect, rate 0.5 to 0.9 in 10 epochs"
        assert ByEpoch(at=(0, 2), rate=(0.1, 0.2), step_size=(0.1, 0.1)).label == "step size and rate by epoch"
        assert ByEpoch(at=(0,), rate=(0.1,), name="found").label == "found"

    def test_a_path_is_written_down_where_it_changes(self):
        found = from_path({"rate": [0.5, 0.5, 0.6, 0.6], "step_size": [0.1, 0.1, 0.1, 0.2]}, "found")
        assert found == ByEpoch(at=(0, 2, 3), rate=(0.5, 0.6, 0.6), step_size=(0.1, 0.1, 0.2), name="found")
        assert [found.in_epoch(epoch)["rate"] for epoch in range(4)] == [0.5, 0.5, 0.6, 0.6]


class TestPopulation:
    def test_the_settings_that_change(self):
        ranges = Population(rates=(0.2, 0.4), kl_weights=(0.5, 2.0)).ranges
        assert ranges(Method(kind="none")) == {"step_size": (0.003, 0.05)}
        assert ranges(DROPCONNECT) == {"step_size": (0.003, 0.05), "rate": (0.2, 0.4)}
        assert ranges(METHODS["per-example"]) == {"step_size": (0.003, 0.05), "kl_weight": (2.0, 8.0)}

    def test_members_are_judged_now_and_then_and_at_the_end(self):
        population = Population(every=5)
        assert [epoch for epoch in range(1, 13) if population.judges(epoch, 12)] == [5, 10, 12]
        assert population.judgements(12) == 3
        assert (population.replaced, Population(members=2).replaced) == (3, 1)

    def test_it_is_part_of_the_digest_and_complete_without_step_size_and_rate(self):
        one, other = population_of(DROPCONNECT), population_of(DROPCONNECT, members=8)
        assert one.digest != other.digest
        assert one.complete
        assert from_dict(Protocol, json.loads(json.dumps(one.to_dict()))) == one
        assert one.stackable(one)
        assert not one.stackable(population_of(Method(kind="dropout")))
        assert not replace(one, population=None).stackable(one)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"members": 1}, "members must be at least 2 and at most 1,000, got 1"),
            ({"members": 1001}, "members must be at least 2 and at most 1,000, got 1001"),
            ({"every": 0}, "every must be at least 1"),
            ({"wait": 1.0}, r"wait must lie in \[0, 1\), got 1.0"),
            ({"share": 0.6}, r"share must lie in \(0, 0.5\]"),
            ({"disturbance": -1.0}, "disturbance must not be negative"),
            ({"rates": (0.5, 1.0)}, "rates must be two rising numbers between 0 and 1"),
            ({"step_sizes": (0.1,)}, "step_sizes must be two rising numbers"),
            ({"keep": 1.0}, "keep must be a share"),
        ],
    )
    def test_its_settings_are_checked(self, settings, message):
        with pytest.raises(ProtocolError, match=message):
            Population(**settings)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"training": Training()}, "give a holdout"),
            ({"training": Training(holdout=9, step_size=0.1)}, "leave step_size, rate, noise and by_epoch out"),
            ({"evaluation": Evaluation(every=3)}, "every is 5 and 3"),
            ({"population": Population(keep=0.1)}, "keep is for methods that learn"),
        ],
    )
    def test_what_does_not_go_with_it_is_refused(self, changes, message):
        with pytest.raises(ProtocolError, match=message):
            replace(population_of(DROPCONNECT), **changes)
