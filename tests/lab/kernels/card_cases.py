"""Launches of the dense layer recorded as a card would get them, and what they need when compiled for one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from dropconnectpp.lab.kernels import gates as gate_kernels
from dropconnectpp.lab.kernels import head, layer, local, synapses
from dropconnectpp.lab.kernels.launch_config import DEFAULTS, using
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.tuning import candidates, tuning

LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a block may have on consumer cards since Ampere; data centre cards have more."""
CARDS = {"Ampere and Ada": 86, "Blackwell": 120}
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.uint8: "*u8"}
REPLICAS, BATCH, WIDTH = 2, 128, 4096

RecordedLaunch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A kernel with the arguments and options that it was launched with."""


class Recorder:
    """Stands for a kernel and notes its launches instead of making them."""

    def __init__(self, kernel: Any, launches: list[RecordedLaunch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append((self.kernel, arguments, options))

        return launch


@contextmanager
def recorded() -> Iterator[list[RecordedLaunch]]:
    """Launches of the dense layer's, the head's and the synapses' kernels, as if there were a card."""
    from dropconnectpp.lab.kernels import gates_triton, head_triton, layer_triton, local_triton, synapses_triton

    kernels = {
        gates_triton: ("gate_kernel",),
        layer_triton: ("product_kernel", "backward_kernel"),
        local_triton: ("moments_kernel", "moments_backward_kernel"),
        head_triton: ("likelihood_kernel", "gradient_kernel"),
        synapses_triton: ("draw_kernel", "update_kernel"),
    }
    launches: list[RecordedLaunch] = []
    with ExitStack() as patches:
        for module, names in kernels.items():
            for name in names:
                stand_in = Recorder(getattr(module, name), launches)
                patches.enter_context(mock.patch.object(module, name, stand_in))
        for launching in (gate_kernels, layer, local, head, synapses):
            patches.enter_context(mock.patch.object(launching, "supported", return_value=True))
        yield launches


def settings(launch: RecordedLaunch) -> dict[str, Any]:
    """The constants and options of a launch, those of its records by the record's name and the field's."""
    kernel, arguments, options = launch
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    records = {name: given[name]._asdict() for name in ("SIZES", "TILE", "TERMS") if name in given}
    fields = {f"{name}.{field}": value.value for name, one in records.items() for field, value in one.items()}
    return {**options, **fields}


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


def launches_of_a_step(name: str, units: int) -> list[RecordedLaunch]:
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
        grad_output = torch.zeros(getattr(gate, "samples", 1), REPLICAS, BATCH, units)
        layer.gated_product(x, weight, gate, replicas, step)
        layer.gated_product_backward_(x, grad_output, weight, gate, replicas, step, update)
        if isinstance(gate, gate_kernels.LearnedGate) and gate.kind == "score":
            gate_kernels.update_gate_(replace(gate, coefficient=torch.zeros(1, REPLICAS)), replicas, step, update)
    return launches


def launches_of_work(work: candidates.Work) -> list[RecordedLaunch]:
    step = tuning.make_step(work.kind, work.units, REPLICAS, torch.device("cpu"))
    with recorded() as launches:
        step.run(work.part)
    return launches


def shared_memory(launch: RecordedLaunch, card: int) -> int:
    """Bytes that a launch needs on a card, by its compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, arguments, options = launch
    given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def kind(path: tuple[int, ...], value: Any, constant: bool = False) -> Any:
        """How Triton calls a value, and for a record each of its own; constants and alignment are noted."""
        if isinstance(value, tuple) and not constant:
            kinds = [kind((*path, place), one) for place, one in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        if constant or value is None or isinstance(value, triton.language.constexpr):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            aligned[path] = [["tt.divisibility", 16]]
            return TYPES[value.dtype]
        return "fp32" if isinstance(value, float) else "u64" if value >> 31 else "i32"

    signature = {
        one.name: kind((place,), True if one.name == "COMPILED" else given[one.name], one.is_constexpr)
        for place, one in enumerate(kernel.params)
    }
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

    for kind, samples in (("open", 1), ("dropout", 1), ("score", 1), ("straight-through", 3), ("local", 2)):
        with recorded() as launches:
            Case(kind, (REPLICAS, BATCH, 512, classes), samples=samples).run(torch.tensor(STEP))
        needed = [shared_memory(launch, CARDS["Ampere and Ada"]) for launch in launches]
        assert max(needed) <= LEAST_SHARED, (kind, needed)
        print(f"{len(needed)} launches fit")


def check_candidates() -> None:
    """Compile what tuning tries besides the defaults, with the first of a group's work; there a failure is skipped."""

    def fits(launch: RecordedLaunch) -> bool:
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
