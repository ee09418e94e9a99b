"""Synapses of every kind, in small; and their kernels compiled for a card that is not there."""

from __future__ import annotations

import torch
from torch import Tensor

from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.kernels.bits import pack
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
        mask=pack(draw() > 0) if masked else None,
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
    from card_cases import recorded, shared_memory
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dropconnectpp.lab.kernels import unfolded_triton

    replicas, step = torch.arange(SHAPE[0]), torch.tensor(0)
    with recorded() as launches:
        for case in (CASES[3], CASES[6], CASES[8]):
            synapses, now = make(*case), table()
            kernels.draw(synapses, now, replicas, step, torch.empty_like(synapses.weight))
            kernels.update(synapses, now, replicas, step, torch.empty_like(synapses.weight))
    assert len(launches) == 6
    for launch in launches:
        shared_memory(launch, 90)

    def build(kernel: object, constants: dict[str, object]) -> None:
        names = kernel.arg_names  # type: ignore[attr-defined]
        kinds = {n: "*bf16" if n.endswith("_ptr") else "i32" for n in names}
        signature = {n: "constexpr" if n in constants else kinds[n] for n in names}
        triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))

    sizes = {"MAPS": 20, "SIZE": 5, "STRIDE": 1, "PADDING": 0, "FILLED": 504}
    build(unfolded_triton.unfold_kernel, {**sizes, "LANES": 512, "BLOCK": 8})
    build(unfolded_triton.fold_kernel, {**sizes, "BLOCK": 1024})
    print("all well")
