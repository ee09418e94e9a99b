"""Synapses of every kind, in small; and their kernels compiled for a card that is not there."""

from __future__ import annotations

import torch
from torch import Tensor

from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.synapses import StepRule, Synapses
from dropconnectpp.lab.philox import Stream

CASES = [
    ("plain", "adam"),
    ("plain", "sgd"),
    ("plain", "adagrad"),
    ("mask", "adam", True, True),
    ("mask", "sgd", True, False),
    ("mask", "adagrad", False, True),
    ("bernoulli", "adam"),
    ("bernoulli", "sgd"),
    ("variance", "adam"),
    ("hard-concrete", "adam"),
]
"""Kind, optimiser, whether there are masks and noise."""
SHAPE = (3, 5, 7)


def make(
    kind: kernels.Kind = "bernoulli",
    rule: str = "adam",
    masked: bool = False,
    noisy: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
) -> Synapses:
    """The same numbers each time."""
    generator = torch.Generator().manual_seed(5)

    def draw() -> Tensor:
        return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)

    gate = None if kind in ("plain", "mask") else 2.0 * draw()
    return Synapses(
        kind,
        StepRule(rule),  # type: ignore[arg-type]
        Stream(1, "gates:case"),
        draw(),
        0.1 * draw(),
        draw().square(),
        gate=gate,
        gate_first=None if gate is None else 0.1 * draw(),
        gate_second=None if gate is None else draw().square(),
        mask=(draw() > 0).to(torch.uint8) if masked else None,
        noisy=noisy,
    )


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    """Settings of a step: three replicas with priors of both kinds, the last with a fixed support."""
    now = torch.zeros((3, len(kernels.COLUMNS)), dtype=dtype)
    for column, values in {
        kernels.LR: (0.01, 0.02, 0.03),
        kernels.GATE_LR: (0.1, 0.2, 0.3),
        kernels.KL: (0.5, 0.2, 0.1),
        kernels.CORRECTION1: (0.19,) * 3,
        kernels.CORRECTION2: (0.002,) * 3,
        kernels.KEEP: (0.7, 1.0, 0.6),
        kernels.FIXED: (0.0, 0.0, 1.0),
        kernels.ALPHA: (1.0, -4.6, 0.5),
        kernels.BETA: (99.0, 0.0, 2.0),
        kernels.TEMPERATURE: (0.66, 0.5, 0.9),
        kernels.STRETCH: (0.1, 0.1, 0.2),
        kernels.CEILING: (0.85, 1e30, 0.4),
        kernels.LEAST: (-0.62, 0.0, -0.85),
    }.items():
        now[:, column] = torch.tensor(values, dtype=dtype)
    return now


def compile_all() -> None:
    """The kernels for an H200 (compute capability 9.0); raises where one does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dropconnectpp.lab.kernels import synapses_triton, unfolded_triton

    target = GPUTarget("cuda", 90, 32)
    pointers = {"mask_ptr": "*u8", "replica_ptr": "*i64", "step_ptr": "*i64"}
    scalars = {"seed": "i64", "count": "i32", "momentum": "fp32", "epsilon": "fp32", "gate_epsilon": "fp32"}

    def build(kernel: object, constants: dict[str, object], low: str = "fp32") -> None:
        names = kernel.arg_names  # type: ignore[attr-defined]
        kinds = {n: pointers.get(n, f"*{low}") if n.endswith("_ptr") else scalars.get(n, "i32") for n in names}
        signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
        triton.compile(ASTSource(kernel, signature, constants), target=target)

    for kind, rule, *rest in (CASES[3], CASES[6], CASES[8]):
        masked, noisy = (*rest, False, False)[:2]
        fixed = {"KIND": kind, "MASKED": masked, "NOISY": noisy, "WIDTH": len(kernels.COLUMNS), "BLOCK": kernels.BLOCK}
        build(synapses_triton.draw_kernel, fixed)
        build(synapses_triton.update_kernel, {**fixed, "RULE": rule, "INSIDE": True})
    sizes = {"MAPS": 20, "SIZE": 5, "STRIDE": 1, "PADDING": 0, "FILLED": 504}
    build(unfolded_triton.unfold_kernel, {**sizes, "LANES": 512, "BLOCK": 8}, "bf16")
    build(unfolded_triton.fold_kernel, {**sizes, "BLOCK": 1024}, "bf16")
    print("all well")
