"""The fastest launches of the dense layer's kernels on a card, measured there one after the other.

To replace the launch in use, a candidate must run, give the twin's numbers, and save `GAIN` of the time.
Shapes: R replicas, B batch, I inputs, O units.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.data.download import ProgressCallback, silent
from dropconnectpp.lab.kernels.gates import Adagrad, FixedGate, Gate, LearnedGate, update_gate_
from dropconnectpp.lab.kernels.launch_config import DEFAULTS, Launch, Launches, using
from dropconnectpp.lab.kernels.local import LocalGate
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.fused_step import backward_, forward
from dropconnectpp.lab.replicas.timing import in_rounds
from dropconnectpp.lab.tuning.candidates import GROUPS, MANY_UNITS, Group, Kind, Part

MOST_REPLICAS, BATCH, INPUTS = 50, 128, 4096
"""The laboratory's shapes: the most replicas that are timed, a batch, and the inputs of the paper's dense layers."""
CHECKED = 2
"""Replicas whose numbers are compared."""
GAIN = 0.02
"""The share of the time that a candidate must save."""
ROUNDS, REPEATS = 15, 20
"""How often each launch is measured, and the steps of the CUDA graph that is one measurement."""
WORKERS = 8
"""Candidates that are compiled at a time."""
FARTHEST = {torch.bfloat16: 4e-3, torch.float32: 5e-3}
"""The largest distance from the twin, in the Frobenius norm. In bfloat16 it is a unit in the last place. In float32 a
CPU's sigmoid may differ in its last bit, and then it draws a gate otherwise."""
WRONG = "its numbers are not plain PyTorch's"


# --------------------------------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Choice:
    """What was chosen for a group. A time is None where it was not reached or failed, or the launch did not run."""

    group: Group
    before: Launch
    after: Launch
    before_us: float | None = None
    after_us: float | None = None
    unfit: int = 0
    """How many candidates do not compile, or need more than the card has."""
    wrong: int = 0
    """How many candidates have other numbers than the twin."""
    failure: str = ""
    """Why the group could not be timed; the others are timed all the same."""
    tried: tuple[tuple[Launch, float | str], ...] = field(default=(), compare=False)
    """Every launch with its time in the first timing, in microseconds, or what is wrong with it."""


def tune(
    present: Launches,
    bench_of: Callable[[Group], Bench],
    *,
    groups: Sequence[Group] = GROUPS,
    deadline: float = float("inf"),
    progress: ProgressCallback = silent,
) -> Iterator[Choice]:
    """Yield the best launch of each group, found on its own bench; none is begun after the deadline (`time.monotonic`).

    Each comes as soon as it is found, so that an interrupted tuning keeps those before.
    """
    for done, group in enumerate(groups):
        before: Launch = getattr(present, group.name)
        if time.monotonic() >= deadline:
            yield Choice(group, before, before)
            continue
        progress(group.title, done, len(groups))
        try:
            found = choose(group, before, bench_of(group))
        except ProtocolError as error:
            found = Choice(group, before, before, failure=str(error))
        except Exception as error:  # of any kind, as in `Bench.problem`, or what the others found would be lost
            found = Choice(group, before, before, failure=f"{group.title}: {type(error).__name__}, {error}")
        yield found


def choose(group: Group, before: Launch, bench: Bench) -> Choice:
    """The fastest launch that runs and is right, if a second timing finds it faster too: the first may be luck."""
    several = [before, *(one for one in group.candidates if one != before)]
    problems = [bench.problem(before)]  # alone, since Triton sets some things up once
    with ThreadPoolExecutor(WORKERS) as pool:
        problems += pool.map(bench.problem, several[1:])
    # Those that failed, once more alone: threads share memory, and Python 3.11 cannot always parse in several at once.
    problems = [problem and bench.problem(one) for one, problem in zip(several, problems, strict=True)]
    runs = [one for one, problem in zip(several, problems, strict=True) if problem is None]
    if not runs:
        raise ProtocolError(f"{group.title}: no launch works on this card. The one in use fails with: {problems[0]}.")
    wrong = problems.count(WRONG)
    unfit = len(problems) - len(runs) - wrong
    times = bench.times(runs)
    by_launch = dict(zip(runs, times, strict=True))
    tried = tuple((one, by_launch.get(one, problem or "")) for one, problem in zip(several, problems, strict=True))
    after_us, after = min(zip(times, runs, strict=True), key=lambda pair: pair[0])
    if runs[0] != before:
        return Choice(group, before, after, None, after_us, unfit, wrong, tried=tried)
    before_us, after_us = bench.times([before, after]) if after != before else (times[0], times[0])
    if after_us > (1 - GAIN) * before_us:
        after, after_us = before, before_us
    return Choice(group, before, after, before_us, after_us, unfit, wrong, tried=tried)


def chosen(present: Launches, choices: Sequence[Choice]) -> Launches:
    """The launches, with those that were chosen."""
    changes: dict[str, Any] = {choice.group.name: choice.after for choice in choices}
    return replace(present, **changes)


# --------------------------------------------------------------------------------------------- on a card


