"""Measure what DropConnectPPLinear costs against nn.Linear: time of a training step, of inference, and memory.

    python benchmarks/training_step.py --cases local "bbvi, running"
    python benchmarks/training_step.py --device cuda --every --out training_step.md

Every ratio comes from one run in which the two take turns, so that a noisy machine slows both; times are
medians. A step is forward, cross-entropy or ELBO, and backward; the input needs no gradient, which is
hard on the masked layer: the plain one then has two matrix products to do instead of three. "With
Adagrad" adds torch.optim.Adagrad as it comes by default, which has twice as many parameters to move for
the masked layer (four times as many with hyper="learned").

On CUDA the first times are those of eager mode, mostly Python's; then the same step is captured in a CUDA
graph and replayed, which is the device's own time. What cannot be captured says why on stderr.

Peak memory is what forward and backward hold at their peak beyond the plain layer's at its own, the
parameters included, in tensors of the weight's size: from torch's allocator, by
torch.cuda.max_memory_allocated or, on the CPU, by the profiler's record of every allocation. It is taken
with an input that needs a gradient, as inside a network.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reporting import Cell, Report, Table, parser
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dropconnectpp as dcpp
from dropconnectpp.estimators import BBVI

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell that it starts and stops

ESTIMATORS: dict[str, dict[str, Any]] = {
    "bbvi, running": {"estimator": BBVI()},
    "bbvi, mean-network": {"estimator": BBVI(baseline="mean-network")},
    "bbvi, leave-one-out of 2": {"estimator": BBVI(baseline="leave-one-out"), "num_samples": 2},
    "bbvi, per synapse": {"estimator": BBVI(per_synapse=True)},
    "straight-through": {"estimator": "straight-through"},
    "local": {"estimator": "local"},
    "concrete": {"estimator": "concrete"},
    "disarm": {"estimator": "disarm"},
    "eq16": {"estimator": "eq16"},
}


def _cases() -> dict[str, dict[str, Any]]:
    """Every estimator with every way to hold the hyper-posterior and to draw masks."""
    cases = {}
    for (title, options), mask, hyper in itertools.product(
        ESTIMATORS.items(), ("batch", "example"), ("optimal", "learned")
    ):
        # Eq. (16) has no optimal hyper-posterior, and local reparameterisation no masks.
        if (title, hyper) != ("eq16", "optimal") and (title, mask) != ("local", "example"):
            words = [title, *(["learned"] if hyper == "learned" else []), *(["mask per example"][: mask == "example"])]
            cases[", ".join(words)] = {**options, "mask": mask, "hyper": hyper}
    return cases


CASES = _cases()
USUAL = [
    *(title for title in ESTIMATORS if title != "eq16"),
    *("bbvi, running, learned", "straight-through, learned", "eq16, learned"),
    *("bbvi, running, mask per example", "straight-through, mask per example"),
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    inputs: int
    outputs: int
    batch: int
    repeats: int
    seconds: float
    tf32: bool
    cases: tuple[str, ...]


class Bench:
    """One layer, plain or masked, with its data and optimiser."""

    def __init__(self, options: dict[str, Any] | None, args: Settings) -> None:
        device = torch.device(args.device)
        torch.manual_seed(0)
        layer: nn.Module = nn.Linear(args.inputs, args.outputs, device=device)
        samples = 1
        if options is not None:
            samples = options.get("num_samples", 1)
            layer = dcpp.convert(layer, **{key: value for key, value in options.items() if key != "num_samples"})
        self.model = nn.Sequential(layer)
        # A check for finite values would wait for the GPU at every step.
        check = device.type == "cpu"
        self.elbo = dcpp.ELBO(self.model, dcpp.categorical, 50_000, num_samples=samples, check_finite=check)
        self.masked = options is not None
        self.x = torch.randn(args.batch, args.inputs, device=device)
        self.y = torch.randint(0, args.outputs, (args.batch,), device=device)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.01)

    def loss(self) -> Tensor:
        if self.masked:
            return self.elbo(self.x, target=self.y).loss
        return F.cross_entropy(self.model(self.x), self.y)

    def passes(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.passes()
        self.optimizer.step()


def synchronise(device: torch.device) -> None:
    """Wait for the device, if it needs waiting for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(plain: Callable[[], None], ours: Callable[[], None], args: Settings) -> tuple[float, float]:
    """Median seconds of each, taking turns."""
    device = torch.device(args.device)
    times: dict[int, list[float]] = {0: [], 1: []}
    for call in (plain, ours):
        call()
    begin = time.perf_counter()
    for turn in range(args.repeats):
        if turn >= 1 and time.perf_counter() - begin > args.seconds:
            break
        for which, call in enumerate((plain, ours)):
            synchronise(device)
            start = time.perf_counter()
            call()
            synchronise(device)
            times[which].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def graphed(bench: Bench, step: Callable[[], None]) -> Callable[[], None]:
    """A step of ``bench`` as one CUDA graph, replayed ten times a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    bench.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        for _ in range(10):
            graph.replay()

    return replay


def compare_graphs(title: str, plain: Bench, ours: Bench, args: Settings) -> list[Cell]:
    """Microseconds of the plain step and of ours without the optimiser, their ratio, and that with it."""
    cells: list[Cell] = []
    for name in ("passes", "step"):
        try:
            times = compare(graphed(plain, getattr(plain, name)), graphed(ours, getattr(ours, name)), args)
            cells += [1e5 * times[0], 1e5 * times[1], times[1] / times[0]]
        except RuntimeError as error:
            torch.cuda.synchronize()
            print(f"{title}: not captured in a CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
            cells += [None, None, None]
    return [*cells[:3], cells[5]]


def peak_bytes(bench: Bench, device: torch.device) -> int:
    """Parameters, gradients and everything else that a third step holds at its peak."""
    bench.x.requires_grad_()
    for _ in range(2):
        bench.passes()
    bench.optimizer.zero_grad()
    bench.x.grad = None
    gc.collect()
    parameters = sum(p.numel() * p.element_size() for p in bench.model.parameters())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        bench.passes()
        return parameters + torch.cuda.max_memory_allocated(device) - base
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        bench.passes()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]  # below zero where memory is freed
    return parameters + max(itertools.accumulate(sizes))


def row(title: str, options: dict[str, Any], args: Settings) -> list[Cell]:
    """One kind of layer against the plain one."""
    device = torch.device(args.device)
    plain, ours = Bench(None, args), Bench(options, args)
    passes = compare(plain.passes, ours.passes, args)
    step = compare(plain.step, ours.step, args)
    cells: list[Cell] = [title, 1e3 * passes[0], 1e3 * passes[1], passes[1] / passes[0], step[1] / step[0]]
    if device.type == "cuda":
        cells += compare_graphs(title, plain, ours, args)
    weight = args.inputs * args.outputs * 4
    difference = peak_bytes(Bench(options, args), device) - peak_bytes(Bench(None, args), device)
    return [*cells, difference / weight]


def inference(args: Settings) -> list[list[Cell]]:
    """A forward pass without gradient, unfolded and folded."""
    plain, ours = Bench(None, args).model.eval(), Bench({}, args).model.eval()
    dense = dcpp.to_dense(ours)
    x = Bench(None, args).x
    rows: list[list[Cell]] = []
    for title, model in (("unfolded, Eq. (19)", ours), ("folded by to_dense", dense)):
        with torch.no_grad():
            times = compare(lambda: repeat(plain, x), lambda m=model: repeat(m, x), args)  # type: ignore[misc]
        rows.append([title, 1e2 * times[0], 1e2 * times[1], times[1] / times[0]])
    return rows


def repeat(model: nn.Module, x: Tensor) -> None:
    """Ten passes: one is too short to time."""
    for _ in range(10):
        model(x)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--inputs", type=int, default=4096, help="of the layer (default: 4096)")
    options.add_argument("--outputs", type=int, default=512, help="of the layer (default: 512)")
    options.add_argument("--batch", type=int, default=128, help="examples in a minibatch (default: 128)")
    options.add_argument("--tf32", action="store_true", help="let CUDA's matrix products use TF32")
    options.add_argument("--repeats", type=int, default=25, help="turns each takes (default: 25)")
    options.add_argument("--seconds", type=float, default=4.0, help="stop a comparison after this (default: 4)")
    options.add_argument("--cases", nargs="*", choices=list(CASES), metavar="CASE", default=USUAL, help="which rows")
    options.add_argument("--every", action="store_true", help=f"every row: {'; '.join(CASES)}")
    given = vars(options.parse_args())
    out = given.pop("out")
    cases = list(CASES) if given.pop("every") else given["cases"]
    args = Settings(**{**given, "cases": tuple(cases)})
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    precision = f"float32 with{'' if args.tf32 else 'out'} TF32" if device.type == "cuda" else "float32"
    shape = f"({args.inputs}, {args.outputs}), batch {args.batch}, {precision}"
    report = Report("Cost of a DropConnect++ layer", device, args)
    columns = ["layer", "nn.Linear ms", "ours ms", "ratio", "ratio with Adagrad"]
    if device.type == "cuda":
        columns += ["graph, nn.Linear µs", "graph, ours µs", "graph ratio", "graph ratio with Adagrad"]
    rows = []
    for title in args.cases:
        rows.append(row(title, CASES[title], args))
        print(f"[{len(rows)}/{len(args.cases)}] {title}", file=sys.stderr, flush=True)
    report.add(Table(f"Training step, {shape}", [*columns, "memory beyond plain, weights"], rows))
    report.add(Table(f"Inference, {shape}", ["layer", "nn.Linear ms", "ours ms", "ratio"], inference(args)))
    report.write(out)


if __name__ == "__main__":
    main()
