"""Table 2: what is measured of each method, and in which order. Never how long it takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_cases import TINY, tiny

from dropconnectpp.lab import device as devices
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.replicas import timing
from dropconnectpp.lab.replicas.stack import Stack

CPU = torch.device("cpu")
PREDICTIONS = {"mean", "folded", "mc30"}


@pytest.mark.parametrize(
    ("method", "predictions"),
    [
        (Method(kind="none"), {"none"}),
        (Method(kind="dropout", rate=0.5), {"dropout"}),
        (Method(kind="dropconnect", rate=0.5), PREDICTIONS),
        (Method(kind="dropconnect", rate=0.0), PREDICTIONS),
        (Method(kind="dropconnect", rate=0.5, evaluation="gaussian"), {"mean", "mc30"}),
        (Method(), PREDICTIONS),
        (Method(hyper="optimal", estimator="concrete"), PREDICTIONS),
    ],
)
def test_every_method_is_measured_in_training_and_prediction(method, predictions):
    (found,) = timing.measure([replace(TINY, method=method)], tiny(), CPU, rounds=2, steps=2)
    assert set(found) == {"seconds_per_epoch", "replicas", "prediction", "rounds", "device", "session"}
    assert set(found["rounds"]) == {"epoch", *predictions}
    assert all(len(several) == 2 for several in found["rounds"].values())
    assert set(found["prediction"]) == predictions
    seconds = [found["seconds_per_epoch"], *found["prediction"].values()]
    assert all(math.isfinite(value) and value > 0.0 for value in seconds)
    assert (found["replicas"], found["device"]) == (1, devices.describe(CPU))


def test_every_round_trains(monkeypatch):
    stacks: list[Stack] = []
    real = timing._predictions
    monkeypatch.setattr(timing, "_predictions", lambda stack: stacks.append(stack) or real(stack))
    timing.measure([TINY], tiny(), CPU, rounds=3, steps=2)
    assert int(stacks[0].step) == 2 * (1 + 1 + 3)  # an epoch, a run before the rounds, and the rounds


def test_an_epoch_is_scaled_from_its_first_steps_and_shared_by_the_replicas(monkeypatch):
    steps: list[int] = []
    real = Stack.train_epoch

    def train_epoch(stack: Stack) -> torch.Tensor:
        steps.append(len(stack.batches))
        return real(stack)

    monkeypatch.setattr(Stack, "train_epoch", train_epoch)
    monkeypatch.setattr(timing, "seconds", lambda *_: 6.0)
    (found,) = timing.measure([TINY], tiny(), CPU, replicas=3, steps=2)
    # Shuffling once, then four batches an epoch of which two are timed; shared by three replicas.
    assert found["seconds_per_epoch"] == (6.0 + 6.0 / 2 * 4) / 3
    assert found["rounds"]["epoch"] == [(6.0 + 6.0 / 2 * 4) / 3] * 31
    assert steps == [2]  # once before the clock starts


def test_the_median_of_the_repeats_counts(monkeypatch):
    times = iter([0.0, 1.0, 10.0, 19.0, 20.0, 22.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    calls: list[int] = []
    assert timing.median_seconds(lambda: calls.append(1), CPU, 3) == 2.0
    assert len(calls) == 3


def test_methods_are_timed_in_turn_after_each_has_run_once(monkeypatch):
    called: list[str] = []
    runs = [{"a": lambda: called.append("a"), "b": lambda: called.append("b")}, {"c": lambda: called.append("c")}]
    times = iter([1.0, 2.0, 3.0, 1.0, 4.0, 9.0, 7.0, 2.0, 3.0])
    monkeypatch.setattr(timing, "seconds", lambda run, _: (run(), next(times))[1])
    told: list[tuple[int, int]] = []
    assert timing.in_rounds(runs, CPU, 3, lambda *how: told.append(how)) == [{"a": 1.0, "b": 2.0}, {"c": 3.0}]
    assert "".join(called) == "abc" * 4
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_slow_machines_get_five_rounds(monkeypatch):
    clock = iter(range(0, 10_000, 1_000))
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(clock))
    called: list[int] = []
    timing.in_rounds([{"a": lambda: called.append(1)}], CPU, 31, lambda *_: None)
    assert len(called) == 1 + 5


def test_predictions_are_scaled_to_ten_thousand(monkeypatch):
    monkeypatch.setattr(timing, "seconds", lambda *_: 3.0)
    (found,) = timing.measure([replace(TINY, method=Method(kind="none"))], tiny(), CPU, steps=1)
    assert found["prediction"] == {"none": pytest.approx(3.0 * 10_000 / 30)}
    assert found["rounds"]["none"] == pytest.approx([3.0 * 10_000 / 30] * 31)


def test_what_is_timed_together_has_one_session(monkeypatch):
    monkeypatch.setattr(timing, "seconds", lambda *_: 3.0)
    first, second = timing.measure([replace(TINY, method=Method(kind="none")), TINY], tiny(), CPU, rounds=2, steps=1)
    (later,) = timing.measure([TINY], tiny(), CPU, rounds=2, steps=1)
    assert first["session"] == second["session"] != later["session"]


def test_what_is_open_gets_any_value_and_the_rest_stays():
    for kind in ("none", "dropout", "dropconnect", "dropconnect++"):
        protocol = paper("cifar10", kind)
        found = timing.complete(protocol)
        assert found.complete
        assert replace(found, method=protocol.method, training=protocol.training) == protocol
        assert found.method.rate == (0.5 if protocol.method.has_rate else None)


def test_a_complete_protocol_is_timed_as_it_is():
    protocol = replace(TINY, method=Method(kind="dropout", rate=0.1))
    assert timing.complete(protocol) == protocol
