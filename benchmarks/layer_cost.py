"""Measure what one training step of a masked layer costs against `nn.Linear`, eager and compiled, in one run.

    python benchmarks/layer_cost.py --device cuda --out layer_cost.md
    python benchmarks/layer_cost.py --cases tiny wide
    python benchmarks/layer_cost.py --device cuda --cases D4096-T128 --host

A step is forward and backward: cross-entropy for a plain layer, the ELBO for ours, with an input that needs a gradient,
as inside a network. On a GPU it runs in bf16 autocast, and compiled steps are CUDA graphs. The layers take turns within
each round, so that a noisy machine slows all of them; times are medians over the rounds. Beside our layers stand
DropConnect as a user would write it and, where they are installed, bayesian-torch's and blitz's layers. GPT-2 is a
model of its size, with every linear layer converted and the optimiser's step counted. Memory is what forward and
backward hold at their peak beyond the plain layer, parameters included, in tensors of the weight's size. Device time is
the sum of what a step's kernels take; where it is far below the step's time, the host is what the step waits for, and
`--host` says where its time goes.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reporting import Cell, Report, Table, parser
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import dropconnectpp as dcpp
from dropconnectpp.ops import noise

Step = Callable[[], None]
COMPILED = "reduce-overhead"
"""torch.compile's mode: with CUDA graphs, so that a compiled step costs what its kernels do."""


@dataclass(frozen=True)
class Size:
    """A layer and the rows it is given."""

    inputs: int
    outputs: int
    rows: int
    layers: int = 1
    options: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        each = ", a mask for each example" if self.options else ""
        return f"{self.layers} x Linear({self.inputs}, {self.outputs}), {self.rows} rows{each}"


CASES = {
    "cuda": {
        "D4096-T128": Size(4096, 4096, 128),
        "D1024-T8192": Size(1024, 1024, 8192),
        "D4096-T8192": Size(4096, 4096, 8192),
        "example": Size(512, 512, 128, options=(("mask", "example"),)),
        "gpt2": Size(768, 768, 8 * 1024),
    },
    "cpu": {
        "wide": Size(4096, 512, 128),
        "tiny": Size(64, 64, 32, layers=8),
        "example": Size(512, 512, 128, options=(("mask", "example"),)),
    },
}


class HandWritten(nn.Linear):
    """DropConnect as a user would write it."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, F.dropout(self.weight, 0.5), self.bias)


def layer_kinds(size: Size) -> dict[str, Callable[[], nn.Module]]:
    """Makers of one layer of each kind."""
    shape, options = (size.inputs, size.outputs), dict(size.options)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "nn.Linear": lambda: nn.Linear(*shape),
        "DropConnect by hand": lambda: HandWritten(*shape),
        "DropConnectLinear": lambda: dcpp.DropConnectLinear(*shape, **options),
        "bbvi": lambda: dcpp.DropConnectPPLinear(*shape, estimator="bbvi", **options),
        "straight-through": lambda: dcpp.DropConnectPPLinear(*shape, estimator="straight-through", **options),
        "local": lambda: dcpp.DropConnectPPLinear(*shape, estimator="local", **options),
    }
    for title, module, name in (
        ("bayesian-torch, reparameterisation", "bayesian_torch.layers", "LinearReparameterization"),
        ("bayesian-torch, Flipout", "bayesian_torch.layers", "LinearFlipout"),
        ("blitz", "blitz.modules", "BayesianLinear"),
    ):
        try:
            kind: Any = getattr(import_module(module), name)
        except ImportError:
            continue
        kinds[title] = lambda kind=kind: kind(*shape)
    return kinds


def first(output: Any) -> Tensor:
    """A competitor's output; some give a KL beside it."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


class Plain(nn.Module):
    """The loss of a model without a posterior."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(first(self.model(x)).float(), y)


class Bound(nn.Module):
    """The loss of a model with one."""

    def __init__(self, model: nn.Module, num_data: int) -> None:
        super().__init__()
        self.elbo = dcpp.ELBO(model, rows_as_examples, num_data, check_finite=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.elbo(x, target=y).loss
        return loss


def rows_as_examples(output: Tensor, target: Tensor) -> Tensor:
    """The log-likelihood of each row."""
    return -F.cross_entropy(output.float(), target, reduction="none")


def has_posterior(model: nn.Module) -> bool:
    """Whether a model is trained by the ELBO."""
    return any(isinstance(m, dcpp.DropConnectPPLinear) for m in model.modules())


class Block(nn.Module):
    """A transformer block of GPT-2's shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.between(x))))
        return out


class GPT2(nn.Module):
    """A language model of GPT-2 small's size; its output layer is its embedding."""

    def __init__(self, words: int = 50_257, length: int = 1024, width: int = 768, blocks: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(blocks)))
        self.last = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = F.linear(self.last(self.blocks(x)), self.words.weight)
        return logits.flatten(0, 1)


# ------------------------------------------------------------------------------------------------ the steps


