"""What follows the dense layer's products: the twin against autograd, its kernels, interpreted and on a GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layer_kernels import distance, interpret
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.lab.kernels import head
from dropconnectpp.lab.kernels.dense import draw_masks
from dropconnectpp.lab.kernels.gates import FixedGate, Gate, LearnedGate, OpenGate, keep_of
from dropconnectpp.lab.kernels.head import Found, Head
from dropconnectpp.lab.kernels.local import LocalGate
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.network import linear, log_likelihoods
from dropconnectpp.ops import gated_weight

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton)"
)
MASKS, UNITS, NOISE = Stream(7, "mask:bias"), Stream(7, "dropout"), Stream(7, "local")
STEP = 12
KINDS = ["open", "dropout", "fixed", "score", "straight-through", "local"]
SLABS = ["fixed, slab", "score, slab", "straight-through, slab", "local, slab"]
SAMPLED = [(kind, 1) for kind in (*KINDS, *SLABS)] + [
    (kind, 3) for kind in (*KINDS, *SLABS) if kind not in ("open", "dropout")
]
SMALL = [(1, 1, 1, 2), (2, 5, 3, 3), (3, 16, 16, 10), (2, 37, 18, 20), (1, 70, 68, 5)]


class Case:
    """One head with its sums; shape is replicas, batch, units, classes."""

    def __init__(
        self, kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, samples: int = 1
    ) -> None:
        stack, batch, units, classes = shape
        generator = torch.Generator().manual_seed(sum(shape) + samples)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        rates, slab = torch.linspace(0.3, 0.7, stack, dtype=dtype), 0.2 if "slab" in kind else 0.0
        logit, kl_scale = normal(stack, units), torch.ones(stack, dtype=dtype)
        logit[0, 0], logit[-1, -1] = -12.0, 12.0  # nearly closed, nearly open: 1 - pi~ must keep its digits
        gate: Gate = OpenGate()
        if "fixed" in kind:
            gate = FixedGate(rates, MASKS, samples, slab)
        elif "local" in kind:
            gate = LocalGate(logit, NOISE, kl_scale, samples=samples, slab_scale=slab)
        elif kind not in ("open", "dropout"):
            how: Any = "score" if "score" in kind else "straight-through"
            gate = LearnedGate(logit, MASKS, kl_scale, how, samples=samples, slab_scale=slab)
        self.replicas = torch.arange(stack) * 5 + 1
        self.sums = normal(2 if "local" in kind else samples, stack, batch, units)
        if "local" in kind:
            # Moments come from rounded products: a variance of nothing may come out below zero.
            self.sums[1] = torch.where(self.sums[1] < 1.5, self.sums[1].square() + 0.1, -5.0)
        labels = torch.randint(classes, (stack, batch), generator=generator)
        self.head = Head(
            normal(stack, units),
            gate,
            FixedGate(rates, UNITS) if kind == "dropout" else None,
            normal(stack, classes, units),
            normal(stack, classes),
            labels,
        )

    def to(self, *where: Any, rows: slice = slice(None)) -> Case:
        """A copy on another device or in another precision, or of some replicas."""

        def moved(of: Any) -> Any:
            if isinstance(of, Tensor):
                kept = of[rows].contiguous()
                return kept.to(*(w for w in where if kept.is_floating_point() or not isinstance(w, torch.dtype)))
            if isinstance(of, FixedGate | LearnedGate):
                return replace(of, **{n: moved(v) for n, v in vars(of).items() if isinstance(v, Tensor)})
            return of

        other = object.__new__(Case)
        other.sums, other.replicas = self.sums[:, rows].contiguous().to(*where), moved(self.replicas)
        other.head = Head(**{name: moved(value) for name, value in vars(self.head).items()})
        return other

    def run(self, step: Tensor | int = STEP) -> Found:
        return head.there_and_back(self.sums, self.head, self.replicas, step)


def tensors(found: Found) -> dict[str, Tensor]:
    given = {field.name: getattr(found, field.name) for field in fields(found)}
    return {name: value for name, value in given.items() if value is not None}


# ------------------------------------------------------------------------------------------------- the twin


def expected(case: Case) -> dict[str, Tensor]:
    """What the library's own functions and autograd make of it."""
    own, gate = case.head, case.head.gate
    leaves = {"by_sums": case.sums, "by_bias": own.bias, "by_weight": own.weight, "by_output_bias": own.output_bias}
    if isinstance(gate, LearnedGate):
        leaves["by_logit"] = gate.logit
    leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    sums, bias, logit = leaves["by_sums"], leaves["by_bias"], leaves.get("by_logit")
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
        logits = linear(hidden, leaves["by_weight"], leaves["by_output_bias"])
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
        assert not head.usable(case.sums, case.head)


