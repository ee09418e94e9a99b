"""Settings that change from epoch to epoch, as plain numbers: what `EpochSchedule` and the laboratory both read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args

from dropconnectpp.errors import ArgumentError, check_choice, check_count

Between = Literal["hold", "linear"]
"""What a setting is between two epochs that are named: the value of the first, or on a line to the second."""


def check_values(at: Sequence[int], values: Mapping[str, Sequence[float]], between: str) -> None:
    """Raise unless each setting has a positive value for each epoch, rates below 1, and epochs rise from 0."""
    check_choice("between", between, get_args(Between))
    for epoch in at:
        check_count("at", epoch, minimum=0)
    if not at or at[0] != 0 or any(one >= other for one, other in pairwise(at)):
        raise ArgumentError(f"at must be epochs that rise from 0, got {list(at)!r}.")
    if not values:
        raise ArgumentError("an epoch schedule needs a setting that changes.")
    for name, given in values.items():
        if len(given) != len(at):
            raise ArgumentError(f"{name} must have a value for each of the {len(at)} epochs in at, got {len(given)}.")
        for value in given:
            if name == "rate" and not 0.0 < value < 1.0:
                raise ArgumentError(f"rate is the share dropped and must lie strictly between 0 and 1, got {value!r}.")
            if name != "rate" and not 0.0 < value < math.inf:
                raise ArgumentError(f"{name} must be positive, got {value!r}.")


def value_at(at: Sequence[int], values: Sequence[float], epoch: int, between: str = "hold") -> float:
    """A setting in an epoch, counted from 0; after the last epoch named it stays.

    >>> [value_at([0, 4], [0.5, 0.9], epoch, "linear") for epoch in (0, 1, 4, 9)]
    [0.5, 0.6, 0.9, 0.9]
    >>> [value_at([0, 4], [0.5, 0.9], epoch) for epoch in (0, 3, 4)]
    [0.5, 0.5, 0.9]
    """
    place = bisect_right(at, epoch) - 1
    if between == "hold" or place + 1 == len(at):
        return values[place]
    share = (epoch - at[place]) / (at[place + 1] - at[place])
    return (1.0 - share) * values[place] + share * values[place + 1]
