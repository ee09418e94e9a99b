"""The estimators keep scikit-learn's contract, and do what they say with learned connections."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.integrations.sklearn import DropConnectClassifier, DropConnectRegressor

CHECKED = [
    DropConnectClassifier((20,), max_iter=25, learning_rate_init=0.01, num_samples=3),
    DropConnectRegressor((20,), max_iter=40, learning_rate_init=0.01, num_samples=3),
]
"""Small and fast; `make test-ecosystem` checks the defaults."""


@parametrize_with_checks(CHECKED)
def test_the_contract_of_scikit_learn_holds(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray[Any, Any], ...]:
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))[:900]
    return x[order[:600]], x[order[600:]], y[order[:600]], y[order[600:]]


@pytest.fixture(scope="module")
def line() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One relevant feature of two, a target far from 0 and noise of a deviation of 5."""
    random = np.random.RandomState(0)
    x = random.randn(400, 2)
    return x, 1e4 + 50.0 * x[:, 0] + 5.0 * random.randn(400)


def small(**options: Any) -> DropConnectClassifier:
    return DropConnectClassifier((32,), **{"max_iter": 60, "learning_rate_init": 5e-3, "random_state": 0, **options})


def test_digits_are_told_apart_and_few_connections_stay(digits: Any) -> None:
    x, x_test, y, y_test = digits
    whole, sparse = small().fit(x, y), small(keep=0.2).fit(x, y)
    assert whole.score(x_test, y_test) > 0.9
    assert sparse.score(x_test, y_test) > 0.9
    assert whole.sparsity_ < 0.05
    assert sparse.sparsity_ == pytest.approx(0.8, abs=0.02)
    dense = dcpp.to_dense(sparse.module_)
    zeros = [int((m.weight == 0).sum()) for m in dense.modules() if isinstance(m, nn.Linear)]
    assert sum(zeros) == pytest.approx(sparse.sparsity_ * (64 * 32 + 32 * 10))
    with torch.no_grad():
        plain = torch.softmax(dense(torch.from_numpy(x_test)), 1).numpy()
    np.testing.assert_allclose(sparse.predict_proba(x_test), plain, atol=1e-9)


def test_the_deviation_is_that_of_a_new_value(line: Any) -> None:
    x, y = line
    model = DropConnectRegressor((20,), max_iter=150, learning_rate_init=5e-3, random_state=0).fit(x[:300], y[:300])
    mean, deviation = model.predict(x[300:], return_std=True)
    np.testing.assert_array_equal(mean, model.predict(x[300:]))
    assert model.noise_[0] == pytest.approx(5.0, rel=0.5)
    assert deviation.shape == (100,)
    assert (deviation >= model.noise_[0] * 0.999).all(), "the network's own uncertainty comes on top"
    inside = np.abs(y[300:] - mean) < 1.64 * deviation
    assert 0.75 < inside.mean() <= 1.0
    found = model.predict_distribution(x[300:])
    low, high = found.interval(0.9)
    assert ((low < found.mean) & (found.mean < high)).all()
    assert found.mean.mean() == pytest.approx(1e4, rel=0.01), "in the targets' own units"


def test_several_targets_have_a_noise_each() -> None:
    x, y = make_regression(200, 5, n_targets=2, random_state=0)
    y = y * [1.0, 100.0] + np.random.RandomState(0).randn(200, 2) * [1.0, 100.0]
    model = DropConnectRegressor((20,), max_iter=100, learning_rate_init=0.01, random_state=0).fit(x, y)
    mean, deviation = model.predict(x, return_std=True)
    assert mean.shape == deviation.shape == (200, 2)
    assert 20 < model.noise_[1] / model.noise_[0] < 500
    assert model.score(x, y) > 0.9
    with pytest.raises(ArgumentError, match=r"y must have outputs of shape \(2,\), as before, got \(\)"):
        model.partial_fit(x, y[:, 0])


def test_pipelines_grids_and_cross_validation(digits: Any) -> None:
    x, _, y, _ = digits
    pipeline = make_pipeline(MinMaxScaler(), small(max_iter=20))
    scores = cross_val_score(pipeline, x, y, cv=2)
    assert scores.min() > 0.8
    grid = GridSearchCV(pipeline, {"dropconnectclassifier__hidden_layer_sizes": [(1,), (32,)]}, cv=2).fit(x, y)
    assert grid.best_params_ == {"dropconnectclassifier__hidden_layer_sizes": (32,)}


def test_a_fit_repeats_and_leaves_no_trace_on_random_numbers(digits: Any) -> None:
    x, x_test, y, _ = digits
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = small(max_iter=3).fit(x, y)
    assert torch.equal(torch.rand(3), expected)
    second = clone(first).fit(x, y)
    np.testing.assert_array_equal(first.predict_proba(x_test), second.predict_proba(x_test))
    other = clone(first).set_params(random_state=1).fit(x, y)
    assert np.abs(first.predict_proba(x_test) - other.predict_proba(x_test)).max() > 1e-3


