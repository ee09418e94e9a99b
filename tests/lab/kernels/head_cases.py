"""Cases of what follows the dense layer's products: every kind of gate of the bias, its tensors, and one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.kernels import head
from dropconnectpp.lab.kernels.gates import FixedGate, Gate, LearnedGate, OpenGate
from dropconnectpp.lab.kernels.head import Head, HeadResult
from dropconnectpp.lab.kernels.local import LocalGate
from dropconnectpp.lab.philox import Stream

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

    def run(self, step: Tensor | int = STEP) -> HeadResult:
        return head.forward_backward(self.sums, self.head, self.replicas, step)


def tensors(found: HeadResult) -> dict[str, Tensor]:
    return {name: value for name, value in found._asdict().items() if value is not None}
