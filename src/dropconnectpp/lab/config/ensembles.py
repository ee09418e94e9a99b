"""An ensemble as settings: networks of one experiment whose predictions are averaged, and its digest.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dropconnectpp.lab.config.protocol import VERSION, Protocol
from dropconnectpp.lab.config.settings import late_settings, require

BENCHMARK = "ensemble"
"""What tells stored settings of ensembles from those of networks."""
MEMBERS = 5


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Ensembles of an experiment's networks. Ensemble e has the replicas from e times `members` on."""

    of: Protocol
    """What each member is; its evaluation says what is judged."""
    members: int = MEMBERS
    benchmark: Literal["ensemble"] = "ensemble"

    def __post_init__(self) -> None:
        require(self.members >= 2, f"members of an ensemble must be at least 2, got {self.members}.")
        require(self.of.evaluation.judged, "members of an ensemble must be judged: set evaluation.judged.")
        require(not self.of.training.holdout, "ensembles are judged on the test set: leave out the holdout.")

    @property
    def data(self) -> str:
        """The data set."""
        return self.of.data

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"Ensemble of {self.members}" + ("" if self.of.method.kind == "none" else f", {self.of.label}")

    def of_replicas(self, number: int) -> range:
        """The replicas of one ensemble.

        >>> from dropconnectpp.lab.config.protocol import Evaluation
        >>> Ensemble(of=Protocol(evaluation=Evaluation(judged=True))).of_replicas(1)
        range(5, 10)
        """
        return range(number * self.members, (number + 1) * self.members)

    def complete_in(self, replicas: Sequence[int]) -> list[int]:
        """The numbers of the ensembles that have all their members among these replicas."""
        there = set(replicas)
        numbers = sorted({replica // self.members for replica in there})
        return [number for number in numbers if there.issuperset(self.of_replicas(number))]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"data": self.data, **late_settings(self)}

    @property
    def digest(self) -> str:
        """The experiment's identity, as that of a `Protocol`."""
        text = json.dumps([VERSION, self.to_dict()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
