"""`calibrate`: the best temperature, kept with the model's likelihood, and undone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.likelihoods import remember, remembered

X = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def truth() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 3)


def labels(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits.softmax(1), 1, generator=torch.Generator().manual_seed(2)).squeeze(1)


def test_a_plain_network_gets_the_temperature_that_scipy_finds(truth: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    model[0].weight.data = 4.0 * truth.T
    y = labels(X @ truth)
    remember(model, dcpp.categorical)
    logits = model(X).detach().double()
    best = minimize_scalar(lambda t: float(nn.functional.cross_entropy(logits / t, y)), bounds=(0.1, 20))
    found = dcpp.calibrate(model, DataLoader(TensorDataset(X, y), batch_size=64))
    assert found.factor == pytest.approx(best.x, rel=1e-3)
    assert found.nll_after == pytest.approx(best.fun, abs=1e-6)
    assert found.nll_before == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-6)
    assert found.factor == pytest.approx(4.0, rel=0.25), "the logits are four times too large"
    assert found.count == 400
    assert remembered(model) == dcpp.categorical.tempered(found.factor)
    assert dcpp.evaluate(model, (X, y))["nll"] == pytest.approx(found.nll_after, rel=1e-5)


def test_networks_are_scaled_before_they_are_averaged(truth: torch.Tensor) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(dcpp.DropConnectPPLinear(5, 3, bias=False, keep_probability=0.9))
    model[0].weight.data = 5.0 * truth.T
    y = labels(X @ truth)
    remember(model, dcpp.categorical)
    found = dcpp.calibrate(model, (X, y), num_samples=9, generator=torch.Generator().manual_seed(4))
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(4)))
    outputs = dcpp.predict(
        model, X, num_samples=9, keep_samples=True, generator=torch.Generator().manual_seed(seed)
    ).outputs.double()

    def nll(t: float) -> float:
        mean = (outputs / t).softmax(-1).mean(0)
        return float(-mean.gather(1, y.unsqueeze(1)).log().mean())

    assert found.nll_after == pytest.approx(nll(found.factor), rel=1e-6)
    assert nll(found.factor) <= min(nll(found.factor * 1.02), nll(found.factor / 1.02))


def test_noise_is_scaled() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(5, 1))
    y = model(X).detach() + 2.5 * torch.randn(400, 1)
    remember(model, dcpp.gaussian(0.5))
    found = dcpp.calibrate(model, (X, y))
    assert found.factor == pytest.approx(float((model(X).detach() - y).square().mean().sqrt()) / 0.5, rel=1e-3)
    assert dcpp.evaluate(model, (X, y))["coverage"] == pytest.approx(90.0, abs=4.0)
    pair = nn.Sequential(nn.Linear(5, 2))
    remember(pair, dcpp.heteroscedastic_gaussian())
    assert dcpp.calibrate(pair, (X, y)).nll_after < dcpp.calibrate(pair, (X, y)).nll_before + 1e-9


def test_noise_that_the_elbo_learned_is_scaled_from_what_it_is_now() -> None:
    torch.manual_seed(6)
    model = nn.Sequential(dcpp.DropConnectPPLinear(5, 1))
    noise = dcpp.gaussian(start=0.3)
    dcpp.ELBO(model, noise, num_data=400)
    y = torch.randn(400, 1)
    found = dcpp.calibrate(model, (X, y))
    assert remembered(model).scale == pytest.approx(0.3 * found.factor)
    found.undo()
    assert remembered(model) is noise


def test_save_keeps_it(truth: torch.Tensor, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(dcpp.DropConnectPPLinear(5, 3))
    model[0].weight.data = 9.0 * truth.T
    y = labels(X @ truth)
    remember(model, dcpp.categorical)
    found = dcpp.calibrate(model, (X, y))
    assert found.factor > 1.5
    dcpp.save(model, tmp_path / "model.safetensors")
    again = dcpp.load(tmp_path / "model.safetensors", nn.Sequential(nn.Linear(5, 3)))
    assert remembered(again) == found.likelihood
    torch.manual_seed(8)
    expected = dcpp.predict(model, X)
    torch.manual_seed(8)
    torch.testing.assert_close(dcpp.predict(again, X).mean, expected.mean)


def test_undone_in_turn(truth: torch.Tensor) -> None:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 3))
    y = labels(X @ truth)
    first = dcpp.calibrate(model, (X, y), likelihood=dcpp.categorical)
    second = dcpp.calibrate(model, (X[:100], y[:100]))
    assert second.likelihood.temperature == pytest.approx(first.factor * second.factor)
    with pytest.raises(ArgumentError, match="Undo the later calibration first"):
        first.undo()
    second.undo()
    assert remembered(model) is first.likelihood
    first.undo()
    assert remembered(model) is None


def test_what_is_right_stays(truth: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(5, 3, bias=False))
    model[0].weight.data = 3.0 * truth.T
    y = labels(X @ truth)
    assert dcpp.calibrate(model, (X, y), likelihood=dcpp.categorical).factor > 2.0
    again = dcpp.calibrate(model, (X, y))
    assert again.factor == pytest.approx(1.0, abs=1e-3)
    assert again.nll_after <= again.nll_before


@pytest.mark.parametrize(
    ("data", "likelihood", "message"),
    [
        ((X, torch.ones(400, 3)), dcpp.poisson(), "scales logits or noise, and Poisson"),
        ((X, torch.zeros(400).long()), None, "does not know which likelihood"),
        (iter([(X, torch.zeros(400).long())]), dcpp.categorical, "three times: give a loader"),
        (X, dcpp.categorical, "A batch has no target"),
    ],
)
def test_refused_with_nothing_changed(data: object, likelihood: object, message: str) -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    with pytest.raises(ArgumentError, match=message):
        dcpp.calibrate(model, data, likelihood=likelihood)
    assert remembered(model) is None
