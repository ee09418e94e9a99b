"""Demos whose outcome is made up: what each network reached, by method and share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropconnectpp.lab.report.tables.demo import GRADUAL, PLAIN, PLAN, POSTERIOR

KEEP = (0.05, 0.01)
SIDE = 4
AROUND = (-0.3, 0.1, 0.2, 0.0)
"""What seeds add to a mean of 0: starts that are better or worse for every method."""
ALONE = (0.05, -0.1, 0.1, -0.05)
"""What they add to one method alone, so that differences have a spread."""


def spread(mean: float, place: int = 0, scale: float = 1.0) -> list[float]:
    """One value a seed; ``place`` tells methods apart."""
    own = ALONE[place:] + ALONE[:place]
    return [mean + scale * (a + b) for a, b in zip(AROUND, own, strict=True)]


def note(
    *,
    plain: float = 85.0,
    plan: Mapping[float, float] | None = None,
    gradual: Mapping[float, float] | None = None,
    kept: Mapping[float, float] | None = None,
    posterior: float = 84.0,
    auroc: Sequence[float] = (0.9, 0.9),
    ms: Sequence[float] = (10.0, 5.0),
    size: Sequence[float] = (1_000_000, 40_000),
) -> dict[str, Any]:
    """The note of a demo of four seeds; means by method, of the sparse ones by share."""
    plan = dict.fromkeys(KEEP, 83.0) if plan is None else plan
    gradual = dict.fromkeys(KEEP, 83.0) if gradual is None else gradual
    networks: list[dict[str, Any]] = []

    def add(method: str, keep: float, values: Sequence[float], more: Any) -> None:
        for seed, value in enumerate(values):
            networks.append({"seed": seed, "method": method, "keep": keep, "accuracy": value, **more(seed)})

    def doubt(place: int) -> Any:
        values = spread(auroc[place], 2 * place, 0.01)
        return lambda seed: {"doubt": {"auroc": values[seed], "entropy": 0.4, "foreign_entropy": 0.9}}

    def sparse(method: str, keep: float) -> Any:
        share = (kept or {}).get(keep, keep)
        times = [spread(one, 2 * place, 0.05 * one) for place, one in enumerate(ms)]

        def more(seed: int) -> dict[str, Any]:
            found: dict[str, Any] = {"kept": {"share": share, "pixels": [0, 1, 2, 3] * SIDE}}
            if keep == min(KEEP) and seed == 0:
                found["connections"] = [[[0, 1], [2, 0]], [[1, 3]]]
            if keep == min(KEEP) and method == PLAN:
                found["compact"] = {
                    "bytes": list(size),
                    "parameters": [250_000, 9_000],
                    "ms": [times[0][seed], times[1][seed]],
                    "apart": 1e-6,
                }
            return found

        return more

    add(PLAIN, 1.0, spread(plain), doubt(0))
    add(POSTERIOR, 1.0, spread(posterior, 1), doubt(1))
    for keep in KEEP:
        add(PLAN, keep, spread(plan[keep], 2), sparse(PLAN, keep))
        add(GRADUAL, keep, spread(gradual[keep], 3), sparse(GRADUAL, keep))
    return {
        "settings": {"seeds": 4, "epochs": 10, "keep": list(KEEP)},
        "data": "fashion-mini",
        "shape": [1, SIDE, SIDE],
        "train": 6000,
        "test": 1500,
        "foreign": 1797,
        "threads": 1,
        "networks": networks,
    }
