"""Layers made on the meta device: their posterior starts when they get memory, whatever brings it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def on_meta(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return dcpp.convert(plain(), keep_probability=0.75, **options)


def expected(**options: Any) -> dict[str, torch.Tensor]:
    state = dcpp.convert(plain(), keep_probability=0.75, **options).state_dict()
    return {key: value for key, value in state.items() if not key.endswith((".weight", ".bias"))}


def assert_starts(model: nn.Module, **options: Any) -> None:
    state = model.state_dict()
    for key, value in expected(**options).items():
        assert torch.equal(state[key], value), key


OPTIONS = [{}, {"hyper": "learned"}, {"parameterisation": "probability"}, {"granularity": "unit"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_posterior_starts_with_the_memory(options: dict[str, Any]) -> None:
    model = on_meta(**options).to_empty(device="cpu")
    assert_starts(model, **options)
    with torch.no_grad():
        model[0].weight_logit.fill_(3.0) if "parameterisation" not in options else None
    trained = [value.clone() for value in model.state_dict().values()]
    moved = model.to("cpu").float().state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(trained, moved, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reset_parameters_starts_the_posterior_too(options: dict[str, Any]) -> None:
    model = on_meta(**options).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_starts(model, **options)
    assert bool(torch.isfinite(model(torch.randn(2, 4))).all())


@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_state_goes_into_a_model_from_the_meta_device(assign: bool) -> None:
    model, state = on_meta(), plain().state_dict()
    model.load_state_dict(state, assign=True) if assign else model.to_empty(device="cpu").load_state_dict(state)
    assert_starts(model)
    assert torch.equal(model[2].weight, state["2.weight"])
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
