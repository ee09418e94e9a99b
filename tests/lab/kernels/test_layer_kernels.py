"""The fused dense layer: its twins against autograd, its kernels, interpreted and on a GPU, against their twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from layer_cases import (
    COMMON,
    KINDS,
    LEARNED,
    RARE,
    SAMPLED,
    STEP,
    STREAM,
    THROUGH,
    Case,
    adagrad_step,
    assert_adagrads_step,
    assert_independent_on_gpu,
    assert_twin_on_gpu,
    distance,
    gate_steps,
    on_gpu,
    step_with,
)
from pairing import one_in
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.kernels import gates, layer
from dropconnectpp.lab.kernels.gates import FixedGate, LearnedGate, OpenGate
from dropconnectpp.ops import gated_weight

# ------------------------------------------------------------------------------------------- the twins


def expected_gradients(case: Case) -> dict[str, Tensor]:
    """What the library's own functions and autograd make of the step."""
    leaves = {name: value.clone().requires_grad_() for name, value in case.trained().items()}
    x, gate, output = case.x.clone().requires_grad_(), case.gate, []
    loss = torch.zeros((), dtype=x.dtype)
    if isinstance(gate, LearnedGate):
        if "alpha" in leaves:
            alpha, beta = functional.positive(leaves["alpha"]), functional.positive(leaves["beta"])
            kl = functional.bernoulli_kl(leaves["logit"], alpha, beta)
            kl = kl + functional.beta_kl(alpha, beta, gate.prior_alpha, gate.prior_beta)
        else:
            kl = functional.beta_bernoulli_kl(leaves["logit"], gate.prior_alpha, gate.prior_beta)
        loss = loss + (gate.kl_scale[:, None, None] * kl).sum()
    if not isinstance(gate, OpenGate):
        keep = torch.sigmoid(leaves["logit"]) if isinstance(gate, LearnedGate) else gate.keep[:, None, None]
        loss = loss + gate.slab_scale * (keep * leaves["weight"].square()).sum() / 2
    for sample, mask in enumerate(case.masks()):
        weight = leaves["weight"]
        if isinstance(gate, LearnedGate) and gate.kind == "score":
            assert mask is not None
            assert gate.coefficient is not None
            log_q = functional.log_bernoulli(mask, leaves["logit"]).flatten(1).sum(1)
            loss = loss - (gate.coefficient[sample] * log_q).sum()
        if isinstance(gate, LearnedGate) and gate.kind == "straight-through":
            assert mask is not None
            weight = gated_weight.straight_through(weight, leaves["logit"], mask, None)
        elif mask is not None:
            weight = gated_weight.masked(weight, mask)
        output.append(torch.bmm(x, weight.mT))
    torch.testing.assert_close(case.forward(), torch.stack(output).detach(), rtol=1e-12, atol=1e-12)
    loss = loss + (torch.stack(output) * case.grad_output).sum()
    found = torch.autograd.grad(loss, [x, *leaves.values()])
    return dict(zip(["x", *leaves], found, strict=True))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("kind", "samples"), SAMPLED)
def test_the_twins_are_autograd_and_adagrad(kind: str, samples: int, inside: bool) -> None:
    case = Case(kind, (2, 5, 3, 7), torch.float64, samples)
    case.update = replace(case.update, inside=inside)
    wanted, masks = expected_gradients(case), case.masks()
    before = {name: value.clone() for name, value in case.trained().items()}
    grad_x, squared = case.backward()
    torch.testing.assert_close(grad_x, wanted["x"], rtol=1e-12, atol=1e-12)
    for name, value in case.trained().items():
        gradient = wanted[name]
        torch.testing.assert_close(getattr(case.update, name), gradient.square(), rtol=1e-9, atol=1e-12)
        step = adagrad_step(case.update, name, gradient)
        torch.testing.assert_close(value, before[name] - step, rtol=1e-7, atol=1e-9)
    if isinstance(case.gate, LearnedGate) and case.gate.kind == "score":
        assert squared is not None
        for mask, found in zip(masks, squared, strict=True):
            assert mask is not None
            score = mask.double() - torch.sigmoid(before["logit"])
            torch.testing.assert_close(found, score.square().sum((1, 2)))
    else:
        assert squared is None


