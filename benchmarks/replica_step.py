"""Time a training step of a stack of replicas, per replica, against the ways PyTorch has to train one network.

    python benchmarks/replica_step.py --device cuda --growth --skip profile

One step is everything: gathering and standardising the batch, forward, masks, backward, Adagrad. Images are
random: time does not depend on them. All is measured in one run; medians of the repeats.

eager            one replica as a user has it: an `nn.Module` with `torch.optim.Adagrad`, converted by
                 `dropconnectpp.convert` and trained by `dropconnectpp.ELBO` for DropConnect++; float32, with TF32
                 products on a GPU; fed from images that lie on the device
CUDA graph       the same step, captured once and replayed
compiled groups  as many replicas as ours, as grouped convolutions in bf16 with channels last: forward and backward by
                 `torch.compile`, Adagrad too, in a CUDA graph where that works; without regularisation only
ours             the laboratory's `Stack`
share of limit   the time that the arithmetic alone would take at --peak, over ours

A comparator that fails costs its own cell only, and the note says why. What needs a GPU is "-" elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from reporting import Cell, Report, Table, parser
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dropconnectpp as dcpp
from dropconnectpp.lab.config.method import PAPER_METHODS, Method
from dropconnectpp.lab.config.protocol import Architecture, Protocol, Training, paper
from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split
from dropconnectpp.lab.data.normalisation import standardise
from dropconnectpp.lab.replicas.network import Shape, Unit, start
from dropconnectpp.lab.replicas.stack import EAGER_STEPS, Stack
from dropconnectpp.lab.replicas.timing import median_seconds

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell that it starts and stops

OPTIMAL, LEARNED = "dropconnect++ (optimal)", "dropconnect++ (learned)"
METHODS = {
    "none": Method(kind="none"),
    "dropout": Method(kind="dropout", rate=0.5),
    "dropconnect": Method(kind="dropconnect", rate=0.5),
    OPTIMAL: Method(hyper="optimal"),
    LEARNED: Method(),
    "straight-through": Method(estimator="straight-through", hyper="optimal"),
    "local": Method(estimator="local", hyper="optimal"),
}
IMAGES = 8192
STEP_SIZE, EPSILON = 0.005, 1e-6
TRAINING_SETS = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257, "norb": 24_300}
"""Training examples of the paper's sets."""
REPEATS_OF_THE_PAPER = 50
PARTS = ("eager", "graph", "compiled", "profile")
SHOWN = 12
"""Kernels named in the tables of where the time goes."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    replicas: int
    growth: tuple[int, ...]
    hidden: tuple[int, ...]
    methods: tuple[str, ...]
    classes: int
    batch: int
    steps: int
    repeats: int
    precision: str
    peak: float
    skip: tuple[str, ...]

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)

    def shape(self, hidden: int) -> Shape:
        """The network that is timed."""
        return Shape(Architecture(hidden=hidden), 3, 32, self.classes)

    def median(self, run: Callable[[], object], steps: int) -> float:
        """Microseconds of one of the steps that a call takes."""
        return 1e6 * median_seconds(run, self.where, self.repeats) / steps


@dataclass
class Figures:
    """Microseconds by comparator, method and width; None where there is none, with a note that says why."""

    found: dict[tuple[str, str, int], float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: tuple[str, str, int]) -> float | None:
        return self.found.get(key)

    def measure(self, comparator: str, method: str, hidden: int, run: Callable[[], float]) -> None:
        """Keep what ``run`` gives; a failure is a note."""
        name = f"{comparator}, {method}, {hidden} units"
        try:
            self.found[comparator, method, hidden] = taken = run()
            print(f"{name}: {taken:.4g} us", file=sys.stderr, flush=True)
        except Exception as error:
            self.found[comparator, method, hidden] = None
            self.note(f"{name}: {reason(error)}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # a graph's memory is its own

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """An error in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0]}"[:200]


