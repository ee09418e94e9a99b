"""The Triton kernel: interpreted on the CPU everywhere, and on a GPU against the CPU in float64."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gate_cases import compare_gates
from torch import Tensor

import dropconnectpp as dcpp
from dropconnectpp import functional
from dropconnectpp.ops import gpu as kernels
from dropconnectpp.ops import posterior

# The kernel is launched by hand: `kernels.posterior_pass` would do the same on CUDA tensors alone. The
# gradient lies inside a larger poisoned buffer, so that a write outside its range shows too.
INTERPRETED = """
import torch
from dropconnectpp import functional
from dropconnectpp.ops import gpu as kernels
from dropconnectpp.ops import gpu_triton as _triton

POISON = 12345.0
torch.manual_seed(0)

def check(count, block, scored, gradient, prior):
    logit = 4 * torch.randn(count)
    logit[0] = 0.0
    logit[count // 2] = -30.0
    mask = torch.rand(count) < 0.5
    coefficient, kl_scale = torch.tensor([-0.7]), torch.tensor(0.3)
    programs = -(-count // block)
    partial = torch.full((2, programs), POISON)
    room = torch.full((count + 2 * block,), POISON)
    kernel, polynomial = kernels._kernel_for(*prior)
    assert kernel is (_triton.posterior_kernel if prior == (1.0, 1.0) else _triton.prior_kernel)
    kernel[(programs,)](
        logit, mask.view(torch.uint8), coefficient, kl_scale, room[block:], partial, count, programs,
        *polynomial, SCALE_IS_POINTER=True, SCORED=scored, GRADIENT=gradient, BLOCK=block,
    )
    kl, slope = functional.collapsed_kl(logit.double(), *prior)
    score = functional.bernoulli_score(mask, logit.double())
    what = f"{count} elements in blocks of {block}, scored={scored}, gradient={gradient}, prior={prior}"
    sums = partial.double().sum(1)
    assert torch.isclose(sums[0], kl.sum(), rtol=2e-6), what
    expected = 0.3 * slope - (-0.7 * score if scored else 0.0)
    squared = score.square().sum() if scored and gradient else torch.zeros((), dtype=torch.float64)
    assert torch.isclose(sums[1], squared, rtol=2e-6), what
    written = room[block : block + count]
    outside = torch.cat([room[:block], room[block + count :]])
    assert bool((outside == POISON).all()), f"wrote outside the gradient: {what}"
    if gradient:
        error = (written.double() - expected).abs().max()
        assert error < 3e-7, f"{what}: {error}"
    else:
        assert bool((written == POISON).all()), f"wrote a gradient nobody asked for: {what}"

for count, block in [(1, 16), (15, 16), (16, 16), (17, 16), (1000, 128), (1024, 1024), (1025, 1024), (3001, 1024)]:
    for scored in (False, True):
        for gradient in (False, True):
            for prior in [(1.0, 1.0), (10.0, 90.0), (2.0, 0.7), (3.0, 3.0)]:
                check(count, block, scored, gradient, prior)

from gate_cases import compare_gates
for count in (1, 1023, 1024, 1025):
    compare_gates(torch.device("cpu"), count)
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernel_is_its_definition(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


def test_the_cpu_never_takes_the_kernel() -> None:
    layer = dcpp.DropConnectPPLinear(3, 2)
    assert not kernels.covers(layer, layer.weight_logit.detach(), None, (), (), None)


# ----------------------------------------------------------------------------------------- on a GPU


def _reference(
    logit: Tensor, mask: Tensor | None, coefficient: float, kl_scale: float, prior: tuple[float, float] = (1.0, 1.0)
) -> tuple[Tensor, ...]:
    """KL sum, sum of squared scores and gradient, by their definition, on the CPU in float64."""
    wide = logit.cpu().double()
    kl, slope = functional.collapsed_kl(wide, *prior)
    assert kl is not None
    assert slope is not None
    if mask is None:
        return kl.sum(), torch.zeros((), dtype=torch.float64), kl_scale * slope
    score = functional.bernoulli_score(mask.cpu(), wide)
    return kl.sum(), score.square().sum(), kl_scale * slope - coefficient * score


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("prior", [(1.0, 1.0), (10.0, 90.0), (2.0, 0.7)])
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("count", [1, 1000, 2**20 + 3])
def test_the_kernel_agrees_with_float64(count: int, scored: bool, prior: tuple[float, float]) -> None:
    logit = 4 * torch.randn(count, device="cuda")
    mask = torch.rand(count, device="cuda") < 0.5 if scored else None
    coefficients = torch.tensor([-0.7], device="cuda") if scored else None
    expected = _reference(logit, mask, -0.7, 0.3, prior)
    runs = [kernels.posterior_pass(logit, mask, coefficients, 0.3, True, prior) for _ in range(3)]
    for kl, squared, gradient in runs:
        assert gradient is not None
        torch.testing.assert_close(kl.cpu().double(), expected[0], rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(squared.cpu().double(), expected[1], rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(gradient.cpu().double(), expected[2], rtol=0.0, atol=3e-7)
        assert torch.equal(gradient, runs[0][2]), "two runs of one launch disagree: a race"
        assert torch.equal(kl, runs[0][0])
        assert torch.equal(squared, runs[0][1])


@pytest.mark.gpu
@pytest.mark.triton
def test_the_kernel_gives_no_gradient_unasked_and_takes_a_scale_on_the_device() -> None:
    logit = torch.randn(1000, device="cuda")
    assert kernels.posterior_pass(logit, None, None, 1.0, False)[2] is None
    scale = torch.tensor(0.3, device="cuda")
    gradient = kernels.posterior_pass(logit, None, None, scale, True)[2]
    assert gradient is not None
    torch.testing.assert_close(gradient.cpu().double(), _reference(logit, None, 0.0, 0.3)[2], rtol=0.0, atol=3e-7)


@pytest.mark.gpu
@pytest.mark.triton
@pytest.mark.parametrize("count", [1, 1000, 2**20 + 3])
def test_the_gates_kernels_agree_with_their_definitions(count: int) -> None:
    for _ in range(3):
        compare_gates(torch.device("cuda"), count)


@pytest.mark.gpu
def test_a_layer_takes_the_kernel_where_it_can() -> None:
    layer = dcpp.DropConnectPPLinear(30, 20, device="cuda")
    wide = dcpp.DropConnectPPLinear(30, 20, device="cuda", dtype=torch.float64)
    mask = torch.rand(20, 30, device="cuda") < 0.5
    taken = importlib.util.find_spec("triton") is not None
    assert kernels.covers(layer, layer.weight_logit.detach(), None, [mask], [], None) is taken
    assert not kernels.covers(wide, wide.weight_logit.detach(), None, [mask], [], None)
    assert not kernels.covers(layer, layer.weight_logit.detach(), mask, [mask], [], None)
    for prior, known in (((10.0, 90.0), taken), ((0.1, 1.0), False)):
        other = dcpp.DropConnectPPLinear(30, 20, alpha=prior[0], beta=prior[1], device="cuda")
        assert kernels.covers(other, other.weight_logit.detach(), None, [mask], [], None) is known
    coefficient = torch.tensor([0.2], device="cuda")
    found = posterior.posterior_pass(layer, "weight", kl_scale=0.1, masks=[mask], coefficients=coefficient)
    expected = _reference(layer.weight_logit.detach(), mask, 0.2, 0.1)
    gradient = found.gradients["weight_logit"].cpu().double()
    torch.testing.assert_close(gradient, expected[2], rtol=0.0, atol=3e-7)
    torch.testing.assert_close(found.squared_score.cpu().double().sum(), expected[1], rtol=2e-6, atol=1e-6)


ESTIMATORS: list[tuple[Any, str, int]] = [
    (dcpp.estimators.BBVI(), "optimal", 1),
    (dcpp.estimators.BBVI(), "learned", 1),
    (dcpp.estimators.BBVI(per_synapse=True), "optimal", 1),
    (dcpp.estimators.BBVI(baseline="mean-network"), "optimal", 1),
    (dcpp.estimators.BBVI(baseline="leave-one-out"), "optimal", 2),
    ("straight-through", "optimal", 1),
    ("straight-through", "learned", 1),
    ("concrete", "optimal", 1),
    ("disarm", "optimal", 1),
    ("local", "optimal", 1),
    ("eq16", "learned", 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize(("estimator", "hyper", "num_samples"), ESTIMATORS, ids=str)
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(estimator: Any, hyper: str, num_samples: int, mask: str) -> None:
    """Two ELBO steps with forced masks; the second has a running baseline to subtract."""
    torch.manual_seed(1)
    batch, shapes = 16, {"0.weight": (20, 30), "0.bias": (20,), "1.weight": (5, 20), "1.bias": (5,)}
    options = {"estimator": estimator, "hyper": hyper, "mask": mask}
    start = torch.nn.Sequential(
        dcpp.DropConnectPPLinear(30, 20, activation=torch.nn.ReLU(), **options),
        dcpp.DropConnectPPLinear(20, 5, kl_weight=0.3, **options),
    )
    with torch.no_grad():
        for name, parameter in start.named_parameters():
            if name.endswith("logit"):
                parameter.normal_()
    lead = (batch,) if mask == "example" else ()
    passes = [{name: torch.rand(*lead, *shape) < 0.5 for name, shape in shapes.items()} for _ in range(2)]
    x, y = torch.randn(batch, 30), torch.randint(0, 5, (batch,))
    found = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        model = copy.deepcopy(start).to(device=device, dtype=dtype)
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=1000, num_samples=num_samples)
        with dcpp.forced_masks(model, passes):
            for _ in range(2):
                model.zero_grad()
                terms = elbo(x.to(device=device, dtype=dtype), target=y.to(device))
                terms.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        values = {"loss": terms.loss.detach(), "kl": terms.kl, **gradients}
        found[device] = {name: value.cpu().double() for name, value in values.items()}
    assert found["cpu"].keys() == found["cuda"].keys()
    for name, value in found["cpu"].items():
        if estimator == "eq16" and name.endswith(("alpha", "beta")):  # scored by a draw of pi: other noise there
            assert bool(torch.isfinite(found["cuda"][name]).all())
        else:
            torch.testing.assert_close(
                found["cuda"][name], value, rtol=2e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
