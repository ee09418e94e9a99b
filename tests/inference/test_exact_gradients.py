"""The unbiased estimators' expected gradient against the truth, by forcing each mask of a tiny network in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Beta

from dropconnectpp.estimators import BBVI, Eq16, running_coefficient, update_moments
from exact_cases import (
    DIRECT,
    EXAMPLE,
    LEARNED,
    MARGINAL,
    NUM_DATA,
    OPTIMAL,
    Case,
    assert_gradients,
    assert_unbiased,
    gate_names,
)

# ------------------------------------------------------------------------------ unbiased estimators

UNBIASED: dict[str, Any] = {
    "running": BBVI(),
    "per-synapse": BBVI(per_synapse=True),
    "mean-network": BBVI(baseline="mean-network"),
    "leave-one-out": BBVI(baseline="leave-one-out"),
    "disarm": "disarm",
}
SHARED = {
    sharing: {"hyper": "optimal", "sharing": sharing, "alpha": 1.5, "beta": 0.4}
    for sharing in ("layer", "unit", "input")
}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"network": "linear"},
    "linear, optimal": {"network": "linear", "options": OPTIMAL},
    "linear, eval, learned, probability": {
        "network": "linear",
        "training": False,
        "kl_weight": 3.0,
        "options": LEARNED | DIRECT,
    },
    "conv2d, eval, prior": {
        "network": "conv2d",
        "training": False,
        "options": OPTIMAL | {"alpha": 0.5, "beta": 3.0},
    },
    "conv2d, eval, marginal": {"network": "conv2d", "training": False, "options": MARGINAL},
    "conv2d, learned": {"network": "conv2d", "options": {"hyper": "learned"}},
    "two layers": {"network": "two layers", "kl_weight": 0.3, "options": OPTIMAL | {"alpha": 2.0} | DIRECT},
    "two layers, marginal": {"network": "two layers", "kl_weight": 0.3, "options": MARGINAL | DIRECT},
    "two layers, a KL weight each": {
        "network": "two layers",
        "kl_weight": 0.5,
        "kl_weights": (0.2, 3.0),
        "options": OPTIMAL,
    },
    "two layers, a KL weight each, marginal": {
        "network": "two layers",
        "kl_weight": 0.5,
        "kl_weights": (0.2, 3.0),
        "options": MARGINAL,
    },
    "two layers, a KL weight each, learned": {"network": "two layers", "kl_weights": (2.5, 0.0), "options": LEARNED},
    "tied": {"network": "tied", "options": OPTIMAL},
    "tied, the first layer's KL weight": {"network": "tied", "kl_weights": (0.2, 3.0), "options": OPTIMAL},
    "tied, the first layer's KL weight, marginal": {"network": "tied", "kl_weights": (0.2, 3.0), "options": MARGINAL},
    "pruned": {"network": "linear", "pruned": True, "options": OPTIMAL},
    "pruned, marginal": {"network": "linear", "pruned": True, "options": MARGINAL},
    "pruned, eval, learned, probability": {
        "network": "linear",
        "training": False,
        "pruned": True,
        "options": LEARNED | DIRECT,
    },
    "L=3": {"network": "two gates", "num_samples": 3, "options": LEARNED},
    "L=3, marginal": {"network": "two gates", "num_samples": 3, "options": MARGINAL},
    "L=2, probability": {"network": "three gates", "num_samples": 2, "options": OPTIMAL | DIRECT},
    "L=2, conv1d": {"network": "conv1d", "num_samples": 2, "kl_weight": 2.0, "options": OPTIMAL},
    "L=2, conv1d, marginal": {"network": "conv1d", "num_samples": 2, "kl_weight": 2.0, "options": MARGINAL},
    "example": {"network": "three gates", "options": EXAMPLE | OPTIMAL | {"beta": 2.0}},
    "example, marginal": {"network": "three gates", "options": EXAMPLE | MARGINAL},
    "example, conv1d, learned": {"network": "conv1d", "training": False, "options": EXAMPLE | LEARNED | DIRECT},
    "example, L=2": {"network": "two gates", "num_samples": 2, "kl_weight": 0.5, "options": EXAMPLE | OPTIMAL},
    "example, L=2, marginal": {
        "network": "two gates",
        "num_samples": 2,
        "kl_weight": 0.5,
        "options": EXAMPLE | MARGINAL,
    },
    "one pi for a layer": {"network": "linear", "options": SHARED["layer"]},
    "one pi for a unit": {"network": "linear", "kl_weight": 2.0, "options": SHARED["unit"]},
    "one pi for an input": {"network": "linear", "training": False, "options": SHARED["input"] | DIRECT},
    "one pi for a layer, conv2d": {"network": "conv2d", "options": SHARED["layer"] | DIRECT},
    "one pi for a unit, pruned": {"network": "linear", "pruned": True, "options": SHARED["unit"] | DIRECT},
    "one pi for an input, pruned": {"network": "linear", "pruned": True, "options": SHARED["input"]},
    "one pi for a unit, tied": {"network": "tied", "kl_weights": (0.2, 3.0), "options": SHARED["unit"]},
    "one pi for an input, L=2": {"network": "conv1d", "num_samples": 2, "options": SHARED["input"]},
    "one pi for a layer, example": {"network": "three gates", "options": EXAMPLE | SHARED["layer"]},
}


TOO_MANY_PAIRS = {
    "linear",
    "linear, optimal",
    "two layers, a KL weight each, marginal",
    "tied, the first layer's KL weight, marginal",
    "L=3, marginal",
    "L=2, probability",
    "L=2, conv1d, marginal",
    "example, marginal",
    "example, L=2",
    "example, L=2, marginal",
    "one pi for a layer",
    "one pi for a unit",
    "one pi for an input",
    "one pi for a unit, tied",
    "one pi for an input, L=2",
}


def applies(name: str, estimator: str) -> bool:
    """Leave-one-out needs other samples; pairs of masks have three outcomes a gate, at times too many."""
    if estimator == "leave-one-out":
        return SETTINGS[name].get("num_samples", 1) > 1
    return estimator != "disarm" or name not in TOO_MANY_PAIRS


GRID = [
    pytest.param(setting, estimator, id=f"{estimator}: {name}")
    for name, setting in SETTINGS.items()
    for estimator in UNBIASED
    if applies(name, estimator)
]


@pytest.mark.parametrize(("setting", "estimator"), GRID)
def test_expected_value_and_gradient_are_exact(setting, estimator):
    assert_unbiased(Case(estimator=UNBIASED[estimator], **setting))


@pytest.mark.parametrize(
    ("estimators", "masks"),
    [
        ((BBVI(), BBVI(baseline="mean-network")), ("example", "batch")),
        ((BBVI(), BBVI(baseline="mean-network")), ("batch", "example")),
        ((BBVI(per_synapse=True), "disarm"), ("example", "batch")),
        (("disarm", BBVI(baseline="mean-network")), ("batch", "batch")),
        (("disarm", "disarm"), ("batch", "batch")),
    ],
    ids=str,
)
def test_layers_with_different_estimators_share_a_model(estimators, masks):
    assert_unbiased(Case("two layers", estimators, masks=masks))


@pytest.mark.parametrize("options", [OPTIMAL, MARGINAL, OPTIMAL | EXAMPLE, MARGINAL | DIRECT, SHARED["layer"]], ids=str)
@pytest.mark.parametrize("per_synapse", [False, True])
def test_without_earlier_minibatches_the_kl_alone_moves_the_gates(options, per_synapse):
    case = Case("three gates", BBVI(per_synapse=per_synapse), options=options)
    case.moments = {name: torch.zeros_like(buffer) for name, buffer in case.moments.items()}
    expected = case.gradients(case.kl() / NUM_DATA)
    for _, masks in case.draws():
        _, found = case.run(masks)
        assert_gradients(found, {name: expected[name] for name in gate_names(case)})


class OwnReward(BBVI):
    """Leaks: the baseline is the sample's own reward, as when Eq. (10) is pooled over a layer."""

    def coefficients(self, reward, baseline):
        return reward.mean(1) - reward.mean(1)


