"""What the rows of all tables share: which experiment they belong to, and a sample's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dropconnectpp.lab.report.selection import ReportedExperiment
from dropconnectpp.lab.report.statistics import Comparison, SampleError, summarise

Table = list[dict[str, Any]]
ByReplica = Mapping[int, float]
OURS = "dropconnect++"
"""The kind of method that the report is about."""
LEAST_EPOCHS = 10
"""Networks that were trained for fewer epochs rank no methods: none of them has converged."""


def statistic(values: Iterable[float]) -> dict[str, Any]:
    """n, mean, standard deviation and interval of a sample, which may be empty."""
    numbers = list(values)
    if not numbers:
        return {"n": 0, "mean": None, "standard_deviation": None, "interval": None}
    found = summarise(numbers)
    return {
        "n": found.n,
        "mean": found.mean,
        "standard_deviation": found.standard_deviation,
        "interval": found.interval,
    }


def identity(experiment: ReportedExperiment) -> dict[str, Any]:
    """The columns that say which experiment a row belongs to."""
    return {
        "data": experiment.data,
        "variant": experiment.variant,
        "title": experiment.title,
        "method": experiment.label,
        "kind": experiment.kind,
        "digest": experiment.digest,
        "trusted": experiment.trusted,
    }


def short(epochs: Iterable[float | None]) -> bool:
    """Whether networks that are compared were all trained for so few epochs that their order says nothing.

    >>> short([5.0, 6.0]), short([5.0, 100.0]), short([None]), short([])
    (True, False, False, False)
    """
    known = list(epochs)
    return bool(known) and all(one is not None and one < LEAST_EPOCHS for one in known)


def difference(mean: float | None, paper: float | None) -> float | None:
    """The mean minus the paper's, if both are known."""
    return None if mean is None or paper is None else mean - paper


def compared(test: Callable[[ByReplica, ByReplica], Comparison], a: ByReplica, b: ByReplica) -> Comparison | None:
    """The result of a test, or None where the samples do not allow one."""
    try:
        return test(a, b)
    except SampleError:
        return None


def plain(test: Comparison) -> dict[str, Any]:
    """The numbers of a test as a mapping."""
    return {
        "difference": test.difference,
        "interval": test.interval,
        "t": test.t,
        "degrees_of_freedom": test.degrees_of_freedom,
        "p": test.p,
        "effect_size": test.effect_size,
    }
