"""Which likelihood a model was trained with: on the model, through copies and pickles, and as plain data."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp import likelihoods
from dropconnectpp.errors import ArgumentError

KNOWN = {
    "categorical": dcpp.categorical,
    "smoothed": dcpp.categorical.smoothed(0.1).tempered(2.0),
    "bernoulli": dcpp.bernoulli.tempered(0.5),
    "gaussian": dcpp.gaussian(0.3),
    "gaussians": dcpp.gaussian((0.3, 0.5)),
    "student_t": dcpp.student_t((0.1, 2.0), df=3.0),
    "heteroscedastic": dcpp.heteroscedastic_gaussian().tempered(1.5),
    "poisson": dcpp.poisson(),
}


def squared(output: Tensor, target: Tensor) -> Tensor:
    return -(output - target).square().sum(1)


@pytest.mark.parametrize("name", KNOWN)
def test_a_description_gives_the_likelihood_back(name: str) -> None:
    described = json.loads(json.dumps(likelihoods.describe(KNOWN[name])))
    assert likelihoods.from_description(described) == KNOWN[name]


@pytest.mark.parametrize("make", [dcpp.gaussian, dcpp.student_t])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_learned_noise_comes_back_at_its_scale_and_goes_on_learning(make: Any, outputs: int) -> None:
    learned = make(outputs=outputs)
    with torch.no_grad():
        learned.log_scale.normal_()
    again = likelihoods.from_description(json.loads(json.dumps(likelihoods.describe(learned))))
    assert isinstance(again, likelihoods.LearnedNoise)
    assert again.noise == learned.noise or again.noise.scale == learned.fixed().scale
    torch.testing.assert_close(again.log_scale, learned.log_scale)
    assert again.log_scale.requires_grad


def test_what_cannot_be_described() -> None:
    assert likelihoods.describe(squared) is None
    with pytest.raises(ArgumentError, match="the likelihood's name must be one of 'categorical'"):
        likelihoods.from_description({"name": "cauchy"})
    with pytest.raises(ArgumentError, match="description of the likelihood 'gaussian' is damaged"):
        likelihoods.from_description({"name": "gaussian"})
    for damage in (
        {"scale": []},
        {"scale": ["1"]},
        {"scale": 2.0},
        {"scale": [1.0], "df": True},
        {"scale": [1.0], "learned": 1},
        {"scale": [1.0], "colour": 1.0},
    ):
        with pytest.raises(ArgumentError, match="description of the likelihood 'gaussian' is damaged"):
            likelihoods.from_description({"name": "gaussian", **damage})
    with pytest.raises(ArgumentError, match="description of the likelihood 'poisson' is damaged"):
        likelihoods.from_description({"name": "poisson", "learned": True})
    with pytest.raises(ArgumentError, match="temperature must be a finite number above 0"):
        likelihoods.from_description({"name": "categorical", "temperature": -1.0})


def test_the_elbo_leaves_its_likelihood_on_the_model() -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 2))
    assert likelihoods.remembered(model) is None
    keys = list(model.state_dict())
    learned = dcpp.gaussian(outputs=2)
    dcpp.ELBO(model, learned, num_data=10)
    assert likelihoods.remembered(model) is learned
    assert list(model.state_dict()) == keys
    assert all(p is not learned.log_scale for p in model.parameters())
    twin = likelihoods.remembered(copy.deepcopy(model))
    assert twin is not learned
    assert torch.equal(twin.log_scale, learned.log_scale)
    assert likelihoods.remembered(dcpp.to_dense(model)) is not None
    likelihoods.remember(model, None)
    assert likelihoods.remembered(model) is None


def test_a_pickle_keeps_what_can_be_described() -> None:
    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 2))
    dcpp.ELBO(model, dcpp.gaussian(0.25), num_data=10)
    assert likelihoods.remembered(pickle.loads(pickle.dumps(model))) == dcpp.gaussian(0.25)
    dcpp.ELBO(model, lambda output, target: squared(output, target), num_data=10)
    assert likelihoods.remembered(pickle.loads(pickle.dumps(model))) is None


def test_wrappers_share_what_they_wrap_remembers() -> None:
    class DistributedLike(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = nn.Sequential(dcpp.DropConnectPPLinear(3, 2))
    dcpp.ELBO(DistributedLike(model), dcpp.bernoulli, num_data=10)
    assert likelihoods.remembered(model) is dcpp.bernoulli
    other = nn.Sequential(dcpp.DropConnectPPLinear(3, 2))
    dcpp.ELBO(other, dcpp.categorical, num_data=10)
    assert likelihoods.remembered(DistributedLike(other)) is dcpp.categorical
