"""Fewer combinations of two parameters, each value still met: on a GPU the time goes to compiling kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

First = TypeVar("First")
Second = TypeVar("Second")


def one_in(every: int, first: Sequence[First], second: Sequence[Second]) -> list[tuple[First, Second]]:
    """Every so many-th pair along the diagonals: each value of either occurs, if the other has ``every`` or more."""
    found = [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if (i + j) % every == 0]
    assert {a for a, _ in found} == set(first), "some value of the first never occurs"
    assert {b for _, b in found} == set(second), "some value of the second never occurs"
    return found
