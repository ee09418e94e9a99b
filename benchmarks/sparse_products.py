"""Measure from which sparsity on `SparseLinear` is faster than `nn.Linear` on a CPU: the evidence for `to_sparse`.

    python benchmarks/sparse_products.py --out sparse_products.md
    python benchmarks/sparse_products.py --sizes 300x100 --rows 1 --rounds 3      # a quick look

Layers of random weights, a share of them zero at random, are called on random rows, as modules and without gradients.
Both take turns within each round; a time is the least over the rounds, which other work on the machine moves least.
A number above 1 is how many times faster the sparse layer is. The threads are torch's default, or `--threads`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from reporting import Cell, Report, Table, parser
from torch import nn

from dropconnectpp.compaction.sparse import crossover
from dropconnectpp.layers.sparse import SparseLinear

SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
SIZES = ("300x100", "784x300", "800x500", "4096x64", "1024x1024", "1024x4096", "4096x4096")
ROWS = (1, 16, 128)


@dataclass(frozen=True)
class Settings:
    """One run of this benchmark."""

    sizes: tuple[str, ...]
    rows: tuple[int, ...]
    rounds: int
    threads: int


def least_times(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """The least seconds of each call over the rounds; they take turns."""
    counts, least = [], [float("inf")] * len(calls)
    for call in calls:
        call()
        began = time.perf_counter()
        call()
        counts.append(max(1, min(200, round(2e-3 / max(time.perf_counter() - began, 1e-6)))))
    for _ in range(rounds):
        for i, call in enumerate(calls):
            began = time.perf_counter()
            for _ in range(counts[i]):
                call()
            least[i] = min(least[i], (time.perf_counter() - began) / counts[i])
    return least


@torch.inference_mode()
def measure(size: str, rows: int, rounds: int) -> list[Cell]:
    """Microseconds of the dense layer, and how many times faster the sparse one is at each sparsity."""
    inputs, units = map(int, size.split("x"))
    x = torch.randn(rows, inputs)
    cells: list[Cell] = []
    microseconds = 0.0
    for sparsity in SPARSITIES:
        layer = nn.Linear(inputs, units)
        layer.weight[torch.rand(units, inputs) < sparsity] = 0.0
        sparse = SparseLinear.of(layer)
        dense_s, sparse_s = least_times([lambda: layer(x), lambda: sparse(x)], rounds)  # noqa: B023 (called at once)
        microseconds = 1e6 * dense_s
        cells.append(dense_s / sparse_s)
    share = crossover(inputs * units, rows)
    return [size, rows, microseconds, *cells, "never" if share is None else f"{share:g}"]


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", default=SIZES, help="inputs x units of the layers")
    made.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows of the input")
    made.add_argument("--rounds", type=int, default=30, help="measurements of each layer, in turn")
    made.add_argument("--threads", type=int, default=0, help="0: torch's own number")
    given = made.parse_args()
    if given.device != "cpu":
        made.error("sparse layers are for the CPU: leave out --device")
    if given.threads:
        torch.set_num_threads(given.threads)
    settings = Settings(tuple(given.sizes), tuple(given.rows), given.rounds, torch.get_num_threads())
    report = Report("Sparse rows against dense layers", torch.device("cpu"), settings)
    torch.manual_seed(0)
    rows = [measure(size, count, settings.rounds) for size in settings.sizes for count in settings.rows]
    report.add(
        Table(
            "How many times faster sparse rows are, by the share of weights that are zero",
            ["layer", "rows", "dense, us", *(f"{s:.0%}" for s in SPARSITIES), "to_sparse from"],
            rows,
            "Least over the rounds; the last column is what `to_sparse` goes by.",
        )
    )
    report.write(given.out)


if __name__ == "__main__":
    main()