@dataclass(frozen=True)
class Step:
    """A layer's tensors in one training step."""

    x: Tensor
    grad_sums: Tensor
    weight: Tensor
    gate: Gate
    update: Adagrad
    replicas: Tensor
    number: Tensor

    def run(self, part: Part) -> list[Tensor]:
        """Run a part of the step: what it returns, and all that it may have changed."""
        if part == "forward":
            return [forward(self.x, self.weight, self.gate, self.replicas, self.number)]
        if part == "backward":
            given = backward_(self.x, self.grad_sums, self.weight, self.gate, self.replicas, self.number, self.update)
        else:
            assert isinstance(self.gate, LearnedGate)
            given = update_gate_(self.gate, self.replicas, self.number, self.update).sum(2)
        return [given, self.weight, *_tensors(self.gate).values(), *_tensors(self.update).values()]

    def to(self, device: torch.device) -> Step:
        """A copy on a device."""
        return replace(
            self,
            gate=replace(self.gate, **_copies(self.gate, device)),
            update=replace(self.update, **_copies(self.update, device)),
            **_copies(self, device),
        )


def _tensors(of: object) -> dict[str, Tensor]:
    return {name: value for name, value in vars(of).items() if isinstance(value, Tensor)}


def _copies(of: object, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device, copy=True) for name, value in _tensors(of).items()}


def make_step(kind: Kind, units: int, replicas: int, device: torch.device) -> Step:
    """A layer of random numbers. Sums of squares start at one, so that no step is a gradient's sign alone.

    The KL weighs as much as it would with one example: at a training's weight a kernel could omit it unnoticed.
    """
    generator = torch.Generator(device).manual_seed(units)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    row, weight = torch.full((replicas,), 0.1, device=device), normal(replicas, units, INPUTS)
    ones = torch.ones_like(row)
    names = () if kind == "fixed" else ("logit", "alpha", "beta") if "learned" in kind else ("logit",)
    learned: dict[str, Any] = {name: normal(*weight.shape) for name in names}
    shared: dict[str, Any] = {"stream": Stream(0, "tuning"), **learned}
    gate: Gate
    if kind == "fixed":
        gate = FixedGate(0.5 + row, **shared)
    elif "local" in kind:
        gate = LocalGate(kl_scale=ones, **shared)
    elif kind == "straight-through":
        gate = LearnedGate(kl_scale=ones, kind=kind, **shared)
    else:
        gate = LearnedGate(kl_scale=ones, coefficient=ones[None], **shared)
    sums: dict[str, Any] = {name: torch.ones_like(weight) for name in ("weight", *names)}
    samples = 2 if "local" in kind else 1
    return Step(
        normal(replicas, BATCH, INPUTS).bfloat16(),
        (0.1 * normal(samples, replicas, BATCH, units)).bfloat16(),
        weight,
        gate,
        Adagrad(sizes=row, epsilon=1e-6, inside=True, gate_sizes=row if names else None, **sums),
        torch.arange(replicas, device=device),
        torch.zeros((), dtype=torch.int64, device=device),
    )


def replicas_that_fit(device: torch.device) -> int:
    """How many are timed: fewer where half of the free memory does not hold their weights, gates and sums."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(CHECKED, min(MOST_REPLICAS, free // 2 // (10 * 4 * MANY_UNITS * INPUTS)))


def distance(one: Tensor, other: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-300))


class Bench:
    """A group's work on a card: compared with the twin on few replicas, timed on all."""

    def __init__(self, group: Group, device: torch.device, replicas: int) -> None:
        self.group, self.device, self.replicas = group, device, replicas
        self.few = self._steps(CHECKED)
        # On a CPU every function runs its twin.
        twins = [step.to(torch.device("cpu")) for step in self.few]
        pairs = zip(group.work, twins, strict=True)
        self.wanted = [[one.to(device) for one in twin.run(work.part)] for work, twin in pairs]
        self.all: list[Step] = []

    def problem(self, launch: Launch) -> str | None:
        """Why a launch cannot be taken, or None."""
        try:
            # A thread has a current device of its own.
            with torch.cuda.device_of(self.few[0].x), self._using(launch):
                for work, step, wanted in zip(self.group.work, self.few, self.wanted, strict=True):
                    found = step.to(self.device).run(work.part)
                    pairs = zip(found, wanted, strict=True)
                    if not all(distance(*pair) <= FARTHEST[pair[0].dtype] for pair in pairs):
                        return WRONG
        except Exception as error:  # Triton, its compilers and the driver have many kinds
            return f"{type(error).__name__}, {error}"
        return None

    def times(self, several: Sequence[Launch]) -> list[float]:
        """Microseconds of the work with each launch: medians over rounds in which their CUDA graphs take turns."""
        self.all = self.all or self._steps(self.replicas)
        pool = torch.cuda.graph_pool_handle()  # shared, since nobody reads what a graph computes
        graphs = [self._captured(launch, pool) for launch in several]
        found = in_rounds([{"replay": graph.replay} for graph in graphs], self.device, ROUNDS)
        return [1e6 * one["replay"] / REPEATS for one in found]

    def _steps(self, replicas: int) -> list[Step]:
        return [make_step(work.kind, work.units, replicas, self.device) for work in self.group.work]

    def _using(self, launch: Launch) -> AbstractContextManager[None]:
        changes: dict[str, Any] = {self.group.name: launch}
        return using(replace(DEFAULTS, **changes))

    def _captured(self, launch: Launch, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with self._using(launch):
            self._run()  # nothing may be compiled or loaded while a graph is captured
            with torch.cuda.graph(graph, pool=pool):
                for _ in range(REPEATS):
                    self._run()
        return graph

    def _run(self) -> None:
        for work, step in zip(self.group.work, self.all, strict=True):
            step.run(work.part)
