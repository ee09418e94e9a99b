"""What `dcpp tune` tries: for every launch of the dense layer, the work that is timed and the candidates.

For cards that we do not have the tiles are guesses; `tuning` finds out which of them a card runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from dropconnectpp.lab.kernels.launch_config import DEFAULTS, Launch
from dropconnectpp.lab.kernels.layer import FEW_UNITS

MANY_UNITS = 512
"""The units of the larger of the paper's dense layers; the smaller has `FEW_UNITS`."""

Part = Literal["forward", "backward", "gates"]
Kind = Literal["fixed", "score", "score, learned", "straight-through", "local", "local, learned"]


@dataclass(frozen=True)
class Work:
    """A part of a training step."""

    part: Part
    kind: Kind
    units: int


@dataclass(frozen=True)
class Group:
    """A launch by its name in `Launches`, the work that is timed, and candidates as changes to the default."""

    name: str
    title: str
    work: tuple[Work, ...]
    changes: tuple[dict[str, Any], ...]

    @property
    def candidates(self) -> list[Launch]:
        """The default first, since the launch in use may be another."""
        default: Launch = getattr(DEFAULTS, self.name)
        return [default, *(replace(default, **change) for change in self.changes)]


GROUPS = (
    Group(
        "forward",
        f"forward, up to {FEW_UNITS} units",
        (Work("forward", "score", FEW_UNITS),),
        (
            {"maxnreg": None},
            {"num_stages": 3},
            {"block_i": 32, "num_stages": 3},
            {"block_i": 32, "num_stages": 4, "num_warps": 4, "maxnreg": None},
            {"num_warps": 4, "maxnreg": None},
            {"block_b": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
            {"split": 256},
            {"split": 1024},
        ),
    ),
    Group(
        "forward_many",
        "forward, more units",
        (Work("forward", "score", MANY_UNITS),),
        (
            {"num_warps": 8},
            {"num_stages": 4},
            {"block_i": 64, "num_stages": 2, "num_warps": 8},
            {"block_o": 128, "num_warps": 8},
            {"block_b": 64},
            {"split": 1024},
        ),
    ),
    Group(
        "backward",
        "backward",
        (Work("backward", "score", FEW_UNITS), Work("backward", "fixed", MANY_UNITS)),
        (
            {"maxnreg": None},
            {"num_stages": 2},
            {"block_i": 32},
            {"block_i": 32, "num_warps": 4, "maxnreg": None},
            {"block_o": 32},
            {"num_warps": 4, "maxnreg": None},
        ),
    ),
    Group(
        "backward_crowded",
        "backward, crowded",
        (Work("backward", "score", MANY_UNITS), Work("backward", "straight-through", FEW_UNITS)),
        (
            {"maxnreg": None},
            {"num_stages": 2},
            {"block_i": 64},
            {"block_i": 16},
            {"num_warps": 4, "maxnreg": None},
            {"block_o": 32},
        ),
    ),
    Group(
        "gates",
        "gates",
        (Work("gates", "score", FEW_UNITS), Work("gates", "score", MANY_UNITS)),
        (
            {"block": 512},
            {"block": 512, "num_warps": 2},
            {"num_warps": 8},
            {"block": 2048, "num_warps": 8},
        ),
    ),
    Group(
        "gates_learned",
        "gates, learned q(pi)",
        (Work("gates", "score, learned", FEW_UNITS), Work("gates", "score, learned", MANY_UNITS)),
        (
            {"block": 256},
            {"block": 256, "num_warps": 2},
            {"num_warps": 8},
            {"block": 1024, "num_warps": 8},
        ),
    ),
    Group(
        "local_forward",
        "local: forward",
        (Work("forward", "local", FEW_UNITS), Work("forward", "local", MANY_UNITS)),
        (
            {"maxnreg": None},
            {"num_stages": 2},
            {"block_i": 64, "num_stages": 2},
            {"num_warps": 4, "maxnreg": None},
            {"block_b": 64, "num_warps": 4, "maxnreg": None},
            {"split": 1024},
        ),
    ),
    Group(
        "local_backward",
        "local: backward",
        (Work("backward", "local", FEW_UNITS),),
        (
            {"maxnreg": None},
            {"num_stages": 2},
            {"block_i": 64},
            {"block_i": 16},
            {"num_warps": 4, "maxnreg": None},
            {"block_o": 32},
        ),
    ),
    Group(
        "local_crowded",
        "local: backward, crowded",
        (Work("backward", "local", MANY_UNITS), Work("backward", "local, learned", FEW_UNITS)),
        (
            {"maxnreg": None},
            {"num_stages": 2},
            {"block_i": 32},
            {"num_warps": 4, "maxnreg": None},
            {"block_o": 32},
        ),
    ),
)
