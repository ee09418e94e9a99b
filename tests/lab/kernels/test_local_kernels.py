"""The dense layer under gates as noise: its twins against autograd, its kernels against the twins, the fused step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_cases import adagrad_step, assert_adagrads_step, distance
from local_cases import KINDS, Case, Shape, assert_twin_on_gpu, on_gpu
from pairing import one_in
from stack_cases import assert_fused_is_plain, bright, settings, stack_of, tensors_of, varied
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.kernels.local import LocalGate
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

# ------------------------------------------------------------------------------------------- the twins


def expected_gradients(case: Case) -> dict[str, Tensor]:
    """What the library's own functions and autograd make of the step."""
    leaves = {name: value.clone().requires_grad_() for name, value in case.trained().items()}
    x, gate, logit = case.x.clone().requires_grad_(), case.gate, leaves["logit"]
    if "alpha" in leaves:
        alpha, beta = functional.positive(leaves["alpha"]), functional.positive(leaves["beta"])
        kl = functional.bernoulli_kl(logit, alpha, beta)
        kl = kl + functional.beta_kl(alpha, beta, gate.prior_alpha, gate.prior_beta)
    else:
        kl = functional.beta_bernoulli_kl(logit, gate.prior_alpha, gate.prior_beta)
    loss = (gate.kl_scale[:, None, None] * kl).sum()
    loss = loss + gate.slab_scale * (torch.sigmoid(logit) * leaves["weight"].square()).sum() / 2
    mean, variance = functional.gaussian_gate_moments(logit, leaves["weight"])
    moments = torch.stack([x @ mean.mT, x.square() @ variance.mT])
    torch.testing.assert_close(case.forward(), moments.detach(), rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(loss + (moments * case.grad_moments).sum(), [x, *leaves.values()])
    return dict(zip(["x", *leaves], found, strict=True))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_twins_are_autograd_and_adagrad(kind: str, inside: bool) -> None:
    case = Case(kind, (2, 5, 3, 7), torch.float64)
    case.update = replace(case.update, inside=inside)
    wanted = expected_gradients(case)
    before = {name: value.clone() for name, value in case.trained().items()}
    torch.testing.assert_close(case.backward(), wanted["x"], rtol=1e-12, atol=1e-12)
    for name, value in case.trained().items():
        gradient = wanted[name]
        torch.testing.assert_close(getattr(case.update, name), gradient.square(), rtol=1e-9, atol=1e-12)
        step = adagrad_step(case.update, name, gradient)
        torch.testing.assert_close(value, before[name] - step, rtol=1e-7, atol=1e-9)


def test_a_gate_near_one_half_keeps_its_digits() -> None:
    case = Case("uniform", (1, 4, 2, 3), torch.float64)
    case.gate = replace(case.gate, logit=case.gate.logit * 1e-6, kl_scale=torch.zeros(1).double())
    case.grad_moments[0] = 0.0  # the variance alone, whose gradient by the logit has the tiny factor 1 - 2 pi~
    narrow = case.to(torch.float32)
    for one in (case, narrow):
        one.backward()
    assert distance(narrow.update.logit.sqrt(), case.update.logit.sqrt()) < 1e-6  # type: ignore[union-attr]


def test_operands_are_rounded_to_the_precision_of_x() -> None:
    case = Case("uniform", (1, 2, 3, 4))
    case.x = case.x.bfloat16()
    mean, variance = functional.gaussian_gate_moments(case.gate.logit, case.weight)
    wide = case.x.float()
    wanted = [
        torch.bmm(inputs.bfloat16().float(), operand.bfloat16().float().mT)
        for inputs, operand in ((wide, mean), (wide.square(), variance))
    ]
    found = case.forward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(wanted))
    assert case.backward().dtype == torch.bfloat16


def test_what_is_missing_is_named() -> None:
    case = Case("learned", (1, 2, 3, 4))
    with pytest.raises(ArgumentError, match="'straight-through' for gates as noise, got 'score'"):
        replace(case.gate, kind="score")
    with pytest.raises(ArgumentError, match="kl_scale"):
        replace(case.gate, kl_scale=torch.zeros(2))
    case.update = replace(case.update, alpha=None)
    with pytest.raises(ArgumentError, match="gate_sizes and a sum of squares for alpha"):
        case.backward()


# --------------------------------------------------------------------------------- the interpreter

