"""Choose the step sizes of `dcpp demo` on MNIST, which the demo does not show; needs `dcpp data fetch mnist`.

    python tools/choose_demo.py                 the table, and what to write into lab/runs/demo/training.py

Each method is tried with the same step sizes and seeds, on 6,000 images of MNIST's training set: as many as the demo
has. Another 1,500 of them judge. Those that keep few connections are tried at one share, `KEEP`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean

import torch
from torch import nn

from dropconnectpp.lab.data import load
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.data.normalisation import standardise
from dropconnectpp.lab.runs.demo import measuring, training
from dropconnectpp.lab.runs.demo.showing import Settings
from dropconnectpp.lab.runs.demo.training import Images

STEPS = (1e-3, 2e-3, 4e-3, 8e-3)
KEEP = 0.02
TRAIN, JUDGE = 6000, 1500
Train = Callable[[Images, int, int, float], nn.Module]
METHODS: dict[str, Train] = {
    "plain network": lambda images, epochs, seed, lr: training.dense(images, epochs, seed, lr),
    "posterior": lambda images, epochs, seed, lr: training.with_posterior(images, epochs, seed, lr),
    "SparsityPlan": lambda images, epochs, seed, lr: training.planned(images, epochs, seed, KEEP, lr),
    "gradual pruning": lambda images, epochs, seed, lr: training.gradual(images, epochs, seed, KEEP, lr),
}


def held_out(dataset: Dataset, train: int = TRAIN, judge: int = JUDGE) -> Images:
    """The first images of a training set, and the ones behind them to judge by; its test set is not touched."""
    count = train + judge
    images = standardise(torch.from_numpy(dataset.train.images[:count].copy())).flatten(1)
    labels = torch.from_numpy(dataset.train.labels[:count].copy())
    classes = len(dataset.classes)
    return Images(images[:train], labels[:train], images[train:], labels[train:], images[:0], classes)


def accuracies(images: Images, train: Train, lr: float, epochs: int, seeds: int) -> list[float]:
    """Of one setting, for each seed, in percent."""
    return [measuring.accuracy(train(images, epochs, seed, lr), images) for seed in range(seeds)]


def main() -> None:
    """Try all settings and print what each gave."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="mnist", help="the data set (default: mnist)")
    options.add_argument("--seeds", type=int, default=2, help="networks of each setting (default: 2)")
    options.add_argument("--epochs", type=int, default=Settings().epochs, help="epochs (default: the demo's)")
    given = options.parse_args()
    torch.set_num_threads(1)
    images = held_out(load(given.data))
    print(f"| Method | {' | '.join(f'{lr:g}' for lr in STEPS)} | chosen |")
    print(f"| --- |{' --: |' * (len(STEPS) + 1)}")
    for name, train in METHODS.items():
        found = {lr: fmean(accuracies(images, train, lr, given.epochs, given.seeds)) for lr in STEPS}
        best = max(found, key=lambda lr: found[lr])
        print(f"| {name} | {' | '.join(f'{one:.2f}' for one in found.values())} | {best:g} |", flush=True)


if __name__ == "__main__":
    main()
