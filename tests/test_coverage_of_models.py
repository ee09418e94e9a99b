"""coverage: each parameter counts once, and what stayed plain says why."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp


class Mixed(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.ones(3))


def quiet(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcpp.coverage(model)


def test_a_plain_model_has_no_gates_and_says_what_could_have() -> None:
    model = Mixed()
    with pytest.warns(
        UserWarning, match=r"coverage: 0\.0% of the model's 203 parameters .* in lstm: it was not included"
    ):
        found = dcpp.coverage(model)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.gated == 0
    assert found.converted == []
    assert found.left == {
        "": "a Mixed is converted where parameters= names its parameters",
        "embed": "a table is converted where include= has its full name, or nn.Embedding",
        "lstm": "it was not included, or left plain for its options",
        "norm": "a LayerNorm is converted where parameters= names its parameters",
        "head": "it was not included, or left plain for its options",
    }


@pytest.mark.parametrize("kind", ["dropconnect++", "dropconnect"])
def test_each_parameter_counts_once_and_the_posterior_does_not(kind: str) -> None:
    found = quiet(dcpp.convert(Mixed(), kind=kind))
    assert found.parameters == 203
    assert found.converted == ["embed", "lstm", "head"]  # the table by the layer that shares its weight
    assert found.gated == 20 + 160 + 12
    assert found.share == pytest.approx(192 / 203)
    assert found.left.keys() == {"", "norm"}


def test_a_share_of_one_half_is_no_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dcpp.coverage(dcpp.convert(model, "0"))
    assert found.share == 0.5


def test_what_stayed_plain_for_a_reason_says_it() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, max_norm=1.0), nn.LSTM(2, 2), nn.Linear(2, 2))
    model[2].forward = lambda x: x  # type: ignore[method-assign]
    found = quiet(dcpp.convert(model, include="1"))
    assert found.converted == ["1"]
    assert "max_norm" in found.left["0"]
    assert "its forward was replaced" in found.left["2"]
    some = quiet(dcpp.convert(nn.LSTM(2, 2), include=(), parameters="weight_*"))
    assert some.left == {"": "only some parameters of this LSTM were named"}


def test_computed_weights_count_as_what_they_are_computed_from() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    found = quiet(dcpp.convert(model))
    assert found.parameters == found.gated == 12 + 3 + 3


def test_the_table_is_read_by_people() -> None:
    text = str(quiet(dcpp.convert(Mixed())))
    assert text.splitlines()[0].split() == ["module", "type", "parameters", "gated", "why", "not"]
    assert "94.6% gated" in text.splitlines()[-1]
    assert len(text.splitlines()) == 7


def test_a_model_without_parameters_is_covered() -> None:
    found = dcpp.coverage(nn.ReLU())
    assert (found.parameters, found.share, found.modules) == (0, 0.0, ())
