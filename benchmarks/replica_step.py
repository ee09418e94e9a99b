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

import itertools
import math
import os
import re
from collections import defaultdict
from functools import partial

import torch
from replica_comparators import compiled_step, eager_step, graph_step
from replica_stacks import IMAGES, LEARNED, METHODS, OPTIMAL, Figures, Settings, reason, stack_step, warm_stack
from reporting import Cell, Report, Table, parser
from torch.profiler import ProfilerActivity, profile

from dropconnectpp.lab.config.method import PAPER_METHODS, Method
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.replicas.network import Shape

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell that it starts and stops

TRAINING_SETS = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 73_257, "norb": 24_300}
"""Training examples of the paper's sets."""
REPEATS_OF_THE_PAPER = 50
PARTS = ("eager", "graph", "compiled", "profile")
SHOWN = 12
"""Kernels named in the tables of where the time goes."""


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
    whole = settings.median(stack.repeat_batches, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        stack.repeat_batches()
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