def test_units_are_kept_by_the_stream_of_dropout() -> None:
    case = Case("dropout", (2, 5, 6, 3), torch.float64)
    case.sums = case.sums.abs() + 10.0
    found, plain = case.run(), replace(case.head, units=None)
    assert case.head.units is not None
    keep = case.head.units.keep[:, None, None].expand_as(case.sums[0])
    kept = draw_masks(UNITS, keep, case.replicas, STEP)
    assert torch.equal(found.by_sums[0] != 0, kept)
    assert (head.there_and_back(case.sums, plain, case.replicas, STEP).by_sums != 0).all()


# ------------------------------------------------------------------------------------------ the interpreter

INTERPRETED = """
import sys
import torch
from dropconnectpp.lab.kernels import head
sys.path.insert(0, sys.argv[1])
from test_head_kernels import SAMPLED, SMALL, STEP, Case, tensors

GUARD, rooms, plain = 64, [], torch.empty

def poisoned(*size, **options):
    value = plain(*size, **options)
    room = torch.full((value.numel() + 2 * GUARD,), 77.0, dtype=value.dtype)
    rooms.append(room)
    inner = room[GUARD : GUARD + value.numel()].view(value.shape)
    return inner.fill_(float("nan"))

def run(case, kernels, step=STEP):
    head.usable = lambda *_: kernels
    torch.empty = poisoned if kernels else plain
    try:
        return tensors(case.run(step))
    finally:
        torch.empty = plain

def check(kind, samples, shape):
    case = Case(kind, shape, samples=samples)
    found = run(case, True, torch.tensor(STEP))
    assert rooms and all((room[:GUARD] == 77.0).all() and (room[-GUARD:] == 77.0).all() for room in rooms)
    rooms.clear()
    wanted = run(case, False)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == (torch.bfloat16 if name == "by_sums" else torch.float32), name
        # What goes back to the sums has bfloat16's eight bits; the interpreter rounds to them towards zero.
        rounding = 1e-2 if name == "by_sums" else 1e-4
        slope = 1.0
        if name == "by_logit":  # however small it makes the gradient
            slope = torch.sigmoid(case.head.gate.logit) * torch.sigmoid(-case.head.gate.logit)
        near = torch.allclose(found[name].float() / slope, value / slope, rtol=rounding, atol=2e-6)
        assert near, (kind, samples, shape, name)
    if shape[0] > 1:
        alone = run(case.to(rows=slice(1, 2)), True)
        rooms.clear()
        for name, value in alone.items():
            row = found[name][:, 1:2] if name in ("rewards", "by_sums") else found[name][1:2]
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


@needs_triton
def test_the_interpreted_kernels_are_their_twin(tmp_path: Path) -> None:
    interpret(INTERPRETED, tmp_path)


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
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "samples"), SAMPLED)
def test_the_head_on_a_gpu_is_its_twin(kind: str, samples: int, shape: tuple[int, int, int, int]) -> None:
    start = Case(kind, shape, samples=samples).to("cuda")
    assert head.usable(start.sums, start.head)
    wanted, first = tensors(widened(start).run()), None
    for _ in range(3):
        found = tensors(start.run(torch.tensor(STEP, device="cuda")))
        assert found.keys() == wanted.keys()
        # Noise of float32 may throw a sum to the other side of zero, which moves the sums over the batch.
        rounding = 5e-3 if "local" in kind else 1e-4
        for name, value in wanted.items():
            assert distance(found[name], value) < (5e-3 if name == "by_sums" else rounding), name
        first = found if first is None else first
        assert all(torch.equal(first[name], value) for name, value in found.items()), "the same every time"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(3, 128, 64, 10), (3, 128, 512, 100)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_network_that_diverged_shows_on_a_gpu(value: float, shape: tuple[int, int, int, int]) -> None:
    for where in ("sums", "output_bias"):
        case = Case("open", shape)
        (case.sums[0, 1, 5] if where == "sums" else case.head.output_bias[1])[2] = value
        found = case.to("cuda").run()
        assert found.rewards[0].isfinite().tolist() == [True, False, True], where
        assert found.by_weight.isfinite().flatten(1).all(1).tolist() == [True, False, True], where


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kind", "samples"), SAMPLED)
def test_a_replica_on_a_gpu_does_not_know_of_the_others(kind: str, samples: int) -> None:
    start = Case(kind, (5, 128, 64, 10), samples=samples).to("cuda")
    for _ in range(3):
        together, alone = tensors(start.run()), tensors(start.to("cuda", rows=slice(3, 4)).run())
        for name, value in alone.items():
            row = together[name][:, 3:4] if name in ("rewards", "by_sums") else together[name][3:4]
            assert torch.equal(value, row), name