@cache
def random_images(classes: int) -> Dataset:
    """Random images of CIFAR's shape."""
    random = np.random.default_rng(0)

    def split(count: int) -> Split:
        return Split(random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), random.integers(0, classes, count))

    return Dataset(
        "random", split(IMAGES), split(128), tuple(map(str, range(classes))), "", "", Provenance("random", True)
    )


# ---------------------------------------------------------------------------------------------- ours


def warm_stack(settings: Settings, method: Method, replicas: int, hidden: int) -> Stack:
    """A stack that has trained on a few batches and, on a GPU, captured its step."""
    protocol = Protocol(
        method=method,
        architecture=Architecture(hidden=hidden),
        training=Training(step_size=STEP_SIZE, batch_size=settings.batch),
        precision=settings.precision,  # type: ignore[arg-type]
    )
    stack = Stack(
        [Unit(protocol, replica) for replica in range(replicas)], random_images(settings.classes), settings.where
    )
    stack.batches = stack.batches[: settings.steps]
    stack.train_epoch()
    while settings.gpu and int(stack.step) <= EAGER_STEPS:
        stack.train_epoch()
    return stack


def stack_step(settings: Settings, method: Method, replicas: int, hidden: int) -> float:
    """Microseconds per replica and step."""
    stack = warm_stack(settings, method, replicas, hidden)
    return settings.median(stack.train_batches, len(stack.batches) * replicas)


# ----------------------------------------------------------------------------- one replica in PyTorch


def network(method: Method, shape: Shape) -> nn.Module:
    """The network as a user would have it."""
    architecture, channels = shape.architecture, shape.channels
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (maps, pooled) in enumerate(zip(architecture.maps, architecture.pooled, strict=True)):
        layers[f"conv{number}"] = nn.Conv2d(channels, maps, architecture.filter_size, padding=architecture.padding)
        if pooled:
            layers[f"pool{number}"] = nn.MaxPool2d(
                architecture.pool_size, architecture.pool_stride, ceil_mode=architecture.ceil_mode
            )
        layers[f"relu{number}"] = nn.ReLU()
        channels = maps
    units, inputs = shape.dense
    layers |= {"flatten": nn.Flatten(), "dense": nn.Linear(inputs, units), "relu": nn.ReLU()}
    if method.kind == "dropout":
        layers["dropout"] = nn.Dropout(method.rate or 0.0)
    layers["output"] = nn.Linear(units, shape.classes)
    model: nn.Module = nn.Sequential(layers)
    if method.kind == "dropconnect":
        model = dcpp.convert(model, include=["dense"], kind="dropconnect", keep_probability=1.0 - (method.rate or 0.0))
    elif method.kind == "dropconnect++":
        model = dcpp.convert(model, include=["dense"], estimator=method.estimator, hyper=method.hyper)
    return model


class One:
    """One replica, its images and its optimiser. Batches follow each other by a counter on the device."""

    def __init__(self, settings: Settings, method: Method, hidden: int) -> None:
        torch.manual_seed(0)
        dataset, device = random_images(settings.classes), settings.where
        self.images, self.labels = (
            torch.from_numpy(a).to(device) for a in (dataset.train.images, dataset.train.labels)
        )
        batches = torch.randperm(IMAGES).split(settings.batch)[: settings.steps]
        self.order = torch.stack(batches).to(device)  # (steps, B)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.model = network(method, settings.shape(hidden)).to(device)
        # A check for finite values would wait for the GPU at every step.
        self.elbo = dcpp.ELBO(self.model, dcpp.categorical, 50_000, check_finite=False)
        self.learned = method.kind == "dropconnect++"
        self.optimizer = torch.optim.Adagrad(dcpp.parameter_groups(self.model, lr=STEP_SIZE), eps=EPSILON)

    def step(self) -> None:
        rows = self.order[self.position].flatten()
        x, y = standardise(self.images[rows]), self.labels[rows]
        self.optimizer.zero_grad()
        loss = self.elbo(x, target=y).loss if self.learned else F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.position.add_(1).remainder_(len(self.order))


