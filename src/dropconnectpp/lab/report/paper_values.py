"""The values that the paper reports, by data set and kind of method: tables show them beside the measured ones."""

from __future__ import annotations

TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "norb": "NORB"}
"""Titles of the paper's data sets by the laboratory's name, in the paper's order."""

KINDS = ("none", "dropout", "dropconnect", "dropconnect++")
"""The kinds of method in the paper's order."""

REPEATS = 50
EPOCHS = 100


def _by_set(*rows: tuple[float, ...]) -> dict[str, dict[str, float]]:
    return {data: {kind: row[i] for kind, row in zip(KINDS, rows, strict=True)} for i, data in enumerate(TITLES)}


ACCURACY = _by_set(
    (74.47, 41.96, 90.53, 90.55),
    (75.70, 46.65, 92.14, 92.07),
    (76.06, 46.12, 91.41, 91.88),
    (76.54, 47.01, 91.99, 93.75),
)
"""Table 1, in percent: means of 50 repetitions. The paper does not give their spread."""

SECONDS = _by_set((9, 10, 15, 5), (9, 10, 15, 5), (9, 10, 15, 5), (10, 13, 19, 6))
"""Table 2: seconds per iteration, which we take to mean an epoch, on a Tesla K40."""

MC_ACCURACY: dict[str, dict[int, float]] = {
    "cifar10": {1: 74.57, 30: 75.95, 50: 76.01, 100: 76.01, 500: 76.36},
    "cifar100": {1: 43.28, 30: 46.33, 50: 46.33, 100: 46.54, 500: 46.94},
    "svhn": {1: 91.32, 30: 91.70, 50: 91.72, 100: 91.78, 500: 91.78},
    "norb": {1: 90.04, 30: 90.78, 50: 91.04, 100: 91.41, 500: 91.58},
}
"""Table 3, in percent: DropConnect++ by Eq. (18), for each number of samples."""

SYNAPSES = 300_000
""""almost 300K synapses" in Figure 1(b), which shows CIFAR-10."""
SHARES = {"below_0.35": 50_000 / SYNAPSES, "between_0.4_and_0.6": 200_000 / SYNAPSES, "above_0.6": 50_000 / SYNAPSES}
"""Figure 1(b): shares of the synapses. The paper says around 50K below 0.35, 200K in [0.4, 0.6], 50K above 0.6."""
FIGURE_1B_DATA = "cifar10"


def accuracy(data: str, kind: str) -> float | None:
    """The value in Table 1, or None.

    >>> accuracy("svhn", "dropout"), accuracy("fashion-mini", "dropout")
    (92.14, None)
    """
    return ACCURACY.get(data, {}).get(kind)


def seconds(data: str, kind: str) -> float | None:
    """The value in Table 2, or None."""
    return SECONDS.get(data, {}).get(kind)


def mc_accuracy(data: str, kind: str, samples: int) -> float | None:
    """The value in Table 3, or None."""
    return MC_ACCURACY.get(data, {}).get(samples) if kind == "dropconnect++" else None


def verdict(data: str, kind_a: str, kind_b: str) -> str | None:
    """The paper's verdict on DropConnect++ against another method: "significantly better" except for one pair.

    >>> verdict("svhn", "dropconnect++", "dropout")
    'comparable'
    """
    if data not in TITLES or kind_a != "dropconnect++" or kind_b not in KINDS[:3]:
        return None
    return "comparable" if (data, kind_b) == ("svhn", "dropout") else "significantly better"