def test_every_sample_has_the_mask_of_its_draw() -> None:
    case = Case("score", (2, 5, 3, 7), torch.float64, samples=3)
    assert isinstance(case.gate, LearnedGate)
    for draw, mask in enumerate(case.masks()):
        assert mask is not None
        assert torch.equal(mask, STREAM.bernoulli(torch.sigmoid(case.gate.logit), case.replicas, STEP, draw))


def test_gates_alone_learn_by_the_score_only() -> None:
    case = Case("straight-through", (2, 5, 3, 7), torch.float64)
    with pytest.raises(ArgumentError, match="gated_product_backward_"):
        gates.update_gate_(case.gate, case.replicas, STEP, case.update)


def test_priors_that_no_polynomial_follows_go_through_the_twin() -> None:
    case = Case("score", (2, 5, 3, 7), torch.float64)
    assert isinstance(case.gate, LearnedGate)
    assert gates.prior_supported(case.gate)
    case.gate = replace(case.gate, prior_alpha=2.0, prior_beta=0.1)
    assert not gates.prior_supported(case.gate)
    wanted = expected_gradients(case)
    case.backward()
    assert case.update.logit is not None
    torch.testing.assert_close(case.update.logit, wanted["logit"].square(), rtol=1e-9, atol=1e-12)


def test_the_cpu_never_takes_a_kernel() -> None:
    case = Case("score", (1, 2, 3, 4)).to(torch.float32)
    assert not layer.supported(case.x.bfloat16(), case.weight, case.gate, case.update)


def test_a_twin_rounds_its_operands_to_the_precision_of_x() -> None:
    case = Case("open", (1, 2, 3, 4))
    case.x = case.x.bfloat16()
    found = case.forward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], torch.bmm(case.x.float(), case.weight.bfloat16().float().mT))
    assert case.backward()[0].dtype == torch.bfloat16


def test_what_is_missing_is_named() -> None:
    logit, kl_scale = torch.zeros(1, 2, 3), torch.zeros(1)
    with pytest.raises(ArgumentError, match="kind"):
        LearnedGate(logit, STREAM, kl_scale, "pathwise")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="both or none"):
        LearnedGate(logit, STREAM, kl_scale, alpha=logit)
    with pytest.raises(ArgumentError, match="samples"):
        LearnedGate(logit, STREAM, kl_scale, samples=0)
    with pytest.raises(ArgumentError, match="samples"):
        FixedGate(kl_scale, STREAM, samples=0)
    for wrong in (torch.zeros(()), torch.zeros(2), torch.zeros(1, 1)):
        with pytest.raises(ArgumentError, match=r"kl_scale must have shape \(1,\), got"):
            LearnedGate(logit, STREAM, wrong)
    case = Case("score", (1, 2, 3, 4))
    gate = case.gate
    case.gate = replace(gate, alpha=case.weight, beta=case.weight)
    with pytest.raises(ArgumentError, match="alpha, beta"):
        case.backward()
    for coefficient in (None, torch.zeros(1), torch.zeros(2, 1)):
        case.gate = replace(gate, coefficient=coefficient)
        with pytest.raises(ArgumentError, match=r"coefficient of shape \(1, 1\)"):
            case.backward()
    for weight in (None, torch.zeros(1)):
        with pytest.raises(ArgumentError, match=r"weight before the step, of shape \(1, 3, 4\)"):
            gates.update_gate_(replace(gate, slab_scale=0.1), case.replicas, STEP, case.update, weight)


# --------------------------------------------------------------------------------- the interpreter

