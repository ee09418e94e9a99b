"""What follows the dense layer's products: the twin against autograd, its kernels, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from head_cases import MASKS, NOISE, SAMPLED, SMALL, STEP, UNITS, Case, tensors
from layer_cases import distance
from pairing import one_in
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.kernels import head
from dropconnectpp.lab.kernels.dense import draw_masks, linear
from dropconnectpp.lab.kernels.gates import FixedGate, LearnedGate, OpenGate, keep_of
from dropconnectpp.lab.kernels.local import LocalGate
from dropconnectpp.lab.replicas.network import log_likelihoods
from dropconnectpp.ops import gated_weight

# ------------------------------------------------------------------------------------------------- the twin


def expected(case: Case) -> dict[str, Tensor]:
    """What the library's own functions and autograd make of it."""
    own, gate = case.head, case.head.gate
    leaves = {
        "grad_sums": case.sums,
        "grad_bias": own.bias,
        "grad_weight": own.weight,
        "grad_output_bias": own.output_bias,
    }
    if isinstance(gate, LearnedGate):
        leaves["grad_logit"] = gate.logit
    leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    sums, bias, logit = leaves["grad_sums"], leaves["grad_bias"], leaves.get("grad_logit")
    rewards = []
    for sample in range(own.samples):
        if isinstance(gate, LocalGate):
            assert logit is not None
            moments = functional.gaussian_gate_moments(logit, bias)
            mean, variance = (s + m.unsqueeze(1) for s, m in zip(sums, moments, strict=True))
            count = mean[0].numel()
            noise = NOISE.normal(case.replicas, STEP, count, sample, dtype=mean.dtype).view(mean.shape)
            before = mean + torch.sqrt(variance.clamp_min(0.0) + 1e-12) * noise
        elif isinstance(gate, OpenGate):
            before = sums[sample] + bias.unsqueeze(1)
        else:
            learned = isinstance(gate, LearnedGate)
            keep = torch.sigmoid(gate.logit) if learned else gate.keep[:, None].expand_as(bias)
            mask = MASKS.bernoulli(keep, case.replicas, STEP, sample)
            through = learned and gate.kind == "straight-through"
            gated = (
                gated_weight.straight_through(bias, logit, mask, None) if through else gated_weight.masked(bias, mask)
            )
            before = sums[sample] + gated.unsqueeze(1)
        hidden = torch.relu(before)
        if own.units is not None:
            keep = own.units.keep[:, None, None]
            hidden = hidden * UNITS.bernoulli(keep.expand_as(hidden), case.replicas, STEP, sample) / keep
        logits = linear(hidden, leaves["grad_weight"], leaves["grad_output_bias"])
        rewards.append(log_likelihoods(logits, own.labels).mean(1))
    loss = -torch.stack(rewards).mean(0).sum()
    if not isinstance(gate, OpenGate):
        # A slab's gradient by the logit is the gate's own step.
        keep = torch.sigmoid(gate.logit) if isinstance(gate, LearnedGate) else gate.keep[:, None]
        loss = loss + gate.slab_scale * (keep * bias.square()).sum() / 2
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    wanted = {name: value for name, value in zip(leaves, found, strict=True) if value is not None}
    return {"rewards": torch.stack(rewards).detach(), **wanted}


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize(("kind", "samples"), SAMPLED)
def test_the_twin_is_autograd(kind: str, samples: int, shape: tuple[int, int, int, int]) -> None:
    case = Case(kind, shape, torch.float64, samples)
    wanted, found = expected(case), tensors(case.run())
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13)
    if "local" in kind and shape[1] > 1:
        assert (case.sums[1] < 0).any(), "a variance below zero is among them"


def test_a_network_that_diverged_shows() -> None:
    case = Case("open", (2, 5, 3, 3))
    case.sums[0, 1, 2, 1] = float("nan")
    rewards = case.run().rewards[0]
    assert rewards.isnan().tolist() == [False, True]


def test_the_cpu_and_many_classes_never_take_a_kernel() -> None:
    for classes in (2, head.MOST_CLASSES + 1):
        case = Case("open", (1, 2, 3, classes))
        assert not head.supported(case.sums, case.head)


def test_units_are_kept_by_the_stream_of_dropout() -> None:
    case = Case("dropout", (2, 5, 6, 3), torch.float64)
    case.sums = case.sums.abs() + 10.0
    found, plain = case.run(), replace(case.head, units=None)
    assert case.head.units is not None
    keep = case.head.units.keep[:, None, None].expand_as(case.sums[0])
    kept = draw_masks(UNITS, keep, case.replicas, STEP)
    assert torch.equal(found.grad_sums[0] != 0, kept)
    assert (head.forward_backward(case.sums, plain, case.replicas, STEP).grad_sums != 0).all()


# ------------------------------------------------------------------------------------------ the interpreter

