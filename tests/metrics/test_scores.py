"""The metrics on tensors, against torchmetrics, scikit-learn and their definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from torch import Tensor
from torchmetrics.classification import BinaryAUROC, MulticlassCalibrationError
from torchmetrics.regression import ContinuousRankedProbabilityScore

from dropconnectpp import metrics
from dropconnectpp.errors import ArgumentError, NonFiniteError, ShapeError


@pytest.fixture
def classified() -> tuple[Tensor, Tensor]:
    """Overconfident probabilities of 5 classes, and classes."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 5, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return (3 * logits).softmax(1), target


def test_nll_and_brier_are_those_of_scikit_learn(classified: tuple[Tensor, Tensor]) -> None:
    probabilities, target = classified
    labels = list(range(5))
    assert float(metrics.nll(probabilities, target).mean()) == pytest.approx(
        sk.log_loss(target, probabilities.numpy(), labels=labels), rel=1e-9
    )
    expected = sk.brier_score_loss(target.numpy(), probabilities.numpy(), labels=labels, scale_by_half=False)
    assert float(metrics.brier(probabilities, target).mean()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bins", [7, 10, 15])
def test_ece_is_that_of_torchmetrics(classified: tuple[Tensor, Tensor], bins: int) -> None:
    probabilities, target = classified
    expected = MulticlassCalibrationError(5, n_bins=bins, norm="l1")(probabilities, target)
    assert metrics.ece(probabilities, target, bins) == pytest.approx(float(expected), rel=1e-5)
    assert metrics.ece(probabilities, target, bins) > 0.1, "the probabilities are overconfident"


def test_adaptive_ece_is_that_of_scikit_learns_quantile_bins(classified: tuple[Tensor, Tensor]) -> None:
    probabilities, target = classified
    confidence, guess = probabilities.max(1)
    right = (guess == target).numpy()
    share, mean = calibration_curve(right, confidence.numpy(), n_bins=12, strategy="quantile")
    assert len(share) == 12  # 600 examples: 50 in each bin
    assert metrics.ece(probabilities, target, 12, adaptive=True) == pytest.approx(np.abs(share - mean).mean(), rel=1e-9)


def test_adaptive_ece_does_not_hang_on_the_order_of_ties() -> None:
    confidence = torch.tensor([0.5, 0.5, 0.5, 0.5])
    for right in itertools.permutations([1.0, 1.0, 0.0, 0.0]):
        assert metrics.equal_counts(confidence, torch.tensor(right), 2).error == pytest.approx(0.0)


def test_bins_hold_what_was_put_in(classified: tuple[Tensor, Tensor]) -> None:
    probabilities = classified[0]
    confidence = probabilities.max(1).values
    found = metrics.equal_width(confidence, torch.ones(600), 10)
    place = (confidence * 10).long().clamp(max=9)
    for number in range(10):
        inside = place == number
        assert found.counts[number] == inside.sum()
        if inside.any():
            assert found.confidence[number] == pytest.approx(float(confidence[inside].mean()))
    assert torch.isnan(found.accuracy[0]), "no confidence of 5 classes is below 0.2"


@pytest.fixture(params=[False, True], ids=["distinct", "ties"])
def doubts(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    """Doubts of known and foreign examples."""
    generator = torch.Generator().manual_seed(1)
    known = torch.randn(230, generator=generator, dtype=torch.float64)
    foreign = torch.randn(170, generator=generator, dtype=torch.float64) + 0.7
    return (known.round(), foreign.round()) if request.param else (known, foreign)


def test_auroc_is_that_of_both(doubts: tuple[Tensor, Tensor]) -> None:
    known, foreign = doubts
    truth = torch.cat([torch.zeros(230), torch.ones(170)]).long()
    together = torch.cat([known, foreign])
    assert metrics.auroc(known, foreign) == pytest.approx(sk.roc_auc_score(truth, together), rel=1e-12)
    expected = BinaryAUROC()(torch.sigmoid(together), truth)
    assert metrics.auroc(known, foreign) == pytest.approx(float(expected), abs=1e-5)


def test_fpr95_is_that_of_scikit_learns_curve(doubts: tuple[Tensor, Tensor]) -> None:
    known, foreign = doubts
    truth = np.r_[np.ones(230), np.zeros(170)]  # known examples are to be kept
    false, true, _ = sk.roc_curve(truth, -torch.cat([known, foreign]).numpy(), drop_intermediate=False)
    assert metrics.fpr95(known, foreign) == pytest.approx(false[true >= 0.95].min())


def test_fpr95_keeps_exactly_95_of_100() -> None:
    known = torch.arange(1.0, 101.0)
    assert metrics.fpr95(known, torch.tensor([95.0])) == 1.0
    assert metrics.fpr95(known, torch.tensor([95.5])) == 0.0


def test_aurc_is_its_definition() -> None:
    generator = np.random.default_rng(2)
    doubt, wrong = generator.random(40), (generator.random(40) < 0.3).astype(float)
    risks = [wrong[np.argsort(doubt)[: k + 1]].mean() for k in range(40)]
    assert metrics.aurc(torch.tensor(doubt), torch.tensor(wrong)) == pytest.approx(np.mean(risks), rel=1e-12)
    answered, risk = metrics.risk_coverage(torch.tensor(doubt), torch.tensor(wrong))
    np.testing.assert_allclose(risk, risks)
    np.testing.assert_allclose(answered, np.arange(1, 41) / 40)


def test_aurc_averages_over_the_order_of_ties() -> None:
    doubt, wrong = np.array([0.0, 1.0, 1.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0, 0.0, 1.0])
    found = []
    for order in itertools.permutations([1, 2, 3]):
        ordered = wrong[[0, *order, 4]]
        found.append(np.mean(ordered.cumsum() / np.arange(1, 6)))
    assert metrics.aurc(torch.tensor(doubt), torch.tensor(wrong)) == pytest.approx(np.mean(found), rel=1e-12)


def test_crps_of_samples_is_that_of_torchmetrics_and_the_integral() -> None:
    generator = torch.Generator().manual_seed(3)
    samples, target = torch.randn(9, 25, generator=generator), torch.randn(25, generator=generator)
    expected = ContinuousRankedProbabilityScore()(samples.T.contiguous(), target)
    assert float(metrics.crps_of_samples(samples, target).mean()) == pytest.approx(float(expected), rel=1e-5)
    one, y = np.sort(samples[:, 0].numpy()), float(target[0])
    value, _ = integrate.quad(lambda x: ((one <= x).mean() - (y <= x)) ** 2, -8, 8, points=[*one, y], limit=500)
    assert float(metrics.crps_of_samples(samples, target)[0]) == pytest.approx(value, abs=1e-6)


def test_intervals_cover_what_they_should() -> None:
    y = torch.tensor(stats.norm.rvs(size=20_000, random_state=0))
    ends = torch.full_like(y, stats.norm.ppf(0.9))
    assert metrics.interval_coverage(-ends, ends, y) == pytest.approx(0.8, abs=0.01)
    assert metrics.sharpness(-ends, ends) == pytest.approx(2 * stats.norm.ppf(0.9))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: metrics.nll(torch.rand(3), torch.zeros(3).long()), ShapeError, r"\(B, C\)"),
        (lambda: metrics.brier(torch.rand(3, 2), torch.zeros(3)), ArgumentError, "whole numbers"),
        (lambda: metrics.ece(torch.rand(3, 2), torch.full((3,), 2)), ArgumentError, "from 0 to 1, got 2 to 2"),
        (lambda: metrics.ece(torch.rand(3, 2), torch.zeros(3).long(), 0), ArgumentError, "bins"),
        (lambda: metrics.nll(torch.full((1, 2), torch.nan), torch.zeros(1).long()), NonFiniteError, "probabilities"),
        (lambda: metrics.auroc(torch.empty(0), torch.ones(1)), ArgumentError, "no example"),
        (lambda: metrics.fpr95(torch.tensor([torch.nan]), torch.ones(1)), NonFiniteError, "Doubts"),
        (lambda: metrics.fpr95(torch.ones(1), torch.ones(1), 1.0), ArgumentError, "known_kept"),
        (lambda: metrics.aurc(torch.ones(2), torch.ones(3)), ShapeError, "one shape"),
        (lambda: metrics.sharpness(torch.ones(1), torch.zeros(1)), ArgumentError, "before it begins"),
        (lambda: metrics.crps_of_samples(torch.ones(2, 3), torch.ones(2)), ShapeError, r"\(S, \*\)"),
    ],
)
def test_what_cannot_be_measured_is_named(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
