"""Convolutions of a stack: grouped against one by one, and bf16 products with float32 gradients against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.replicas.convolutions import (
    FEW_MAPS,
    _FirstConvolution,
    _MixedConvolution,
    features,
    grouped_convolution,
    grouped_features,
)
from dropconnectpp.lab.replicas.network import Shape, start

REPLICAS, BATCH, MAPS, SIDE = 3, 2, 5, 6
BF16 = 2.0**-8
"""Half a unit in the last place of bf16, relative."""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
CONVOLUTIONS = {"first": _FirstConvolution, "mixed": _MixedConvolution}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(value: Tensor) -> Tensor:
    """To what bf16 holds, in float64."""
    return value.bfloat16().double()


def oracle(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """Each replica by itself: x (B, R*C, H, W) -> (B, R*O, H, W)."""
    parts = x.chunk(len(weight), dim=1)
    return torch.cat([F.conv2d(p, w, b, padding=padding) for p, w, b in zip(parts, weight, bias, strict=True)], 1)


@devices
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("side", "padding"), [(5, 2), (3, 0), (3, 1)])
def test_bf16_products_meet_float32_sums(device, name, channels, side, padding):
    x = rounded(numbers(BATCH, REPLICAS * channels, SIDE, SIDE, seed=1)).requires_grad_()
    weight, bias = numbers(REPLICAS, MAPS, channels, side, side, seed=2), numbers(REPLICAS, MAPS, seed=3)
    low = x.detach().to(device, torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    leaves = [value.float().to(device).requires_grad_() for value in (weight, bias)]
    output = CONVOLUTIONS[name].apply(low, *leaves, padding)
    # The filters are rounded on their way in; with the same rounding the rest is exact but for the result's own.
    seen = [rounded(value).requires_grad_() for value in (weight, bias)]
    expected = oracle(x, *seen, padding)
    assert output.dtype == torch.bfloat16
    assert output.shape == expected.shape
    size = oracle(x.abs(), *(value.abs() for value in seen), padding).detach()
    assert ((output.detach().double().cpu() - expected.detach()).abs() <= 2 * BF16 * size).all()
    upstream = rounded(numbers(*expected.shape, seed=4))
    found = torch.autograd.grad(output, [low, *leaves], upstream.to(device, torch.bfloat16), allow_unused=True)
    by_x, *by_leaves = torch.autograd.grad(expected, [x, *seen], upstream)
    for one, other in zip(found[1:], by_leaves, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double().cpu(), other, rtol=0, atol=1e-6 * float(other.abs().max()))
    if name == "mixed":
        torch.testing.assert_close(found[0].double().cpu(), by_x, rtol=0, atol=4 * BF16 * float(by_x.abs().max()))
    else:
        assert found[0] is None


def test_a_gradient_rounded_to_bf16_would_be_caught():
    gradient = numbers(50)
    assert (rounded(gradient) - gradient).abs().max() > 1e-4 * gradient.abs().max()


@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_windows_are_laid_out_for_images_alone(channels, needs_gradient, monkeypatch):
    used: list[str] = []
    for kind in (_FirstConvolution, _MixedConvolution):
        run = kind.apply
        monkeypatch.setattr(kind, "apply", lambda *a, run=run, kind=kind: used.append(kind.__name__) or run(*a))
    x = torch.zeros(1, 2 * channels, 4, 4, dtype=torch.bfloat16, requires_grad=needs_gradient)
    grouped_convolution(x, torch.zeros(2, 5, channels, 3, 3), torch.zeros(2, 5), 1)
    first = channels <= FEW_MAPS and not needs_gradient
    assert used == ["_FirstConvolution" if first else "_MixedConvolution"]


def test_no_gradient_is_made_for_inputs_that_need_none():
    x = torch.zeros(1, 16, 4, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 5, 8, 3, 3, requires_grad=True)
    output = grouped_convolution(x, weight, torch.zeros(2, 5), 1)
    output.sum().backward()
    assert x.grad is None
    assert weight.grad is not None


# ------------------------------------------------------------------------------------------- whole stacks

ARCHITECTURES = {
    "tiny": Architecture(maps=(2, 3), pooled=(True, False), filter_size=3, padding=1, hidden=4),
    "paper's shape": Architecture(maps=(4, 4, 8), hidden=4),
    "floor": Architecture(maps=(3, 4), pooled=(False, True), filter_size=3, padding=0, ceil_mode=False, hidden=4),
}


def stack(architecture: Architecture, channels: int, side: int = 12) -> tuple[Tensor, dict[str, Tensor]]:
    shape = Shape(architecture, channels, side, 3)
    parameters = start(shape, 1, torch.arange(REPLICAS), torch.float64)
    for name, value in parameters.items():
        if name.endswith("bias"):
            value.copy_(numbers(*value.shape, seed=8))
    return numbers(REPLICAS, BATCH, channels, side, side, seed=9), parameters


def convolutional(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in parameters.items() if name.startswith("conv")}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_grouped_features_equal_one_replica_after_the_other(name, channels, dtype, tolerance):
    images, parameters = stack(ARCHITECTURES[name], channels)
    found = []
    for make in (features, grouped_features):
        leaves = {key: value.to(dtype).clone().requires_grad_() for key, value in parameters.items()}
        output = make(images.to(dtype), leaves, ARCHITECTURES[name])
        gradients = torch.autograd.grad(output.square().sum(), list(convolutional(leaves).values()))
        found.append([output.detach(), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(one.abs().max()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_features_are_those_of_plain_layers_with_the_relu_before_the_pool(name):
    architecture = ARCHITECTURES[name]
    images, parameters = stack(architecture, 2)
    found = features(images, parameters, architecture)
    for r in range(REPLICAS):
        x = images[r]
        for layer, pooled in enumerate(architecture.pooled):
            weight, bias = parameters[f"conv{layer}.weight"][r], parameters[f"conv{layer}.bias"][r]
            x = F.relu(F.conv2d(x, weight, bias, padding=architecture.padding))
            x = F.max_pool2d(x, 3, 2, ceil_mode=architecture.ceil_mode) if pooled else x
        torch.testing.assert_close(found[r], x.flatten(1), rtol=1e-12, atol=1e-12)
    assert found.shape == (REPLICAS, BATCH, architecture.dense_inputs(12))


@devices
def test_bf16_features_are_close_to_float64(device):
    architecture = ARCHITECTURES["paper's shape"]
    images, parameters = stack(architecture, 3)
    exact = grouped_features(images, parameters, architecture)
    leaves = {name: value.float().to(device) for name, value in parameters.items()}
    low = grouped_features(images.to(device, torch.bfloat16), leaves, architecture)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double().cpu(), exact, rtol=0.05, atol=0.03 * float(exact.abs().max()))


@devices
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_where_bf16_rounds_nothing_features_and_gradients_are_exact(device, channels):
    # Filters of two ones and small whole numbers everywhere: no sum needs more than bf16's eight bits, and maxima
    # that are equal are settled alike, so that every gradient takes the same way.
    architecture = ARCHITECTURES["paper's shape"]
    images, parameters = stack(architecture, channels)
    images = torch.randint(-2, 3, images.shape, generator=torch.Generator().manual_seed(1)).double()
    for value in convolutional(parameters).values():
        if value.ndim == 2:
            value.round_()
        else:
            ranked = value.flatten(2).argsort(-1).argsort(-1)
            value.copy_(((ranked < 1).double() - (ranked < 2).double() + (ranked < 3).double()).view(value.shape))
    wide = {name: value.requires_grad_() for name, value in convolutional(parameters).items()}
    exact = grouped_features(images, wide, architecture)
    leaves = {name: value.detach().float().to(device).requires_grad_() for name, value in wide.items()}
    low = grouped_features(images.to(device, torch.bfloat16), leaves, architecture)
    assert float(exact.detach().abs().max()) <= 256
    assert torch.equal(low.double().cpu(), exact)
    gradients = torch.autograd.grad(low.float().sum(), list(leaves.values()))
    for one, other in zip(gradients, torch.autograd.grad(exact.sum(), list(wide.values())), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-6, atol=1e-6)


def test_without_gradients_the_features_are_the_same():
    architecture = Architecture(maps=(8, 8, 16))
    images, parameters = stack(architecture, 3)
    leaves = {name: value.float().requires_grad_() for name, value in parameters.items()}
    trained = grouped_features(images.bfloat16(), leaves, architecture).detach()
    with torch.no_grad():
        assert torch.equal(grouped_features(images.bfloat16(), leaves, architecture), trained)


def test_a_pool_that_sticks_out_counts():
    paper = Architecture()
    assert paper.sides(32) == (16, 8, 8)
    assert Architecture(ceil_mode=False).sides(32) == (15, 7, 7)
    images, parameters = stack(Architecture(maps=(1, 1, 1)), 1, side=32)
    assert features(images, parameters, Architecture(maps=(1, 1, 1))).shape == (REPLICAS, BATCH, 64)


@pytest.mark.parametrize("ceil_mode", [True, False])
@pytest.mark.parametrize("pool_size", [1, 2, 3, 4])
@pytest.mark.parametrize("pool_stride", [1, 2, 3, 4])
def test_sides_are_those_that_torch_gives(ceil_mode, pool_size, pool_stride):
    architecture = Architecture(
        maps=(1,),
        pooled=(True,),
        filter_size=1,
        padding=0,
        pool_size=pool_size,
        pool_stride=pool_stride,
        ceil_mode=ceil_mode,
    )
    for side in range(pool_size, 14):
        expected = F.max_pool2d(torch.zeros(1, side, side), pool_size, pool_stride, ceil_mode=ceil_mode).shape[-1]
        assert architecture.sides(side) == (expected,), side