# The launches are the package's own. What they allocate is poisoned and lies between guards, and so
# do the parameters, so that a missing write and a write outside both show.
CHECK = """
import torch
from contextlib import nullcontext
from dataclasses import replace
from dropconnectpp.lab.kernels import gates, layer
from dropconnectpp.lab.kernels.launch_config import using
from guarded import guarded, poisoned, rooms, untouched
from launch_cases import SMALL, other_tiles
from layer_cases import COMMON, LEARNED, RARE, STEP, Case

def guard(case):
    for name, value in case.trained().items():
        total = getattr(case.update, name)
        if name == "weight":
            case.weight = guarded(value)
        else:
            case.gate = replace(case.gate, **{name: guarded(value)})
        case.update = replace(case.update, **{name: guarded(total)})

def run(case, kernels, step=STEP):
    layer.supported = gates.supported = lambda *_: kernels
    with poisoned(guarded) if kernels else nullcontext():
        return case.forward(), case.backward(step)

def check(kind, shape, samples, inside, step):
    case = Case(kind, shape, samples=samples)
    # Operands that bfloat16 holds: the interpreter rounds to it towards zero.
    case.weight, case.grad_output = case.weight.bfloat16().float(), case.grad_output.bfloat16().float()
    case.update = replace(case.update, inside=inside)
    wanted, found, alone = case.to(torch.float32), case.to(torch.float32), case.to(torch.float32, rows=slice(1, 2))
    for one in (wanted, found, alone):
        one.x = one.x.bfloat16()
    guard(found)
    dropped = case.dropped()
    output, (grad_x, squared) = run(found, True, step)
    untouched()
    twin_output, (twin_grad_x, twin_squared) = run(wanted, False)
    where = kind, shape, samples, inside
    assert output.dtype == torch.float32 and grad_x.dtype == torch.bfloat16, where
    # The order of a sum, and for grad_x bfloat16's last place.
    assert torch.allclose(output, twin_output, rtol=1e-5, atol=1e-5), where
    assert torch.allclose(grad_x.float(), twin_grad_x.float(), rtol=1e-2, atol=1e-5), where
    assert (squared is None) == (twin_squared is None)
    if squared is not None:
        assert torch.allclose(squared, twin_squared, rtol=1e-5), where
    for name, value in found.trained().items():
        squares, twins = getattr(found.update, name), getattr(wanted.update, name)
        assert torch.allclose(squares.sqrt(), twins.sqrt(), rtol=2e-5, atol=2e-5), (*where, name)
        if name == "weight" and dropped is not None:
            assert not squares[dropped].any() and squares[~dropped].all(), "masks are the twin's, synapse by synapse"
        away = twins.sqrt() > 1e-2  # a first step is the gradient's sign: nearly free where the gradient vanishes
        twin = wanted.trained()[name]
        assert torch.allclose(value[away], twin[away], rtol=1e-4, atol=1e-4), (*where, name)
    if shape[0] > 1:
        row = run(alone, True, step)
        rooms.clear()
        assert torch.equal(row[0], output[:, 1:2]) and torch.equal(row[1][0][0], grad_x[1]), where
        for name, value in alone.trained().items():
            assert torch.equal(value[0], found.trained()[name][1]), (*where, name)
"""

GIVEN = f"""{CHECK}
from layer_cases import THROUGH, gate_steps
for kind in THROUGH:
    for shape in ((1, 2, 3, 7), (3, 2, 5, 260)):
        start = Case(kind, shape)
        found, wanted, alone = (start.to(torch.float32, rows=rows) for rows in (slice(None), slice(None), slice(0, 1)))
        guard(found)
        gates.supported = lambda *_: True
        with using(SMALL):
            gate_steps(found)
            gate_steps(alone)
        untouched()
        gates.supported = lambda *_: False
        gate_steps(wanted)
        for name, value in wanted.trained().items():
            if name == "weight":
                continue
            squares, twins = getattr(found.update, name), getattr(wanted.update, name)
            assert torch.allclose(squares.sqrt(), twins.sqrt(), rtol=2e-4, atol=2e-4), (kind, shape, name)
            away = twins.sqrt() > 1e-2  # as above
            assert away.any() and torch.allclose(value[away], found.trained()[name][away], rtol=1e-3, atol=1e-4), name
            assert torch.equal(alone.trained()[name], found.trained()[name][:1]), (kind, shape, name)
print("all well")
"""

