"""Measure what few connections cost on little data: scikit-learn's digits, 1,198 images to train on.

    python benchmarks/digits_sparsity.py --repeats 2 --tries 1 --steps 300      # a quick look

An MLP 64-300-100-10 is trained with Adam: plain; with the preset "sparse" and a `SparsityPlan` that keeps a share of
the weights; and with gradual magnitude pruning (Zhu and Gupta, 2017) to the same share. For each share the setting
of either method is the best of as many on a fifth of the training images, held out, with `--tries` networks each.
Then `--repeats` networks train on all training images, each with a split and a start of its own that all methods
share. Test accuracy in percent, by one pass in eval mode; means with 95% intervals (Student's t), differences by
Welch's test.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from reporting import Cell, Report, Table, parser
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import dropconnectpp as dcpp

BATCH = 64
LR = 1e-3
HELD_OUT = 0.2
RANKED_EVERY = 20
"""Steps between two rankings by magnitude."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    repeats: int
    tries: int
    steps: int
    keep: tuple[float, ...]


@dataclass(frozen=True)
class Images:
    """Images to train on and images to judge by."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    def held_out(self, seed: int) -> Images:
        """The training images alone, a fifth of them to judge by."""
        return split(self.x, self.y, HELD_OUT, seed)

    def accuracy(self, model: nn.Module) -> float:
        """Percent right, by one pass in eval mode."""
        with torch.no_grad():
            right: Tensor = model.eval()(self.x_test).argmax(1) == self.y_test
        return 100.0 * right.double().mean().item()


def split(x: Tensor, y: Tensor, share: float, seed: int) -> Images:
    """Take a share of the images apart, class by class."""
    parts = train_test_split(x, y, test_size=share, random_state=seed, stratify=y)
    return Images(parts[0], parts[2], parts[1], parts[3])


def digits(seed: int) -> Images:
    """1,198 images to train on, 599 to test."""
    data = load_digits()
    return split(torch.as_tensor(data.data / 16.0).float(), torch.as_tensor(data.target), 1 / 3, seed)


def network() -> nn.Sequential:
    """A plain classifier, as anybody would write it."""
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def fit(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    images: Images,
    steps: int,
    after: Callable[[int], None],
) -> None:
    """Adam with a step size that falls to 0 over the second half; ``after`` is called after each step."""
    weights = [p for name, p in model.named_parameters() if not name.endswith("_logit")]
    optimizer = torch.optim.Adam(weights, lr=LR)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2.0 * (1.0 - step / steps)))
    order: list[Tensor] = []
    for step in range(steps):
        if not order:
            order = list(torch.randperm(len(images.x)).split(BATCH))
        rows = order.pop()
        optimizer.zero_grad()
        loss(images.x[rows], images.y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        falling.step()
        after(step + 1)


# ------------------------------------------------------------------------------------------ the methods


def plain(images: Images, steps: int) -> nn.Module:
    """The dense network."""
    model = network()
    fit(model, lambda x, y: nn.functional.cross_entropy(model(x), y), images, steps, lambda step: None)
    return model


@dataclass(frozen=True)
class Planned:
    """DropConnect++ with a plan, as the how-to has it."""

    warmup: float = 0.3
    fix_at: float = 0.8
    noise: float = 0.0

    def train(self, images: Images, steps: int, keep: float) -> tuple[nn.Module, float]:
        """A model, and the share of its weights that is kept."""
        model = dcpp.convert(network(), preset="sparse")
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=len(images.x))
        options: dict[str, Any] = {"warmup": self.warmup, "fix_at": self.fix_at, "noise": self.noise}
        plan = dcpp.SparsityPlan(elbo, steps, keep=keep, **options)
        fit(model, lambda x, y: elbo(x, target=y).loss, images, steps, lambda step: plan.step())
        return model, plan.share_kept


@dataclass(frozen=True)
class Gradual:
    """Gradual magnitude pruning: the share falls by a cubic from a tenth of the training to ``until``."""

    until: float = 0.5
    scope: Literal["global", "layer"] = "global"
    noise: float = 0.0
    """DropConnect's rate on what is left."""

    def share(self, step: int, steps: int, keep: float) -> float:
        """What is kept after a step."""
        done = min(max((step / steps - 0.1) / (self.until - 0.1), 0.0), 1.0)
        return keep + (1.0 - keep) * (1.0 - done) ** 3

    def train(self, images: Images, steps: int, keep: float) -> tuple[nn.Module, float]:
        """A model, and the share of its weights that is kept."""
        model = network()
        layers = [layer for layer in model if isinstance(layer, nn.Linear)]
        masks = [torch.ones_like(layer.weight) for layer in layers]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            for index, layer in enumerate(model):
                if not isinstance(layer, nn.Linear):
                    x = layer(x)
                    continue
                mask = masks[index // 2]
                if self.noise:
                    mask = mask * (torch.rand_like(mask) >= self.noise) / (1.0 - self.noise)
                x = nn.functional.linear(x, layer.weight * mask, layer.bias)
            return nn.functional.cross_entropy(x, y)

        @torch.no_grad()
        def rank(step: int) -> None:
            if step % RANKED_EVERY == 0 or step == steps:
                left = largest([layer.weight.abs() for layer in layers], self.share(step, steps, keep), self.scope)
                for mask, found in zip(masks, left, strict=True):
                    mask.copy_(found)
            for layer, mask in zip(layers, masks, strict=True):
                layer.weight.mul_(mask)

        fit(model, loss, images, steps, rank)
        kept = sum(int((layer.weight != 0).sum()) for layer in layers)
        return model, kept / sum(layer.weight.numel() for layer in layers)


def largest(sizes: list[Tensor], share: float, scope: str) -> list[Tensor]:
    """The largest share of all entries, or of each tensor's, as masks."""
    if scope == "layer":
        return [largest([one], share, "global")[0] for one in sizes]
    flat = torch.cat([one.flatten() for one in sizes])
    found = torch.zeros_like(flat)
    found[flat.topk(round(share * len(flat))).indices] = 1.0
    return [part.view_as(one) for part, one in zip(found.split([one.numel() for one in sizes]), sizes, strict=True)]


Method = Planned | Gradual
TRIED: dict[str, tuple[Method, ...]] = {
    "SparsityPlan": (Planned(), Planned(warmup=0.6), Planned(fix_at=0.6), Planned(noise=0.1)),
    "gradual magnitude": (Gradual(), Gradual(until=0.8), Gradual(scope="layer"), Gradual(noise=0.1)),
}

# ------------------------------------------------------------------------------------------ the comparison


def chosen(settings: Settings, progress: Callable[[str], None]) -> tuple[dict[tuple[str, float], Method], Table]:
    """The best setting of each method for each share, on held-out training images; the first of equals."""
    best: dict[tuple[str, float], Method] = {}
    rows: list[list[Cell]] = []
    for name, options in TRIED.items():
        found: dict[tuple[Method, float], float] = {}
        for option in options:
            for keep in settings.keep:
                values = []
                for attempt in range(settings.tries):
                    images = digits(attempt).held_out(attempt)
                    torch.manual_seed(1000 + attempt)
                    values.append(images.accuracy(option.train(images, settings.steps, keep)[0]))
                found[option, keep] = statistics.mean(values)
            progress(f"{name}, {option}")
        for keep in settings.keep:
            best[name, keep] = max(options, key=lambda option, keep=keep: found[option, keep])  # type: ignore[misc]
        for option in options:
            cells = [f"{found[option, keep]:.2f}{' *' if best[name, keep] == option else ''}" for keep in settings.keep]
            rows.append([str(option), *cells])
    note = f"{settings.tries} networks a cell. A star marks what was chosen."
    columns = ["setting", *(f"{keep:.0%}" for keep in settings.keep)]
    return best, Table("Every setting tried: accuracy in percent on held-out training images", columns, rows, note)


def interval(values: list[float]) -> str:
    """Mean and 95% interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def difference(ours: list[float], theirs: list[float]) -> str:
    """Difference of means with its 95% interval and p, by Welch's test."""
    if statistics.stdev(ours) == statistics.stdev(theirs) == 0.0:
        return f"{statistics.mean(ours) - statistics.mean(theirs):+.2f}"
    found: Any = stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = found.confidence_interval(0.95)
    return f"{statistics.mean(ours) - statistics.mean(theirs):+.2f} [{low:+.2f}, {high:+.2f}], p = {found.pvalue:.2g}"


def tables(
    accuracies: dict[tuple[str, float], list[float]], shares: dict[tuple[str, float], list[float]]
) -> list[Table]:
    """Accuracy by share, the differences, and the shares that were met."""
    keeps = sorted({keep for _, keep in shares}, reverse=True)
    dense = accuracies["plain", 1.0]
    rows: list[list[Cell]] = [["plain", interval(dense), *[None] * len(keeps)]]
    rows += [[name, None, *(interval(accuracies[name, keep]) for keep in keeps)] for name in TRIED]
    ours, theirs = TRIED
    apart: list[list[Cell]] = [
        [f"{ours} - plain", *(difference(accuracies[ours, keep], dense) for keep in keeps)],
        [f"{ours} - {theirs}", *(difference(accuracies[ours, keep], accuracies[theirs, keep]) for keep in keeps)],
    ]
    met: list[list[Cell]] = [
        [name, *(f"{min(shares[name, keep]):.2%} to {max(shares[name, keep]):.2%}" for keep in keeps)] for name in TRIED
    ]
    columns = [f"{keep:.0%}" for keep in keeps]
    note = f"{len(dense)} networks a cell, each with a split and a start of its own; 599 test images."
    return [
        Table("Test accuracy in percent by share of weights kept", ["method", "100%", *columns], rows, note),
        Table("Differences of the means, with 95% intervals and p by Welch's test", ["difference", *columns], apart),
        Table("Shares of weights kept, least to most", ["method", *columns], met),
    ]


def main() -> None:
    """Choose, train, compare."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=16, help="networks a cell of the comparison (default: 16)")
    options.add_argument("--tries", type=int, default=3, help="networks for each setting that is tried (default: 3)")
    options.add_argument("--steps", type=int, default=1500, help="optimiser steps of a training (default: 1500)")
    options.add_argument("--keep", type=float, nargs="+", default=[0.08, 0.04, 0.02, 0.01], help="shares to keep")
    given = vars(options.parse_args())
    out = given.pop("out")
    settings = Settings(**given | {"keep": tuple(given["keep"])})
    report = Report("Few connections on scikit-learn's digits", torch.device(settings.device), settings)
    torch.set_flush_denormal(True)  # moments of gradients that are gone would cost three times the time
    total = sum(map(len, TRIED.values())) + settings.repeats
    done = 0

    def progress(what: str) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

    best, tried = chosen(settings, progress)
    accuracies: dict[tuple[str, float], list[float]] = {}
    shares: dict[tuple[str, float], list[float]] = {}
    for seed in range(settings.repeats):
        images = digits(seed)
        torch.manual_seed(seed)
        accuracies.setdefault(("plain", 1.0), []).append(images.accuracy(plain(images, settings.steps)))
        for (name, keep), option in best.items():
            torch.manual_seed(seed)
            model, share = option.train(images, settings.steps, keep)
            accuracies.setdefault((name, keep), []).append(images.accuracy(model))
            shares.setdefault((name, keep), []).append(share)
        progress(f"network {seed + 1} of {settings.repeats}")
    for table in [*tables(accuracies, shares), tried]:
        report.add(table)
    report.write(out)


if __name__ == "__main__":
    main()
