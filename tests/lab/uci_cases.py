"""What tests of the UCI benchmark share: a folder in its form, and a training of seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dropconnectpp.lab.config.uci import Training
from dropconnectpp.lab.data.dataset import RegressionSet
from dropconnectpp.lab.data.formats import uci

SHORT = Training(hidden=5, steps=40, folds=2, batch=8, draws=6, trial_draws=4, members=2)
ROWS, SPLITS = 60, 3


def table(seed: int = 0) -> np.ndarray:
    """Three inputs, a column that is none, and the target."""
    generator = np.random.default_rng(seed)
    x = generator.normal(5.0, 2.0, (ROWS, 3))
    y = 100.0 + 20.0 * np.sin(x[:, 0]) + x[:, 1] + generator.normal(size=ROWS)
    return np.column_stack([x, np.zeros(ROWS), y])


def write_set(folder: Path, seed: int = 0) -> Path:
    """A set's folder, as the benchmark has it."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "data.txt", table(seed))
    np.savetxt(folder / "index_features.txt", [0, 1, 2], fmt="%.18e")  # as published: whole numbers written so
    np.savetxt(folder / "index_target.txt", [4], fmt="%.18e")
    for split in range(SPLITS):
        order = np.random.default_rng(split).permutation(ROWS)
        np.savetxt(folder / f"index_train_{split}.txt", order[:48], fmt="%.18e")
        np.savetxt(folder / f"index_test_{split}.txt", order[48:], fmt="%.18e")
    return folder


def made(folder: Path) -> RegressionSet:
    """The set, read."""
    return uci.read(write_set(folder), "uci:yacht")
