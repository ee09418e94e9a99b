"""The masked weight, by given masks and by drawn ones: the same numbers as its definition, and no gradient harmed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dropconnectpp as dcpp
from dropconnectpp import functional
from dropconnectpp.ops import gated_weight, noise
from dropconnectpp.ops.drawn import Draw, Gating, Synapses, draw_gated, gated_plainly

SEED = torch.tensor(2**60 + 77)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_weight, "CHUNK", 64)
    monkeypatch.setattr(noise, "CHUNK", 64)
    monkeypatch.setattr(gated_weight, "SMALL", 1)


def as_chunks(transposed: bool, *tensors: Tensor) -> list[Tensor]:
    """The tensors as they are, or with their memory in another order, which cannot be taken in chunks."""
    if not transposed:
        return list(tensors)
    return [t.transpose(0, -1).contiguous().transpose(0, -1) for t in tensors]


# ------------------------------------------------------------------------------- masks that are given


@pytest.mark.parametrize("shape", [(7,), (9, 17), (3, 4, 5, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_masked_products_and_their_gradients(shape: tuple[int, ...], transposed: bool) -> None:
    weight, logit, upstream = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    weight, upstream = as_chunks(transposed, weight, upstream)
    mask = torch.rand(shape) < 0.5
    weight.requires_grad_()
    logit.requires_grad_()
    expected = (upstream * mask).clone()
    slope = functional.straight_through_gradient(logit.detach(), weight.detach(), upstream)
    (found,) = torch.autograd.grad(gated_weight.masked(weight, mask), weight, upstream.clone())
    assert torch.equal(found, expected)
    both = torch.autograd.grad(
        gated_weight.straight_through(weight, logit, mask, None), [weight, logit], upstream.clone()
    )
    assert torch.equal(both[0], expected)
    assert torch.allclose(both[1], slope, atol=1e-15)


@pytest.mark.parametrize("count", [1, 64, 65, 200])
@pytest.mark.parametrize("out", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_may_be_written_in_another_precision(dtype: torch.dtype, out: torch.dtype, count: int) -> None:
    weight, mask = torch.randn(count).to(dtype), torch.rand(count) < 0.5
    found = gated_weight.multiply(weight, mask, torch.empty(count, dtype=out))
    assert torch.equal(found, (weight * mask).to(out))
    assert gated_weight.multiply(weight, mask, weight) is weight  # over itself


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through"])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_a_layers_gradients_are_those_of_plain_torch(estimator: str, shape: tuple[int, ...]) -> None:
    """Inputs without a batch axis hand the output's own gradient to the bias: it must not be overwritten."""
    layer = dcpp.DropConnectPPLinear(5, 3, estimator=estimator, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    masks = {"weight": torch.rand(3, 5) < 0.5, "bias": torch.tensor([True, False, True])}
    with dcpp.forced_masks(layer, masks):
        output = layer(x)
    upstream = torch.randn_like(output)
    wanted = [x, layer.weight, layer.bias]
    found = torch.autograd.grad(output, wanted, upstream)
    plain = torch.nn.functional.linear(x, layer.weight * masks["weight"], layer.bias * masks["bias"])
    for ours, theirs in zip(found, torch.autograd.grad(plain, wanted, upstream), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-14)


# ------------------------------------------------------------------------------- masks that a draw defines


def gating(logits: list[Tensor], kept: list[Tensor | None], through: bool, mirrored: bool, seed: Tensor) -> Gating:
    synapses = tuple(Synapses(x, k, stream) for stream, (x, k) in enumerate(zip(logits, kept, strict=True)))
    return Gating(Draw(seed), synapses, mirrored, through, None)


@pytest.mark.parametrize("way", [draw_gated, gated_plainly])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_drawn_products_and_their_gradients(
    way: type, through: bool, mirrored: bool, pruned: bool, transposed: bool
) -> None:
    """A weight and a bias in one go, each by the mask of its own stream."""
    parameters = [torch.randn(9, 17, dtype=torch.float64), torch.randn(9, dtype=torch.float64)]
    parameters[0], upstream = as_chunks(transposed, parameters[0], torch.randn(9, 17, dtype=torch.float64))
    upstreams = [upstream, torch.randn(9, dtype=torch.float64)]
    logits = [torch.randn_like(p) for p in parameters]
    kept = [(torch.rand(p.shape) < 0.7) if pruned else None for p in parameters]
    for tensor in (*parameters, *logits):
        tensor.requires_grad_()
    products = way(tuple(parameters), gating(logits, kept, through, mirrored, SEED))
    wanted = [*parameters, *(logits if through else [])]
    found = torch.autograd.grad(products, wanted, [g.clone() for g in upstreams])
    for index, (parameter, logit, upstream) in enumerate(zip(parameters, logits, upstreams, strict=True)):
        mask = noise.binary(logit.detach(), parameter.shape, SEED, index, mirrored)
        left = torch.ones_like(mask) if kept[index] is None else kept[index]
        assert torch.equal(products[index], parameter * (mask & left))
        torch.testing.assert_close(found[index], upstream * (mask & left), rtol=0, atol=1e-15)
        if through:
            slope = functional.straight_through_gradient(logit.detach(), parameter.detach(), upstream) * left
            torch.testing.assert_close(found[2 + index], slope, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "disarm"])
def test_autocast_writes_the_product_once_and_in_its_precision(dtype: torch.dtype, estimator: str) -> None:
    layer = dcpp.DropConnectPPLinear(40, 30, estimator=estimator)
    x, seed = torch.randn(8, 40), torch.Generator()
    found = []
    for enabled in (False, True):
        layer.zero_grad()
        with dcpp.sampling(layer.train(), seed.manual_seed(3)), torch.autocast("cpu", dtype=dtype, enabled=enabled):
            output = layer(x)
        assert output.dtype == (dtype if enabled else torch.float32)
        output.float().square().sum().backward()
        found.append((output.float(), *(p.grad for p in layer.parameters() if p.grad is not None)))
        assert layer.weight.grad.dtype == torch.float32
    assert len(found[0]) == (5 if estimator == "straight-through" else 3)
    for exact, rough in zip(*found, strict=True):
        scale = float(exact.detach().abs().max())
        torch.testing.assert_close(rough, exact, rtol=0, atol=(0.04 if dtype == torch.bfloat16 else 0.006) * scale)
        assert torch.equal(rough == 0, exact == 0)  # the same mask


@pytest.mark.parametrize("through", [False, True])
def test_a_products_gradient_leaves_the_tensors_it_came_from_alone(through: bool) -> None:
    weight, logit = torch.randn(90, 9, requires_grad=True), torch.randn(90, 9, requires_grad=True)
    (product,) = draw_gated((weight,), gating([logit], [None], through, False, SEED))
    kept = [t.detach().clone() for t in (weight, logit, product)]
    product.sum().backward(retain_graph=True)
    first = [None if t.grad is None else t.grad.clone() for t in (weight, logit)]
    product.sum().backward()
    for tensor, before in zip((weight, logit, product), kept, strict=True):
        assert torch.equal(tensor.detach(), before)
    for tensor, once in zip((weight, logit), first, strict=True):
        assert once is None or torch.equal(tensor.grad, 2 * once)
    assert (logit.grad is not None) == through