class MeanOfAll(BBVI):
    """Leaks: the mean over samples, the sample's own reward among them."""

    def coefficients(self, reward, baseline):
        return reward.mean(1) - reward.mean((0, 1))


class FoldedFirst(BBVI):
    """Leaks: the moments take in this minibatch before they are used."""

    def coefficients(self, reward, baseline):
        own = reward.mean(1)
        return running_coefficient(own, update_moments(baseline, own.mean(0), torch.full_like(own[0], 0.01), 0.9))


@pytest.mark.parametrize("leak", [OwnReward, MeanOfAll, FoldedFirst])
def test_a_leaking_baseline_is_caught(leak):
    with pytest.raises(AssertionError, match="logit"):
        assert_unbiased(Case("two gates", leak(), num_samples=2))


# --------------------------------------------------------------------------- Eq. (16) as printed


def printed_loss(case: Case, masks: dict[str, Tensor], varpi: Tensor, generator: torch.Generator) -> Tensor:
    """Minus Eq. (16)'s objective over N, whose gradient by W, pi~, alpha~ and beta~ the equation prints."""
    score = torch.zeros((), dtype=torch.float64)
    for keys, layer, name in case.synapses():
        a, b = layer.hyper_posterior(name)
        heads, tails = (torch._standard_gamma(v.detach(), generator=generator) for v in (a, b))
        score = score + Bernoulli(layer.keep_probability(name)).log_prob(masks[keys[0]].double()).sum()
        score = score + Beta(a, b).log_prob(heads / (heads + tails)).sum()
    return -case.log_likelihood(masks) + case.kl_weight / NUM_DATA * case.kl(weighted=True) + varpi * score


