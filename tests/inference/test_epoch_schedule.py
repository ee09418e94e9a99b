"""Settings by epoch: their values, where they are set, and going on from a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.inference.epoch_values import check_values, value_at


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(dcpp.DropConnectLinear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))


def optimizer_of(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_a_value_holds_until_the_next_epoch_that_is_named():
    assert [value_at([0, 2, 5], [1.0, 2.0, 3.0], epoch) for epoch in range(7)] == [1, 1, 2, 2, 2, 3, 3]


def test_a_value_on_a_line_meets_both_ends_and_stays():
    found = [value_at([0, 4], [1.0, 3.0], epoch, "linear") for epoch in range(6)]
    assert found == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]


@pytest.mark.parametrize(
    ("at", "values", "between", "message"),
    [
        ([], {"lr": []}, "hold", "epochs that rise from 0"),
        ([1, 2], {"lr": [0.1, 0.1]}, "hold", "epochs that rise from 0"),
        ([0, 3, 3], {"lr": [0.1] * 3}, "hold", "epochs that rise from 0"),
        ([0, 2.5], {"lr": [0.1, 0.1]}, "hold", "at must be a whole number"),
        ([0, 2], {"lr": [0.1]}, "hold", "lr must have a value for each of the 2 epochs in at, got 1"),
        ([0], {"lr": [0.0]}, "hold", "lr must be positive"),
        ([0], {"kl_weight": [float("inf")]}, "hold", "kl_weight must be positive"),
        ([0], {"rate": [1.0]}, "hold", "rate is the share dropped"),
        ([0], {"lr": [0.1]}, "spline", "between must be one of 'hold', 'linear'"),
        ([0], {}, "hold", "needs a setting that changes"),
    ],
)
def test_what_is_no_schedule_is_refused(at, values, between, message):
    with pytest.raises(ArgumentError, match=message):
        check_values(at, values, between)


def test_settings_are_set_at_once_and_with_each_step():
    model = model_of()
    optimizer = optimizer_of(model)
    schedule = dcpp.EpochSchedule(optimizer, model, at=[0, 2], lr=[0.4, 0.2], rate=[0.25, 0.75])
    for expected in ((0.4, 0.25), (0.4, 0.25), (0.2, 0.75), (0.2, 0.75)):
        assert (optimizer.param_groups[0]["lr"], model[2].p) == expected
        assert model[0].fixed_keep_probability == 1.0 - expected[1]
        schedule.step()


def test_the_masks_of_a_layer_follow_the_rate():
    layer = dcpp.DropConnectLinear(200, 50, bias=False)
    nn.init.ones_(layer.weight)
    schedule = dcpp.EpochSchedule(None, layer, at=[0, 1], rate=[0.1, 0.9])
    kept = [layer(torch.eye(200)).mean().item()]
    schedule.step()
    kept.append(layer(torch.eye(200)).mean().item())
    assert kept == pytest.approx([0.9, 0.1], abs=0.03)
    assert layer.eval()(torch.eye(200)).mean().item() == pytest.approx(0.1)


def test_groups_keep_the_ratio_of_their_step_sizes():
    model = model_of()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    dcpp.EpochSchedule(optimizer, at=[0], lr=[0.02])
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02, 0.1])


def test_the_weight_of_the_kl_is_the_elbos():
    model = dcpp.convert(nn.Sequential(nn.Linear(4, 3)))
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=10)
    schedule = dcpp.EpochSchedule(None, elbo, at=[0, 1], kl_weight=[0.5, 2.0])
    assert elbo.kl_weight == 0.5
    schedule.step()
    assert elbo.kl_weight == 2.0


def test_a_resumed_schedule_goes_on_where_it_was():
    model = model_of()
    optimizer = optimizer_of(model)
    options: dict[str, Any] = {"at": [0, 4], "lr": [0.1, 0.3], "rate": [0.5, 0.9], "between": "linear"}
    schedule = dcpp.EpochSchedule(optimizer, model, **options)
    schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))  # plain data
    schedule.step()
    expected = optimizer.param_groups[0]["lr"], model[2].p
    again = model_of()
    other = optimizer_of(again, lr=0.7)
    resumed = dcpp.EpochSchedule(other, again, at=[0], lr=[1.0], rate=[0.2])
    resumed.load_state_dict(state)
    resumed.step()
    assert (other.param_groups[0]["lr"], again[2].p) == expected
    assert resumed.state_dict() == schedule.state_dict()


def test_a_state_of_other_settings_is_refused():
    model = model_of()
    state = dcpp.EpochSchedule(None, model, at=[0], rate=[0.5]).state_dict()
    schedule = dcpp.EpochSchedule(optimizer_of(model), at=[0], lr=[0.5])
    with pytest.raises(ArgumentError, match="the state is of a schedule of rate; this one is of lr"):
        schedule.load_state_dict(state)
    assert schedule.settings == {"lr": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": [0.1]}, "lr is set in an optimizer"),
        ({"rate": [0.1], "model": nn.Linear(2, 2)}, "the model has none"),
        ({"rate": [0.1]}, "the model has none"),
        ({"kl_weight": [0.1], "model": nn.Linear(2, 2)}, "kl_weight is set in an ELBO"),
    ],
)
def test_a_setting_needs_something_to_be_set_in(options, message):
    with pytest.raises(ArgumentError, match=message):
        dcpp.EpochSchedule(at=[0], **options)
