"""A layer's own weight of the KL: in the loss and its gradient on every path, and nowhere else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributions as td
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from elbo_cases import X, Y, bound, each_estimator, each_mask, gradients, make, masks_of, samples_for

WEIGHTS = {"0": 0.2, "2": 3.0}


def weighted(model: nn.Sequential, weights: dict[str, float] | None = None) -> nn.Sequential:
    for name, weight in (WEIGHTS if weights is None else weights).items():
        model.get_submodule(name).kl_weight = weight
    return model


def divergence(layer: Any) -> Tensor:
    """Eq. (20) + Eq. (21) of a layer from torch.distributions, at the best q(pi) or the learned one."""
    total = torch.zeros((), dtype=torch.float64)
    prior = td.Beta(*torch.tensor([layer.alpha, layer.beta], dtype=torch.float64))
    for name in layer.synapse_names:
        pi, (a, b) = torch.sigmoid(layer.logit(name)), layer.hyper_posterior(name)
        log_pi, log_rest = (torch.digamma(v) - torch.digamma(a + b) for v in (a, b))
        cross = pi * log_pi + (1 - pi) * log_rest
        total = total + (td.kl_divergence(td.Beta(a, b), prior) - td.Bernoulli(pi).entropy() - cross).sum()
    return total


def weighted_divergence(model: nn.Module, weights: dict[str, float]) -> Tensor:
    return torch.stack([weight * divergence(model.get_submodule(name)) for name, weight in weights.items()]).sum()


def step(model: nn.Module, name: str, **options: Any) -> tuple[dcpp.ELBOTerms, dict[str, Tensor]]:
    """The second step from one seed: a running baseline has something to subtract."""
    elbo = bound(model, num_samples=samples_for(name), **options)
    elbo(X, target=Y)
    model.zero_grad()
    terms = elbo(X, target=Y)
    terms.loss.backward()
    return terms, gradients(model)


@each_estimator
@each_mask
@pytest.mark.parametrize("options", [{}, {"alpha": 2.0, "beta": 9.0}, {"hyper": "learned"}], ids=str)
def test_the_gradient_is_the_data_part_and_each_weighted_divergence(name: str, mask: str, options: Any) -> None:
    terms, found = step(weighted(make(name, mask, **options)), name, kl_weight=0.5)
    _, data = step(weighted(make(name, mask, **options), dict.fromkeys(WEIGHTS, 0.0)), name, kl_weight=0.5)
    model = make(name, mask, **options)
    price = weighted_divergence(model, WEIGHTS)
    torch.testing.assert_close(terms.elbo, terms.log_likelihood - 0.5 * price.detach())
    torch.testing.assert_close(terms.loss, -terms.elbo / 30)
    slopes = torch.autograd.grad(0.5 * price / 30, list(model.parameters()), allow_unused=True, materialize_grads=True)
    for key, slope in zip(found, slopes, strict=True):
        torch.testing.assert_close(found[key] - data[key], slope, rtol=1e-9, atol=1e-12)
        assert (slope != 0).any() == (not key.endswith((".weight", ".bias")))


@pytest.mark.parametrize("name", ["straight-through", "local", "concrete"])
@each_mask
def test_the_loss_of_pathwise_layers_is_its_definition(name: str, mask: str) -> None:
    """The same pass by hand, minus its mean log-likelihood plus the divergences, under autograd as a whole."""
    model = weighted(make(name, mask, beta=9.0))
    elbo = bound(model, kl_weight=0.5)
    elbo(X, target=Y).loss.backward()
    found = gradients(model)
    model.zero_grad()
    elbo.generator.manual_seed(2)
    with elbo.sample():
        output = model(X)
    loss = -td.Categorical(logits=output).log_prob(Y).mean() + 0.5 * weighted_divergence(model, WEIGHTS) / 30
    loss.backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-9, atol=1e-12)


@each_estimator
def test_what_is_reported_is_the_divergence_itself(name: str) -> None:
    plain, model = make(name), weighted(make(name))
    plain_terms, _ = step(plain, name)
    terms, _ = step(model, name)
    torch.testing.assert_close(terms.kl, plain_terms.kl, rtol=1e-15, atol=0)  # layers of one weight are summed first
    assert torch.equal(terms.log_likelihood, plain_terms.log_likelihood)
    torch.testing.assert_close(terms.kl, weighted_divergence(model, dict.fromkeys(WEIGHTS, 1.0)).detach())
    assert torch.equal(dcpp.kl_divergence(model), dcpp.kl_divergence(plain))
    for key, value in dcpp.named_kl(plain).items():
        assert torch.equal(dcpp.named_kl(model)[key], value)
        assert dcpp.posterior(model)[key].kl == dcpp.posterior(plain)[key].kl
    kl = {key: value.detach() for key, value in dcpp.named_kl(model).items()}
    torch.testing.assert_close(terms.elbo, terms.log_likelihood - 0.2 * kl["0"] - 3.0 * kl["2"])


@each_estimator
def test_a_weight_of_one_for_all_is_the_elbos_own(name: str) -> None:
    terms, found = step(weighted(make(name), dict.fromkeys(WEIGHTS, 0.25)), name)
    expected, gradient = step(make(name), name, kl_weight=0.25)
    assert torch.equal(terms.loss, expected.loss)
    assert all(torch.equal(found[key], gradient[key]) for key in found)


@pytest.mark.parametrize("name", ["mean-network", "straight-through"])
def test_accumulated_halves_are_the_whole_batch(name: str) -> None:
    model = weighted(make(name))
    elbo, masks = bound(model), masks_of(model)
    with dcpp.forced_masks(model, masks):
        elbo(X, target=Y).loss.backward()
        whole = gradients(model)
        model.zero_grad()
        for half in (slice(0, 3), slice(3, 6)):
            (elbo(X[half], target=Y[half]).loss / 2).backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, whole[key], rtol=1e-9, atol=1e-12)


def test_a_layers_weight_may_change_between_steps_and_differ_from_its_twins() -> None:
    model = make("straight-through")
    elbo = bound(model)
    for weight in (1.0, 0.0, 2.0):
        model[0].kl_weight = weight
        terms = elbo(X, target=Y)
        kl = dcpp.named_kl(model)
        torch.testing.assert_close(terms.elbo, (terms.log_likelihood - weight * kl["0"] - kl["2"]).detach())


def test_float32_through_the_streamed_pass_is_float64() -> None:
    for options in ({}, {"alpha": 2.0, "beta": 98.0}):
        found = {}
        for dtype in (torch.float64, torch.float32):
            model = weighted(make(**options)).to(dtype)
            elbo = bound(model)
            masks = {key: (torch.arange(mask.numel()) % 3 > 0).view_as(mask) for key, mask in masks_of(model).items()}
            with dcpp.forced_masks(model, masks):
                for _ in range(2):
                    model.zero_grad()
                    elbo(X.to(dtype), target=Y).loss.backward()
            found[dtype] = gradients(model)
        for key, gradient in found[torch.float32].items():
            torch.testing.assert_close(gradient.double(), found[torch.float64][key], rtol=2e-5, atol=2e-6)


# ------------------------------------------------------------------------------ where the options go


def options_of(layer: Any) -> tuple[float, float]:
    assert layer.options()["kl_weight"] == layer.kl_weight
    assert layer.options()["logit_step"] == layer.logit_step
    return layer.kl_weight, layer.logit_step


def test_both_are_shown_where_they_differ_from_one() -> None:
    assert "kl_weight" not in repr(dcpp.DropConnectPPLinear(3, 2))
    assert "logit_step" not in repr(dcpp.DropConnectPPLinear(3, 2))
    shown = repr(dcpp.DropConnectPPLinear(3, 2, kl_weight=0.25, logit_step=4))
    assert shown.endswith("estimator='straight-through', kl_weight=0.25, logit_step=4.0)")
    assert repr(dcpp.DropConnectPPConv1d(3, 2, 1, kl_weight=0)).endswith("estimator='straight-through', kl_weight=0.0)")


def test_both_survive_copies_pruning_and_pickles() -> None:
    model = dcpp.convert(nn.Sequential(nn.Linear(4, 3), nn.Conv1d(2, 2, 1)), kl_weight=0.25, logit_step=4.0)
    for again in (copy.deepcopy(model), dcpp.prune(model, keep=0.5), pickle.loads(pickle.dumps(model))):
        assert [options_of(layer) for layer in again] == [(0.25, 4.0)] * 2
    old = copy.deepcopy(model[0])  # as it was pickled before there were such options
    del old.kl_weight, old.logit_step
    assert options_of(old) == (1.0, 1.0)


def test_a_state_has_neither_as_it_has_no_prior() -> None:
    layer = dcpp.DropConnectPPLinear(3, 2, kl_weight=0.25, logit_step=4.0, alpha=2.0)
    other = dcpp.DropConnectPPLinear(3, 2)
    other.load_state_dict(layer.state_dict(), strict=True)
    assert (*options_of(other), other.alpha) == (1.0, 1.0, 1.0)
    layer.load_state_dict(other.state_dict(), strict=True)
    assert (*options_of(layer), layer.alpha) == (0.25, 4.0, 2.0)


@pytest.mark.parametrize(
    ("hyper", "kl"),
    [("optimal", dcpp.functional.beta_bernoulli_kl), ("marginal", dcpp.functional.marginal_kl)],
)
def test_converted_layers_that_share_a_weight_share_both(hyper: str, kl: Any) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    options: dict[str, Any] = {"estimator": "straight-through", "hyper": hyper, "beta": 9.0}
    model = dcpp.convert(nn.Sequential(first, second), kl_weight=0.25, logit_step=4.0, **options)
    assert [options_of(layer) for layer in model] == [(0.25, 4.0)] * 2
    model[1].kl_weight = 7.0  # its bias is its own, the weight counts with the first layer
    terms = dcpp.ELBO(model, dcpp.categorical, 30)(torch.randn(4, 3), target=torch.tensor([0, 1, 2, 0]))
    one = kl(torch.zeros(()), 1.0, 9.0)
    torch.testing.assert_close(terms.log_likelihood - terms.elbo, (0.25 * 12 + 7.0 * 3) * one, rtol=1e-4, atol=0)
    torch.testing.assert_close(terms.kl, 15 * one)


def test_fixed_rates_have_neither() -> None:
    with pytest.raises(ArgumentError, match="no option 'kl_weight', and neither have layers of kind 'dropconnect'"):
        dcpp.convert(nn.Linear(3, 2), kind="dropconnect", kl_weight=0.5)
    with pytest.raises(ArgumentError, match="logit_step must be a finite number above 0, got -1"):
        dcpp.convert(nn.Linear(3, 2), logit_step=-1)
