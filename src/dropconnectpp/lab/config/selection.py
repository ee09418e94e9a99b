"""How settings are chosen, as frozen settings: what is tried, how long, on how much data.

`Selection` is of step sizes, rates and logit steps; `SparsitySearch` of whole methods that keep few connections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dropconnectpp.lab.config.settings import ProtocolError

STEP_SIZES = (0.005, 0.01, 0.05)
"""The paper's."""
RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
FARTHER = (0.9, 0.95)
"""Rates to go on to after `RATES`."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What is tried to choose the settings that a protocol leaves open, and how much is spent on it."""

    step_sizes: tuple[float, ...] = STEP_SIZES
    step_epochs: int = 2
    """"the first few iterations". Step sizes are compared by the mean training loss over the last of these epochs."""
    step_replicas: int = 3
    rates: tuple[float, ...] = RATES
    farther: tuple[float, ...] | None = None
    """Rates to go on to, one after another, while the highest rate tried is the best. None: `FARTHER` after `RATES`,
    and none after any others."""
    logit_steps: tuple[float, ...] = ()
    """Logit steps to try for DropConnect++ where none is given; they are chosen as rates are."""
    rate_epochs: int | None = None
    """For rates and logit steps. None: as many as the experiment has."""
    rate_replicas: int = 3
    holdout_share: float = 0.1
    """Share of the training set on which rates and logit steps are compared."""
    together: bool = False
    """Whether step sizes are compared there too, each with each rate or logit step: more expensive, and fair to a rate
    that needs another step size than the one that starts fastest. step_epochs and step_replicas are then unused."""

    def __post_init__(self) -> None:
        if not self.step_sizes or not all(0.0 < step < math.inf for step in self.step_sizes):
            raise ProtocolError(f"step_sizes must be one or more positive numbers, got {self.step_sizes}.")
        if not self.rates or not all(0.0 <= rate < 1.0 for rate in self.rates):
            raise ProtocolError(f"rates must be one or more numbers in [0, 1), got {self.rates}.")
        farther = self.farther or ()
        if list(farther) != sorted(set(farther)) or not all(max(self.rates) < rate < 1.0 for rate in farther):
            raise ProtocolError(f"farther must be rising numbers between the highest rate and 1, got {farther}.")
        if not all(0.0 < step < math.inf for step in self.logit_steps):
            raise ProtocolError(f"logit_steps must be positive numbers, got {self.logit_steps}.")
        for name in ("step_epochs", "step_replicas", "rate_epochs", "rate_replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ProtocolError(f"{name} must be at least 1, got {value}.")
        if not 0.0 < self.holdout_share < 1.0:  # with none held out, rates would be compared on the test set
            raise ProtocolError(f"holdout_share must lie in (0, 1), got {self.holdout_share}.")

    def after(self, rate: float) -> float | None:
        """The rate to go on to where ``rate`` is the best; None if `rates` has a higher one, and after the last.

        >>> Selection().after(0.7), Selection().after(0.8), Selection().after(0.9), Selection().after(0.95)
        (None, 0.9, 0.95, None)
        """
        farther = self.farther
        if farther is None:
            farther = FARTHER if self.rates == RATES else ()
        if rate < max(self.rates):
            return None
        return next((one for one in farther if one > rate), None)


CONTROL_NAMES = ("random", "magnitude", "unlearned", "from-start")


@dataclass(frozen=True, kw_only=True)
class SparsitySearch:
    """For each method and share of weights, which setting goes to the test set, of those that an experiment names.

    The rule was fixed before anything was measured: of the settings that keep the share, the one with the lowest error
    on held-out training data; of equals the one with the lowest NLL.
    """

    keep: tuple[float, ...]
    """Shares of weights to keep."""
    repeats: int = 2
    """Networks of each setting that is tried."""
    holdout_share: float = 1 / 6
    """Share of the training set on which settings are compared: 10,000 images of MNIST."""
    slack: float = 0.1
    """A setting keeps a share if its networks keep at most this part more, on average."""
    controls: tuple[str, ...] = ()
    """Controls of what was chosen of DropConnect++, trained with it: random, magnitude, unlearned, from-start."""

    def __post_init__(self) -> None:
        if not self.keep or not all(0.0 < share < 1.0 for share in self.keep):
            raise ProtocolError(f"keep must be one or more shares in (0, 1), got {self.keep}.")
        if len(set(self.keep)) < len(self.keep):
            raise ProtocolError(f"keep names a share twice: {self.keep}.")
        if self.repeats < 1:
            raise ProtocolError(f"repeats must be at least 1, got {self.repeats}.")
        if not 0.0 < self.holdout_share < 1.0:
            raise ProtocolError(f"holdout_share must lie in (0, 1), got {self.holdout_share}.")
        if unknown := set(self.controls) - set(CONTROL_NAMES):
            known = ", ".join(CONTROL_NAMES)
            raise ProtocolError(f"controls must be of {known}, got {', '.join(sorted(unknown))}.")
        if not 0.0 <= self.slack < math.inf:
            raise ProtocolError(f"slack must be at least 0, got {self.slack}.")

    def reached(self, share: float, keep: float) -> bool:
        """Whether networks that keep ``share`` on average count as keeping ``keep``.

        >>> search = SparsitySearch(keep=(0.02,))
        >>> search.reached(0.0219, 0.02), search.reached(0.0221, 0.02), search.reached(0.01, 0.02)
        (True, False, True)
        """
        return share <= keep * (1.0 + self.slack)
