"""The operations as torch knows them: torch's own checks, the numbers of the functions behind them, one mask a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dropconnectpp as dcpp
from dropconnectpp import functional
from dropconnectpp.ops import noise, registered
from dropconnectpp.ops.drawn import Draw, Gating, Synapses, draw_gated, gated_plainly

SEED = torch.tensor(2**61 + 99)
SEEDS = torch.tensor([2**61 + 99, 2**55 + 3])
DTYPES = [torch.float32, torch.float64]
NAMES = [
    "held",
    "uniform",
    "examples",
    "normal",
    "binary",
    "gated",
    "gated_backward",
    "posterior",
    "posterior_backward",
]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it checks


def parameter(dtype: torch.dtype = torch.float64, grad: bool = True, shape: tuple[int, ...] = (6, 9)) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape))).requires_grad_(grad)


def kept_of(pruned: bool) -> Tensor | None:
    return torch.arange(54).view(6, 9) % 3 > 0 if pruned else None


def check(name: str, *arguments: Any) -> None:
    torch.library.opcheck(getattr(registered, name), arguments)


def test_every_operation_is_there_and_checked() -> None:
    assert {str(getattr(registered, name)._qualname) for name in NAMES} == {f"dropconnectpp::{name}" for name in NAMES}
    found = {name for name in vars(registered) if isinstance(getattr(registered, name), torch.library.CustomOpDef)}
    assert found == set(NAMES)


# ------------------------------------------------------------------------------- torch's checks


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [[4, 3], [0, 3], [7], []], ids=str)
def test_torch_accepts_the_noise(shape: list[int], double: bool) -> None:
    check("uniform", shape, SEED, 3, double)
    check("normal", shape, SEED, 3, double)
    if shape and shape[0]:
        check("examples", shape, SEED, 3, double, 2)


def test_torch_accepts_a_copy() -> None:
    check("held", torch.randn(2, 3))
    value = torch.randn(3)
    before = registered.held(value)
    value.add_(1.0)
    torch.testing.assert_close(before, value - 1.0)


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_accepts_the_masks(dtype: torch.dtype, mirrored: bool) -> None:
    check("binary", parameter(dtype, grad=False), [6, 9], SEED, 3, mirrored)
    check("binary", torch.tensor(0.3, dtype=dtype), [6, 9], SEED, 3, mirrored)


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_accepts_the_masked_weight(dtype: torch.dtype, pruned: bool, through: bool) -> None:
    weight, logit = parameter(dtype), parameter(dtype, grad=through)
    check("gated", weight, logit, kept_of(pruned), SEED, 3, True, through, dtype)
    upstream = parameter(dtype, grad=False)
    check("gated_backward", upstream, weight.detach(), logit.detach(), kept_of(pruned), SEED, 3, False, through)


@pytest.mark.parametrize("last", [("grad",), ("weight",), ("weight", "logit")], ids=str)
def test_torch_accepts_weights_and_gradients_in_any_memory_layout(last: tuple[str, ...]) -> None:
    """A convolution's gradient is channels last where its maps are, whatever the weight is."""
    tensors = {name: parameter(grad=False, shape=(4, 3, 2, 2)) for name in ("grad", "weight", "logit")}
    for name in last:
        tensors[name] = tensors[name].contiguous(memory_format=torch.channels_last)
    grad, weight, logit = tensors.values()
    check("gated", weight, logit, None, SEED, 3, False, True, torch.float64)
    check("gated_backward", grad, weight, logit, None, SEED, 3, False, True)
    check("binary", logit, [4, 3, 2, 2], SEED, 3, False)
    upstream, scale = torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    coefficients = torch.tensor([0.7, -1.3], dtype=torch.float64)
    settings = (None, SEEDS, coefficients, scale, 1.0, 1.0, "marginal", 3, False)
    check("posterior", logit, *settings)
    check("posterior_backward", upstream, logit, *settings)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_torch_accepts_a_masked_weight_in_half_precision(out: torch.dtype) -> None:
    check("gated", parameter(torch.float32), parameter(torch.float32), None, SEED, 3, False, True, out)


@pytest.mark.parametrize("hyper", ["marginal", "optimal"])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_torch_accepts_the_posterior(hyper: str, pruned: bool, paired: bool, count: int) -> None:
    logit, scale = parameter(), torch.tensor(0.3, dtype=torch.float64)
    coefficients = torch.tensor([0.7, -1.3], dtype=torch.float64)[:count]
    settings = (kept_of(pruned), SEEDS[:count], coefficients, scale, 1.0, 1.0, hyper, 3, paired)
    check("posterior", logit, *settings)
    check("posterior_backward", torch.tensor(2.0, dtype=torch.float64), logit.detach(), *settings)


# ------------------------------------------------------------------------------- the functions behind them


