"""compact on chains made at random: whatever stands in them, the outputs are the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_cases import switch_off
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError

BETWEEN = (nn.ReLU, nn.Sigmoid, nn.Softplus, nn.Dropout, nn.PReLU, nn.ELU, nn.Identity)


def dense_layers(draw: st.DrawFn, inputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        units = draw(st.integers(1, 7))
        layers.append(nn.Linear(inputs, units, bias=draw(st.booleans())))
        layers += draw(st.sampled_from([[], [nn.BatchNorm1d(units)], [nn.PReLU(units)], [nn.LayerNorm(units)]]))
        layers.append(draw(st.sampled_from(BETWEEN))())
        inputs = units
    return [*layers, nn.Linear(inputs, 3)]


def convolutions(draw: st.DrawFn) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    channels = draw(st.sampled_from([1, 4]))
    first = channels
    for _ in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([1, channels, 2 if channels % 2 == 0 else 1]))
        units = groups * draw(st.integers(1, 3))
        mode = draw(st.sampled_from(["zeros", "circular", "replicate"]))
        layers.append(nn.Conv2d(channels, units, 3, padding=draw(st.integers(0, 1)), groups=groups, padding_mode=mode))
        layers += draw(st.sampled_from([[], [nn.BatchNorm2d(units)], [nn.AvgPool2d(3, 1, 1)], [nn.MaxPool2d(2, 1)]]))
        layers.append(draw(st.sampled_from(BETWEEN))())
        channels = units
    return layers, first


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    if draw(st.booleans()):
        inputs = draw(st.integers(1, 8))
        modules, x = dense_layers(draw, inputs), torch.randn(4, inputs)
    else:
        modules, channels = convolutions(draw)
        x = torch.randn(3, channels, 12, 12)
        flat = nn.Sequential(*modules, nn.Flatten())(x).shape[1]
        modules += [nn.Flatten(), *dense_layers(draw, flat)]
    model = nn.Sequential(*modules).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.weight)
    switch_off(model, draw(st.sampled_from([0.1, 0.4, 0.7])), torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return model.eval(), x.double()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains())
@torch.no_grad()
def test_random_chains(case: tuple[nn.Sequential, torch.Tensor]) -> None:
    model, x = case
    try:
        small = dcpp.compact(model)
    except ArgumentError as error:
        assert "no unit and no input of any layer is off" in str(error)  # noqa: PT017 (drawn at random: either may be)
        return
    torch.testing.assert_close(small(x), model(x), rtol=0.0, atol=1e-10)
    assert small.compaction.parameters[1] <= small.compaction.parameters[0] + sum(  # a fold may need a bias
        module.weight.shape[0] for module in model.modules() if isinstance(module, nn.Linear) and module.bias is None
    )
