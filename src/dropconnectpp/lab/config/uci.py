"""The UCI regression benchmark as settings: sets, methods, what each of them tries, and an experiment's digest.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from dropconnectpp.lab.config.protocol import VERSION
from dropconnectpp.lab.config.settings import ProtocolError, check_fields, late_settings, require

SETS: Mapping[str, str] = MappingProxyType(
    {
        "yacht": "yacht",
        "bostonHousing": "boston",
        "energy": "energy",
        "concrete": "concrete",
        "wine-quality-red": "wine",
        "power-plant": "power",
        "kin8nm": "kin8nm",
        "naval-propulsion-plant": "naval",
        "protein-tertiary-structure": "protein",
    }
)
"""The benchmark's folders and what the literature calls them, smallest first."""
PREFIX = "uci:"
BENCHMARK = "uci"
"""What tells stored settings of this benchmark from those of images."""

Kind = Literal["plain", "mc-dropout", "dropconnect", "dropconnect++", "ensemble"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which they are trained: the ensemble takes its settings from the plain networks."""
LABELS: Mapping[str, str] = MappingProxyType(
    {
        "plain": "Plain network",
        "mc-dropout": "MC dropout",
        "dropconnect": "DropConnect",
        "dropconnect++": "DropConnect++",
        "ensemble": "Ensemble of 5",
    }
)
SMALL = 2_000
"""Sets with fewer examples have two inner folds, and fewer steps."""
PARTS = 5
"""Into how many parts a training split is cut; one at a time is held out."""


@dataclass(frozen=True)
class Setting:
    """What is chosen on held-out training data."""

    rate: float
    """The share that is dropped; of DropConnect++ what the prior expects to be dropped, and where training starts."""
    precision: float
    """Of the normal prior of the weights, inputs and target standardised: weight decay."""


RATES = (0.001, 0.005, 0.02, 0.1)
PRECISIONS = (0.1, 10.0)
NOISY = tuple(Setting(rate, precision) for rate in RATES for precision in PRECISIONS)
PLAIN = tuple(Setting(0.0, precision) for precision in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0))
FACTORS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0, 4.0, 5.5, 7.5, 10.0)
"""What the learned noise may be multiplied by: chosen with the setting, on the same held-out data, by every method."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How every network of a set is trained, whatever its method."""

    hidden: int
    steps: int
    folds: int
    """How many parts of a training split are held out in turn to choose by."""
    batch: int = 32
    step_size: float = 0.01
    """Of Adam, falling to 0 along a cosine."""
    logit_step: float = 5.0
    """The keep probabilities' step size over the weights'."""
    draws: int = 200
    """Networks drawn for the test half."""
    trial_draws: int = 50
    """Networks drawn for held-out data."""
    members: int = 5
    """Networks of an ensemble."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in late_settings(self).items():
            require(value > 0, f"{name} must be above 0, got {value}.")
        require(self.folds <= PARTS, f"folds must be at most {PARTS}, got {self.folds}.")

    @classmethod
    def usual(cls, data: str, examples: int) -> Training:
        """Of the benchmark: 50 hidden units, 100 for protein."""
        if data == f"{PREFIX}protein-tertiary-structure":
            return cls(hidden=100, steps=20_000, folds=1)
        return cls(hidden=50, steps=4_000, folds=2) if examples < SMALL else cls(hidden=50, steps=10_000, folds=1)


@dataclass(frozen=True, kw_only=True)
class Regression:
    """One method on one set. Its replicas are the published splits, by their numbers."""

    data: str
    """The set, uci:NAME."""
    kind: Kind
    training: Training
    root_seed: int = 0
    settings: tuple[Setting, ...] = field(default=())
    """What is tried; eight settings for each method where none are given."""
    factors: tuple[float, ...] = FACTORS
    benchmark: Literal["uci"] = "uci"

    def __post_init__(self) -> None:
        check_fields(self)
        require(0 <= self.root_seed < 2**63, f"root_seed must lie in [0, 2^63), got {self.root_seed}.")
        if not self.settings:
            object.__setattr__(self, "settings", PLAIN if self.members_kind == "plain" else NOISY)
        require(all(factor > 0 for factor in self.factors), f"factors must be above 0, got {self.factors}.")
        for one in self.settings:
            inside = one.rate == 0.0 if self.members_kind == "plain" else 0.0 < one.rate < 1.0
            require(inside and one.precision >= 0.0, f"{self.kind} has no setting {one}.")

    @property
    def members_kind(self) -> Kind:
        """The method of a single network: plain for an ensemble."""
        return "plain" if self.kind == "ensemble" else self.kind

    @property
    def label(self) -> str:
        """What tables call the method."""
        return LABELS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return late_settings(self)

    @property
    def digest(self) -> str:
        """The experiment's identity, as that of a `Protocol`."""
        text = json.dumps([VERSION, self.to_dict()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def set_named(name: str) -> str:
    """A set's name as uci:FOLDER, given with or without the prefix, by the folder's name or the literature's.

    >>> set_named("boston")
    'uci:bostonHousing'
    """
    bare = name.removeprefix(PREFIX)
    short = {label: folder for folder, label in SETS.items()}
    if bare not in SETS and bare not in short:
        raise ProtocolError(f"There is no UCI set {name!r}. Choose from {', '.join(PREFIX + one for one in SETS)}.")
    return PREFIX + short.get(bare, bare)
