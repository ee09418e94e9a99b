"""Cases of the fused dense layer: every kind of gate, its tensors, one step, and how two results are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.kernels import gates, layer
from dropconnectpp.lab.kernels.gates import Adagrad, FixedGate, Gate, LearnedGate, OpenGate
from dropconnectpp.lab.philox import Stream

STREAM = Stream(7, "mask:weight")
LEARNED = ["score", "straight-through", "score, learned", "straight-through, learned"]
PRIORS = {"learned": (1.5, 0.7), "skewed": (2.0, 0.7), "even": (3.0, 3.0)}
"""By a word of the kind; the uniform one else."""
COMMON = ["open", "fixed", *LEARNED]
RARE = [
    "fixed, slab",
    "score, skewed",
    "straight-through, skewed",
    "score, even",
    "score, slab",
    "straight-through, slab",
    "score, learned, slab",
    "straight-through, skewed, slab",
]
KINDS = [*COMMON, *RARE]
THROUGH = [kind for kind in KINDS if "straight-through" in kind]
SAMPLED = [(kind, 1) for kind in KINDS] + [(kind, 3) for kind in KINDS if kind != "open"]
"""Kinds of gates with how many samples they take."""
STEP = 12


class Case:
    """One layer's tensors, with sums of squares that start at zero: after one step they are the gradients' squares."""

    def __init__(
        self, kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, samples: int = 1
    ) -> None:
        stack, batch, units, width = shape
        generator = torch.Generator().manual_seed(sum(shape))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.replicas = torch.arange(stack) * 5 + 1
        self.x, self.grad_output = normal(stack, batch, width), normal(samples, stack, batch, units)
        self.weight, logit = normal(stack, units, width), 2 * normal(stack, units, width)
        logit[0, 0, 0] = 0.0
        alpha, beta = (normal(stack, units, width) for _ in range(2))
        self.gate: Gate = OpenGate()
        slab_scale = 0.2 if "slab" in kind else 0.0
        if "fixed" in kind:
            self.gate = FixedGate(torch.linspace(0.2, 0.8, stack, dtype=dtype), STREAM, samples, slab_scale)
        elif kind != "open":
            self.gate = LearnedGate(
                logit,
                STREAM,
                torch.linspace(0.3, 0.6, stack, dtype=dtype),
                "score" if "score" in kind else "straight-through",
                normal(samples, stack) if "score" in kind else None,
                samples=samples,
                slab_scale=slab_scale,
            )
            for prior in (prior for word, prior in PRIORS.items() if word in kind):
                self.gate = replace(self.gate, prior_alpha=prior[0], prior_beta=prior[1])
            if "learned" in kind:
                self.gate = replace(self.gate, alpha=alpha, beta=beta)
        sizes = torch.linspace(0.1, 0.3, stack, dtype=dtype)
        self.update = Adagrad(self.weight, sizes, 1e-6, True, gate_sizes=2 * sizes)
        zeros = {name: torch.zeros_like(value) for name, value in self.trained().items()}
        self.update = replace(self.update, **zeros)

    def trained(self) -> dict[str, Tensor]:
        names = ("logit", "alpha", "beta")
        found = {"weight": self.weight, **{name: getattr(self.gate, name, None) for name in names}}
        return {name: value for name, value in found.items() if value is not None}

    def to(self, *where: Any, rows: slice = slice(None)) -> Case:
        """A copy on another device or in another precision, or of some replicas."""

        def moved(values: dict[str, Any]) -> dict[str, Tensor]:
            given = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            chosen = {n: v[:, rows] if n in ("grad_output", "coefficient") else v[rows] for n, v in given.items()}
            return {n: v.to(*where).clone() for n, v in chosen.items()}

        other = object.__new__(Case)
        for name, value in moved({name: getattr(self, name) for name in ("x", "grad_output", "weight")}).items():
            setattr(other, name, value)
        other.replicas = self.replicas[rows].to(other.x.device)
        other.gate = replace(self.gate, **moved(vars(self.gate)))
        other.update = replace(self.update, **moved(vars(self.update)))
        return other

    def masks(self) -> list[Tensor | None]:
        return list(gates.draw(self.gate, self.weight, self.replicas, STEP))

    def dropped(self) -> Tensor | None:
        """Synapses that no sample keeps; with a slab they have a gradient nonetheless."""
        masks = [mask for mask in self.masks() if mask is not None]
        return ~torch.stack(masks).any(0) if masks and not getattr(self.gate, "slab_scale", 0.0) else None

    def forward(self) -> Tensor:
        return layer.gated_product(self.x, self.weight, self.gate, self.replicas, STEP)

    def backward(self, step: Tensor | int = STEP) -> tuple[Tensor, Tensor | None]:
        weight = self.weight.clone()
        grad_x = layer.gated_product_backward_(
            self.x, self.grad_output, self.weight, self.gate, self.replicas, step, self.update
        )
        if not isinstance(self.gate, LearnedGate) or self.gate.kind != "score":
            return grad_x, None
        return grad_x, gates.update_gate_(self.gate, self.replicas, step, self.update, weight).sum(2)


def gate_steps(case: Case) -> None:
    """Two steps of gates whose gradient by the logit is known; sums of squares are away from zero in the second."""
    assert isinstance(case.gate, LearnedGate)
    for _ in range(2):
        gates.step_gate_(case.gate, 0.5 + torch.sin(case.weight), case.weight, case.update)


def distance(one: Tensor, other: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-300))


def adagrad_step(update: Adagrad, name: str, gradient: Tensor) -> Tensor:
    """What Adagrad's first step takes off a parameter; the sums of squares were zero before."""
    root = (gradient.square() + update.epsilon).sqrt() if update.inside else gradient.abs() + update.epsilon
    sizes = update.sizes if name == "weight" else update.gate_sizes
    assert sizes is not None
    return sizes[:, None, None] * gradient / root


