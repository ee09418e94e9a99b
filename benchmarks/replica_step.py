"""Microseconds per replica and training step of a stack of replicas, against one replica in eager PyTorch.

One step is everything: gathering and standardising the batch, forward, masks, backward, Adagrad. Pictures are
random: time does not depend on them. The eager network is an ordinary `nn.Module` with `torch.optim.Adagrad`,
fed from the same device-resident pictures, measured in the same run. Median of the repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from reporting import Cell, Report, Table, parser
from torch import nn

from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split
from dropconnectpp.lab.data.normalisation import standardise
from dropconnectpp.lab.protocol import Architecture, Method, Protocol, Training
from dropconnectpp.lab.timing import median_seconds
from dropconnectpp.lab.training import Stack, Unit

METHODS = {
    "none": Method(kind="none"),
    "dropout": Method(kind="dropout", rate=0.5),
    "dropconnect": Method(kind="dropconnect", rate=0.5),
    "dropconnect++ (optimal)": Method(hyper="optimal"),
    "dropconnect++ (learned)": Method(),
    "straight-through": Method(estimator="straight-through", hyper="optimal"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    replicas: int
    growth: tuple[int, ...]
    hidden: tuple[int, ...]
    classes: tuple[int, ...]
    batch: int
    steps: int
    repeats: int
    precision: str


def pictures(classes: int) -> Dataset:
    """Random pictures of CIFAR's shape."""
    random = np.random.default_rng(0)

    def split(count: int) -> Split:
        return Split(random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), random.integers(0, classes, count))

    return Dataset(
        "random", split(8192), split(128), tuple(map(str, range(classes))), "", "", Provenance("random", True)
    )


def stack_step(settings: Settings, method: Method, replicas: int, hidden: int = 64, classes: int = 10) -> float:
    """Microseconds per replica and step."""
    device = torch.device(settings.device)
    protocol = Protocol(
        method=method,
        architecture=Architecture(hidden=hidden),
        training=Training(step_size=0.005, batch_size=settings.batch),
        precision=settings.precision,  # type: ignore[arg-type]
    )
    stack = Stack([Unit(protocol, replica) for replica in range(replicas)], pictures(classes), device)
    stack.batches = stack.batches[: settings.steps]
    stack.train_epoch()
    stack.train_epoch()
    return 1e6 * median_seconds(stack.train_epoch, device, settings.repeats) / (len(stack.batches) * replicas)


def eager_step(settings: Settings) -> float:
    """Microseconds per step of an ordinary module without regularisation."""
    device = torch.device(settings.device)
    dataset = pictures(10)
    images, labels = (torch.from_numpy(a).to(device) for a in (dataset.train.images, dataset.train.labels))
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.005)
    order = torch.randperm(len(images), device=device).split(settings.batch)[: settings.steps]

    def epoch() -> None:
        for rows in order:
            loss = nn.functional.cross_entropy(model(standardise(images[rows])), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    epoch()
    return 1e6 * median_seconds(epoch, device, settings.repeats) / len(order)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--replicas", type=int, help="default: 50 on a GPU, 4 on a CPU")
    options.add_argument("--growth", type=int, nargs="*", help="numbers of replicas to compare")
    options.add_argument("--hidden", type=int, nargs="*", default=[64, 512])
    options.add_argument("--classes", type=int, nargs="*", default=[10, 100])
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--steps", type=int, help="steps timed together; default: 20 on a GPU, 3 on a CPU")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--precision", default="mixed", choices=("mixed", "float32", "float64"))
    given = options.parse_args()
    gpu = given.device == "cuda"
    settings = Settings(
        device=given.device,
        replicas=given.replicas or (50 if gpu else 4),
        growth=tuple(given.growth if given.growth is not None else ((1, 4, 16, 50, 100) if gpu else (1, 2, 4, 8))),
        hidden=tuple(given.hidden),
        classes=tuple(given.classes),
        batch=given.batch,
        steps=given.steps or (20 if gpu else 3),
        repeats=given.repeats,
        precision=given.precision,
    )
    report = Report("A training step of a stack of replicas", torch.device(settings.device), settings)
    eager = eager_step(settings)
    rows: list[list[Cell]] = [["one replica, eager PyTorch, none", 1, eager, 1.0, None]]
    plain = 0.0
    for name, method in METHODS.items():
        taken = stack_step(settings, method, settings.replicas)
        plain = plain or taken
        rows.append([name, settings.replicas, taken, eager / taken, taken / plain])
    columns = ["method", "replicas", "us per replica-step", "times faster than eager", "ratio to none"]
    report.add(Table("Methods", columns, rows))
    method = replace(METHODS["dropconnect++ (optimal)"])
    growth = [
        [f"{r} replicas", stack_step(settings, METHODS["none"], r), stack_step(settings, method, r)]
        for r in settings.growth
    ]
    report.add(Table("Number of replicas", ["stack", "none, us", "dropconnect++ (optimal), us"], growth))
    sizes = [
        [f"{hidden} units, {classes} classes"]
        + [stack_step(settings, chosen, settings.replicas, hidden, classes) for chosen in (METHODS["none"], method)]
        for hidden in settings.hidden
        for classes in settings.classes
    ]
    report.add(Table("Width and classes", ["dense layer", "none, us", "dropconnect++ (optimal), us"], sizes))
    report.write(given.out)


if __name__ == "__main__":
    main()