SMALL_TILES = f"""{CHECK}
layer.FEW_UNITS = 16
with using(SMALL):
    for kind in COMMON:
        for shape in ((2, 5, 3, 7), (3, 16, 16, 32), (2, 20, 10, 75), (2, 37, 18, 36)):
            check(kind, shape, 1, shape[1] == 5, torch.tensor(STEP) if shape[0] == 3 else STEP)
    for kind in RARE:
        check(kind, (2, 5, 3, 7), 1, False, STEP)
        check(kind, (1, 20, 18, 36), 1 if "fixed" in kind else 2, True, STEP)
    for kind in LEARNED:
        for shape in ((2, 5, 3, 7), (2, 20, 18, 36)):
            check(kind, shape, 2, True, STEP)
print("all well")
"""

CANDIDATES = f"""{CHECK}
for group, launches in other_tiles("forward", "backward", "gates"):
    with using(launches):
        for work in group.work:
            check(work.kind, (1, 37, 70, 36) if work.units > layer.FEW_UNITS else (1, 65, 33, 75), 1, True, STEP)
print("all well")
"""

POLYGAMMAS = """
import torch
import triton
import triton.language as tl
from dropconnectpp.lab.kernels.gates_triton import polygammas, softplus

@triton.jit
def kernel(x_ptr, digamma_ptr, trigamma_ptr, softplus_ptr, sigmoid_ptr, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    x = tl.load(x_ptr + places)
    digamma, trigamma = polygammas(tl.exp(x))
    tl.store(digamma_ptr + places, digamma)
    tl.store(trigamma_ptr + places, trigamma)
    value, gradient = softplus(2.0 * x)
    tl.store(softplus_ptr + places, value)
    tl.store(sigmoid_ptr + places, gradient)

x = torch.linspace(-16.0, 16.0, 4096)
found = torch.full((4, 4096), 77.0)
kernel[(1,)](x, *found, COUNT=4096)
y = torch.exp(x).double()
torch.testing.assert_close(found[0].double(), torch.digamma(y), rtol=1e-6, atol=1e-6)
torch.testing.assert_close(found[1].double(), torch.polygamma(1, y), rtol=1e-6, atol=0.0)
torch.testing.assert_close(found[2].double(), torch.nn.functional.softplus(2.0 * x.double()), rtol=1e-6, atol=0.0)
torch.testing.assert_close(found[3].double(), torch.sigmoid(2.0 * x.double()), rtol=1e-6, atol=0.0)
print("all well")
"""

PRIORS = """
import torch
import triton
import triton.language as tl
from dropconnectpp import _polynomials as polynomials
from dropconnectpp import functional
from dropconnectpp.ops.gpu_triton import prior_gradient, tanh_of_half

@triton.jit
def kernel(logit_ptr, gradient_ptr, even, odd, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    logit = tl.load(logit_ptr + places)
    size = tl.abs(logit)
    decay = tl.exp(-size)
    large = 1.0 / (1.0 + decay)
    gradient = prior_gradient(logit, decay * large, large, tanh_of_half(size, decay, large), even, odd)
    tl.store(gradient_ptr + places, gradient)

logit = torch.linspace(-20.0, 20.0, 4096)
for prior in ((2.0, 0.7), (0.6, 20.0), (30.0, 5.0), (1.0, 1.0)):
    found = torch.full((4096,), 77.0)
    kernel[(1,)](logit, found, *polynomials.prior_polynomial(*prior), COUNT=4096)
    wanted = functional.beta_bernoulli_kl_gradient(logit.double(), *prior)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=5e-7)
print("all well")
"""


@pytest.mark.triton
@pytest.mark.parametrize(
    "source",
    [SMALL_TILES, CANDIDATES, GIVEN, POLYGAMMAS, PRIORS],
    ids=["small tiles", "candidates", "given gradients", "polygammas", "priors"],
)
def test_the_interpreted_kernels_are_their_twins(source: str, run_interpreted: Callable[..., None]) -> None:
    run_interpreted(source)


