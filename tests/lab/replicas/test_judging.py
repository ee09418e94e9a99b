"""Judged probabilities against the library's metrics, against what is measured elsewhere, and of an ensemble."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from stack_cases import METHODS, bright, settings, stack_of
from torch import Tensor

from dropconnectpp import metrics
from dropconnectpp.lab.config.protocol import Evaluation
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.corruptions import corrupt
from dropconnectpp.lab.replicas import evaluation, judging
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

WHAT = Evaluation(
    samples=(),
    curve_samples=0,
    shares=(),
    predictive_samples=4,
    judged=True,
    corruptions=("contrast", "gaussian_noise"),
)
UNITS = [
    Unit(settings(METHODS["none"]), 0),
    Unit(settings(METHODS["dropout"]), 1),
    Unit(settings(METHODS["dropconnect"]), 2),
    Unit(settings(METHODS["straight-through"]), 3),
]
FOREIGN = bright(seed=9, channels=3)


@pytest.fixture(scope="module")
def stack() -> Stack:
    found = stack_of(*UNITS)
    found.train_epoch()
    return found


@pytest.fixture(scope="module")
def kept() -> dict[judging.Images, Tensor]:
    return {}


@pytest.fixture(scope="module")
def judged(stack: Stack, kept: dict[judging.Images, Tensor]) -> list[list[dict[str, Any]]]:
    return judging.judge(stack, WHAT, FOREIGN, keep=kept.__setitem__)


def entry(found: list[dict[str, Any]], way: str, images: str = "test", severity: int = 0) -> dict[str, Any]:
    (one,) = [e for e in found if (e["prediction"], e["images"], e["severity"]) == (way, images, severity)]
    return one


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-6, abs=1e-6)  # log-probabilities are kept in float32


def test_every_way_and_set_of_images_is_there_once(judged) -> None:
    sets = [("test", 0), ("foreign", 0), *((name, s) for name in WHAT.corruptions for s in range(1, 6))]
    for row, found in enumerate(judged):
        ways = ("one pass",) if row == 0 else ("one pass", "networks")  # nothing is drawn of a plain network
        told = [(e["prediction"], (e["images"], e["severity"])) for e in found]
        assert sorted(told) == sorted((way, one) for way in ways for one in sets)


def test_on_the_test_set_it_is_what_is_measured_elsewhere(stack: Stack, judged) -> None:
    for found, other in zip(judged, evaluation.final(stack, WHAT), strict=True):
        one = entry(found, "one pass")
        assert {name: one[name] for name in ("accuracy", "nll", "brier", "ece")} == near(
            {name: other[name] for name in ("accuracy", "nll", "brier", "ece")}
        )
    for row in (1, 2, 3):
        drawn, other = entry(judged[row], "networks"), evaluation.final(stack, WHAT)[row]["uncertainty"]
        assert {name: drawn[name] for name in ("accuracy", "nll")} == near({n: other[n] for n in ("accuracy", "nll")})


def test_scores_are_the_librarys(stack: Stack, judged, kept) -> None:
    labels = stack.examples.test_labels
    for row, way in ((0, "one pass"), (3, "networks")):
        probabilities = kept["test", 0][row].double().exp()
        one = entry(judged[row], way)
        assert one["nll"] == near(float(metrics.nll(probabilities, labels).mean()))
        assert one["brier"] == near(float(metrics.brier(probabilities, labels).mean()))
        assert one["ece"] == near(metrics.ece(probabilities, labels))


def test_foreign_images_are_told_by_entropy(judged, kept) -> None:
    def entropy(logs: Tensor) -> Tensor:
        return -(logs.double().exp() * logs.double()).sum(-1)

    for row, way in ((0, "one pass"), (2, "networks")):
        known, foreign = entropy(kept["test", 0][row]), entropy(kept["foreign", 0][row])
        one = entry(judged[row], way, "foreign")
        truth = [0] * len(known) + [1] * len(foreign)
        assert one["auroc"] == near(roc_auc_score(truth, torch.cat([known, foreign]).numpy()))
        assert one["data"] == "tiny9"
        assert one["entropy"] == near(float(foreign.mean()))
        assert 0.0 <= one["fpr95"] <= 1.0


def test_corrupted_images_are_judged_as_a_test_set_of_them_would_be(stack: Stack, judged) -> None:
    other = stack_of(*UNITS)
    other.load_state(stack.state())
    other.examples.test_images = corrupt(stack.examples.test_images, "gaussian_noise", 5)
    alone = judging.judge(other, replace(WHAT, corruptions=()))
    for row, found in enumerate(judged):
        for way in ("one pass", "networks")[: 1 if row == 0 else 2]:
            one = entry(found, way, "gaussian_noise", 5)
            expected = entry(alone[row], way)
            assert {name: one[name] for name in ("accuracy", "nll")} == {n: expected[n] for n in ("accuracy", "nll")}


def test_a_replica_does_not_know_its_neighbours(stack: Stack, judged) -> None:
    alone = stack_of(UNITS[2])
    alone.train_epoch()
    (found,) = judging.judge(alone, WHAT, FOREIGN)
    for one, other in zip(found, judged[2], strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert one[name] == (value if isinstance(value, str) else near(value)), name


def test_a_replica_that_diverged_is_told_apart_from_nothing(stack: Stack) -> None:
    logs = torch.full((1, 5, 3), math.nan)
    (found,) = judging.scores(judging.FOREIGN, logs, stack.examples.test_labels, judging.entropies(logs))
    assert (found["auroc"], found["fpr95"]) == (None, None)


def test_what_does_nothing_or_is_unknown_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="corruptions do nothing unless judged is true"):
        Evaluation(corruptions=("contrast",))
    with pytest.raises(ProtocolError, match=r"corruptions must be of gaussian_noise, .* got fog"):
        Evaluation(judged=True, corruptions=("fog",))
    with pytest.raises(ProtocolError, match="names one twice"):
        Evaluation(judged=True, corruptions=("contrast", "contrast"))
