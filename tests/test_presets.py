"""Named sets of options: whole, read-only, and no more than a default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp import presets
from dropconnectpp.errors import ArgumentError
from dropconnectpp.estimators import BBVI
from dropconnectpp.lab.config.method import LIBRARY_PRESETS, METHODS, PAPER_METHODS, PRESETS, Method, MethodName
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2))


def test_the_papers_setting() -> None:
    layer = dcpp.convert(plain(), preset="paper")[2]
    options = {key: value for key, value in layer.options().items() if key in dcpp.PRESETS["paper"]}
    assert options == {
        "estimator": BBVI(baseline="running").options(),
        "hyper": "learned",
        "alpha": 1.0,
        "beta": 1.0,
        "keep_probability": 0.5,
    }


def test_a_connection_that_is_worth_nothing_is_off_and_starts_on() -> None:
    layers = [m for m in dcpp.convert(plain(), preset="sparse") if isinstance(m, DropConnectPPLayer)]
    assert len(layers) == 2
    for layer in layers:
        assert layer.alpha / (layer.alpha + layer.beta) <= 0.01
        assert float(layer.keep_probability().detach().min()) == pytest.approx(0.9)
        assert (layer.straight_through, layer.logit_step, layer.kl_weight) == (True, 1.0, 1.0)


def test_the_laboratory_has_the_presets_that_were_measured_there() -> None:
    assert list(LIBRARY_PRESETS) == list(PRESETS)
    sparse = {"estimator": "straight-through", "hyper": "optimal", "alpha": 10.0, "beta": 90.0, "logit_step": 100.0}
    assert PRESETS["sparse"] == Method(**sparse)  # what recorded rows call by this name
    assert Method(**dcpp.PRESETS["paper"]) == Method() == PAPER_METHODS["dropconnect++"]
    assert get_args(MethodName) == tuple(METHODS)
    for name, method in PRESETS.items():
        options = dict(dcpp.PRESETS[LIBRARY_PRESETS[name]])
        assert method == Method(**options)
        assert method.label == f"DropConnect++ ({name})"


@pytest.mark.parametrize("name", dcpp.PRESETS)
def test_every_preset_converts_trains_and_says_what_it_is_for(name: str) -> None:
    model = dcpp.convert(plain(), preset=name)
    for index in (0, 2):
        options = dict(dcpp.PRESETS[name])
        made = dcpp.convert(plain(), **options)[index]
        assert model[index].options() == made.options()
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=50)
    elbo(torch.randn(4, 2, 4), target=torch.tensor([0, 1, 0, 1])).loss.backward()
    assert model[2].weight_logit.grad is not None
    source = Path(presets.__file__).read_text()
    assert re.search(rf'^- "{name}": .+\.$', source, flags=re.MULTILINE)
    assert "were measured on" in source


@pytest.mark.parametrize(
    "options",
    [
        {"hyper": "optimal"},
        {"estimator": "straight-through", "keep_probability": 0.9},
        {"mask": "example", "beta": 9.0},
    ],
)
def test_explicit_options_win(options: dict[str, Any]) -> None:
    layer = dcpp.convert(plain(), ["2"], preset="paper", **options)[2]
    expected = dcpp.DropConnectPPLinear(9, 2, **{**dcpp.PRESETS["paper"], **options})
    assert layer.options() == expected.options()
    assert repr(layer) == repr(expected)


def test_no_preset_is_the_layers_own_default() -> None:
    assert dcpp.convert(plain(), preset=None)[2].options() == dcpp.DropConnectPPLinear(9, 2).options()


def test_what_cannot_be_is_refused_before_anything_changes() -> None:
    model = plain()
    listed = ", ".join(repr(name) for name in dcpp.PRESETS)
    with pytest.raises(ArgumentError, match=re.escape(f"preset must be one of {listed}; got 'papre'.")):
        dcpp.convert(model, preset="papre", inplace=True)
    words = "preset='paper' needs kind='dropconnect++', got 'dropconnect', which learns no rate."
    with pytest.raises(ArgumentError, match=re.escape(words)):
        dcpp.convert(model, preset="paper", kind="dropconnect", inplace=True)
    assert type(model[2]) is nn.Linear


def test_presets_are_read_only() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        dcpp.PRESETS["mine"] = {}  # type: ignore[index]
    with pytest.raises(TypeError, match="does not support item assignment"):
        dcpp.PRESETS["paper"]["alpha"] = 2.0  # type: ignore[index]
    presets.preset_options("paper")["alpha"] = 2.0
    assert dcpp.PRESETS["paper"]["alpha"] == 1.0
