"""Noise that is known, learned or predicted: against torch.distributions and scipy."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch import distributions as td

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, NonFiniteError, ShapeError
from dropconnectpp.likelihoods import LearnedNoise
from dropconnectpp.likelihoods.student_t import student_t_cdf

DOUBLE = torch.float64
EXTRA_AXES = [(3,), (3, 4)]


def summed(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1)


@pytest.mark.parametrize("extra", EXTRA_AXES)
def test_one_scale_per_output(extra: tuple[int, ...]) -> None:
    output, target = torch.randn(2, 5, *extra, dtype=DOUBLE)
    scales = torch.tensor([0.3, 1.0, 2.0], dtype=DOUBLE)
    broad = scales.view(3, *[1] * (len(extra) - 1))
    given = dcpp.gaussian((0.3, 1.0, 2.0))
    learned = dcpp.gaussian(outputs=3).double()
    with torch.no_grad():
        learned.log_scale.copy_(scales.log())
    for likelihood in (given, learned, learned.fixed()):
        torch.testing.assert_close(likelihood(output, target), summed(td.Normal(output, broad).log_prob(target)))
        assert likelihood.mean(output) is output
    torch.testing.assert_close(given.deviation(output), broad.expand_as(output))
    torch.testing.assert_close(given.cdf(output, target), td.Normal(output, broad).cdf(target))


@pytest.mark.parametrize("df", [1.0, 2.5, 4.0, 300.0])
@pytest.mark.parametrize("scale", [0.4, (0.4, 1.0, 2.0)])
def test_student_t(df: float, scale: Any) -> None:
    output, target = 3 * torch.randn(2, 5, 3, dtype=DOUBLE)
    likelihood = dcpp.student_t(scale, df=df)
    truth = td.StudentT(df, output, torch.tensor(scale, dtype=DOUBLE))
    torch.testing.assert_close(likelihood(output, target), summed(truth.log_prob(target)))
    below = scipy.stats.t.cdf(target, df, loc=output, scale=np.array(scale))
    torch.testing.assert_close(likelihood.cdf(output, target), torch.from_numpy(below), rtol=1e-10, atol=1e-14)
    deviation = torch.from_numpy(np.broadcast_to(scipy.stats.t.std(df, scale=np.array(scale)), (5, 3)).copy())
    torch.testing.assert_close(likelihood.deviation(output), deviation.nan_to_num(math.inf))  # scipy: no mean, so NaN


@pytest.mark.parametrize("df", [0.3, 1.0, 4.0, 30.0, 1e4])
def test_student_t_cdf_in_both_tails(df: float) -> None:
    values = torch.cat([torch.linspace(-60, 60, 401, dtype=DOUBLE), torch.tensor([-1e6, 1e6, 1e-9], dtype=DOUBLE)])
    truth = torch.from_numpy(scipy.stats.t.cdf(values, df))
    torch.testing.assert_close(student_t_cdf(values, df), truth, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("extra", [(), (4,)])
def test_a_model_that_predicts_its_noise(extra: tuple[int, ...]) -> None:
    output, target = torch.randn(5, 6, *extra, dtype=DOUBLE), torch.randn(5, 3, *extra, dtype=DOUBLE)
    truth = td.Normal(output[:, :3], (0.5 * output[:, 3:]).exp())
    likelihood = dcpp.heteroscedastic_gaussian()
    torch.testing.assert_close(likelihood(output, target), summed(truth.log_prob(target)))
    torch.testing.assert_close(likelihood.mean(output), truth.mean)
    torch.testing.assert_close(likelihood.deviation(output), truth.stddev)
    torch.testing.assert_close(likelihood.cdf(output, target), truth.cdf(target))
    wider = td.Normal(truth.mean, 2 * truth.stddev)
    torch.testing.assert_close(likelihood.tempered(2.0)(output, target), summed(wider.log_prob(target)))


def test_poisson() -> None:
    output = torch.randn(50, 2, dtype=DOUBLE)
    target = torch.randint(0, 6, (50, 2))
    truth = td.Poisson(output.exp())
    likelihood = dcpp.poisson()
    torch.testing.assert_close(likelihood(output, target), summed(truth.log_prob(target)))
    torch.testing.assert_close(likelihood.mean(output), truth.mean)
    torch.testing.assert_close(likelihood.deviation(output), truth.stddev)
    for value in (target.double(), target + 0.5, torch.full_like(output, -1.0)):
        below = torch.from_numpy(scipy.stats.poisson.cdf(value, output.exp()))
        torch.testing.assert_close(likelihood.cdf(output, value), below)
    assert likelihood(output, torch.full_like(output, 0.5)).isnan().all()
    assert likelihood(output, torch.full_like(output, -1.0)).isnan().all()


def test_a_target_that_is_no_count_stops_the_step() -> None:
    elbo = dcpp.ELBO(dcpp.DropConnectPPLinear(2, 1), dcpp.poisson(), num_data=4)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        elbo(torch.randn(4, 2), target=torch.full((4, 1), -2.0))


def test_label_smoothing_is_torchs_and_for_training_alone() -> None:
    logits, target = torch.randn(6, 4, dtype=DOUBLE), torch.randint(4, (6,))
    smoothed = dcpp.categorical.smoothed(0.1)
    truth = -nn.functional.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(smoothed(logits, target), truth)
    torch.testing.assert_close(smoothed.log_prob(logits, target), dcpp.categorical(logits, target))
    torch.testing.assert_close(smoothed.mean(logits), dcpp.categorical.mean(logits))


@pytest.mark.parametrize("likelihood", [dcpp.categorical, dcpp.bernoulli])
def test_a_temperature_divides_the_logits(likelihood: Any) -> None:
    logits = torch.randn(6, 4, dtype=DOUBLE)
    target = torch.randint(4, (6,)) if likelihood == dcpp.categorical else torch.rand(6, 4, dtype=DOUBLE)
    cooler = likelihood.tempered(2.0).tempered(1.5)
    torch.testing.assert_close(cooler(logits, target), likelihood(logits / 3, target))
    torch.testing.assert_close(cooler.mean(logits), likelihood.mean(logits / 3))


def test_one_output_is_no_softmax() -> None:
    for call in (
        lambda: dcpp.categorical(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)),
        lambda: dcpp.categorical.mean(torch.zeros(4, 1)),
    ):
        with pytest.raises(
            ArgumentError, match=r"probability 1 whatever the input.*likelihood=bernoulli.*gaussian\(\)"
        ):
            call()


def test_an_output_object_is_its_logits() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    logits, target = torch.randn(4, 3), torch.randint(3, (4,))
    truth = dcpp.categorical(logits, target)
    assert torch.equal(dcpp.categorical(Output(logits), target), truth)
    assert torch.equal(dcpp.categorical({"logits": logits}, target), truth)


# ------------------------------------------------------------------------------------------ learned noise


def noisy_line(count: int = 2000) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 2)
    return x, x @ torch.tensor([[1.0, 0.0], [2.0, 1.0]]) + torch.randn(count, 2) * torch.tensor([0.2, 0.7])


@pytest.mark.parametrize("make", [dcpp.gaussian, dcpp.student_t])
def test_a_learned_scale_is_the_one_of_most_likelihood(make: Any) -> None:
    likelihood = make(outputs=2)
    residuals = torch.randn(500, 2) * torch.tensor([0.2, 3.0])
    optimizer = torch.optim.LBFGS(likelihood.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -likelihood(torch.zeros_like(residuals), residuals).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    if make is dcpp.gaussian:
        torch.testing.assert_close(likelihood.scale, residuals.square().mean(0).sqrt(), rtol=1e-3, atol=0)
    else:
        for found, column in zip(likelihood.scale.tolist(), residuals.T, strict=True):
            best = scipy.stats.t.fit(column.double().numpy(), f0=4.0, floc=0.0)[2]
            assert found == pytest.approx(best, rel=1e-3)


def test_the_elbo_learns_one_noise_per_output() -> None:
    x, y = noisy_line()
    model = dcpp.DropConnectPPLinear(2, 2, estimator="straight-through", keep_probability=0.9999)  # hardly a mask
    elbo = dcpp.ELBO(model, dcpp.gaussian(outputs=2), num_data=len(x), kl_weight=0.0)
    groups = dcpp.parameter_groups(elbo, lr=0.05, weight_decay=0.1)
    assert [(g["name"], g["weight_decay"]) for g in groups] == [("weights", 0.1), ("posterior", 0.0), ("noise", 0.0)]
    assert groups[2]["params"] == [elbo.log_likelihood.log_scale]
    assert "log_likelihood.log_scale" in elbo.state_dict()
    assert [key for key in model.state_dict() if "scale" in key] == []
    optimizer = torch.optim.Adam(dcpp.parameter_groups(elbo, lr=0.05))
    for step in range(400):
        if step == 300:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        loss = elbo(x, y).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert elbo.log_likelihood.scale.tolist() == pytest.approx([0.2, 0.7], rel=0.1)  # 1.6% is one standard error


def test_noise_that_no_optimiser_holds_is_said() -> None:
    model = dcpp.DropConnectPPLinear(2, 2, estimator="straight-through")
    elbo = dcpp.ELBO(model, dcpp.gaussian(), num_data=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    elbo(x, y).loss.backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"No optimiser holds the noise scale.*elbo.parameters\(\)"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo = dcpp.ELBO(model, dcpp.gaussian(), num_data=10)
        optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
        for _ in range(3):
            elbo(x, y).loss.backward()
            optimizer.step()


def test_errors_name_the_rule() -> None:
    with pytest.raises(ShapeError, match=r"noise scale for each of 2 outputs and needs an output of shape \(B, 2, "):
        dcpp.gaussian((1.0, 2.0))(torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(ShapeError, match=re.escape("shape (B, 2K, ...): K means, then K log-variances; got (4, 3)")):
        dcpp.heteroscedastic_gaussian()(torch.zeros(4, 3), torch.zeros(4, 1))
    with pytest.raises(ArgumentError, match=r"outputs says how many scales to learn, and scale=0\.5 is given"):
        dcpp.gaussian(0.5, outputs=2)
    with pytest.raises(ArgumentError, match="df must be a finite number above 0"):
        dcpp.student_t(df=0.0)
    with pytest.raises(ArgumentError, match="start must be a finite number above 0"):
        dcpp.gaussian(start=-1.0)
    with pytest.raises(ArgumentError, match=r"label_smoothing must lie in \[0, 1\), got 1.0"):
        dcpp.categorical.smoothed(1.0)


def test_an_infinite_variance_is_called_so() -> None:
    assert dcpp.student_t(1.0, df=2.0).deviation(torch.zeros(1)).item() == math.inf
    assert isinstance(dcpp.student_t(), LearnedNoise)
