"""Counts by place as a picture: squares of a few shades, one path a shade, so that a page stays small."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from dropconnectpp.lab.report.render.drawing import colour_of

SHADES = 6
"""Steps of darkness."""


def squares(place: int, rows: Sequence[Mapping[str, Any]]) -> Callable[[Axes], None]:
    """What draws `connections` by `row` and `column`, in the colour of a place among methods."""
    most = max(float(row["connections"]) for row in rows) or 1.0
    shades: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        if row["connections"] > 0:
            shade = min(SHADES, 1 + int(SHADES * (float(row["connections"]) / most) ** 0.5))
            shades.setdefault(shade, []).append((row["column"], row["row"]))
    height, width = (1 + max(int(row[name]) for row in rows) for name in ("row", "column"))
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY]

    def draw(axes: Axes) -> None:
        for shade, places in sorted(shades.items()):
            corners = [(x + a, y + b) for x, y in places for a, b in ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))]
            path = Path(corners, codes * len(places))
            axes.add_patch(PathPatch(path, facecolor=colour_of(place), alpha=shade / SHADES, linewidth=0))
        axes.set(xlim=(-0.5, width + 0.5), ylim=(height + 0.5, -0.5), aspect="equal", xticks=[], yticks=[])
        axes.grid(visible=False)
        for side in ("top", "right", "bottom", "left"):
            axes.spines[side].set(visible=True, alpha=0.3)

    return draw
