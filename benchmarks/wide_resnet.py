"""Measure a sparse modern network by the library alone: WRN-22-2 on CIFAR-10, beside gradual magnitude pruning.

    python benchmarks/wide_resnet.py --data cifar-10-batches-bin --device cuda --rows wrn.jsonl --out wrn.md
    python benchmarks/wide_resnet.py --images 256 --depth 10 --width 1 --epochs 2 --repeats 1 --eager   # a quick look

A wide residual network (Zagoruyko and Komodakis, 2016) is trained with SGD, Nesterov momentum 0.9, weight decay 5e-4
and a step size that falls from 0.1 as half a cosine, on random crops and flips that are made on the device, under
bf16 autocast and `torch.compile`: dense; with the preset "sparse" and a `SparsityPlan`; and with gradual magnitude
pruning (Zhu and Gupta, 2017), one global ranking. Both remove weights of all convolutions and of the last layer; the
share counts these. Methods take turns, seed after seed, in one run. Nothing is chosen on the test images: settings are
those of the options. Published for this network, 250 epochs, 80% sparse: RigL 93.1, gradual pruning 93.2, dense 94.1.

`--data` is the folder of CIFAR-10's binary version; without it images are noise, to see that all runs. With `--rows`
each finished network is a line there, and a run that is started again goes on after the last one.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import Cell, Report, Table, parser
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import dropconnectpp as dcpp

BATCH, CLASSES, SIDE, MARGIN = 128, 10, 32, 4
BEGIN, END, EVERY = 0.1, 0.7, 100
"""Gradual pruning: between which shares of the steps weights are removed, and how many lie between two removals."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    epochs: int
    repeats: int
    sparsity: tuple[float, ...]
    depth: int
    width: int
    noise: float
    fix_at: float
    compiled: bool
    mode: str


# ------------------------------------------------------------------------------------------- the images


