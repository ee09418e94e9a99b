"""Predictions of real values and counts are those of the mixture over networks, not of a normal with its moments."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, ShapeError

DOUBLE = torch.float64
X = torch.randn(7, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))


def model_of(outputs: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """One layer, and every mask of it: networks apart enough for mixtures of several modes."""
    torch.manual_seed(3)
    model = nn.Sequential(dcpp.DropConnectPPLinear(2, 2, bias=False, dtype=DOUBLE), nn.Linear(2, outputs, dtype=DOUBLE))
    with torch.no_grad():
        model[0].weight.mul_(4.0)
    masks = [{"0.weight": torch.tensor(bits).view(2, 2)} for bits in itertools.product([0, 1], repeat=4)]
    return model, masks


def predicted(likelihood: Any, outputs: int = 3, **options: Any) -> tuple[dcpp.Prediction, np.ndarray]:
    model, masks = model_of(outputs)
    rows = []
    with torch.no_grad():
        for mask in masks:
            with dcpp.forced_masks(model, mask):
                rows.append(model(X))
        with dcpp.forced_masks(model, masks):
            found = dcpp.predict(model, X, num_samples=len(masks), likelihood=likelihood, **options)
    return found, torch.stack(rows).numpy()


SCALES = np.array([0.3, 0.5, 0.2])
CASES: dict[str, tuple[Any, int, Any]] = {
    "gaussian": (dcpp.gaussian(0.3), 3, lambda o: scipy.stats.norm(o, 0.3)),
    "gaussians": (dcpp.gaussian(tuple(SCALES)), 3, lambda o: scipy.stats.norm(o, SCALES)),
    "student_t": (dcpp.student_t(0.3, df=3.0), 3, lambda o: scipy.stats.t(3.0, o, 0.3)),
    "heteroscedastic": (
        dcpp.heteroscedastic_gaussian(),
        6,
        lambda o: scipy.stats.norm(o[..., :3], np.exp(0.5 * o[..., 3:])),
    ),
    "poisson": (dcpp.poisson(), 3, lambda o: scipy.stats.poisson(np.exp(o))),
}
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_mean_and_the_two_parts_of_the_standard_deviation(name: str) -> None:
    likelihood, outputs, truth = CASES[name]
    found, each = predicted(likelihood, outputs)
    of = truth(each)
    noise = np.sqrt(of.var().mean(0)) * np.ones_like(of.mean()[0])
    model = of.mean().std(0, ddof=1)
    np.testing.assert_allclose(found.mean, of.mean().mean(0))
    np.testing.assert_allclose(found.noise_deviation, noise)
    np.testing.assert_allclose(found.model_deviation, model)
    np.testing.assert_allclose(found.standard_deviation, np.sqrt(noise**2 + model**2))
    np.testing.assert_allclose(found.samples, of.mean())
    assert found.entropy is None
    assert found.mutual_information is None


@each_case
def test_quantiles_are_where_the_mixtures_distribution_function_says(name: str) -> None:
    likelihood, outputs, truth = CASES[name]
    found, each = predicted(likelihood, outputs)
    of = truth(each)
    low, high = found.interval(0.9)
    for probability, value in ((0.05, low), (0.95, high), (0.5, found.quantile(0.5))):
        below = of.cdf(value.numpy()).mean(0)
        if name == "poisson":
            assert (below >= probability).all()
            assert (of.cdf(value.numpy() - 1).mean(0) < probability).all()
        else:
            np.testing.assert_allclose(below, probability, atol=1e-9)
    assert (low < high).all()


def test_an_interval_is_not_that_of_a_normal_with_the_moments() -> None:
    found, _ = predicted(dcpp.gaussian(0.05), 3)
    low, high = found.interval(0.5)
    matched = 2 * 0.6745 * found.standard_deviation
    assert ((high - low) / matched - 1).abs().max() > 0.3


@each_case
def test_log_prob_is_the_log_of_the_averaged_density(name: str) -> None:
    likelihood, outputs, truth = CASES[name]
    found, each = predicted(likelihood, outputs)
    y = torch.randint(0, 4, (7, 3)).double() if name == "poisson" else torch.randn(7, 3, dtype=DOUBLE)
    of = truth(each)
    logs = (of.logpmf if name == "poisson" else of.logpdf)(y.numpy()).sum(-1)
    np.testing.assert_allclose(found.log_prob(y), np.log(np.exp(logs).mean(0)))


@each_case
def test_crps_is_the_integral(name: str) -> None:
    likelihood, outputs, truth = CASES[name]
    found, each = predicted(likelihood, outputs)
    y = torch.randint(0, 4, (7, 3)).double() if name == "poisson" else torch.randn(7, 3, dtype=DOUBLE)
    crps = found.crps(y)
    for i, k in ((0, 0), (3, 1), (6, 2)):
        of = truth(each[:, i, :])
        exact = crps_by_quadrature(of, k, float(y[i, k]), counts=name == "poisson")
        assert crps[i, k].item() == pytest.approx(exact, rel=1e-5 if name == "student_t" else 1e-6), (i, k)


def crps_by_quadrature(of: Any, k: int, value: float, counts: bool) -> float:
    """The integral of (F - 1{y <= x})^2 for output k, with F averaged over networks."""

    def below(x: float) -> float:
        probabilities = of.cdf(x)
        return float(probabilities[:, k].mean())

    if counts:
        return sum((below(count) - (value <= count)) ** 2 for count in range(400))
    wide = 60.0
    left = scipy.integrate.quad(lambda x: below(x) ** 2, value - wide, value, limit=500, points=[value - 3])[0]
    right = scipy.integrate.quad(lambda x: (below(x) - 1) ** 2, value, value + wide, limit=500, points=[value + 3])[0]
    return left + right


def test_learned_noise_is_that_of_the_prediction_whatever_comes_after() -> None:
    learned = dcpp.gaussian()
    found, _ = predicted(learned)
    with torch.no_grad():
        learned.log_scale.fill_(3.0)
    assert found.noise_deviation.max() == 1.0


def test_yes_and_no_and_classes_have_the_log_of_their_mean_probability() -> None:
    found, each = predicted(dcpp.categorical, 3)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    probabilities = np.exp(each) / np.exp(each).sum(-1, keepdims=True)
    expected = np.log(probabilities.mean(0)[np.arange(7), y])
    np.testing.assert_allclose(found.log_prob(y), expected)
    np.testing.assert_allclose(predicted(dcpp.categorical, 3, keep_samples=True)[0].log_prob(y), expected)
    found, each = predicted(dcpp.bernoulli, 1)
    yes = torch.tensor([[0.0], [1], [1], [0], [1], [0], [0]])
    mean = (1 / (1 + np.exp(-each))).mean(0)
    np.testing.assert_allclose(found.log_prob(yes), np.log(np.where(yes > 0, mean, 1 - mean))[:, 0])
    kept = predicted(dcpp.bernoulli, 1, keep_samples=True)[0]
    np.testing.assert_allclose(kept.log_prob(yes.double()), found.log_prob(yes))


def test_several_values_an_example_need_the_networks_themselves() -> None:
    found, each = predicted(dcpp.bernoulli, 2)
    y = torch.ones(7, 2, dtype=DOUBLE)
    with pytest.raises(ArgumentError, match=r"log_prob needs each network's output: predict\(..., keep_samples=True\)"):
        found.log_prob(y)
    kept = predicted(dcpp.bernoulli, 2, keep_samples=True)[0]
    joint = (1 / (1 + np.exp(-each))).prod(-1).mean(0)
    np.testing.assert_allclose(kept.log_prob(y), np.log(joint))


def test_what_classes_do_not_have_is_refused_by_name() -> None:
    found, _ = predicted(dcpp.categorical, 3)
    for call in (lambda: found.interval(0.9), lambda: found.quantile(0.5), lambda: found.crps(torch.zeros(7, 3))):
        with pytest.raises(ArgumentError, match="is for real values and counts, and the likelihood is Categorical"):
            call()
    with pytest.raises(ArgumentError, match="samples needs each network's output"):
        _ = found.samples
    real, _ = predicted(dcpp.gaussian(1.0))
    with pytest.raises(ArgumentError, match="level must lie strictly between 0 and 1, got 90"):
        real.interval(90)
    with pytest.raises(ShapeError, match=r"crps needs targets of shape \(7, 3\), got \(7,\)"):
        real.crps(torch.zeros(7))


def test_eq_18_has_noise_and_no_spread_of_networks() -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(2, 1, activation=nn.Identity(), dtype=DOUBLE))
    found = dcpp.predict(model, X, average="activations", likelihood=dcpp.gaussian(0.3))
    assert found.model_deviation is None
    assert found.standard_deviation.unique().tolist() == [0.3]
    low, high = found.interval(0.9)
    torch.testing.assert_close(high - low, torch.full_like(low, 2 * 0.3 * scipy.stats.norm.ppf(0.95)))


def test_a_summary_is_printed_not_tensors() -> None:
    real, _ = predicted(dcpp.gaussian(0.3))
    assert repr(real).startswith("Prediction(mean of shape (7, 3), 16 networks, gaussian, standard deviation ")
    assert "noise 0.3)" in repr(real)
    classes, _ = predicted(dcpp.categorical)
    assert "categorical, entropy" in repr(classes)
    assert "tensor" not in repr(real) + repr(classes)
    own, _ = predicted(lambda output, target: output.sum(1))
    assert "a likelihood of your own" in repr(own)
