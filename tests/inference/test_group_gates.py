"""Gates that groups of synapses share, against the truth: each mask of the groups of a tiny network in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.estimators import BBVI, Concrete, Eq16
from dropconnectpp.ops.noise import generator_of
from exact_cases import (
    DIRECT,
    EXAMPLE,
    LEARNED,
    MARGINAL,
    NUM_DATA,
    OPTIMAL,
    assert_gradients,
    assert_unbiased,
    gate_names,
    linear_likelihood,
    others,
)
from group_cases import GroupCase, membership

UNBIASED: dict[str, Any] = {
    "running": BBVI(),
    "per-synapse": BBVI(per_synapse=True),
    "mean-network": BBVI(baseline="mean-network"),
    "leave-one-out": BBVI(baseline="leave-one-out"),
    "disarm": "disarm",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "inputs": {"network": "linear, no bias", "options": MARGINAL | {"granularity": "input"}},
    "inputs, with biases": {"network": "linear", "options": MARGINAL | {"granularity": "input"}},
    "inputs, of blocks": {"network": "wide", "options": OPTIMAL | {"granularity": (2, 1)}},
    "units": {"network": "linear", "kl_weight": 2.0, "options": MARGINAL | {"granularity": "unit"}},
    "units, learned, probability": {
        "network": "linear",
        "training": False,
        "options": LEARNED | DIRECT | {"granularity": "unit"},
    },
    "units, L=2": {"network": "linear", "num_samples": 2, "options": MARGINAL | {"granularity": "unit"}},
    "units, example": {"network": "two gates", "options": EXAMPLE | MARGINAL | {"granularity": "unit"}},
    "units with biases, example": {"network": "three gates", "options": EXAMPLE | OPTIMAL | {"granularity": "unit"}},
    "units, example, L=2": {
        "network": "three gates",
        "num_samples": 2,
        "options": EXAMPLE | LEARNED | {"granularity": "unit"},
    },
    "inputs, example": {"network": "linear, no bias", "options": EXAMPLE | MARGINAL | {"granularity": "input"}},
    "blocks": {"network": "wide", "options": MARGINAL | {"granularity": (1, 2)}},
    "one block": {"network": "wide", "num_samples": 2, "options": LEARNED | {"granularity": (2, 4)}},
    "blocks, example, learned": {"network": "wide", "options": EXAMPLE | LEARNED | {"granularity": (2, 2)}},
    "two layers": {"network": "two layers", "kl_weights": (0.2, 3.0), "options": OPTIMAL | {"granularity": "unit"}},
    "tied": {"network": "tied", "kl_weights": (0.2, 3.0), "options": MARGINAL | {"granularity": "input"}},
    "tied units": {"network": "tied", "options": MARGINAL | {"granularity": "unit"}},
    "kernels": {"network": "two channels", "training": False, "options": MARGINAL | {"granularity": "kernel"}},
    "channels": {"network": "two channels", "options": OPTIMAL | DIRECT | {"granularity": "input"}},
    "filters": {"network": "conv2d", "options": MARGINAL | {"granularity": "unit"}},
    "part of a kernel": {"network": "two channels", "options": MARGINAL | {"granularity": (2, 1, 1)}},
    "channels of groups": {"network": "two groups", "options": MARGINAL | {"granularity": "input"}},
    "channels of groups, example": {
        "network": "two groups",
        "options": EXAMPLE | MARGINAL | {"granularity": (2, 2)},
    },
    "pruned": {"network": "linear", "pruned": True, "options": MARGINAL | {"granularity": "input"}},
    "one pi for all units": {
        "network": "linear",
        "options": {"hyper": "optimal", "sharing": "layer", "alpha": 1.5, "beta": 0.4, "granularity": "unit"},
    },
    "one pi for all inputs, pruned": {
        "network": "linear",
        "pruned": True,
        "options": {"hyper": "optimal", "sharing": "layer", "alpha": 1.5, "granularity": "input"},
    },
}
TOO_MANY_PAIRS = {"inputs, with biases", "pruned", "units, example, L=2"}


def applies(name: str, estimator: str) -> bool:
    several = SETTINGS[name].get("num_samples", 1) > 1
    if estimator == "leave-one-out":
        return several
    return estimator != "disarm" or name not in TOO_MANY_PAIRS


GRID = [
    pytest.param(setting, estimator, id=f"{estimator}: {name}")
    for name, setting in SETTINGS.items()
    for estimator in UNBIASED
    if applies(name, estimator)
]


@pytest.mark.parametrize(("setting", "estimator"), GRID)
def test_expected_value_and_gradient_are_exact(setting, estimator):
    assert_unbiased(GroupCase(estimator=UNBIASED[estimator], **setting))


@pytest.mark.parametrize("granularity", ["input", "unit", (1, 2), (2, 2)])
@pytest.mark.parametrize("options", [MARGINAL, MARGINAL | EXAMPLE, LEARNED | DIRECT])
def test_straight_through_is_exact_where_the_likelihood_is_linear_in_each_gate(granularity, options):
    network = "multilinear" if isinstance(granularity, str) else "one layer"
    chosen = options | {"granularity": granularity}
    case = GroupCase(network, "straight-through", likelihood=linear_likelihood, options=chosen)
    assert_unbiased(case)


@pytest.mark.parametrize("setting", ["inputs", "units", "kernels", "part of a kernel", "channels of groups", "blocks"])
def test_straight_through_is_the_slope_in_each_gate(setting):
    case = GroupCase(estimator="straight-through", **SETTINGS[setting])
    _, found = case.expectation()
    assert_gradients(found, others(case, case.gradients(case.exact_loss())))
    expected = case.gradients(case.kl_weight * case.kl() / NUM_DATA)
    gates = case._gates()
    for probability, (masks,) in case.draws():
        leaves = {key: mask.double().requires_grad_() for key, mask in masks.items()}
        found_slopes = torch.autograd.grad(case.gated_log_likelihood(leaves), list(leaves.values()))
        slopes = dict(zip(leaves, found_slopes, strict=True))
        for owner, layer, name in gates:
            parameter = case._parameter(layer, name)
            pi = case._pi(layer, name).detach()
            units = layer.granularity == "unit"
            slope = slopes[f"{owner}.{name}"].flatten()
            slope = slope if name == "bias" else membership(layer, "weight") @ slope
            if units and layer.bias is not None:
                slope = slope + slopes[f"{owner}.bias"]
            chain = pi * (1 - pi) if layer.parameterisation == "logit" else 1.0
            key = f"{owner}.{name}_{layer.parameterisation}"
            expected[key] = expected[key] - probability * (slope * chain).view_as(parameter)
    assert_gradients(found, {name: expected[name] for name in gate_names(case)})


ONE_LAYER_ONE_MASK = [
    name
    for name, setting in SETTINGS.items()
    if "mask" not in setting["options"]
    and "num_samples" not in setting
    and setting["network"] not in ("tied", "two layers")
]


@pytest.mark.parametrize("setting", ONE_LAYER_ONE_MASK)
def test_local_has_the_moments_of_every_mask(setting):
    case = GroupCase(estimator="local", **SETTINGS[setting])
    layer = case.model[0]
    mean, deviation = layer.gaussian_moments(case.x)
    outputs, weights = [], []
    with torch.no_grad():
        for probability, (masks,) in case.draws():
            with dcpp.forced_masks(case.model, masks):
                outputs.append(layer(case.x))
            weights.append(probability)
    outputs, weights = torch.stack(outputs), torch.tensor(weights, dtype=torch.float64)
    average = torch.tensordot(weights, outputs, 1)
    torch.testing.assert_close(mean, average, rtol=0, atol=1e-10)
    spread = torch.tensordot(weights, (outputs - average) ** 2, 1)
    torch.testing.assert_close(deviation.square(), spread + 1e-12, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "setting", ["inputs, with biases", "units", "kernels", "blocks", "pruned", "channels of groups"]
)
def test_local_differentiates_its_moments(setting):
    case = GroupCase(estimator="local", **SETTINGS[setting])
    layer = case.model[0]
    names = [n for n, p in layer.named_parameters()]

    def moments(*values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (case.x,))

    layer.forward = layer.gaussian_moments  # so that functional_call asks for the moments
    try:
        assert torch.autograd.gradcheck(moments, [p.detach().clone().requires_grad_() for p in layer.parameters()])
    finally:
        del layer.forward


@pytest.mark.parametrize(
    "setting", ["inputs, with biases", "units", "blocks", "filters", "units, example", "inputs, example"]
)
@pytest.mark.parametrize("options", [MARGINAL, LEARNED])
def test_concrete_is_the_relaxed_gradient_for_one_draw_of_noise(setting, options):
    chosen = {**SETTINGS[setting], "kl_weight": 1.0}
    chosen["options"] = chosen["options"] | options
    case = GroupCase(estimator=Concrete(temperature=0.5), **chosen)
    case.elbo.generator = torch.Generator().manual_seed(8)
    found = case.gradients(case.elbo(case.x, target=case.y).loss)
    seed = torch.randint(2**62, (), generator=torch.Generator().manual_seed(8))
    each = case.model[0].mask == "example"
    relaxed = []
    for stream, (_, layer, name) in enumerate(case._gates()):
        logit = torch.logit(case._pi(layer, name))
        shape = (len(case.x), logit.numel()) if each else (logit.numel(),)
        noise = torch.rand(shape, dtype=torch.float64, generator=generator_of(seed, stream, seed.device))
        relaxed.append(torch.sigmoid((logit + torch.log1p(-noise) - torch.log(noise)) / 0.5))
    if each:
        rows = []
        for row in range(len(case.x)):
            one = GroupCase.gated_log_likelihood(_RowOf(case, row), case._masks([gate[row] for gate in relaxed]))
            rows.append(one)
        value = torch.stack(rows).mean()
    else:
        value = case.gated_log_likelihood(case._masks(relaxed))
    assert_gradients(found, case.gradients(-value + case.kl() / NUM_DATA))


class _RowOf:
    """A case with one example."""

    def __init__(self, case: GroupCase, row: int) -> None:
        self.parameters, self.plain, self.model, self.likelihood = (
            case.parameters,
            case.plain,
            case.model,
            case.likelihood,
        )
        self.x, self.y = case.x[row : row + 1], case.y[row : row + 1]


@pytest.mark.parametrize("granularity", ["input", "unit", (1, 2)])
@pytest.mark.parametrize("options", [LEARNED, LEARNED | EXAMPLE, LEARNED | DIRECT])
def test_eq16_carries_no_data_or_the_data_with_the_wrong_sign(granularity, options):
    for baseline in ("running", "same-sample"):
        chosen = options | {"granularity": granularity}
        case = GroupCase("linear, no bias", Eq16(baseline=baseline), options=chosen)
        exact = case.gradients(case.exact_loss())
        kl = case.gradients(case.kl() / NUM_DATA)
        _, found = case.expectation()
        for name in gate_names(case):
            data = exact[name] - kl[name]
            wrong = kl[name] if baseline == "running" else kl[name] - data
            torch.testing.assert_close(found[name], wrong, rtol=0, atol=1e-10)
            assert data.abs().min() > 1e-4
        assert_gradients(found, {name: exact[name] for name in exact if name.endswith((".weight", ".bias"))})


def test_a_shared_gate_is_not_a_gate_each():
    """The oracle can fail: with gates of their own, at the same rates, the expectation is another."""
    case = GroupCase(estimator=BBVI(), **SETTINGS["units"])
    apart = GroupCase(estimator=BBVI(), **(SETTINGS["units"] | {"options": MARGINAL}))
    logits = case.model[0].weight_logit.detach()
    state = {k: v for k, v in case.model.state_dict().items() if not k.endswith("logit")}
    apart.model.load_state_dict(state | {"0.weight_logit": logits.expand(2, 2), "0.bias_logit": logits[:, 0]})
    gap = case.expected_log_likelihood() - apart.expected_log_likelihood()
    assert gap.detach().abs() > 1e-3


def test_forced_masks_must_be_one_for_a_group():
    case = GroupCase("linear", options=MARGINAL | {"granularity": "unit"})
    masks = {"0.weight": torch.tensor([[1, 1], [0, 0]]), "0.bias": torch.tensor([1, 0])}
    with dcpp.forced_masks(case.model, masks):
        case.model(case.x)
    with (
        pytest.raises(ArgumentError, match="one gate for a unit's weights and its bias"),
        dcpp.forced_masks(case.model, masks | {"0.bias": torch.tensor([1, 1])}),
    ):
        pass
    with (
        pytest.raises(ArgumentError, match=r"one gate for a block of \(1, 2\)"),
        dcpp.forced_masks(case.model, masks | {"0.weight": torch.tensor([[1, 0], [0, 0]])}),
    ):
        pass
