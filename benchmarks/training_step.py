"""What DropConnectPPLinear costs against nn.Linear: time of a training step, of inference, and memory.

Every ratio comes from one run in which the two take turns, so that a noisy machine slows both. A step
is forward, cross-entropy or ELBO, and backward; "with Adagrad" adds torch's default optimiser, which
has twice as many parameters to move for the masked layer. On CUDA a step is also captured in a graph,
which shows the device's time without Python's. Peak memory is what a step holds beyond the plain
layer's step at its own peak, in tensors of the weight's size (on the CPU by counting live tensors).
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reporting import Cell, Report, Table, parser
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dropconnectpp as dcpp
from dropconnectpp.estimators import BBVI

CASES: dict[str, dict[str, Any]] = {
    "bbvi, running": {},
    "bbvi, mean-network": {"estimator": BBVI(baseline="mean-network")},
    "bbvi, per synapse": {"estimator": BBVI(per_synapse=True)},
    "straight-through": {"estimator": "straight-through"},
    "local": {"estimator": "local"},
    "concrete": {"estimator": "concrete"},
    "disarm": {"estimator": "disarm"},
    "bbvi, learned": {"hyper": "learned"},
    "eq16, learned": {"hyper": "learned", "estimator": "eq16"},
    "bbvi, mask per example": {"mask": "example"},
    "straight-through, mask per example": {"mask": "example", "estimator": "straight-through"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    inputs: int
    outputs: int
    batch: int
    repeats: int
    seconds: float
    cases: tuple[str, ...]


class Bench:
    """One layer, plain or masked, with its data and optimiser."""

    def __init__(self, options: dict[str, Any] | None, args: Settings) -> None:
        device = torch.device(args.device)
        torch.manual_seed(0)
        layer: nn.Module = nn.Linear(args.inputs, args.outputs, device=device)
        if options is not None:
            layer = dcpp.convert(layer, **options)
        self.model = nn.Sequential(layer)
        self.elbo = dcpp.ELBO(self.model, dcpp.categorical, num_data=50_000, check_finite=device.type == "cpu")
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


def graphed(bench: Bench) -> Callable[[], None]:
    """The forward and backward passes as one CUDA graph, replayed ten times a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            bench.passes()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    bench.optimizer.zero_grad()
    with torch.cuda.graph(graph):
        bench.loss().backward()

    def replay() -> None:
        for _ in range(10):
            graph.replay()

    return replay


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors alive at once, by their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.watch(value)
        return result

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, key)

    def release(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def peak_bytes(bench: Bench, device: torch.device) -> int:
    """Parameters, gradients and everything else that a third step holds at its peak."""
    for _ in range(2):
        bench.passes()
    bench.optimizer.zero_grad()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        bench.passes()
        extra = torch.cuda.max_memory_allocated(device) - base
    else:
        with LiveBytes() as live:
            for value in [*bench.elbo.parameters(), *bench.elbo.buffers(), bench.x]:
                live.watch(value)
            base = live.now
            bench.passes()
        extra = live.peak - base
    return extra + sum(p.numel() * p.element_size() for p in bench.model.parameters())


def row(title: str, options: dict[str, Any], args: Settings) -> list[Cell]:
    """One kind of layer against the plain one."""
    device = torch.device(args.device)
    plain, ours = Bench(None, args), Bench(options, args)
    passes = compare(plain.passes, ours.passes, args)
    step = compare(plain.step, ours.step, args)
    cells: list[Cell] = [title, 1e3 * passes[0], 1e3 * passes[1], passes[1] / passes[0], step[1] / step[0]]
    if device.type == "cuda":
        try:
            replay = compare(graphed(plain), graphed(ours), args)
            cells += [1e5 * replay[0], 1e5 * replay[1], replay[1] / replay[0]]
        except RuntimeError as error:
            torch.cuda.synchronize(device)
            print(f"{title}: not captured in a CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
            cells += [None, None, None]
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
    options.add_argument("--inputs", type=int, default=4096)
    options.add_argument("--outputs", type=int, default=512)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--repeats", type=int, default=25, help="turns each takes (default: 25)")
    options.add_argument("--seconds", type=float, default=4.0, help="stop a comparison after this (default: 4)")
    options.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), help="which rows")
    given = vars(options.parse_args())
    out = given.pop("out")
    args = Settings(**{**given, "cases": tuple(given["cases"])})
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = f"({args.inputs}, {args.outputs}), batch {args.batch}, float32 without TF32"
    report = Report("Cost of a DropConnect++ layer", device, args)
    columns = ["layer", "nn.Linear ms", "ours ms", "ratio", "ratio with Adagrad"]
    if device.type == "cuda":
        columns += ["graph, nn.Linear µs", "graph, ours µs", "graph ratio"]
    rows = []
    for title in args.cases:
        rows.append(row(title, CASES[title], args))
        print(f"[{len(rows)}/{len(args.cases)}] {title}", file=sys.stderr, flush=True)
    report.add(Table(f"Training step, {shape}", [*columns, "memory beyond plain, weights"], rows))
    report.add(Table(f"Inference, {shape}", ["layer", "nn.Linear ms", "ours ms", "ratio"], inference(args)))
    report.write(out)


if __name__ == "__main__":
    main()
