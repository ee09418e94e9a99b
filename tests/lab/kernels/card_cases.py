"""Launches of the dense layer recorded as a card would get them, and what they need when compiled for one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from dropconnectpp.lab.kernels import gates as gate_kernels
from dropconnectpp.lab.kernels import layer, local
from dropconnectpp.lab.kernels.launch_config import DEFAULTS, using
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.tuning import candidates, tuning

LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a block may have on consumer cards since Ampere; data centre cards have more."""
CARDS = {"Ampere and Ada": 86, "Blackwell": 120}
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
REPLICAS, BATCH, WIDTH = 2, 128, 4096

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel with the arguments and options that it was launched with."""


class Recorder:
    """Stands for a module of kernels and notes their launches instead of making them."""

    def __init__(self, module: ModuleType, launches: list[Launch]) -> None:
        self.module, self.launches = module, launches

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.module, name)

        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append((kernel, arguments, options))

        return mock.MagicMock(__getitem__=lambda _, grid: launch)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches of the dense layer's kernels, as if there were a card."""
    from dropconnectpp.lab.kernels import gates_triton, layer_triton, local_triton

    launches: list[Launch] = []
    with (
        mock.patch.object(layer, "compiled", return_value=Recorder(layer_triton, launches)),
        mock.patch.object(local, "compiled", return_value=Recorder(local_triton, launches)),
        mock.patch.object(layer, "usable", return_value=True),
        mock.patch.object(local, "usable", return_value=True),
        mock.patch.object(gate_kernels, "compiled", return_value=Recorder(gates_triton, launches)),
        mock.patch.object(gate_kernels, "ready", return_value=True),
    ):
        yield launches


def gates(weight: torch.Tensor) -> dict[str, gate_kernels.Gate]:
    stream, row = Stream(1, "mask:weight"), torch.ones(REPLICAS)
    logit, alpha, beta = (torch.zeros_like(weight) for _ in range(3))
    few = {"prior_alpha": 10.0, "prior_beta": 90.0}
    return {
        "none": gate_kernels.OpenGate(),
        "DropConnect": gate_kernels.FixedGate(row, stream),
        "score": gate_kernels.LearnedGate(logit, stream, row),
        "score, learned q(pi)": gate_kernels.LearnedGate(logit, stream, row, alpha=alpha, beta=beta),
        "straight-through": gate_kernels.LearnedGate(logit, stream, row, "straight-through", **few),
        "straight-through, five masks": gate_kernels.LearnedGate(
            logit, stream, row, "straight-through", samples=5, **few
        ),
        "local": local.LocalGate(logit, stream, row, **few),
        "local, learned q(pi)": local.LocalGate(logit, stream, row, alpha=alpha, beta=beta),
    }


def launches_of_a_step(name: str, units: int) -> list[Launch]:
    weight, x = torch.zeros(REPLICAS, units, WIDTH), torch.zeros(REPLICAS, BATCH, WIDTH, dtype=torch.bfloat16)
    gate, row, step = gates(weight)[name], torch.ones(REPLICAS), torch.tensor(0)
    hyper = {key: torch.zeros_like(weight) for key in ("alpha", "beta") if "learned" in name}
    sums = torch.zeros_like(weight)
    update = gate_kernels.Adagrad(sums, row, 1e-6, True, logit=torch.zeros_like(weight), gate_sizes=row, **hyper)
    replicas = torch.arange(REPLICAS)
    with recorded() as launches:
        if isinstance(gate, local.LocalGate):
            local.gate_moments(x, weight, gate)
            local.gate_moments_backward_(x, torch.zeros(2, REPLICAS, BATCH, units), weight, gate, update)
            return launches
        by_output = torch.zeros(getattr(gate, "samples", 1), REPLICAS, BATCH, units)
        layer.gated_product(x, weight, gate, replicas, step)
        layer.gated_product_backward_(x, by_output, weight, gate, replicas, step, update)
        if isinstance(gate, gate_kernels.LearnedGate) and gate.kind == "score":
            gate_kernels.update_gate_(replace(gate, coefficient=torch.zeros(1, REPLICAS)), replicas, step, update)
    return launches


def launches_of_work(work: candidates.Work) -> list[Launch]:
    step = tuning.make_step(work.kind, work.units, REPLICAS, torch.device("cpu"))
    with recorded() as launches:
        step.run(work.part)
    return launches


def shared_memory(launch: Launch, card: int) -> int:
    """Bytes that a launch needs on a card, by its compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, arguments, options = launch
    given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
    signature: dict[str, Any] = {}
    constants, aligned = {}, {}
    for place, parameter in enumerate(kernel.params):
        value = True if parameter.name == "COMPILED" else given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], aligned[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            signature[parameter.name] = tuple("fp32" for _ in value)
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "u64" if value >> 31 else "i32"
    how = {name: value for name, value in options.items() if name not in kernel.arg_names}
    found = triton.compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", card, 32), options=how
    )
    return int(found.metadata.shared)


def check(name: str, units: int) -> None:
    """Compile every launch of a step; in a process of its own, since others interpret kernels."""
    launches = launches_of_a_step(name, units)
    assert launches
    for card in CARDS.values() if units == 64 else [CARDS["Ampere and Ada"]]:
        for launch in launches:
            needed = shared_memory(launch, card)
            assert needed <= LEAST_SHARED, f"{launch[0].__name__} needs {needed} bytes on sm_{card}"
    print(f"{len(launches)} launches fit")


def check_head(classes: int) -> None:
    """Compile what follows the layer's products, with ten classes and with a hundred."""
    from head_cases import STEP, Case

    from dropconnectpp.lab.kernels import head, head_triton

    for kind, samples in (("open", 1), ("dropout", 1), ("score", 1), ("straight-through", 3), ("local", 2)):
        case, launches = Case(kind, (REPLICAS, BATCH, 512, classes), samples=samples), list[Launch]()
        with (
            mock.patch.object(head, "compiled", return_value=Recorder(head_triton, launches)),
            mock.patch.object(head, "usable", return_value=True),
        ):
            case.run(torch.tensor(STEP))
        needed = [shared_memory(launch, CARDS["Ampere and Ada"]) for launch in launches]
        assert max(needed) <= LEAST_SHARED, (kind, needed)
        print(f"{len(needed)} launches fit")


def check_candidates() -> None:
    """Compile what tuning tries besides the defaults, with the first of a group's work; there a failure is skipped."""

    def fits(launch: Launch) -> bool:
        try:
            return shared_memory(launch, CARDS["Ampere and Ada"]) <= LEAST_SHARED
        except Exception as error:
            print(launch[0].__name__, error, file=sys.stderr)
            return False

    for group in candidates.GROUPS:
        launches = []
        for candidate in group.candidates[1:]:
            with using(replace(DEFAULTS, **{group.name: candidate})):
                launches += launches_of_work(group.work[0])
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(fits, launches))
        found = [done or fits(launch) for done, launch in zip(found, launches, strict=True)]  # as in tuning
        print(f"{group.name} {sum(found)} of {len(found)} candidates fit")
