"""What the rows of all tables share: whose they are, and a sample in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dropconnectpp.lab.report.selection import Experiment
from dropconnectpp.lab.report.statistics import Comparison, SampleError, summarise

Table = list[dict[str, Any]]
OURS = "dropconnect++"
Sample = Mapping[int, float]
"""Values by replica."""


def statistic(values: Iterable[float]) -> dict[str, Any]:
    """A sample's line; an empty sample is a line too."""
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


def who(experiment: Experiment) -> dict[str, Any]:
    """Whose row it is."""
    return {
        "data": experiment.data,
        "variant": experiment.variant,
        "title": experiment.title,
        "method": experiment.label,
        "kind": experiment.kind,
        "digest": experiment.digest,
        "trusted": experiment.trusted,
    }


def difference(mean: float | None, paper: float | None) -> float | None:
    """One less the other, where there are both."""
    return None if mean is None or paper is None else mean - paper


def compared(test: Callable[[Sample, Sample], Comparison], a: Sample, b: Sample) -> Comparison | None:
    """A test's answer; None where there is too little to test."""
    try:
        return test(a, b)
    except SampleError:
        return None


def plain(test: Comparison) -> dict[str, Any]:
    """A test as a mapping."""
    return {
        "difference": test.difference,
        "interval": test.interval,
        "t": test.t,
        "degrees_of_freedom": test.degrees_of_freedom,
        "p": test.p,
        "effect_size": test.effect_size,
    }
