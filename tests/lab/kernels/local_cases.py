"""Cases of the dense layer under gates as noise: every kind of prior, its tensors, and one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from guarded import poisoned
from layer_cases import distance
from torch import Tensor

from dropconnectpp.lab.kernels import layer, local
from dropconnectpp.lab.kernels.gates import Adagrad
from dropconnectpp.lab.kernels.local import LocalGate
from dropconnectpp.lab.philox import Stream

PRIORS = {"uniform": (1.0, 1.0), "sparse": (10.0, 90.0), "even": (3.0, 3.0), "learned": (1.5, 0.7)}
KINDS = ["uniform", "sparse", "even", "learned", "uniform, slab", "sparse, slab", "learned, slab"]
Shape = tuple[int, int, int, int]


class Case:
    """One layer's tensors, with sums of squares that start at zero: after one step they are the gradients' squares."""

    def __init__(self, kind: str, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        stack, batch, units, width = shape
        generator = torch.Generator().manual_seed(sum(shape) + len(kind))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.x, self.grad_moments = normal(stack, batch, width), normal(2, stack, batch, units)
        self.weight, logit = normal(stack, units, width), 2 * normal(stack, units, width)
        logit[0, 0, 0] = 0.0
        alpha, beta = (normal(stack, units, width) for _ in range(2))
        prior = PRIORS[kind.partition(",")[0]]
        self.gate = LocalGate(
            logit,
            Stream(7, "local"),
            torch.linspace(0.3, 0.6, stack, dtype=dtype),
            alpha=alpha if "learned" in kind else None,
            beta=beta if "learned" in kind else None,
            prior_alpha=prior[0],
            prior_beta=prior[1],
            slab_scale=0.2 if "slab" in kind else 0.0,
        )
        sizes = torch.linspace(0.1, 0.3, stack, dtype=dtype)
        zeros = {name: torch.zeros_like(value) for name, value in self.trained().items()}
        self.update = Adagrad(sizes=sizes, epsilon=1e-6, inside=True, gate_sizes=2 * sizes, **zeros)  # type: ignore[arg-type]

    def trained(self) -> dict[str, Tensor]:
        found = {"weight": self.weight, **{name: getattr(self.gate, name) for name in ("logit", "alpha", "beta")}}
        return {name: value for name, value in found.items() if value is not None}

    def to(self, *where: Any, rows: slice = slice(None)) -> Case:
        """A copy on another device or in another precision, or of some replicas."""

        def moved(values: dict[str, Any]) -> dict[str, Tensor]:
            given = {name: value for name, value in values.items() if isinstance(value, Tensor)}
            chosen = {n: v[:, rows] if n == "grad_moments" else v[rows] for n, v in given.items()}
            return {n: v.to(*where).clone() for n, v in chosen.items()}

        other = object.__new__(Case)
        for name, value in moved({name: getattr(self, name) for name in ("x", "grad_moments", "weight")}).items():
            setattr(other, name, value)
        other.gate = replace(self.gate, **moved(vars(self.gate)))
        other.update = replace(self.update, **moved(vars(self.update)))
        return other

    def exact(self) -> Case:
        """The same with numbers that bfloat16 holds, and their products too: no operand is rounded."""
        for name in ("x", "grad_moments", "weight"):
            setattr(self, name, (4 * getattr(self, name)).round().clamp(-15, 15) / 4)
        logit = self.gate.logit
        self.gate = replace(self.gate, logit=torch.where(logit < -1, -40.0, torch.where(logit > 1, 40.0, 0.0)))
        return self

    def forward(self) -> Tensor:
        return local.gate_moments(self.x, self.weight, self.gate)

    def backward(self) -> Tensor:
        return local.gate_moments_backward_(self.x, self.grad_moments, self.weight, self.gate, self.update)


def on_gpu(kind: str, shape: Shape) -> Case:
    case = Case(kind, shape).to("cuda")
    case.x = case.x.bfloat16()
    case.grad_moments = (case.grad_moments / shape[1]).bfloat16().float()
    assert layer.supported(case.x, case.weight, case.gate, case.update)
    return case


def assert_twin_on_gpu(kind: str, shape: Shape) -> None:
    """What a GPU computes is what the twin computes in float64, and the same every time."""
    start, first = on_gpu(kind, shape), None
    wide = start.to(torch.float64)
    wide.x = start.x  # so that the twin rounds the same operands
    wanted, wanted_grad_x = wide.forward(), wide.backward()
    for _ in range(3):
        case = start.to("cuda")
        with poisoned():
            moments, grad_x = case.forward(), case.backward()
        for one, other in zip(moments, wanted, strict=True):
            assert distance(one, other) < 5e-4
        assert distance(grad_x, wanted_grad_x) < 2e-3  # one place of bfloat16 here and there
        for name in case.trained():
            roots = [getattr(one.update, name).sqrt() for one in (case, wide)]
            assert distance(*roots) < 1e-4, name
        found = [moments, grad_x, *case.trained().values()]
        first = found if first is None else first
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True)), "the same every time"