@dataclass
class Runner:
    """How steps are run and timed on one device."""

    device: torch.device
    rounds: int
    seconds: float

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 on a GPU, nothing on a CPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def wait(self) -> None:
        """Until the device has done what it was asked."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self, loss: nn.Module, x: Tensor, y: Tensor, optimiser: torch.optim.Optimizer | None = None) -> Step:
        """Forward and backward, and the optimiser's part if there is one."""

        def run() -> None:
            if x.grad is not None:
                x.grad = None
            for parameter in loss.parameters():
                parameter.grad = None
            with self.autocast():
                value = loss(x, y)
            value.backward()
            if optimiser is not None:
                optimiser.step()

        return run

    def time_together(self, steps: dict[str, Step]) -> dict[str, float]:
        """Median microseconds of each step; they take turns."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        counts: dict[str, int] = {}
        for name, step in steps.items():
            for _ in range(3):
                step()
            self.wait()
            began = time.perf_counter()
            step()
            self.wait()
            each = time.perf_counter() - began
            counts[name] = max(1, min(50, round(self.seconds / self.rounds / len(steps) / max(each, 1e-6))))
        for _ in range(self.rounds):
            for name, step in steps.items():
                self.wait()
                began = time.perf_counter()
                for _ in range(counts[name]):
                    step()
                self.wait()
                times[name].append((time.perf_counter() - began) / counts[name])
        return {name: 1e6 * statistics.median(values) for name, values in times.items()}

    def device_time(self, step: Step, steps: int = 5) -> float | None:
        """Microseconds that a step's kernels take; None on a CPU."""
        if self.device.type != "cuda":
            return None
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                step()
            self.wait()
        events = [
            event for event in found.events() if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        return sum(event.device_time for event in events) / steps

    def peak(self, step: Step) -> int:
        """Bytes that a step holds at its peak, gradients included; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def loss_of(model: nn.Module, num_data: int) -> nn.Module:
    """A model with its loss."""
    return Bound(model, num_data) if has_posterior(model) else Plain(model)


@dataclass(frozen=True)
class Row:
    """What was measured of one kind of layer."""

    kind: str
    us: float
    device_us: float | None = None
    extra: float | None = None
    """Peak memory beyond the plain layer, in weights."""


def steps_of(runner: Runner, size: Size, compiled: bool, kinds: list[str] | None) -> dict[str, tuple[Step, nn.Module]]:
    """A step of each kind, run once, and its loss."""
    found: dict[str, tuple[Step, nn.Module]] = {}
    y = torch.randint(size.outputs, (size.rows,), device=runner.device)
    for title, make in layer_kinds(size).items():
        if (compiled and "torch, " in title) or (kinds and title not in kinds):
            continue
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(make() for _ in range(size.layers))) if size.layers > 1 else make()
        loss: nn.Module = loss_of(model.to(runner.device), 100 * size.rows)
        x = torch.randn(size.rows, size.inputs, device=runner.device, requires_grad=True)
        ready = torch.compile(loss, fullgraph=True, mode=COMPILED) if compiled else loss
        step = runner.step(ready, x, y)
        step()  # what libraries take once, such as cuBLAS's workspace, is no part of a layer's peak
        loss.zero_grad()
        x.grad = None
        found[title] = step, loss
    return found


def measure_layers(runner: Runner, size: Size, compiled: bool, kinds: list[str] | None) -> list[Row]:
    """A row for each kind."""
    steps = steps_of(runner, size, compiled, kinds)
    extra: dict[str, float] = {}
    weight = size.inputs * size.outputs * size.layers
    for title, (step, loss) in steps.items():
        before = torch.cuda.memory_allocated() if runner.device.type == "cuda" else 0
        held = runner.peak(step) - before
        extra[title] = sum(parameter.numel() for parameter in loss.parameters()) / weight + held / (4 * weight)
        loss.zero_grad()
    found = runner.time_together({title: step for title, (step, _) in steps.items()})
    plain = next(iter(extra.values()))
    rows = [
        Row(title, found[title], runner.device_time(step), extra[title] - plain) for title, (step, _) in steps.items()
    ]
    return [*rows, *drawing(runner, size)] if size.options else rows


def drawing(runner: Runner, size: Size) -> list[Row]:
    """What it takes to draw the numbers behind one mask for each example: into memory, and a block at a time."""
    seed, one = torch.tensor(1, device=runner.device), torch.Size((1, size.outputs, size.inputs))
    whole = torch.Size((size.rows, *one[1:]))

    def by_torch() -> None:
        torch.rand(whole, device=runner.device)

    def in_blocks() -> None:
        blocks = noise.Blocks(seed, 0, torch.float32, runner.device)
        for _ in range(size.rows):
            blocks.next(one)

    steps = {"torch.rand of as many numbers": by_torch}
    if runner.device.type == "cpu":
        steps["our generator, in blocks that a cache holds"] = in_blocks
    found = runner.time_together(steps)
    return [Row(name, value, runner.device_time(steps[name])) for name, value in found.items()]


def measure_gpt2(runner: Runner, compiled: bool) -> list[Row]:
    """The same for a model of GPT-2's size, the optimiser's step included."""
    steps: dict[str, Step] = {}
    tokens = torch.randint(50_257, (8, 1024), device=runner.device)
    for title in ("nn.Linear", "bbvi", "straight-through"):
        torch.manual_seed(0)
        model: nn.Module = GPT2().to(runner.device)
        if title != "nn.Linear":
            model = dcpp.convert(model, include=nn.Linear, inplace=True, estimator=title)
        loss = loss_of(model, 1_000_000)
        optimiser = torch.optim.AdamW(loss.parameters(), lr=1e-4, fused=True)
        ready = torch.compile(loss, fullgraph=True, mode=COMPILED) if compiled else loss
        steps[title] = runner.step(ready, tokens, tokens.flatten(), optimiser)
    found = runner.time_together(steps)
    return [Row(title, value, runner.device_time(steps[title], 2)) for title, value in found.items()]


def table(title: str, rows: list[Row], cuda: bool) -> Table:
    """One case as a table."""
    plain = rows[0].us
    columns = ["layer", "us", "ratio", *(["of it on the device, us", "extra memory, weights"] if cuda else [])]
    cells: list[list[Cell]] = []
    for row in rows:
        more: list[Cell] = [None if row.device_us is None else f"{row.device_us:,.0f}"]
        more.append(None if row.extra is None else f"{row.extra:.2f}")
        cells.append([row.kind, f"{row.us:,.0f}", f"{row.us / plain:.2f}", *(more if cuda else [])])
    return Table(title, columns, cells)


def host_tables(runner: Runner, size: Size, kinds: list[str], steps: int = 20) -> Iterator[Table]:
    """Where the host's time goes in a step of each kind: torch's own operations, and Python's functions."""
    for title, (step, _) in steps_of(runner, size, False, kinds).items():
        for _ in range(25):  # the first steps of a bound watch which gates are used
            step()
        runner.wait()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(steps):
                step()
            runner.wait()
        averages = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in averages) / steps
        launches = sum(event.count for event in averages if "LaunchKernel" in event.key) / steps
        cells: list[list[Cell]] = [
            [event.key, f"{event.count / steps:.1f}", f"{event.self_cpu_time_total / steps:.0f}"]
            for event in averages[:16]
        ]
        note = f"A step has {launches:.0f} launches, and {total:.0f} us in torch's operations while they are recorded."
        yield Table(f"{title}, {size.title}: the host in torch's operations", ["operation", "calls", "us"], cells, note)
        recorded = cProfile.Profile()
        recorded.enable()
        for _ in range(steps):
            step()
        runner.wait()
        recorded.disable()
        lines = sorted(pstats.Stats(recorded).stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
        cells = [
            [f"{Path(file).name}:{line} {name}", f"{calls / steps:.1f}", f"{1e6 * own / steps:.0f}"]
            for (file, line, name), (_, calls, own, *_) in lines[:24]
        ]
        total = 1e6 * sum(item[1][2] for item in lines) / steps
        note = f"{total:.0f} us a step while they are recorded."
        if runner.device.type == "cuda":
            note += " Backward's Python functions run on another thread and are not among them."
        yield Table(f"{title}, {size.title}: the host in Python's functions", ["function", "calls", "us"], cells, note)


def main() -> None:
    """Measure what the command line asks for."""
    made = parser(__doc__)
    made.add_argument("--cases", nargs="+", help="some of the device's cases, such as tiny or gpt2 (default: all)")
    made.add_argument(
        "--modes",
        nargs="+",
        default=["eager", "compiled"],
        choices=["eager", "compiled"],
        help="how steps run on a GPU; on a CPU they are eager (default: both)",
    )
    made.add_argument("--kinds", nargs="+", help="some of the layers, such as nn.Linear bbvi (default: all)")
    made.add_argument("--host", action="store_true", help="say where the host's time goes instead, for each case")
    made.add_argument("--rounds", type=int, default=9, help="rounds in which the layers take turns (default: 9)")
    made.add_argument("--seconds", type=float, default=4.0, help="time for each case and mode (default: 4)")
    options = made.parse_args()
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    runner = Runner(device, options.rounds, options.seconds)
    report = Report("What a layer costs", device, runner)
    for mode in options.modes if cuda else ["eager"]:
        for key, size in CASES[device.type].items():
            if options.cases and key not in options.cases:
                continue
            torch.compiler.reset()
            whole, compiled = key == "gpt2", mode == "compiled"
            if options.host:
                if not (whole or compiled):
                    for found in host_tables(runner, size, options.kinds or ["nn.Linear", "bbvi", "straight-through"]):
                        report.add(found)
                report.write(options.out)
                continue
            title = "GPT-2 small, 8 x 1024 tokens, with AdamW" if whole else size.title
            rows = measure_gpt2(runner, compiled) if whole else measure_layers(runner, size, compiled, options.kinds)
            report.add(table(f"{title}, {mode}", rows, cuda))
            report.write(options.out)  # what is cut off later keeps the cases that were done


if __name__ == "__main__":
    main()
