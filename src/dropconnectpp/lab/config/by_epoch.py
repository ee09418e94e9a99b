"""Step size, rate and KL weight by epoch, as frozen settings of a protocol.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dropconnectpp.errors import ArgumentError
from dropconnectpp.inference.epoch_values import Between, check_values, value_at
from dropconnectpp.lab.config.settings import ProtocolError, check_fields

SETTINGS = ("step_size", "rate", "kl_weight")
"""What may change from epoch to epoch."""
WORDS = {"step_size": "step size", "rate": "rate", "kl_weight": "KL weight"}


@dataclass(frozen=True, kw_only=True)
class ByEpoch:
    """Values of settings at epochs, counted from 0; what is given here takes the place of the protocol's own."""

    at: tuple[int, ...]
    """The epochs that are named; the first is 0."""
    step_size: tuple[float, ...] = ()
    rate: tuple[float, ...] = ()
    kl_weight: tuple[float, ...] = ()
    between: Between = "hold"
    """Between two epochs that are named a setting stays, or goes on a line."""
    name: str = ""
    """What tables call the schedule."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in SETTINGS:
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        try:
            check_values(self.at, self.values, self.between)
        except ArgumentError as error:
            raise ProtocolError(f"by_epoch: {error}") from None

    @property
    def values(self) -> dict[str, tuple[float, ...]]:
        """What changes, by name."""
        return {name: values for name in SETTINGS if (values := getattr(self, name))}

    def in_epoch(self, epoch: int) -> dict[str, float]:
        """The settings of an epoch.

        >>> ByEpoch(at=(0, 4), rate=(0.5, 0.9), between="linear").in_epoch(1)
        {'rate': 0.6}
        """
        return {name: value_at(self.at, values, epoch, self.between) for name, values in self.values.items()}

    @property
    def label(self) -> str:
        """What tables call it.

        >>> ByEpoch(at=(0, 30), rate=(0.5, 0.9), between="linear").label
        'rate 0.5 to 0.9 in 30 epochs'
        """
        if self.name:
            return self.name
        if self.between == "linear" and len(self.at) == 2:
            lines = [f"{WORDS[name]} {low:g} to {high:g}" for name, (low, high) in self.values.items()]
            return f"{' and '.join(lines)} in {self.at[1]} epochs"
        return f"{' and '.join(WORDS[name] for name in self.values)} by epoch"


def from_path(path: Mapping[str, Sequence[float]], name: str = "") -> ByEpoch:
    """The schedule with a value for each epoch, written down where one of them changes.

    >>> from_path({"step_size": [0.01, 0.01, 0.02], "rate": [0.5, 0.5, 0.5]})
    ByEpoch(at=(0, 2), step_size=(0.01, 0.02), rate=(0.5, 0.5), kl_weight=(), between='hold', name='')
    """
    columns = list(zip(*path.values(), strict=True))
    at = [0, *(epoch for epoch, (one, other) in enumerate(pairwise(columns), 1) if one != other)]
    kept: dict[str, Any] = {key: tuple(values[epoch] for epoch in at) for key, values in path.items()}
    return ByEpoch(at=tuple(at), name=name, **kept)