@pytest.mark.parametrize("baseline", ["running", "same-sample"])
@pytest.mark.parametrize("own", [1.0, 0.3])
def test_eq16_is_the_printed_gradient_for_one_sample(baseline, own):
    case = Case("three gates", Eq16(baseline=baseline), kl_weight=2.0, kl_weights=(own,), options=LEARNED)
    case.elbo.generator = torch.Generator()
    for _, (masks,) in case.draws():
        case.elbo.generator.manual_seed(3)
        _, found = case.run([masks])
        generator = torch.Generator().manual_seed(3)
        torch.randint(2**62, (1,), generator=generator)  # the seed of the masks, had they not been forced
        varpi = case.log_likelihood(masks).detach()
        if baseline == "running":
            varpi = case.moments["0/layer"][0] / case.moments["0/layer"][1]
        assert_gradients(found, case.gradients(printed_loss(case, masks, varpi, generator)))


@pytest.mark.parametrize("options", [LEARNED, LEARNED | EXAMPLE, LEARNED | DIRECT])
def test_eq16_carries_no_data_or_the_data_with_the_wrong_sign(options):
    for baseline in ("running", "same-sample"):
        case = Case("three gates", Eq16(baseline=baseline), options=options)
        exact = case.gradients(case.exact_loss())
        kl = case.gradients(case.kl() / NUM_DATA)
        _, found = case.expectation()
        for name in gate_names(case):
            data = exact[name] - kl[name]
            wrong = kl[name] if baseline == "running" else kl[name] - data
            torch.testing.assert_close(found[name], wrong, rtol=0, atol=1e-10)
            assert data.abs().min() > 1e-3
        weights = [name for name in exact if name.endswith((".weight", ".bias"))]
        assert_gradients(found, {name: exact[name] for name in weights})
