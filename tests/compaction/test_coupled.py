"""compact on models that call their layers in their own way."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES, Concatenating, Encoder, ResNet, settled, switch_off
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, MissingPackageError

pytest.importorskip("torch_pruning")


@pytest.mark.parametrize(("make", "x"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
@torch.no_grad()
def test_random_rows_and_columns(make: Any, x: Tensor, share: float) -> None:
    x = x.double() if x.is_floating_point() else x
    for seed in range(3):
        model = settled(make, x)
        switch_off(model, share, torch.Generator().manual_seed(seed))
        expected, before = model(x), str(model)
        small = dcpp.compact(model, x)
        torch.testing.assert_close(small(x), expected, rtol=0.0, atol=1e-12)
        fresh = torch.randn(2, *x.shape[1:]).to(x) if x.is_floating_point() else x.flip(0, 1)
        torch.testing.assert_close(small(fresh), model(fresh), rtol=0.0, atol=1e-12)
        assert small.compaction.parameters[1] < small.compaction.parameters[0] or share == 0.2
        assert str(model) == before


@pytest.mark.parametrize(("make", "x"), CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_masked_models(make: Any, x: Tensor) -> None:
    model = dcpp.prune(dcpp.convert(settled(make, x).float(), exclude="*out_proj"), keep=0.08).eval()
    small = dcpp.compact(model, x)
    torch.testing.assert_close(small(x), model(x), rtol=0.0, atol=1e-6)
    assert small.compaction.parameters[1] < small.compaction.parameters[0]


@torch.no_grad()
def test_coupled_channels_go_when_nobody_reads_them() -> None:
    """Channel 2 of the trunk: written by the stem and both blocks, read by neither."""
    x = CASES["residual sums"][1].double()
    model = settled(ResNet, x)
    for name in ("blocks.0.first", "blocks.1.first", "wider", "shortcut"):
        model.get_submodule(name).weight[:, 2] = 0.0
    small = dcpp.compact(model, x)
    kept = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    assert torch.equal(small.stem.weight, model.stem.weight[kept])
    assert torch.equal(small.blocks[1].second.weight, model.blocks[1].second.weight[kept])
    assert torch.equal(small.blocks[1].second_norm.running_var, model.blocks[1].second_norm.running_var[kept])
    assert torch.equal(small.shortcut.weight, model.shortcut.weight[:, kept])
    model.shortcut.weight[0, 2] = 1.0  # one reader is enough to keep it
    model.head.weight[:, 5] = 0.0
    assert dcpp.compact(model, x).stem.out_channels == 8


@torch.no_grad()
def test_a_branch_that_is_concatenated_twice_needs_both_readers_gone() -> None:
    x = CASES["concatenation"][1].double()
    model = settled(Concatenating, x)
    model.hidden.weight.view(12, 16, 4)[:, 3] = 0.0
    assert dcpp.compact(model, x).left.out_channels == 6
    model.hidden.weight.view(12, 16, 4)[:, 13] = 0.0
    small = dcpp.compact(model, x)
    assert (small.left.out_channels, small.depthwise.groups, small.hidden.in_features) == (5, 14, 56)


@torch.no_grad()
def test_a_constant_is_folded_only_where_padding_does_not_show() -> None:
    """A dead channel behind BatchNorm is a constant: folded by a circular padding, left by zeros."""
    x = CASES["residual sums"][1].double()
    model = settled(ResNet, x)
    model.blocks[0].first.weight[1] = 0.0
    model.blocks[0].first_norm.bias[1] = 0.7
    small = dcpp.compact(model, x)
    assert small.blocks[0].first.out_channels == 8
    assert "its zero padding is not" in small.compaction.left["blocks.0.second"]
    for conv in (model.blocks[0].second, model.blocks[0].first):
        conv.padding_mode = "circular"
    small = dcpp.compact(model, x)
    assert small.blocks[0].first.out_channels == 7
    torch.testing.assert_close(small(x), model(x), rtol=0.0, atol=1e-12)


def test_the_result_of_a_custom_model_is_rebuilt() -> None:
    from dropconnectpp.compaction.structure import describe, rebuild

    x = CASES["residual sums"][1]
    model = dcpp.prune(dcpp.convert(settled(ResNet, x).float()), keep=0.03).eval()
    small = dcpp.compact(model, x)
    again = rebuild(ResNet(), describe(small) or {}).eval()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x), small(x))


class Tricks(nn.Module):
    """One hidden layer, and something unusual about it."""

    def __init__(self, trick: str) -> None:
        super().__init__()
        self.trick = trick
        self.first, self.second, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("mask", (torch.rand(8) < 0.5).float())
        with torch.no_grad():
            self.first.weight[:4] = 0.0
            self.out.weight[:, 2:6] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.trick == "twice":
            return self.out(self.second(F.relu(self.second(x))))
        if self.trick == "functional":
            return self.out(F.linear(x, self.second.weight))
        if self.trick == "softmax":
            return self.out(x.softmax(-1))
        if self.trick == "parameter":
            return self.out(x * self.scale)
        if self.trick == "buffer":
            return self.out(x + self.mask)
        if self.trick == "input":
            return self.out(x) + self.out(x + F.pad(x[:, :6], (0, 2)))
        if self.trick == "split":
            return self.out(torch.cat(x.chunk(2, -1)[::-1], -1))
        if self.trick == "transposed":
            return self.out((x @ x.T) @ x)
        if self.trick == "view of known size":
            return self.out(x.view(-1, 2, 4).flatten(1))
        if self.trick == "features too":
            return torch.cat([self.out(x), x], -1)
        raise AssertionError(self.trick)


TRICKS = {
    "twice": "second: it is called twice",
    "functional": "first: its units go into",
    "softmax": "first: its units go into an operation that stops them: Softmax",
    "parameter": "first: its units go into an operation that stops them: Mul with something",
    "buffer": "first: its units go into an operation that stops them: Add with something",
    "input": "out: it is called twice",
    "split": "first: its units go into an operation that stops them: Split",
    "transposed": "first: its units go into",
    "view of known size": "first: its units go into an operation that stops them: View",
}


@pytest.mark.parametrize("trick", [*TRICKS, "features too"])
@torch.no_grad()
def test_what_cannot_be_followed_is_whole_and_named(trick: str) -> None:
    model, x = Tricks(trick).eval(), torch.randn(5, 6)
    small = dcpp.compact(model, x)
    torch.testing.assert_close(small(x), model(x))
    assert small.first.out_features == 8
    assert TRICKS.get(trick, "") in str(small.compaction)


@torch.no_grad()
def test_tied_weights_are_left() -> None:
    model = Tricks("twice")
    model.trick = "softmax"
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    tied[2].weight = tied[0].weight
    tied[0].weight[:3] = 0.0
    small = dcpp.compact(tied)
    x = torch.randn(4, 8)
    torch.testing.assert_close(small(x), tied(x))
    assert small[2].weight is small[0].weight
    assert "its weight is used in two places" in str(small.compaction)


class Reading(nn.Module):
    """A model that asks a layer for its width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.out.weight[:, 2:6] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x)) * float(self.first.out_features)


