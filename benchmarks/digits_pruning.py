"""Measure whether the posterior knows which synapses matter: accuracy on scikit-learn's digits after pruning.

    python benchmarks/digits_pruning.py --repeats 2 --epochs 5      # a quick look

Each repeat trains the network of `examples/digits.py` with DropConnect++ on its first layer from another
seed, keeps a share of the synapses by each score and at random, and counts test accuracy by Eq. (19), in
percent. Means over the repeats with 95% intervals (Student's t); the last rows are paired differences.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from reporting import Cell, Report, Table, parser
from scipy.stats import t as student
from torch import nn

import dropconnectpp as dcpp

SCORES = ("keep_probability", "magnitude", "product")
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    device: str
    repeats: int
    epochs: int
    estimator: str
    preset: str | None

    @property
    def options(self) -> dict[str, str]:
        """Of `convert`."""
        return {"estimator": self.estimator} if self.preset is None else {"preset": self.preset}


def example() -> object:
    """The module `examples/digits.py`."""
    path = Path(__file__).parents[1] / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def at_random(model: nn.Module, share: float) -> nn.Module:
    """The model with a random share of its first layer's weights."""
    pruned = dcpp.prune(model, keep=1.0)
    kept = torch.zeros(pruned[0].weight.numel(), dtype=torch.bool)
    kept[torch.randperm(kept.numel())[: round(share * kept.numel())]] = True
    pruned[0].keep_only("weight", kept.view_as(pruned[0].weight))
    return pruned


def interval(values: list[float]) -> str:
    """Mean and 95% interval."""
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def main() -> None:
    """Train, prune, count."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=20, help="seeds (default: 20)")
    options.add_argument("--epochs", type=int, default=60, help="passes over the training set (default: 60)")
    options.add_argument("--estimator", default="straight-through", help="how pi~ is learned")
    options.add_argument("--preset", choices=list(dcpp.PRESETS), help="a set of options instead of the estimator")
    given = vars(options.parse_args())
    out = given.pop("out")
    settings = Settings(**given)
    report = Report("Pruning by the posterior, scikit-learn's digits", torch.device(settings.device), settings)
    digits = example()
    x_train, y_train, x_test, y_test = digits.digits()  # type: ignore[attr-defined]
    found: dict[str, list[list[float]]] = {score: [] for score in (*SCORES, "random")}
    for seed in range(settings.repeats):
        torch.manual_seed(seed)
        model = dcpp.convert(digits.network(), include=["0"], **settings.options)  # type: ignore[attr-defined]
        digits.train(model, x_train, y_train, settings.epochs, f"repeat {seed}")  # type: ignore[attr-defined]
        for score, rows in found.items():
            pruned = [
                at_random(model, s) if score == "random" else dcpp.prune(model, keep=s, score=score) for s in SHARES
            ]
            rows.append([digits.accuracy(p, x_test, y_test) for p in pruned])  # type: ignore[attr-defined]
        print(f"[{seed + 1}/{settings.repeats}]", file=sys.stderr, flush=True)
    table: list[list[Cell]] = [
        [score, *(interval([row[i] for row in rows]) for i in range(len(SHARES)))] for score, rows in found.items()
    ]
    ours = found["keep_probability"]
    for other in ("magnitude", "random"):
        differences = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, found[other], strict=True)]
        cells = [interval([row[i] for row in differences]) for i in range(1, len(SHARES))]
        table.append([f"keep_probability - {other}", None, *cells])
    columns = ["kept by", *(f"{share:.0%}" for share in SHARES)]
    how = settings.preset or settings.estimator
    note = f"{settings.repeats} repeats, {settings.epochs} epochs, {how}, {len(x_test)} test images."
    report.add(Table("Test accuracy in percent by share of synapses kept", columns, table, note))
    report.write(out)


if __name__ == "__main__":
    main()
