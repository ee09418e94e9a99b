"""How optimisers treat a posterior: what is said once, and by whom nothing is said."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.inference import optimisers

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3


def network(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    return dcpp.convert(plain, estimator="straight-through", **options)


def complaints(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 4) -> list[str]:
    """What is said in a few steps of these optimisers."""
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            elbo(X, Y).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    return [str(one.message) for one in caught]


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if not name.endswith("_logit")]


def logits(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("_logit")]


def test_nothing_is_said_of_groups_as_they_should_be() -> None:
    model = network(logit_step=5.0)
    groups = dcpp.parameter_groups(model, lr=1e-2, weight_decay=0.1)
    assert complaints(model, torch.optim.SGD(groups)) == []


def test_log_odds_that_no_optimiser_holds_are_named_once() -> None:
    model = network()
    (said,) = complaints(model, torch.optim.SGD(weights(model), lr=0.1))
    assert said.startswith("No optimiser holds 0.weight_logit, 0.bias_logit, 2.weight_logit and 1 others")
    assert "parameter_groups" in said


def test_two_optimisers_may_share_a_model() -> None:
    model = network()
    pair = torch.optim.Adam(weights(model)), torch.optim.SGD(logits(model), lr=0.1)
    assert complaints(model, *pair) == []


def test_frozen_log_odds_are_no_oversight() -> None:
    model = network()
    for logit in logits(model):
        logit.requires_grad_(False)
    assert complaints(model, torch.optim.SGD(weights(model), lr=0.1)) == []


def test_weight_decay_on_log_odds_is_said() -> None:
    model = network()
    (said,) = complaints(model, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    assert said.startswith("Weight decay acts on 0.weight_logit")
    assert "towards 1/2" in said


def test_a_step_size_that_is_not_applied_is_said() -> None:
    model = network(logit_step=5.0)
    (said,) = complaints(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "logit_step is not applied to 0.weight_logit (5)" in said


def test_a_model_of_somebody_else_is_none_of_our_business() -> None:
    mine, other = network(), nn.Linear(4, 3)
    elbo = dcpp.ELBO(mine, dcpp.categorical, num_data=20)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            stranger.step()
    assert elbo in optimisers._checks


def test_what_listens_does_not_outlive_its_bound() -> None:
    model = network()
    before = len(optimisers._listeners)
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=20)
    plan = dcpp.SparsityPlan(dcpp.ELBO(network(preset="sparse"), dcpp.categorical, num_data=20), 10, price=1.0)
    assert len(optimisers._listeners) == before + 2  # a plan takes its bound's place
    del elbo, plan
    gc.collect()
    assert len(optimisers._listeners) == before


def test_which_optimisers_hold_a_model_is_asked_again_when_groups_are_added() -> None:
    model, other = network(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    held = optimisers.Membership({id(p): p for p in model.parameters()})
    assert optimizer not in held
    optimizer.add_param_group({"params": weights(model)})
    assert optimizer in held