def assert_adagrads_step(start: Any) -> None:
    """What a step on a GPU moves is what Adagrad makes of its sums of squares, with epsilon on either side."""
    for inside in (False, True):
        start.update = replace(start.update, inside=inside)
        for _ in range(3):
            case = start.to("cuda")
            case.backward()
            for name, value in case.trained().items():
                before, gradient = start.trained()[name], getattr(case.update, name).sqrt()
                moved = adagrad_step(case.update, name, gradient)
                torch.testing.assert_close((value - before).abs(), moved, rtol=1e-4, atol=1e-5)


def on_gpu(kind: str, shape: tuple[int, int, int, int], samples: int = 1) -> Case:
    case = Case(kind, shape, samples=samples).to("cuda")
    case.x = case.x.bfloat16()
    case.grad_output = (case.grad_output / shape[1]).bfloat16().float()
    assert layer.supported(case.x, case.weight, case.gate, case.update)
    return case


def step_with(case: Case, masks: list[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """`Case.backward` by the twins with masks that are given: in float64 they would draw others."""
    weight = case.weight.clone()
    grad_x = layer._backward_(case.x, case.grad_output, case.weight, case.gate, masks, case.update)
    if not isinstance(case.gate, LearnedGate) or case.gate.coefficient is None:
        return grad_x, None
    given = [mask for mask in masks if mask is not None]
    return grad_x, gates._update_gate_(case.gate, given, case.update, weight).sum(2)


def assert_twin_on_gpu(kind: str, shape: tuple[int, int, int, int], samples: int) -> None:
    """What a GPU computes is what the twin computes in float64, and the same every time."""
    start = on_gpu(kind, shape, samples)
    masks, dropped = start.masks(), start.dropped()
    wide = start.to(torch.float64)
    wanted_output = torch.stack([layer._product(wide.x, wide.weight, mask) for mask in masks])
    wanted_grad_x, wanted_squared = step_with(wide, masks)
    first = None
    for _ in range(3):
        case = start.to("cuda")
        step = torch.tensor(STEP, device="cuda")
        output, (grad_x, squared) = case.forward(), case.backward(step)
        # bfloat16 has eight bits: 2^-9 for the weights, and as much again for what is stored.
        assert distance(output, wanted_output) < 4e-3
        assert distance(grad_x, wanted_grad_x) < 6e-3
        for name in case.trained():
            roots = [getattr(one.update, name).sqrt() for one in (case, wide)]
            assert distance(*roots) < 1e-4, name
        if dropped is not None:
            assert not case.update.weight[dropped].any()
        if squared is not None:
            assert wanted_squared is not None
            assert distance(squared, wanted_squared) < 1e-5
        found = [output, grad_x, *case.trained().values()]
        first = found if first is None else first
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True)), "the same every time"


def assert_independent_on_gpu(kind: str, samples: int, shape: tuple[int, int, int, int]) -> None:
    """A replica's numbers on a GPU are those it has alone."""
    start = on_gpu(kind, shape, samples)
    for _ in range(3):
        stack, alone = start.to("cuda"), start.to("cuda", rows=slice(3, 4))
        together, single = stack.forward(), alone.forward()
        assert torch.equal(together[:, 3:4], single)
        assert torch.equal(stack.backward()[0][3:4], alone.backward()[0])
        for name, value in alone.trained().items():
            assert torch.equal(value, stack.trained()[name][3:4]), name
