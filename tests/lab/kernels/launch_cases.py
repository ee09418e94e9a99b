"""Launches other than the defaults: small tiles, other numbers, and the candidates of a tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dropconnectpp.lab.kernels.launch_config import DEFAULTS, Launches, Walk
from dropconnectpp.lab.tuning import candidates

TILES = {"block_b": 16, "block_o": 16, "block_i": 16, "split": 32, "block": 128}
HERE = {"card": "Card of the tests", "triton": "9.9", "kernels": "0123abcd"}


def with_tiles(launch: Any, **tiles: int) -> Any:
    return replace(launch, **{name: value for name, value in tiles.items() if hasattr(launch, name)})


SMALL = Launches(**{name: with_tiles(launch, **TILES) for name, launch in vars(DEFAULTS).items()})
OTHER = replace(
    DEFAULTS,
    forward=replace(DEFAULTS.forward, block_i=32, num_stages=4),
    backward=replace(DEFAULTS.backward, maxnreg=None),
    gates=Walk(block=2048, num_warps=8),
)


def other_tiles(*groups: str) -> Iterator[tuple[candidates.Group, Launches]]:
    """Candidates of groups, by how their names begin, as far as the tiles are not the default's."""
    for group in candidates.GROUPS:
        default, *others = group.candidates
        different = {with_tiles(default, **vars(one) | default.options) for one in others} - {default}
        if group.name.startswith(groups):
            yield from ((group, replace(DEFAULTS, **{group.name: one})) for one in different)