def test_a_model_that_would_give_something_else_is_an_error() -> None:
    model = Reading()
    before = str(model)
    with pytest.raises(ArgumentError, match=r"cannot be followed: made compact it would give other outputs \(by up to"):
        dcpp.compact(model, torch.randn(4, 6), inplace=True)
    assert str(model) == before


def test_a_graph_that_torch_pruning_cannot_make_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reading()
    state = copy.deepcopy(model.state_dict())

    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("unsupported operand")

    monkeypatch.setattr("torch_pruning.dependency.DependencyGraph.build_dependency", broken)
    with pytest.raises(
        ArgumentError, match=r"Torch-Pruning cannot follow the model \(TypeError: unsupported operand\)"
    ):
        dcpp.compact(model, torch.randn(4, 6), inplace=True)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_an_example_that_does_not_fit_is_an_error() -> None:
    model = settled(ResNet, CASES["residual sums"][1])
    with torch.no_grad():
        model.head.weight[:, 0] = 0.0
    before = copy.deepcopy(model.state_dict())
    for example in (torch.randn(2, 4, 8, 8).double(), (torch.randn(3, 3), 3), {"y": torch.randn(3)}, "text"):
        with pytest.raises(ArgumentError, match="the model does not run on example_input"):
            dcpp.compact(model, example)
    with pytest.raises(ArgumentError, match=r"ResNet calls its layers in its own way\. Give example_input"):
        dcpp.compact(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_inputs_may_be_several_or_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(3, 6), nn.Linear(4, 6), nn.Linear(6, 2)
            with torch.no_grad():
                self.out.weight[:, :3] = 0.0

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"z": self.out(F.relu(self.a(x) + self.b(y)))}

    model, x, y = Two(), torch.randn(5, 3), torch.randn(5, 4)
    for example in ((x, y), {"x": x, "y": y}):
        small = dcpp.compact(model, example)
        assert (small.a.out_features, small.b.out_features) == (3, 3)
        torch.testing.assert_close(small(x, y)["z"], model(x, y)["z"])


def test_modes_and_frozen_parameters_stay_as_they_are() -> None:
    x = CASES["transformer"][1]
    model = Encoder()
    with torch.no_grad():
        model.blocks.layers[0].linear1.weight[:9] = 0.0
    model.tokens.weight.requires_grad_(False)
    model.blocks.layers[0].linear1.weight.requires_grad_(False)
    small = dcpp.compact(model, x)
    assert small.training
    assert not small.blocks.layers[0].linear1.weight.requires_grad
    assert small.blocks.layers[0].linear1.bias.requires_grad
    assert small.blocks.layers[0].linear1.out_features == 15


def test_without_torch_pruning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    x = CASES["signals"][1]
    model = dcpp.prune(dcpp.convert(settled(CASES["signals"][0], x).float()), keep=0.1).eval()
    monkeypatch.setitem(sys.modules, "torch_pruning.dependency", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'dropconnectpp\[compact\]'"):
        dcpp.compact(model, x)
