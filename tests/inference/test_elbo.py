"""The ELBO's terms against hand computation, and what it refuses."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as td

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, NonFiniteError, ShapeError
from elbo_cases import (
    ESTIMATORS,
    X,
    Y,
    bound,
    each_estimator,
    each_mask,
    gradients,
    make,
    masked_output,
    masks_of,
    samples_for,
)


def kl_by_hand(model: nn.Module, alpha: float, beta: float, hyper: str) -> Tensor:
    """E_q(pi)[KL[q(z) || p(z | pi)]] + KL[q(pi) || p(pi)], or KL[q(z) || p(z)], by torch.distributions and digammas."""
    total = torch.zeros((), dtype=torch.float64)
    for key, logit in model.named_parameters():
        if key.endswith("_logit"):
            pi = torch.sigmoid(logit.detach())
            if hyper == "marginal":
                total += td.kl_divergence(
                    td.Bernoulli(pi), td.Bernoulli(torch.tensor(alpha / (alpha + beta)).to(pi))
                ).sum()
                continue
            q = td.Beta(alpha + pi, beta + 1 - pi)
            together = torch.digamma(alpha + beta + 1 + torch.zeros_like(pi))
            log_on, log_off = torch.digamma(q.concentration1) - together, torch.digamma(q.concentration0) - together
            cross = pi * log_on + (1 - pi) * log_off
            total += (td.kl_divergence(q, td.Beta(alpha, beta)) - td.Bernoulli(pi).entropy() - cross).sum()
    return total


# ---------------------------------------------------------------------------------------- the terms


@pytest.mark.parametrize("hyper", ["marginal", "optimal"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("name", ["running", "mean-network", "straight-through", "disarm"])
def test_terms_are_those_of_eq_15(name: str, alpha: float, beta: float, hyper: str) -> None:
    model = make(name, alpha=alpha, beta=beta, hyper=hyper)
    elbo = bound(model, num_data=50, kl_weight=0.3)
    masks = masks_of(model)
    with dcpp.forced_masks(model, masks):
        terms = elbo(X, target=Y)
    output = masked_output(model, masks, X)
    log_likelihood = 50 * td.Categorical(logits=output).log_prob(Y).mean()
    kl = kl_by_hand(model, alpha, beta, hyper)
    torch.testing.assert_close(terms.log_likelihood, log_likelihood.detach())
    torch.testing.assert_close(terms.kl, kl)
    torch.testing.assert_close(terms.elbo, log_likelihood.detach() - 0.3 * kl)
    torch.testing.assert_close(terms.loss.detach(), -terms.elbo / 50)
    torch.testing.assert_close(terms.output, output)
    assert terms.loss.requires_grad
    assert not any(value.requires_grad for value in (terms.elbo, terms.log_likelihood, terms.kl))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("local", "concrete")])
@each_mask
def test_weights_get_the_mean_gradient_of_the_passes(name: str, mask: str) -> None:
    model = make(name, mask)
    passes = [masks_of(model) for _ in range(4)]
    elbo = bound(model, num_samples=4 if name != "disarm" else 2)
    with dcpp.forced_masks(model, passes):
        elbo(X, target=Y).loss.backward()
    found = gradients(model)
    model.zero_grad()
    loss = -torch.stack([td.Categorical(logits=masked_output(model, m, X)).log_prob(Y).mean() for m in passes]).mean()
    loss.backward()
    for key in ("0.weight", "0.bias", "2.weight", "2.bias"):
        torch.testing.assert_close(found[key], model.get_parameter(key).grad)


@each_mask
def test_the_likelihood_counts_n_over_b_times(mask: str) -> None:
    model = make(mask=mask)
    masks = masks_of(model)
    with dcpp.forced_masks(model, masks):
        once = bound(model, num_data=30)(X, target=Y)
        twice_the_batch = bound(model, num_data=30)(torch.cat([X, X]), target=torch.cat([Y, Y]))
        twice_the_data = bound(model, num_data=60)(X, target=Y)
    torch.testing.assert_close(twice_the_batch.log_likelihood, once.log_likelihood)
    torch.testing.assert_close(twice_the_data.log_likelihood, 2 * once.log_likelihood)
    torch.testing.assert_close(twice_the_data.kl, once.kl)


@each_estimator
@pytest.mark.parametrize("options", [{"hyper": "marginal", "beta": 3.0}, {"hyper": "optimal"}, {"hyper": "learned"}])
def test_kl_weight_scales_the_kl_and_its_gradient_and_may_change(name: str, options: dict[str, Any]) -> None:
    found = {}
    if name.startswith("eq16"):
        options = {"hyper": "learned"}
    model = make(name, **options)
    elbo = bound(model, num_samples=samples_for(name))
    start = copy.deepcopy(elbo.state_dict())
    for weight in (0.0, 1.0, 3.0):
        elbo.load_state_dict(start)
        elbo.generator.manual_seed(2)
        elbo.kl_weight = weight
        model.zero_grad()
        terms = elbo(X, target=Y)
        terms.loss.backward()
        torch.testing.assert_close(terms.elbo, terms.log_likelihood - weight * terms.kl)
        found[weight] = gradients(model)
    model.zero_grad()
    dcpp.kl_divergence(model).backward()
    for key, parameter in model.named_parameters():
        slope = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / 30
        torch.testing.assert_close(found[1.0][key] - found[0.0][key], slope)
        torch.testing.assert_close(found[3.0][key] - found[0.0][key], 3 * slope)


def test_num_samples_are_averaged() -> None:
    model = make()
    passes = [masks_of(model) for _ in range(3)]
    elbo = bound(model, num_samples=3)
    with dcpp.forced_masks(model, passes):
        terms = elbo(X, target=Y)
    values = [td.Categorical(logits=masked_output(model, masks, X)).log_prob(Y).mean() for masks in passes]
    torch.testing.assert_close(terms.log_likelihood, 30 * torch.stack(values).mean().detach())
    torch.testing.assert_close(terms.output, masked_output(model, passes[0], X))


class Conditioned(nn.Module):
    """A model of two inputs and an option, with a structured output."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.left = dcpp.DropConnectPPLinear(3, 2, dtype=torch.float64, **options)
        self.right = dcpp.DropConnectPPLinear(2, 2, dtype=torch.float64, **options)

    def forward(self, a: Tensor, b: Tensor, *, gain: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.left(a) + gain * self.right(b)}