def test_a_pickle_predicts_and_goes_on_as_the_original(line: Any) -> None:
    x, y = line
    model = DropConnectRegressor((8,), max_iter=5, random_state=0).fit(x, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(model.predict(x, return_std=True), again.predict(x, return_std=True))
    for one in (model, again):
        one.partial_fit(x[:100], y[:100])
    np.testing.assert_array_equal(model.predict(x, return_std=True), again.predict(x, return_std=True))
    assert dcpp.likelihoods.remembered(again.module_) is again._fitted.elbo.log_likelihood


def test_a_stream_counts_its_examples(digits: Any) -> None:
    x, x_test, y, y_test = digits
    model = small(learning_rate_init=0.01)
    for _ in range(4):
        for rows in np.array_split(np.arange(len(x)), 6):
            model.partial_fit(x[rows], y[rows], classes=np.arange(10))
    assert model._fitted.elbo.num_data == 4 * len(x)
    assert model.score(x_test, y_test) > 0.85
    with pytest.raises(ArgumentError, match="not what it was on the first call"):
        model.partial_fit(x, y, classes=np.arange(11))
    with pytest.raises(ArgumentError, match="classes that were not there before"):
        model.partial_fit(x[:2], np.array([3, 12]))


def test_connections_are_chosen_by_fit_alone(digits: Any) -> None:
    x, _, y, _ = digits
    model = small(keep=0.3, max_iter=30)
    with pytest.raises(ArgumentError, match="partial_fit cannot choose connections"):
        model.partial_fit(x, y, classes=np.arange(10))
    off = [~layer.weight_kept.clone() for layer in _gated(model.fit(x, y))]
    before = [layer.weight.detach().clone() for layer in _gated(model)]
    model.partial_fit(x, y)
    for layer, gone, weight in zip(_gated(model), off, before, strict=True):
        assert torch.equal(~layer.weight_kept, gone)
        assert not torch.equal(layer.weight, weight)


def _gated(model: DropConnectClassifier) -> list[Any]:
    return [m for m in model.module_.modules() if isinstance(m, dcpp.DropConnectPPLinear)]


def test_early_stopping_puts_the_best_weights_back(digits: Any) -> None:
    x, _, y, _ = digits
    model = small(early_stopping=True, n_iter_no_change=3, learning_rate_init=0.05, max_iter=80).fit(x, y)
    scores = model.validation_scores_
    assert model.n_iter_ == len(scores) < 80
    assert scores.index(max(scores)) == len(scores) - 4
    # keep: connections are fixed after 80% of the epochs, and only then may training end
    model = small(keep=0.3, early_stopping=True, n_iter_no_change=1, learning_rate_init=0.05, max_iter=30).fit(x, y)
    assert model.n_iter_ > 24


def test_any_module_can_be_trained(digits: Any) -> None:
    x, x_test, y, y_test = digits
    given = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
    before = {key: value.clone() for key, value in given.state_dict().items()}
    model = small(module=given, max_iter=15, learning_rate_init=3e-3)
    assert clone(model).fit(x.astype(np.float32), y).score(x_test, y_test) > 0.9
    assert all(torch.equal(value, before[key]) for key, value in given.state_dict().items())
    assert isinstance(clone(model).fit(x, y).module_[1][1], dcpp.DropConnectPPConv2d)
    made = small(module=lambda features, outputs: nn.Linear(features, outputs), layer_options={"alpha": 2.0})
    assert made.fit(x, y).module_[1].alpha == 2.0
    with pytest.raises(ArgumentError, match=r"must give 10 outputs .* got \(2, 9\)"):
        small(module=nn.Linear(64, 9)).fit(x, y)
    with pytest.raises(ArgumentError, match=r"must make a torch\.nn\.Module, and made int"):
        small(module=lambda features, outputs: 3).fit(x, y)
    with pytest.raises(ArgumentError, match="module must be a torch"):
        small(module=3).fit(x, y)


def test_the_precision_is_that_of_the_data(digits: Any) -> None:
    x, x_test, y, _ = digits
    model = small(max_iter=2).fit(x.astype(np.float32), y)
    assert model.predict_proba(x_test).dtype == np.float32
    assert next(model.module_.parameters()).dtype == torch.float32
    assert small(max_iter=2).fit(x, y).predict_proba(x_test).dtype == np.float64


def test_one_class_is_refused(digits: Any) -> None:
    x, _, y, _ = digits
    with pytest.raises(ArgumentError, match="two classes, and y holds one class"):
        small().fit(x[:5], np.zeros(5))
    with pytest.raises(ArgumentError, match="batch_size must be a whole number"):
        small(batch_size=0).fit(x, y)


def test_names_are_remembered(digits: Any) -> None:
    x, _, y, _ = digits
    names = np.array(["even", "odd"])[y % 2]
    model = small(max_iter=15).fit(x, names)
    assert model.classes_.tolist() == ["even", "odd"]
    assert set(model.predict(x)) == {"even", "odd"}
    assert model.score(x, names) > 0.9
