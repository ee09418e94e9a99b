"""compact on chains: the same outputs, fewer units; what is in the way is an error, and nothing changes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError


def dense_chain(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 30), activation(), nn.Linear(30, 20), activation(), nn.Linear(20, 4)
    ).eval()


def masked_chain(keep: float, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return dcpp.prune(dcpp.convert(dense_chain(activation)).eval(), keep=keep)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.Softplus, nn.GELU, nn.Tanh])
@pytest.mark.parametrize("keep", [0.01, 0.05, 0.3])
def test_a_pruned_chain_gives_the_same_with_fewer_units(keep: float, activation: type[nn.Module]) -> None:
    model = masked_chain(keep, activation)
    small = dcpp.compact(model)
    x = torch.randn(50, 6, 6)
    torch.testing.assert_close(small(x), model(x), rtol=0.0, atol=1e-6)
    assert small.compaction.parameters[1] < small.compaction.parameters[0]
    assert small.compaction.parameters[1] == sum(p.numel() for p in small.parameters())


def test_by_hand() -> None:
    """Unit 0 is dead, unit 1 constant, unit 2 unread, input 0 unconnected; one unit is left."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.0, 0, 0], [0, 0, 0], [5, 6, 7], [0, 2, 3]]))
        model[0].bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
        model[2].weight.copy_(torch.tensor([[4.0, 10.0, 0.0, 2.0]]))
        model[2].bias.fill_(0.5)
    small = dcpp.compact(model)
    assert small[0].weight.tolist() == [[2.0, 3.0]]
    assert small[0].columns.tolist() == [1, 2]
    assert small[0].bias.tolist() == [3.0]
    assert small[2].weight.tolist() == [[2.0]]
    expected = 0.5 + 4.0 * 0.5 + 10.0 * torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(small[2].bias.detach(), expected[None], rtol=0.0, atol=1e-12)
    first, last = small.compaction.layers
    assert (first.units, first.inputs, last.inputs, last.folded) == ((4, 1), (3, 2), (4, 1), 2)
    assert small.compaction.flops == (2 * 12 + 2 * 4, 2 * 2 + 2)


def test_inputs_of_the_model_may_stay_whole() -> None:
    model, x = masked_chain(0.05), torch.randn(50, 6, 6)
    small, wide = dcpp.compact(model), dcpp.compact(model, select_inputs=False)
    torch.testing.assert_close(wide(x), model(x), rtol=0.0, atol=1e-6)
    linear = [one for one in wide.modules() if isinstance(one, nn.Linear)]
    assert {type(one) for one in linear} == {nn.Linear}
    assert linear[0].in_features == 36
    assert [one.out_features for one in linear] == [row.units[1] for row in small.compaction.layers]


def test_death_spreads_both_ways() -> None:
    """A layer that reads one unit kills all others before it, and what was constant makes constants after it."""
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        model[2].weight[1:] = 0.0
        model[2].weight[0, 2:] = 0.0
    small = dcpp.compact(model)
    assert [layer.units for layer in small.compaction.layers] == [(6, 2), (6, 1), (2, 2)]
    x = torch.randn(9, 5)
    torch.testing.assert_close(small(x), model(x))


def test_a_dead_network_still_gives_its_biases() -> None:
    model = dense_chain()
    with torch.no_grad():
        model[3].weight.zero_()
    small = dcpp.compact(model)
    x = torch.randn(3, 6, 6)
    torch.testing.assert_close(small(x), model(x), rtol=0.0, atol=1e-6)
    assert [layer.units[1] for layer in small.compaction.layers] == [1, 1, 4]


def test_the_result_is_an_ordinary_model() -> None:
    model = masked_chain(0.05)
    small = dcpp.compact(model)
    x = torch.randn(3, 6, 6)
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert torch.equal(twin(x), small(x))
        assert str(twin.compaction) == str(small.compaction)
    small(x).sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


def test_inplace() -> None:
    model = masked_chain(0.05)
    x = torch.randn(3, 6, 6)
    before = model(x)
    untouched = copy.deepcopy(model)
    assert dcpp.compact(model) is not model
    assert str(model) == str(untouched)
    assert dcpp.compact(model, inplace=True) is model
    torch.testing.assert_close(model(x), before)
    assert model.compaction.parameters[1] < model.compaction.parameters[0]


def test_the_table_says_what_went() -> None:
    text = str(dcpp.compact(masked_chain(0.01)).compaction)
    assert text.splitlines()[0].split() == ["layer", "kind", "units", "inputs", "parameters", "FLOPs"]
    assert "bytes: 7,256 -> " in text
    assert "times smaller)" in text


def hooked(model: nn.Module) -> nn.Module:
    model[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    return model


def parametrised(model: nn.Module) -> nn.Module:
    nn.utils.parametrizations.weight_norm(model[1])  # type: ignore[index]
    return model


OBSTACLES: dict[str, tuple[Any, str]] = {
    "not pruned": (dense_chain, "no unit, input or head of any layer is off: the model was not pruned"),
    "no layer": (nn.ReLU, "no linear layer, convolution or attention"),
    "a hook": (lambda: hooked(masked_chain(0.01)), "1 has a forward hook"),
    "a parametrisation": (lambda: parametrised(dense_chain()), "a parameter of 1 is parametrised"),
    "batch statistics": (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), r"Call model.eval\(\) first"),
}


@pytest.mark.parametrize(("make", "message"), OBSTACLES.values(), ids=OBSTACLES.keys())
@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_in_the_way_is_an_error(make: Any, message: str, inplace: bool) -> None:
    model = make()
    before = str(model)
    with pytest.raises(ArgumentError, match=message):
        dcpp.compact(model, inplace=inplace)
    assert str(model) == before


def test_a_converted_model_that_was_not_pruned_loses_its_gates_alone() -> None:
    model = dcpp.convert(dense_chain()).eval()
    small = dcpp.compact(model)
    x = torch.randn(3, 6, 6)
    torch.testing.assert_close(small(x), model(x))
    assert small.compaction.parameters[0] == small.compaction.parameters[1]


def test_what_is_not_followed_is_whole_and_named() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model = dcpp.prune(dcpp.convert(plain).eval(), keep=0.1)
    small = dcpp.compact(model)
    assert "1" in small.compaction.left
    assert small[0].out_features == 8
    assert small[2].out_features < 8
    x = torch.randn(6, 8)
    torch.testing.assert_close(small(x), model(x))