@each_estimator
def test_models_of_several_inputs_options_and_structured_outputs(name: str) -> None:
    hyper = "learned" if name.startswith("eq16") else "optimal"
    model = Conditioned(estimator=ESTIMATORS[name], hyper=hyper)
    b = torch.randn(6, 2, dtype=torch.float64)
    elbo = bound(
        model, num_samples=samples_for(name), likelihood=lambda out, target: dcpp.categorical(out["logits"], target)
    )
    ones = {k: torch.ones_like(p) for k, p in model.named_parameters() if k.endswith(("weight", "bias"))}
    with dcpp.forced_masks(model, ones):
        terms = elbo(X, b, gain=2.0, target=Y)
        terms.loss.backward()
    expected = nn.functional.linear(X, model.left.weight, model.left.bias)
    expected = expected + 2.0 * nn.functional.linear(b, model.right.weight, model.right.bias)
    torch.testing.assert_close(terms.output["logits"], expected)
    torch.testing.assert_close(terms.log_likelihood, 30 * dcpp.categorical(expected, Y).mean().detach())
    gradients(model)


# ---------------------------------------------------------------------------------------- refusals


@each_estimator
@each_mask
def test_values_that_are_not_finite_are_refused_before_anything_changes(name: str, mask: str) -> None:
    model = make(name, mask)
    elbo = bound(model, num_samples=samples_for(name))
    elbo(X, target=Y)
    before = copy.deepcopy(elbo.state_dict())
    spoiled = X.clone()
    spoiled[0, 1] = float("nan")
    words = r"the loss is nan; input 0 holds 1 values that are not finite; output 0 holds .* No parameter and no moment"
    with pytest.raises(NonFiniteError, match=words):
        elbo(spoiled, target=Y)
    with elbo.sample():
        output = model(spoiled)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        elbo.terms(output, Y)
    assert all(torch.equal(before[key], value) for key, value in elbo.state_dict().items())
    elbo(X, target=Y)
    with torch.no_grad():
        model[2].bias[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"parameter 2\.bias is not finite"):
        elbo(X, target=Y)


def test_an_infinite_loss_is_refused_and_the_check_can_be_turned_off() -> None:
    def impossible(output: Tensor, target: Tensor) -> Tensor:
        return dcpp.categorical(output, target) - float("inf")

    with pytest.raises(NonFiniteError, match=r"the loss is inf\. .* check_finite=False turns this check off"):
        bound(make(), likelihood=impossible)(X, target=Y)
    assert bound(make(), likelihood=impossible, check_finite=False)(X, target=Y).loss == float("inf")


@pytest.mark.parametrize(
    ("likelihood", "shape"),
    [
        (lambda out, y: dcpp.categorical(out, y).mean(), "()"),
        (lambda out, y: out, "(6, 2)"),
        (lambda out, y: dcpp.categorical(out, y)[:0], "(0,)"),
        (lambda out, y: float(dcpp.categorical(out, y).detach().sum()), "float"),
    ],
)
def test_log_likelihoods_must_be_one_value_per_example(likelihood: Any, shape: str) -> None:
    words = f"log_likelihood must return one value per example, shape (B,), got {shape}. Sum over what"
    with pytest.raises(ShapeError, match=re.escape(words)):
        bound(make(), likelihood=likelihood)(X, target=Y)


def test_num_data_must_cover_the_batch() -> None:
    with pytest.raises(ArgumentError, match=r"at least the batch size, got num_data=5 and a batch of 6\. Give the"):
        bound(make(), num_data=5)(X, target=Y)
    bound(make(), num_data=6)(X, target=Y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_data": 0}, "num_data must be a whole number of at least 1, got 0."),
        ({"num_data": 10.0}, "num_data must be a whole number of at least 1, got 10.0."),
        ({"num_data": True}, "num_data must be a whole number of at least 1, got True."),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1, got 0."),
        ({"kl_weight": -1.0}, "kl_weight must be a finite number of at least 0, got -1.0."),
        ({"kl_weight": float("nan")}, "kl_weight must be a finite number of at least 0, got nan."),
        ({"likelihood": "categorical"}, "log_likelihood must be callable, (output, target) -> (B,), got 'categorical'"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        bound(make(), **options)


def test_estimators_are_checked_against_the_number_of_samples() -> None:
    with pytest.raises(ArgumentError, match=r"baseline='leave-one-out' needs num_samples of at least 2, got 1\."):
        bound(make("leave-one-out"))
    elbo = bound(make())
    with pytest.raises(ArgumentError, match="kl_weight must be a finite number"):
        elbo.kl_weight = float("inf")
    assert elbo.kl_weight == 1.0