# The launches are the package's own. What they allocate is poisoned and lies between guards, and so
# do the parameters, so that a missing write and a write outside both show.
CHECK = """
import torch
from contextlib import nullcontext
from dataclasses import replace
from dropconnectpp.lab.kernels import local
from dropconnectpp.lab.kernels.launch_config import using
from guarded import guarded, poisoned, rooms, untouched
from launch_cases import SMALL, other_tiles
from layer_cases import distance
from local_cases import KINDS, Case

def guard(case):
    values = {name: guarded(value) for name, value in case.trained().items()}
    sums = {name: guarded(getattr(case.update, name)) for name in values}
    case.weight = values.pop("weight")
    case.gate, case.update = replace(case.gate, **values), replace(case.update, **sums)

def run(case, kernels):
    local.supported = lambda *_: kernels
    with poisoned(guarded) if kernels else nullcontext():
        return case.forward(), case.backward()

def check(kind, shape, inside, exact):
    case = Case(kind, shape)
    # The interpreter rounds to bfloat16 towards zero: of what a gradient of a weight comes from nothing is rounded.
    plain = case.to(torch.float32)
    case.exact()
    if not exact:
        case.weight, case.gate = plain.weight, replace(case.gate, logit=plain.gate.logit)
    case.update = replace(case.update, inside=inside)
    wanted, found, alone = case.to(torch.float32), case.to(torch.float32), case.to(torch.float32, rows=slice(1, 2))
    for one in (wanted, found, alone):
        one.x = one.x.bfloat16()
    guard(found)
    moments, grad_x = run(found, True)
    untouched()
    twin_moments, twin_grad_x = run(wanted, False)
    where = kind, shape, inside, exact
    assert moments.dtype == torch.float32 and grad_x.dtype == torch.bfloat16, where
    if exact:
        assert torch.allclose(moments, twin_moments, rtol=1e-5, atol=1e-5), where
        assert torch.allclose(grad_x.float(), twin_grad_x.float(), rtol=1e-2, atol=1e-5), where
    for one, twin in zip((*moments, grad_x), (*twin_moments, twin_grad_x), strict=True):
        assert distance(one, twin) < 1.2e-2, where
    for name, value in found.trained().items():
        roots, twins = getattr(found.update, name).sqrt(), getattr(wanted.update, name).sqrt()
        assert torch.allclose(roots, twins, rtol=3e-5, atol=3e-5), (*where, name)
        away = twins > 1e-2  # a first step is the gradient's sign: nearly free where the gradient vanishes
        assert torch.allclose(value[away], wanted.trained()[name][away], rtol=1e-4, atol=1e-4), (*where, name)
    if shape[0] > 1:
        row_moments, row_grad_x = run(alone, True)
        assert torch.equal(row_moments, moments[:, 1:2]) and torch.equal(row_grad_x[0], grad_x[1]), where
        for name, value in alone.trained().items():
            assert torch.equal(value[0], found.trained()[name][1]), (*where, name)
    rooms.clear()
"""

SMALL_TILES = f"""{CHECK}
local.FEW_UNITS = 16
with using(SMALL):
    for number, kind in enumerate(KINDS):
        check(kind, (2, 5, 3, 7), number % 2 == 0, False)
        check(kind, (1, 20, 18, 36), number % 2 == 1, False)
    for kind in ("sparse", "learned"):
        for shape in ((2, 1, 1, 4), (3, 16, 16, 32), (2, 37, 10, 75)):
            check(kind, shape, shape[1] == 16, True)
print("all well")
"""

CANDIDATES = f"""{CHECK}
for group, launches in other_tiles("local"):
    with using(launches):
        for work in group.work:
            kind = "learned" if "learned" in work.kind else "sparse"
            check(kind, (1, 37, 70, 36) if work.units > local.FEW_UNITS else (1, 65, 33, 75), True, True)
print("all well")
"""


@pytest.mark.triton
@pytest.mark.parametrize("source", [SMALL_TILES, CANDIDATES], ids=["small tiles", "candidates"])
def test_the_interpreted_kernels_are_their_twins(source: str, run_interpreted: Callable[..., None]) -> None:
    run_interpreted(source)


# -------------------------------------------------------------------------------------- the fused step


def sparse(**options: Any) -> Method:
    return Method(estimator="local", hyper="optimal", alpha=10.0, beta=90.0, **options)


LOCAL = [
    Method(estimator="local"),
    Method(estimator="local", hyper="optimal", logit_step=10.0),
    sparse(logit_step=10.0, keep_probability=0.3),
    sparse(num_samples=2, slab=0.1),
    Method(estimator="local", num_samples=3, alpha=2.0, slab=0.1),
    *varied(Method(estimator="local", hyper="optimal", num_samples=2)),
]
OTHERS = [Method(logit_step=30.0), Method(estimator="straight-through", num_samples=2), Method(kind="none")]