# ---------------------------------------------------------------------------------------------- on a GPU

SHAPES = [(1, 128, 64, 4096), (3, 100, 10, 75), (2, 128, 512, 4096), (50, 128, 64, 4096), (200, 7, 64, 256)]
ODD_SHAPES = [(2, 300, 64, 256), (2, 129, 33, 130)]
SAMPLED_SHAPES = [(3, 128, 64, 4096), (2, 128, 512, 4096), (3, 100, 10, 75), (2, 129, 33, 130)]


@pytest.mark.parametrize(("kind", "samples"), SAMPLED)
def test_the_step_with_given_masks_is_the_step(kind: str, samples: int) -> None:
    case, other = (Case(kind, (2, 5, 3, 7), torch.float64, samples) for _ in range(2))
    for found, expected in zip(step_with(other, other.masks()), case.backward(), strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found, expected)
    for name, value in case.trained().items():
        torch.testing.assert_close(other.trained()[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "shape", "samples"),
    [(*pair, 1) for pair in one_in(2, COMMON, SHAPES + ODD_SHAPES)]
    + [(*pair, 1) for pair in one_in(2, RARE, SAMPLED_SHAPES)]
    + [(*pair, 3) for pair in one_in(2, ("fixed", *LEARNED), SAMPLED_SHAPES)],
)
def test_the_layer_on_a_gpu_is_its_twin(kind: str, shape: tuple[int, int, int, int], samples: int) -> None:
    assert_twin_on_gpu(kind, shape, samples)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 2, 64, 1), (50, 2, 512, 1), (3, 2, 10, 75), (2, 2, 64, 4096)])
@pytest.mark.parametrize("kind", THROUGH)
def test_gates_with_a_given_gradient_on_a_gpu_take_their_twins_steps(
    kind: str, shape: tuple[int, int, int, int]
) -> None:
    start, first = Case(kind, shape).to("cuda"), None
    wanted = start.to(torch.float64)
    gate_steps(wanted)
    for _ in range(3):
        case = start.to("cuda")
        gate_steps(case)
        found = {name: value for name, value in case.trained().items() if name != "weight"}
        for name, value in found.items():
            squares = getattr(wanted.update, name)
            assert distance(getattr(case.update, name), squares) < 1e-3, name
            away = squares.sqrt() > 1e-2  # a first step is the gradient's sign: nearly free where the gradient vanishes
            assert distance(value[away], wanted.trained()[name][away]) < 1e-3, name
        first = found if first is None else first
        assert all(torch.equal(first[name], value) for name, value in found.items()), "the same every time"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_a_gpu_is_adagrads(kind: str) -> None:
    assert_adagrads_step(on_gpu(kind, (3, 100, 10, 75)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "samples", "shape"),
    [(*sampled, shape) for sampled, shape in one_in(2, SAMPLED, [(5, 128, 64, 4096), (5, 100, 10, 75)])],
)
def test_a_replica_on_a_gpu_does_not_know_of_the_others(
    kind: str, samples: int, shape: tuple[int, int, int, int]
) -> None:
    assert_independent_on_gpu(kind, samples, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [75, 256, 4096])
def test_masks_on_a_gpu_are_the_streams(width: int) -> None:
    for kind, samples in (("fixed", 1), ("fixed", 3), ("score", 1), ("score", 3)):
        start = on_gpu(kind, (3, width, 64, width), samples)
        # One example for each input, so that a gated product is a mask, and a masked gradient too: here how many keep.
        start.x = torch.eye(width, device="cuda", dtype=torch.bfloat16).expand(3, width, width).contiguous()
        start.weight, start.grad_output = torch.ones_like(start.weight), torch.ones_like(start.grad_output)
        masks = torch.stack([mask for mask in start.masks() if mask is not None]).float()
        for _ in range(3):
            case = start.to("cuda")
            assert torch.equal(case.forward().mT, masks)
            case.backward()
            assert torch.equal(case.update.weight, masks.sum(0).square())