@dataclass(frozen=True)
class Images:
    """Training and test images on a device, uint8, and what standardises them."""

    train: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor) -> Images:
        """With each channel's mean and standard deviation over the training images."""
        parts = train.float().transpose(0, 1).flatten(1)
        mean, deviation = (value.view(1, -1, 1, 1) for value in (parts.mean(1), parts.std(1)))
        margins = [MARGIN] * 4
        return cls(pad(train, margins), labels, test, test_labels, mean, deviation)

    def standardise(self, images: Tensor) -> Tensor:
        """As the network sees them; the margin of a crop is black, as it is elsewhere."""
        return ((images.float() - self.mean) / self.deviation).contiguous(memory_format=torch.channels_last)

    def batch(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random crops and flips of some training images."""
        device, count = self.train.device, len(rows)
        top, left = torch.randint(0, 2 * MARGIN + 1, (2, count, 1), generator=generator, device=device)
        flipped = torch.rand((count, 1), generator=generator, device=device) < 0.5
        along = torch.arange(SIDE, device=device)
        columns = left + torch.where(flipped, SIDE - 1 - along, along)
        chosen = self.train[rows.view(-1, 1, 1), :, (top + along).unsqueeze(2), columns.unsqueeze(1)]  # (B, H, W, C)
        return self.standardise(chosen.permute(0, 3, 1, 2)), self.labels[rows]


def read_images(folder: Path | None, count: int | None, device: str) -> Images:
    """CIFAR-10's binary version, or noise; of each class as the files have it, the first ``count`` images."""
    if folder is None:
        random = np.random.default_rng(0)
        parts = [random.integers(0, 256, (n, 1 + 3 * SIDE**2), dtype=np.uint8) for n in (count or 512, 256)]
        for part in parts:
            part[:, 0] %= CLASSES
    else:
        names = [[f"data_batch_{n}.bin" for n in range(1, 6)], ["test_batch.bin"]]
        files = [[np.fromfile(folder / name, np.uint8).reshape(-1, 1 + 3 * SIDE**2) for name in own] for own in names]
        parts = [np.concatenate(own)[:count] for own in files]
    found = []
    for part in parts:
        found += [
            torch.from_numpy(part[:, 1:].reshape(-1, 3, SIDE, SIDE)),
            torch.from_numpy(part[:, 0].astype(np.int64)),
        ]
    return Images.of(*(one.to(device) for one in found))


# ------------------------------------------------------------------------------------------ the network


class Block(nn.Module):
    """Two convolutions with norm and ReLU before each, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.around = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps of the block's own size."""
        hidden = torch.relu(self.norm1(x))
        beside = x if self.around is None else self.around(hidden)
        hidden = self.conv2(torch.relu(self.norm2(self.conv1(hidden))))
        return hidden + beside


def wide_resnet(depth: int, width: int) -> nn.Sequential:
    """A plain WRN-``depth``-``width``, as anybody would write it."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    maps = 16
    for group in range(3):
        for number in range((depth - 4) // 6):
            outputs = 16 * width * 2**group
            blocks.append(Block(maps, outputs, 2 if group and not number else 1))
            maps = outputs
    model = nn.Sequential(
        *blocks, nn.BatchNorm2d(maps), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(maps, CLASSES)
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


# ------------------------------------------------------------------------------------------ the methods


@dataclass
class Method:
    """A network in training: the loss of a batch, and what is done after each optimiser step."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    after: Callable[[int], None]
    kept: Callable[[], float]


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    """What both methods remove."""
    return [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def compiled(function: Any, settings: Settings) -> Any:
    """In one graph, where that is asked for."""
    return torch.compile(function, fullgraph=True, mode=settings.mode) if settings.compiled else function


def dense(settings: Settings, steps: int, keep: float, count: int) -> Method:
    """The network as it is."""
    model = wide_resnet(settings.depth, settings.width).to(settings.device)
    run = compiled(model, settings)
    return Method(model, lambda x, y: cross_entropy(run(x).float(), y), lambda step: None, lambda: 1.0)


def planned(settings: Settings, steps: int, keep: float, count: int) -> Method:
    """The preset "sparse" and a plan, as the how-to has them."""
    model = dcpp.convert(wide_resnet(settings.depth, settings.width), preset="sparse").to(settings.device)
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=count, check_finite=False)
    plan = dcpp.SparsityPlan(elbo, steps, keep=keep, noise=settings.noise, fix_at=settings.fix_at)
    run = compiled(elbo, settings)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = run(x, target=y).loss
        return found

    return Method(model, loss, lambda step: plan.step(), lambda: plan.share_kept)


def gradual(settings: Settings, steps: int, keep: float, count: int) -> Method:
    """Magnitude pruning: the share kept falls by a cubic, the smallest of all weights go."""
    method = dense(settings, steps, keep, count)
    weights = weights_of(method.model)
    masks = [torch.ones_like(weight, dtype=torch.bool) for weight in weights]
    last = round(END * steps)

    @torch.no_grad()
    def after(step: int) -> None:
        if BEGIN * steps < step <= last and (last - step) % EVERY == 0:
            share = keep + (1.0 - keep) * (1.0 - (step / steps - BEGIN) / (END - BEGIN)) ** 3
            flat = torch.cat([weight.abs().flatten() for weight in weights])
            least = flat.kthvalue(len(flat) - max(1, round(share * len(flat))) + 1).values
            for mask, weight in zip(masks, weights, strict=True):
                mask.copy_(weight.abs() >= least)
        torch._foreach_mul_(weights, masks)

    def kept() -> float:
        return sum(int((weight != 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)

    return Method(method.model, method.loss, after, kept)


METHODS = {"dense": dense, "SparsityPlan": planned, "gradual magnitude": gradual}
"""By name, in the order in which they take turns."""


# ------------------------------------------------------------------------------------ training and judging


def autocast(device: str) -> AbstractContextManager[None]:
    """bf16 products."""
    return torch.autocast(device.partition(":")[0], dtype=torch.bfloat16)  # type: ignore[return-value]


def train(name: str, keep: float, seed: int, images: Images, settings: Settings) -> dict[str, Any]:
    """One network from start to end: its test accuracy by one pass, the share that it keeps, and its seconds."""
    torch.manual_seed(seed)  # methods share starts, orders, crops and flips
    steps_each = len(images.train) // BATCH if len(images.train) >= BATCH else 1
    steps = steps_each * settings.epochs
    method = METHODS[name](settings, steps, keep, len(images.train))
    optimizer = torch.optim.SGD(
        [p for n, p in method.model.named_parameters() if not n.endswith("_logit")],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,
    )
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    generator = torch.Generator(images.train.device).manual_seed(seed)
    method.model.train()
    begun = time.perf_counter()
    for step, rows in enumerate(_orders(len(images.train), steps_each, settings.epochs, generator), 1):
        x, y = images.batch(rows, generator)
        with autocast(settings.device):
            loss = method.loss(x, y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        falling.step()
        method.after(step)
    accuracy = judge(method.model, images, settings)
    seconds = time.perf_counter() - begun
    return {"accuracy": accuracy, "kept": method.kept(), "loss": float(loss.detach()), "seconds": seconds}


def _orders(count: int, steps: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator, device=generator.device)
        yield from order[: steps * BATCH].split(BATCH)


@torch.no_grad()
def judge(model: nn.Module, images: Images, settings: Settings) -> float:
    """Percent of the test images right, by one pass in eval mode."""
    model.eval()
    with autocast(settings.device):
        guesses = [model(images.standardise(part)).argmax(1) for part in images.test.split(1000)]
    return 100.0 * float((torch.cat(guesses) == images.test_labels).double().mean())


def known_rows(path: Path | None) -> list[dict[str, Any]]:
    """Networks that an earlier run finished."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []


def run_all(settings: Settings, images: Images, path: Path | None, seconds: float) -> list[dict[str, Any]]:
    """Every network that is not known yet, the seeds' turns one after the other, until the time is over."""
    rows, begun, longest = known_rows(path), time.perf_counter(), 0.0
    about = asdict(settings) | {"images": len(images.train)}
    about = {name: value for name, value in about.items() if name not in ("repeats", "sparsity")}
    done = {(row["method"], row["sparsity"], row["seed"]) for row in rows if row["settings"] == about}
    work = [
        (name, sparsity, seed)
        for seed in range(settings.repeats)
        for sparsity in (0.0, *settings.sparsity)
        for name in METHODS
        if (name == "dense") == (sparsity == 0.0)
    ]
    for name, sparsity, seed in work:
        if (name, sparsity, seed) in done:
            continue
        if time.perf_counter() - begun + 1.1 * longest > seconds:
            break
        found = train(name, 1.0 - sparsity, seed, images, settings)
        longest = max(longest, found["seconds"])
        rows.append({"method": name, "sparsity": sparsity, "seed": seed, **found, "settings": about})
        print(
            f"{name}, {sparsity:.0%} sparse, seed {seed}: {found['accuracy']:.2f}% in {found['seconds']:.0f} s",
            flush=True,
        )
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    wanted = set(work)
    return [r for r in rows if r["settings"] == about and (r["method"], r["sparsity"], r["seed"]) in wanted]


# --------------------------------------------------------------------------------------------- the table


def table(rows: list[dict[str, Any]], settings: Settings) -> Table:
    """Accuracy by method and sparsity, with how many networks and what they keep."""
    lines: list[list[Cell]] = []
    for sparsity in (0.0, *settings.sparsity):
        for name in METHODS:
            mine = [row for row in rows if (row["method"], row["sparsity"]) == (name, sparsity)]
            if mine:
                values = [row["accuracy"] for row in mine]
                spread = statistics.stdev(values) if len(values) > 1 else None
                kept = [row["kept"] for row in mine]
                shares = f"{min(kept):.2%} to {max(kept):.2%}"
                seconds = statistics.mean(row["seconds"] for row in mine)
                mean = f"{statistics.mean(values):.2f}"
                lines.append([f"{sparsity:.0%}", name, mean, spread, len(values), shares, seconds])
    columns = ["sparse", "method", "accuracy", "SD", "n", "kept", "seconds"]
    note = f"WRN-{settings.depth}-{settings.width}, {settings.epochs} epochs; test accuracy in percent by one pass."
    return Table("Accuracy by share of weights removed", columns, lines, note)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--data", type=Path, help="folder with CIFAR-10's binary version (default: noise)")
    options.add_argument("--images", type=int, help="of the training set, and at most of the test set (default: all)")
    options.add_argument("--epochs", type=int, default=250, help="of each network (default: 250, as published)")
    options.add_argument("--repeats", type=int, default=3, help="seeds (default: 3)")
    options.add_argument("--sparsity", type=float, nargs="+", default=[0.8, 0.9, 0.95], help="shares removed")
    options.add_argument("--depth", type=int, default=22, help="6 n + 4 (default: 22)")
    options.add_argument("--width", type=int, default=2, help="times 16 maps (default: 2)")
    options.add_argument("--noise", type=float, default=0.0, help="of the plan: DropConnect's rate (default: 0)")
    options.add_argument(
        "--fix-at", type=float, default=0.8, help="of the plan: when the support is fixed (default: 0.8)"
    )
    options.add_argument("--eager", action="store_true", help="without torch.compile")
    options.add_argument("--mode", default="default", help="of torch.compile, such as reduce-overhead")
    options.add_argument("--rows", type=Path, help="a file with a line for each finished network; goes on from it")
    options.add_argument("--seconds", type=float, default=math.inf, help="begin no network that would end later")
    given = options.parse_args()
    settings = Settings(
        device=given.device,
        epochs=given.epochs,
        repeats=given.repeats,
        sparsity=tuple(given.sparsity),
        depth=given.depth,
        width=given.width,
        noise=given.noise,
        fix_at=given.fix_at,
        compiled=not given.eager,
        mode=given.mode,
    )
    report = Report("A sparse wide residual network", torch.device(given.device), settings)
    images = read_images(given.data, given.images, given.device)
    report.add(table(run_all(settings, images, given.rows, given.seconds), settings))
    report.write(given.out)


if __name__ == "__main__":
    main()