def mixed_units(batch_size: int) -> list[Unit]:
    """Segments of every kind, some replicas of a segment with numbers of their own."""
    methods = [LOCAL[0], OTHERS[0], *LOCAL[1:], *OTHERS[1:]]
    return [Unit(settings(method, batch_size=batch_size), replica) for replica, method in enumerate(methods)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_fused_step_is_the_plain_one(batch_size: int) -> None:
    units = mixed_units(batch_size)
    together = len(varied(LOCAL[0]))  # of which one segment is made
    assert len(stack_of(*units).segments) == len(LOCAL) - together + 1 + len(OTHERS)
    assert_fused_is_plain(units, batch_size)


@pytest.mark.parametrize("method", LOCAL)
def test_the_kernels_gate_what_acts_as_noise(method: Method) -> None:
    (segment,) = stack_of(Unit(settings(method), 0)).segments
    assert isinstance(segment.regulariser.gate(), LocalGate)


@pytest.mark.parametrize(
    "method",
    [Method(estimator="local", parameterisation="probability"), Method(estimator="local", hyper="optimal", alpha=0.1)],
)
def test_what_the_kernels_cannot_gate_takes_the_plain_step(method: Method) -> None:
    (segment,) = stack_of(Unit(settings(method), 0)).segments
    assert segment.regulariser.gate() is None


# ---------------------------------------------------------------------------------------------- on a GPU

SHAPES: list[Shape] = [
    (1, 128, 64, 4096),
    (50, 128, 64, 4096),
    (2, 128, 512, 4096),
    (3, 128, 64, 3136),
    (2, 200, 512, 3136),
    (3, 1, 64, 4096),
    (3, 100, 10, 75),
    (2, 129, 33, 130),
    (200, 7, 1, 256),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "shape"), one_in(3, KINDS, SHAPES))
def test_the_layer_on_a_gpu_is_its_twin(kind: str, shape: Shape) -> None:
    assert_twin_on_gpu(kind, shape)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "shape"), one_in(3, KINDS, [(3, 100, 10, 75), (2, 128, 64, 4096), (2, 200, 64, 256)]))
def test_a_step_on_a_gpu_is_adagrads(kind: str, shape: Shape) -> None:
    assert_adagrads_step(on_gpu(kind, shape))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "shape"),
    one_in(2, KINDS, [(5, 128, 64, 4096), (5, 128, 512, 3136), (5, 200, 64, 256), (5, 100, 10, 75)]),
)
def test_a_replica_on_a_gpu_does_not_know_of_the_others(kind: str, shape: Shape) -> None:
    start = on_gpu(kind, shape)
    for _ in range(3):
        stack, alone = start.to("cuda"), start.to("cuda", rows=slice(3, 4))
        assert torch.equal(stack.forward()[:, 3:4], alone.forward())
        assert torch.equal(stack.backward()[3:4], alone.backward())
        for name, value in alone.trained().items():
            assert torch.equal(value, stack.trained()[name][3:4]), name


def whole_network(methods: Sequence[Method], fused: bool, graph: bool = True) -> Stack:
    """The paper's network after one epoch of ten steps, in mixed precision."""
    protocols = [
        replace(settings(method, step_size=0.0005, batch_size=16), architecture=Architecture(), precision="mixed")
        for method in methods
    ]
    units = [Unit(protocol, row) for row, protocol in enumerate(protocols)]
    stack = Stack(units, bright(train=160, channels=3, side=32), torch.device("cuda"), graph=graph)
    assert stack.fused
    stack.fused = fused
    stack.train_epoch()
    return stack


@pytest.mark.gpu
def test_the_fused_step_on_a_gpu_stays_close_to_the_plain_one() -> None:
    methods = [*LOCAL, *OTHERS]
    fused, plain, eager = (whole_network(methods, *how) for how in ((True,), (False,), (True, False)))
    torch.testing.assert_close(fused.loss_sum, plain.loss_sum, rtol=0.02, atol=0)
    torch.testing.assert_close(fused.loss_sum, eager.loss_sum, rtol=1e-3, atol=0)
    for row, method in enumerate(methods):
        found, expected = tensors_of(fused, row), tensors_of(plain, row)
        found.pop("moments", None)
        expected.pop("moments", None)
        for name, value in expected.items():
            apart = (found[name] - value).abs()
            # The first steps of Adagrad have the gradient's sign alone; a posterior's steps are larger.
            step = method.logit_step if "_" in name else 1.0
            assert apart.median() <= 1e-3 * step, (method.label, name)