INTERPRETED = """
import torch
from contextlib import nullcontext
from dropconnectpp.lab.kernels import head
from guarded import guarded, poisoned, rooms, untouched
from head_cases import SAMPLED, SMALL, STEP, Case, tensors

def run(case, kernels, step=STEP):
    head.supported = lambda *_: kernels
    with poisoned(guarded) if kernels else nullcontext():
        return tensors(case.run(step))

def check(kind, samples, shape):
    case = Case(kind, shape, samples=samples)
    found = run(case, True, torch.tensor(STEP))
    untouched()
    wanted = run(case, False)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == (torch.bfloat16 if name == "grad_sums" else torch.float32), name
        # What goes back to the sums has bfloat16's eight bits; the interpreter rounds to them towards zero.
        rounding = 1e-2 if name == "grad_sums" else 1e-4
        chain = 1.0
        if name == "grad_logit":  # however small it makes the gradient
            chain = torch.sigmoid(case.head.gate.logit) * torch.sigmoid(-case.head.gate.logit)
        near = torch.allclose(found[name].float() / chain, value / chain, rtol=rounding, atol=2e-6)
        assert near, (kind, samples, shape, name)
    if shape[0] > 1:
        alone = run(case.to(rows=slice(1, 2)), True)
        rooms.clear()
        for name, value in alone.items():
            row = found[name][:, 1:2] if name in ("rewards", "grad_sums") else found[name][1:2]
            assert torch.equal(value, row), (kind, samples, shape, name)

head.BLOCK = 16
for kind, samples in SAMPLED:
    for shape in SMALL if samples == 1 else SMALL[1:3]:
        check(kind, samples, shape)
case = Case("open", (2, 5, 3, 3))
case.sums[0, 1, 2, 1] = float("nan")
assert run(case, True)["rewards"][0].isnan().tolist() == [False, True], "a network that diverged shows"
print("all well")
"""


@pytest.mark.triton
def test_the_interpreted_kernels_are_their_twin(run_interpreted: Callable[..., None]) -> None:
    run_interpreted(INTERPRETED)


# ------------------------------------------------------------------------------------------------ on a GPU

SHAPES = [(1, 128, 64, 10), (50, 128, 64, 10), (3, 128, 512, 10), (2, 128, 512, 100), (200, 7, 64, 5), (2, 300, 33, 3)]


def widened(case: Case) -> Case:
    """In float64, where masks may differ: uniform numbers have more bits. None of these does."""
    wide, units = case.to(torch.float64), case.head.units
    for one in range(case.head.samples):
        found = []
        for c in (case, wide):
            gate = c.head.gate
            if isinstance(gate, FixedGate | LearnedGate) and not isinstance(gate, LocalGate):
                found.append(
                    draw_masks(MASKS, keep_of(gate, c.head.bias).expand_as(c.head.bias), c.replicas, STEP, one)
                )
            if units is not None:
                found.append(head._unit_factor(c.head.units, c.sums[0], c.replicas, STEP, one) != 0)  # type: ignore[arg-type]
        assert not found or torch.equal(found[0], found[1]), "take another seed"
    return wide


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "samples"), SAMPLED)
def test_masks_in_float64_are_those_in_float32(kind: str, samples: int, shape: tuple[int, int, int, int]) -> None:
    widened(Case(kind, shape, samples=samples))


@pytest.mark.gpu
@pytest.mark.parametrize(("sampled", "shape"), one_in(3, SAMPLED, SHAPES))
def test_the_head_on_a_gpu_is_its_twin(sampled: tuple[str, int], shape: tuple[int, int, int, int]) -> None:
    kind, samples = sampled
    start = Case(kind, shape, samples=samples).to("cuda")
    assert head.supported(start.sums, start.head)
    wanted, first = tensors(widened(start).run()), None
    for _ in range(3):
        found = tensors(start.run(torch.tensor(STEP, device="cuda")))
        assert found.keys() == wanted.keys()
        # Noise of float32 may throw a sum to the other side of zero, which moves the sums over the batch.
        rounding = 5e-3 if "local" in kind else 1e-4
        for name, value in wanted.items():
            assert distance(found[name], value) < (5e-3 if name == "grad_sums" else rounding), name
        first = found if first is None else first
        assert all(torch.equal(first[name], value) for name, value in found.items()), "the same every time"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 128, 64, 10), (3, 128, 512, 100)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_network_that_diverged_shows_on_a_gpu(value: float, shape: tuple[int, int, int, int]) -> None:
    for where in ("sums", "output_bias"):
        case = Case("open", shape)
        (case.sums[0, 1, 5] if where == "sums" else case.head.output_bias[1])[2] = value
        found = case.to("cuda").run()
        assert found.rewards[0].isfinite().tolist() == [True, False, True], where
        assert found.grad_weight.isfinite().flatten(1).all(1).tolist() == [True, False, True], where


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "samples"), SAMPLED)
def test_a_replica_on_a_gpu_does_not_know_of_the_others(kind: str, samples: int) -> None:
    start = Case(kind, (5, 128, 64, 10), samples=samples).to("cuda")
    for _ in range(3):
        together, alone = tensors(start.run()), tensors(start.to("cuda", rows=slice(3, 4)).run())
        for name, value in alone.items():
            row = together[name][:, 3:4] if name in ("rewards", "grad_sums") else together[name][3:4]
            assert torch.equal(value, row), name