def eager_step(settings: Settings, method: Method, hidden: int) -> float:
    """Microseconds per step of one replica, launched by Python."""
    one = One(settings, method, hidden)
    one.step()
    return settings.median(repeated(one.step, len(one.order)), len(one.order))


def graph_step(settings: Settings, method: Method, hidden: int) -> float:
    """Microseconds per step of one replica, replayed."""
    one = One(settings, method, hidden)
    graph = captured(one.step)
    return settings.median(repeated(graph.replay, len(one.order)), len(one.order))


def repeated(run: Callable[[], None], times: int) -> Callable[[], None]:
    """So many calls as one: a single step is too short to time."""

    def calls() -> None:
        for _ in range(times):
            run()

    return calls


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as a CUDA graph, after a few outside it on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except Exception:
        torch.cuda.synchronize()
        raise
    graph.replay()
    return graph


# ----------------------------------------------------------------- many replicas by torch.compile


class Groups:
    """R replicas as grouped convolutions in plain torch, forward and backward and Adagrad compiled."""

    def __init__(self, settings: Settings, hidden: int) -> None:
        torch._dynamo.reset()
        dataset, device = random_images(settings.classes), settings.where
        self.images, self.labels = (
            torch.from_numpy(a).to(device) for a in (dataset.train.images, dataset.train.labels)
        )
        count = settings.replicas
        orders = torch.stack([torch.randperm(IMAGES)[: settings.steps * settings.batch] for _ in range(count)])
        self.order = orders.view(count, settings.steps, settings.batch).transpose(0, 1).contiguous().to(device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        shape = settings.shape(hidden)
        self.architecture = shape.architecture
        self.parameters = start(shape, 0, torch.arange(count, device=device), torch.float32)
        for value in self.parameters.values():
            value.requires_grad_()
        self.sums = [torch.zeros_like(value) for value in self.parameters.values()]
        self.compiled_loss = torch.compile(self.loss, dynamic=False)
        self.compiled_update = torch.compile(adagrad, dynamic=False)

    def loss(self, images: Tensor, labels: Tensor, rows: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The sum over replicas of the mean loss on their batches: rows (R, B) of the images and labels."""
        replicas = len(rows)
        low = {name: value.to(torch.bfloat16) for name, value in parameters.items()}
        x = standardise(images[rows]).to(torch.bfloat16).transpose(0, 1).flatten(1, 2)
        x = x.contiguous(memory_format=torch.channels_last)
        for layer, pooled in enumerate(self.architecture.pooled):
            weight, bias = low[f"conv{layer}.weight"], low[f"conv{layer}.bias"]
            filters = weight.flatten(0, 1).contiguous(memory_format=torch.channels_last)
            x = F.conv2d(x, filters, bias.flatten(), padding=self.architecture.padding, groups=replicas)
            if pooled:
                size, stride = self.architecture.pool_size, self.architecture.pool_stride
                x = F.max_pool2d(x, size, stride, ceil_mode=self.architecture.ceil_mode)
            x = torch.relu(x)
        flat = x.unflatten(1, (replicas, -1)).transpose(0, 1).flatten(2)
        units = torch.relu(dense(flat, low["dense.weight"], low["dense.bias"]))
        logits = dense(units, low["output.weight"], low["output.bias"]).float()
        return F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten()) * replicas

    def step(self) -> None:
        rows = self.order[self.position].squeeze(0)
        values = list(self.parameters.values())
        loss = self.compiled_loss(self.images, self.labels, rows, self.parameters)
        gradients = torch.autograd.grad(loss, values)
        self.compiled_update([value.detach() for value in values], list(gradients), self.sums)
        self.position.add_(1).remainder_(len(self.order))


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (R, B, I), weight (R, O, I), bias (R, O) -> (R, B, O)."""
    return torch.bmm(x, weight.transpose(1, 2)) + bias.unsqueeze(1)


def adagrad(values: list[Tensor], gradients: list[Tensor], sums: list[Tensor]) -> None:
    """p -= step g / sqrt(sum g^2 + epsilon)."""
    torch._foreach_addcmul_(sums, gradients, gradients)
    roots = torch._foreach_sqrt(torch._foreach_add(sums, EPSILON))
    torch._foreach_addcdiv_(values, gradients, roots, value=-STEP_SIZE)


def compiled_step(settings: Settings, hidden: int, figures: Figures) -> float:
    """Microseconds per replica and step; without a CUDA graph where it cannot be captured."""
    groups = Groups(settings, hidden)
    groups.step()
    steps = len(groups.order) * settings.replicas
    if settings.gpu:
        try:
            graph = captured(groups.step)
            return settings.median(repeated(graph.replay, len(groups.order)), steps)
        except Exception as error:
            figures.note(f"compiled groups, {hidden} units: timed without a CUDA graph ({reason(error)})")
    return settings.median(repeated(groups.step, len(groups.order)), steps)


# ------------------------------------------------------------------------------------- limit and projection


def step_operations(shape: Shape, batch: int) -> int:
    """Additions and multiplications of one replica's step: forward, input gradients but the first layer's, weights'."""
    architecture, channels, side = shape.architecture, shape.channels, shape.side
    layers = []
    for maps, after in zip(architecture.maps, architecture.sides(side), strict=True):
        places = (side + 2 * architecture.padding - architecture.filter_size + 1) ** 2
        layers.append(places * maps * channels * architecture.filter_size**2)
        channels, side = maps, after
    layers += [math.prod(shape.dense), shape.architecture.hidden * shape.classes]
    return 2 * batch * (3 * sum(layers) - layers[0])


def projection(figures: Figures, batch: int) -> Table:
    """Hours of the whole of Table 1, from what a replica-step takes."""
    rows: list[list[Cell]] = []
    plans = [("ours", LEARNED), ("ours", OPTIMAL), ("eager", LEARNED)]
    for data, examples in TRAINING_SETS.items():
        protocol = paper(data, "none")
        hidden, training = protocol.architecture.hidden, protocol.training
        whole = (
            examples // training.batch_size if training.last_batch == "drop" else -(-examples // training.batch_size)
        )
        steps = whole * training.epochs * REPEATS_OF_THE_PAPER
        hours: list[Cell] = []
        for comparator, last in plans:
            names = [last if name == "dropconnect++" else name for name in PAPER_METHODS]
            taken = [figures[comparator, name, hidden] for name in names]
            known = batch == training.batch_size and None not in taken
            hours.append(steps * sum(t for t in taken if t is not None) / 3.6e9 if known else None)
        rows.append([data, hidden, examples, len(PAPER_METHODS) * steps / 1e6, *hours])

    def total(column: int) -> float | None:
        cells = [row[column] for row in rows]
        return None if None in cells else math.fsum(cell for cell in cells if isinstance(cell, float))

    rows.append(["all", None, None, total(3), total(4), total(5), total(6)])
    columns = ["data", "units", "examples", "million replica-steps", "ours, learned, h", "ours, optimal, h", "eager, h"]
    note = (
        "None, Dropout, DropConnect and DropConnect++, 50 repeats of 100 epochs each, training alone; DropConnect++ "
        "with learned hyper-parameters as in the paper, or at their optimum. Every set counts as CIFAR-10 images "
        "with 10 classes at its own width: CIFAR-100's output layer is larger, and so are small NORB's images."
    )
    return Table("The whole of Table 1, projected", columns, rows, note)


# ---------------------------------------------------------------------------------- where the time goes


def short(name: str) -> str:
    """A kernel's name without its types and arguments, in at most 64 characters.

    >>> short("void at::native::(anonymous namespace)::fill<4, float>(int, float)")
    'fill<4, float>'
    """
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "<unnamed>::"):
        name = name.replace(noise, "")
    if name.endswith(")"):
        depth = 0
        for place in range(len(name) - 1, -1, -1):
            depth += {")": 1, "(": -1}.get(name[place], 0)
            if depth == 0:
                name = name[:place] or name
                break
    name = re.sub(r"\s+", " ", name.replace("|", "/"))
    return name if len(name) <= 64 else name[:61] + "..."


def kernel_times(settings: Settings, method: Method, hidden: int) -> list[list[Cell]]:
    """The longest kernels of a step, the rest of them, and the time in which none runs; us per replica-step."""
    stack = warm_stack(settings, method, settings.replicas, hidden)
    steps = len(stack.batches) * settings.replicas
    whole = settings.median(stack.train_batches, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        stack.train_batches()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in recorded.key_averages():
        if event.self_device_time_total > 0 and not event.key.startswith("Activity Buffer"):
            times[short(event.key)] += event.self_device_time_total / steps
            counts[short(event.key)] += event.count
    ranked = sorted(times, key=times.__getitem__, reverse=True)
    batches = len(stack.batches)
    rows: list[list[Cell]] = [
        [name, counts[name] / batches, times[name], times[name] / whole] for name in ranked[:SHOWN]
    ]
    if ranked[SHOWN:]:
        rest = sum(times[name] for name in ranked[SHOWN:])
        launches = sum(counts[name] for name in ranked[SHOWN:]) / batches
        rows.append([f"{len(ranked) - SHOWN} other kernels", launches, rest, rest / whole])
    gap = whole - sum(times.values())
    rows.append(["between kernels", None, gap, gap / whole])
    rows.append(["the whole step", sum(counts.values()) / batches, whole, 1.0])
    return rows


def where_the_time_goes(settings: Settings, name: str, hidden: int) -> Table:
    """A table by kernels, or what kept it from being made."""
    columns = ["kernel", "launches per step", "us per replica-step", "share"]
    title, note = f"Where the time goes: {name}, {hidden} units", ""
    rows: list[list[Cell]] = [["-", None, None, None]]
    if not settings.gpu:
        note = "Kernels are recorded on a GPU only."
    else:
        try:
            rows = kernel_times(settings, METHODS[name], hidden)
        except Exception as error:
            note = reason(error)
    return Table(title, columns, rows, note)


# ----------------------------------------------------------------------------------------------- tables


def compare(settings: Settings, figures: Figures) -> None:
    """Ours is known by now: all comparators, those first that can do least harm to what follows."""
    cases = list(itertools.product(settings.hidden, settings.methods))
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if "eager" not in settings.skip:
        for hidden, name in cases:
            figures.measure("eager", name, hidden, partial(eager_step, settings, METHODS[name], hidden))
    if settings.gpu and "graph" not in settings.skip:
        for hidden, name in cases:
            figures.measure("CUDA graph", name, hidden, partial(graph_step, settings, METHODS[name], hidden))
    if settings.gpu and "compiled" not in settings.skip:
        for hidden in settings.hidden:
            figures.measure("compiled groups", "none", hidden, partial(compiled_step, settings, hidden, figures))
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def methods_table(settings: Settings, figures: Figures, hidden: int) -> Table:
    """Every method at one width."""
    operations = step_operations(settings.shape(hidden), settings.batch)
    limit = operations / (settings.peak * 1e6) if settings.gpu else None  # peak is 1e12 a second
    rows: list[list[Cell]] = []
    for name in settings.methods:
        eager, graph, groups, ours = (
            figures[comparator, name, hidden] for comparator in ("eager", "CUDA graph", "compiled groups", "ours")
        )
        plain = figures["ours", "none", hidden]
        faster = [None if ours is None or other is None else other / ours for other in (eager, graph, groups)]
        share = None if ours is None or limit is None else limit / ours
        ratio = None if ours is None or plain is None else ours / plain
        rows.append([name, eager, graph, groups, ours, *faster, ratio, share])
    columns = ["method", "eager, us", "CUDA graph, us", "compiled groups, us", "ours, us"]
    columns += ["eager / ours", "graph / ours", "compiled / ours", "ours / none", "share of limit"]
    notes = [
        f"us per replica-step, batch {settings.batch}; compiled groups and ours: {settings.replicas} replicas at once. "
        f"One replica-step is {operations / 1e9:.3g} GFLOP"
        + (f": {limit:.3g} us at {settings.peak:g} TFLOP/s." if limit is not None else ".")
    ]
    if settings.gpu and "compiled" not in settings.skip:
        notes.append("Compiled groups were measured without regularisation only.")
    if not settings.gpu:
        notes.append("CUDA graphs and compiled groups are measured on a GPU only.")
    notes += [note for note in figures.notes if f", {hidden} units" in note]
    return Table(f"Methods, {hidden} units", columns, rows, "\n".join(f"- {note}" for note in notes))


def growth_table(settings: Settings, figures: Figures, hidden: int) -> Table:
    """Numbers of replicas, none and DropConnect++."""
    rows: list[list[Cell]] = []
    for count in settings.growth:
        for name in ("none", OPTIMAL):
            if count == settings.replicas and name in settings.methods:
                figures.found[f"{count} replicas", name, hidden] = figures["ours", name, hidden]
            else:
                run = partial(stack_step, settings, METHODS[name], count, hidden)
                figures.measure(f"{count} replicas", name, hidden, run)
        rows.append([f"{count} replicas", *(figures[f"{count} replicas", name, hidden] for name in ("none", OPTIMAL))])
    return Table("Number of replicas", ["stack", "none, us", f"{OPTIMAL}, us"], rows, f"{hidden} units.")


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--replicas", type=int, help="networks in a stack (default: 50 on a GPU, 4 on a CPU)")
    options.add_argument(
        "--growth", type=int, nargs="*", help="numbers of replicas to compare; none given: no such table"
    )
    options.add_argument(
        "--hidden", type=int, nargs="+", default=[64, 512], help="units of the dense layer (default: 64 512)"
    )
    options.add_argument(
        "--methods", nargs="+", choices=list(METHODS), metavar="METHOD", default=list(METHODS),
        help=f"which to time (default: all: {', '.join(METHODS)})",
    )  # fmt: skip
    options.add_argument("--classes", type=int, default=10, help="of the random images (default: 10)")
    options.add_argument("--batch", type=int, default=128, help="images in a minibatch (default: 128)")
    options.add_argument("--steps", type=int, help="steps timed together; default: 20 on a GPU, 3 on a CPU")
    options.add_argument("--repeats", type=int, default=3, help="whose median is shown (default: 3)")
    options.add_argument(
        "--precision", default="mixed", choices=("mixed", "float32", "float64"), help="of ours (default: mixed)"
    )
    options.add_argument("--peak", type=float, default=300.0, help="TFLOP/s of the arithmetic limit (default: 300)")
    options.add_argument("--skip", nargs="*", choices=PARTS, default=[], help="what to leave out")
    given = options.parse_args()
    gpu = given.device == "cuda"
    settings = Settings(
        device=given.device,
        replicas=given.replicas or (50 if gpu else 4),
        growth=tuple(given.growth if given.growth is not None else ((1, 4, 16, 50, 100) if gpu else (1, 2, 4, 8))),
        hidden=tuple(given.hidden),
        methods=tuple(given.methods),
        classes=given.classes,
        batch=given.batch,
        steps=min(given.steps or (20 if gpu else 3), IMAGES // given.batch),
        repeats=given.repeats,
        precision=given.precision,
        peak=given.peak,
        skip=tuple(given.skip),
    )
    report = Report("A training step of a stack of replicas", settings.where, settings)
    figures = Figures()
    for hidden, name in itertools.product(settings.hidden, settings.methods):
        run = partial(stack_step, settings, METHODS[name], settings.replicas, hidden)
        figures.measure("ours", name, hidden, run)
    if settings.growth:
        report.add(growth_table(settings, figures, settings.hidden[0]))
    compare(settings, figures)
    for hidden in settings.hidden:
        report.add(methods_table(settings, figures, hidden))
    report.add(projection(figures, settings.batch))
    # Last: a profiler leaves its traces on every later launch.
    if "profile" not in settings.skip:
        for hidden, name in itertools.product(settings.hidden, ("none", OPTIMAL)):
            report.add(where_the_time_goes(settings, name, hidden))
    report.write(given.out)


if __name__ == "__main__":
    main()
