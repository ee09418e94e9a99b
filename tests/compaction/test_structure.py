"""describe and rebuild: a plain or converted model takes a compact model's structure, or stays as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.compaction.structure import describe, rebuild
from dropconnectpp.errors import ArgumentError


def plain_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 20),
        nn.Linear(20, 4),
    )


def pruned(plain: nn.Module, **options: Any) -> nn.Module:
    return dcpp.prune(dcpp.convert(plain, **options).eval(), keep=0.05)


def through_json(model: nn.Module) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(json.dumps(describe(model)))
    return described


X = torch.randn(5, 3, 4, 4)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("activation", [None, nn.LeakyReLU(0.2)])
def test_a_fresh_model_takes_structure_and_state(converted: bool, activation: nn.Module | None) -> None:
    plain = plain_model()
    model = pruned(plain, include=nn.Linear, activation=activation)
    small = dcpp.compact(model)
    fresh = plain_model().double()
    if converted:
        fresh = dcpp.convert(fresh, include=nn.Linear, activation=activation)
    before = torch.get_rng_state()
    again = rebuild(fresh, through_json(small))
    assert torch.equal(before, torch.get_rng_state())
    again.load_state_dict(small.state_dict())
    assert torch.equal(again.eval()(X.double()), copy.deepcopy(small).double()(X.double()))
    assert [type(m) for m in again.modules()] == [type(m) for m in small.modules()]


def test_a_layer_alone_and_a_layer_of_two_names() -> None:
    layer = nn.Linear(6, 3)
    with torch.no_grad():
        layer.weight[:, :4] = 0.0
    small = dcpp.compact(layer)
    again = rebuild(nn.Linear(6, 3), through_json(small))
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(torch.ones(2, 6)), small(torch.ones(2, 6)))
    twice = nn.Sequential(nn.Linear(6, 6), shared := nn.Linear(6, 6), shared)
    small = dcpp.compact(pruned(twice, include="0"))
    again = rebuild(copy.deepcopy(twice), through_json(small))
    assert isinstance(again, nn.Sequential)
    assert again[1] is again[2]


def test_an_untouched_model_has_no_description() -> None:
    assert describe(plain_model()) is None
    assert describe(pruned(plain_model())) is None


def renamed(described: dict[str, Any]) -> None:
    described["modules"]["9"] = described["modules"].pop("5")


def set_argument(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda described: described["modules"][name]["arguments"].update({key: value})


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nothing": (lambda d: d.clear(), "has no 'modules'"),
    "another type": (lambda d: d["modules"]["5"].update(type="Bilinear"), "damaged: '5' is"),
    "no arguments": (lambda d: d["modules"]["5"].pop("arguments"), "damaged: '5' is"),
    "one argument too many": (set_argument("5", "power", 3), "has the arguments"),
    "another name": (renamed, "9 was a Linear, and the model has no module there"),
    "larger": (set_argument("5", "in_features", 21), "5 was saved with in_features=21, the model has 20"),
    "no number": (set_argument("5", "in_features", "3"), "in_features='3'"),
    "less than one": (set_argument("5", "out_features", 0), "out_features=0"),
    "another geometry": (set_argument("0", "stride", [2, 2]), r"stride=\[2, 2\], the model's has \(1, 1\)"),
    "more groups": (set_argument("0", "groups", 2), "groups=2, the model has 1"),
    "a Sequential of nothing": (lambda d: d["modules"][""].update(arguments={"names": 3}), "is a Sequential of 3"),
    "another Sequential": (lambda d: d["modules"][""].update(arguments={"names": ["0"]}), r"Sequential of \['0'\]"),
    "the same as nothing": (
        lambda d: d["modules"].update({"5": {"type": "same", "arguments": {"as": "8"}}}),
        "not there",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_damaged_description_changes_nothing(damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    described = through_json(dcpp.compact(pruned(plain_model())))
    damage(described)
    model = plain_model().eval()
    children, output = dict(model.named_modules()), model(X)
    with pytest.raises(ArgumentError, match=message):
        rebuild(model, described)
    assert dict(model.named_modules()) == children
    assert torch.equal(model(X), output)


def test_groups_that_do_not_divide_the_channels_are_damage() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(4, 4, 3))
    described = through_json(dcpp.compact(pruned(model)))
    described["modules"]["0"]["arguments"].update(groups=2, in_channels=3, out_channels=4)
    with pytest.raises(ArgumentError, match="'0' cannot be a Conv1d"):
        rebuild(model, described)
