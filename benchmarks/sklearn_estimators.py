"""Measure the scikit-learn estimators with their defaults beside scikit-learn's own MLP with its defaults.

    python benchmarks/sklearn_estimators.py --repeats 2 --datasets digits      # a quick look

Digits (1,797 images, ten classes) and diabetes (442 patients, real values), a third of each held out. Nothing is tuned
for anybody: one hidden layer of 100 units and 200 passes are the defaults of both. The MLP gets standardised inputs,
and standardised targets, as ours standardise by themselves. All methods share the splits; means over splits with 95%
intervals, and paired differences from the MLP (Student's t).
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from reporting import Cell, Report, Table, parser
from scipy import stats
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dropconnectpp.integrations.sklearn import DropConnectClassifier, DropConnectRegressor

KEEP = 0.2
METHODS = ("MLP of scikit-learn", "ours", f"ours, keep={KEEP}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of this benchmark."""

    repeats: int
    datasets: tuple[str, ...]


def classifier(method: str, seed: int) -> Any:
    """The classifier of that name."""
    if method == METHODS[0]:
        return make_pipeline(StandardScaler(), MLPClassifier(random_state=seed))
    return DropConnectClassifier(keep=KEEP if "keep" in method else None, random_state=seed)


def regressor(method: str, seed: int) -> Any:
    """The regressor of that name."""
    if method == METHODS[0]:
        mlp = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
        return TransformedTargetRegressor(mlp, transformer=StandardScaler())
    return DropConnectRegressor(keep=KEEP if "keep" in method else None, random_state=seed)


def judge_classes(model: Any, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Accuracy in percent, and -log p of the right class in nats."""
    probability = model.predict_proba(x)[np.arange(len(y)), y]
    return 100.0 * float(model.score(x, y)), float(-np.log(np.maximum(probability, 1e-300)).mean())


def judge_values(model: Any, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float]:
    """R^2 in percent, and -log p in nats; for a model that tells no deviation, that of its training residuals."""
    if isinstance(model, DropConnectRegressor):
        mean, deviation = model.predict(x, return_std=True)
    else:
        mean, deviation = model.predict(x), np.full(len(y), model.residual_)
    logs = -0.5 * ((y - mean) / deviation) ** 2 - np.log(deviation) - 0.5 * math.log(2 * math.pi)
    return 100.0 * float(model.score(x, y)), float(-logs.mean())


DATASETS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., tuple[float, float]], str]] = {
    "digits": (load_digits, classifier, judge_classes, "accuracy in percent"),
    "diabetes": (load_diabetes, regressor, judge_values, "R² in percent"),
}


def interval(values: list[float], digits: int = 2) -> str:
    """Mean and 95% interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.{digits}f} ± {half:.{digits}f}"


def compare(name: str, repeats: int) -> Table:
    """Every method on every split of one data set."""
    load, make, judge, unit = DATASETS[name]
    x, y = load(return_X_y=True)
    found: dict[str, list[tuple[float, float, float]]] = {method: [] for method in METHODS}
    for seed in range(repeats):
        stratify = y if name == "digits" else None
        x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=1 / 3, random_state=seed, stratify=stratify)
        for method in METHODS:
            model = make(method, seed)
            start = time.process_time()
            model.fit(x_train, y_train)
            seconds = time.process_time() - start
            if method == METHODS[0] and name != "digits":
                model.residual_ = float(np.std(y_train - model.predict(x_train)))
            found[method].append((*judge(model, x_test, y_test), seconds))
        print(f"[{seed + 1}/{repeats}] {name}", file=sys.stderr, flush=True)
    rows: list[list[Cell]] = []
    base = found[METHODS[0]]
    for method, values in found.items():
        scores, nll, seconds = ([value[i] for value in values] for i in range(3))
        apart = [score - other[0] for score, other in zip(scores, base, strict=True)]
        difference = None if method == METHODS[0] else interval(apart)
        rows.append([method, interval(scores), difference, interval(nll, 3), f"{statistics.median(seconds):.1f}"])
    columns = ["method", unit, "difference", "NLL in nats", "fit in s"]
    judged = f"{repeats} splits; {len(x_test)} of {len(x)} examples are judged."
    note = f"{judged} Seconds are medians of one thread's processor time."
    return Table(f"{name.capitalize()}, with defaults", columns, rows, note)


def main() -> None:
    """Train, compare."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=10, help="splits of each data set (default: 10)")
    options.add_argument("--datasets", nargs="+", choices=list(DATASETS), default=list(DATASETS), help="which ones")
    given = options.parse_args()
    torch.set_num_threads(1)
    settings = Settings(repeats=given.repeats, datasets=tuple(given.datasets))
    report = Report("Estimators with their defaults", torch.device("cpu"), settings)
    for name in settings.datasets:
        report.add(compare(name, settings.repeats))
    report.write(given.out)


if __name__ == "__main__":
    main()