@pytest.mark.parametrize("double", [False, True])
def test_the_noise_is_the_eager_one(double: bool) -> None:
    shape, dtype = torch.Size([5, 2000]), torch.float64 if double else torch.float32
    device = torch.device("cpu")
    assert torch.equal(registered.uniform(shape, SEED, 3, double), noise.uniform(shape, SEED, 3, dtype, device))
    assert torch.equal(registered.normal(shape, SEED, 3, double), noise.normal(shape, SEED, 3, dtype, device))
    blocks = noise.Blocks(SEED, 3, dtype, device)
    whole = torch.cat([blocks.next(torch.Size([size, 2000])) for size in (2, 2, 1)])
    assert torch.equal(registered.examples(shape, SEED, 3, double, 2), whole)


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("count", [50, 20_000])
def test_the_masked_weight_and_its_gradient_are_the_eager_ones(
    count: int, mirrored: bool, pruned: bool, through: bool
) -> None:
    weight, logit = parameter(torch.float32, shape=(count,)), parameter(torch.float32, shape=(count,))
    kept = torch.rand(count) < 0.7 if pruned else None
    upstream = torch.randn(count)
    traced = registered.gated(weight, logit, kept, SEED, 3, mirrored, through, torch.float32)
    gating = Gating(Draw(SEED), (Synapses(logit, kept, 3),), mirrored, through, None)
    (eager,) = draw_gated((weight,), gating)
    (plain,) = gated_plainly((weight,), Gating(Draw(SEED), gating.synapses, mirrored, through, None))
    assert torch.equal(traced, eager)
    torch.testing.assert_close(plain, eager)
    wanted = [weight, *([logit] if through else [])]
    found = [torch.autograd.grad(product, wanted, upstream.clone()) for product in (traced, eager, plain)]
    for ours, theirs, slow in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours, slow, rtol=1e-5, atol=1e-6)
    if not through:
        again = registered.gated(weight, logit, kept, SEED, 3, mirrored, through, torch.float32)
        assert torch.autograd.grad(again.sum(), logit, allow_unused=True)[0] is None


@pytest.mark.parametrize(("hyper", "alpha", "beta"), [("marginal", 2.0, 9.0), ("optimal", 1.0, 1.0)])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_posterior_is_its_definition(
    hyper: Any, alpha: float, beta: float, pruned: bool, paired: bool, count: int
) -> None:
    logit, kept = parameter(), kept_of(pruned)
    left = torch.ones(6, 9, dtype=torch.float64) if kept is None else kept.double()
    coefficients = torch.tensor([0.7, -1.3], dtype=torch.float64)[:count]
    scale = torch.tensor(0.3, dtype=torch.float64)
    settings = (kept, SEEDS[:count], coefficients, scale, alpha, beta, hyper, 3, paired)
    loss, kl, squared = registered.posterior(logit, *settings)
    (gradient,) = torch.autograd.grad(2.0 * loss, logit)
    wide = logit.detach()
    if hyper == "marginal":
        value = functional.marginal_kl(wide, alpha, beta)
        slope = functional.marginal_kl_gradient(wide, alpha, beta)
    else:
        value, slope = functional.collapsed_kl(wide, alpha, beta)  # type: ignore[assignment]
    expected = 0.3 * slope
    for seed, coefficient in zip(SEEDS[:count], coefficients, strict=True):
        mask, mirror = (noise.binary(wide, wide.shape, seed, 3, arm) for arm in (False, True))
        if paired:
            expected = expected - functional.disarm_gradient(wide, coefficient * (mask.double() - mirror.double()))
        else:
            expected = expected - coefficient * functional.bernoulli_score(mask, wide)
    torch.testing.assert_close(kl, (value * left).sum())
    torch.testing.assert_close(loss, 0.3 * (value * left).sum())
    torch.testing.assert_close(gradient, 2.0 * expected * left)
    assert squared.shape == (count,)
    if not paired:
        scores = [
            functional.bernoulli_score(noise.binary(wide, wide.shape, seed, 3), wide) * left for seed in SEEDS[:count]
        ]
        expected = torch.stack([score.square().sum() for score in scores]) if scores else torch.zeros(0)
        torch.testing.assert_close(squared, expected.double())


# ------------------------------------------------------------------------------- compiled and eager


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "disarm", "concrete", "local"])
@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("width", [7, 120], ids=["torch's generator", "NumPy's"])
def test_a_compiled_layer_draws_the_masks_of_an_eager_one(width: int, mask: str, estimator: str) -> None:
    """For one seed tensor: inside `sampling`, whose draw is made outside of what is compiled."""
    torch.compiler.reset()
    layer = dcpp.DropConnectPPLinear(width, width, estimator=estimator, mask=mask)
    torch.nn.init.normal_(layer.weight_logit)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, width)
    for training in (True, False):
        model = torch.nn.Sequential(layer).train(training)
        with dcpp.sampling(model, torch.Generator().manual_seed(1)):
            eager = layer(x)
            traced = compiled(x)
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-5)
        with dcpp.sampling(model, torch.Generator().manual_seed(2)):
            assert not torch.allclose(compiled(x), eager)
    torch.compiler.reset()
