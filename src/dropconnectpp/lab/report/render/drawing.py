"""Render drawings: inline SVG in the page's own colours, and SVG, PNG and PDF files.

On the page, text from outside never enters a drawing: names are in the legend, which is HTML. In a file, the legend
is part of the drawing.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any, Literal

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dropconnectpp",
    "svg.image_inline": True,
    "pdf.fonttype": 42,
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": "#000000",
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}
FigureKind = Literal[
    "convergence",
    "likelihood",
    "keep_probabilities",
    "reliability",
    "pruning",
    "population",
    "frontier",
    "corruptions",
    "small_data",
    "demo",
]
FileFormat = Literal["svg", "png", "pdf"]
STAND_INS = ("#7f7f01", "#7f7f02", "#7f7f03", "#7f7f04", "#7f7f05", "#7f7f06", "#7f7f07", "#7f7f08")
"""Placeholders: the page defines the colour of each, light and dark, as --series-1, --series-2 and so on."""
LIGHT = ("#6f7479", "#b8720a", "#0f6cad", "#b8322a", "#0b7d5c", "#8a4a9e", "#7a6a00", "#2b8fa3")
DARK = ("#a3a9ae", "#e6a545", "#62b0ea", "#f0776c", "#4cc49c", "#cf96e0", "#cdbb4a", "#67c9dc")
DASHES = ((0, (2, 1.5)), (0, (5, 2)), (0, (6, 2, 1, 2)), "solid")
"""Line styles in the paper's order of methods; DropConnect++ is the solid line."""
SIZE = (4.3, 2.9)
MARGINS = {"left": 0.135, "right": 0.96, "bottom": 0.165, "top": 0.97}
"""As shares of the size. They are the same for all panels, so axes line up and no layout is computed."""
HEADING, LEGEND_LINE = 0.3, 0.2
"""Heights in inches, in a file: of the heading above a panel, and of a line of the legend."""
PIXELS_PER_INCH = 200
METADATA: dict[FileFormat, Mapping[str, None]] = {
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "png": {"Software": None},
    "pdf": dict.fromkeys(("Creator", "Producer", "CreationDate")),
}
"""No dates and versions, so that the same numbers give the same bytes."""


@dataclass(frozen=True)
class LegendEntry:
    """One entry of the legend."""

    label: str
    place: int

    @property
    def series(self) -> int:
        """The number of its colour, from 1: --series-1."""
        return self.place % len(STAND_INS) + 1

    @property
    def dashes(self) -> str:
        """The value of stroke-dasharray."""
        dashes = dashes_of(self.place)
        return "none" if isinstance(dashes, str) else " ".join(f"{1.5 * length:g}" for length in dashes[1])


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    name: str
    """Unique on the page."""
    heading: str
    title: str
    description: str
    draw: Callable[[Axes], None]

    @property
    def svg(self) -> str:
        """The panel as an <svg> element for the page."""
        return inline(self)


@dataclass(frozen=True)
class Drawing:
    """Panels with one caption and one legend."""

    name: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[LegendEntry, ...]


def colour_of(place: int) -> str:
    """The colour of a place in the current palette."""
    return f"C{place % len(STAND_INS)}"


def dashes_of(place: int) -> Any:
    """The line style of a place."""
    return DASHES[place % len(DASHES)]


@contextmanager
def _style(palette: tuple[str, ...]) -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's matplotlibrc must not change the page
        settings: Any = {**STYLE, "axes.prop_cycle": cycler(color=palette)}
        matplotlib.rcParams.update(settings)
        yield


def inline(panel: Panel) -> str:
    """One panel as an <svg> element. The same drawing gives the same text."""
    with _style(STAND_INS):
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(**MARGINS)
        panel.draw(figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=METADATA["svg"])
    text, name = stream.getvalue(), panel.name
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>|<style type=.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    # Remove the white backgrounds of the figure and of the axes.
    text = re.sub(r'\s*<g id="patch_[12]">\s*<path [^>]*fill: #ffffff[^>]*/>\s*</g>', "", text)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text).replace("xlink:href", "href")
    text = text.replace("#000000", "currentColor")
    for place, colour in enumerate(STAND_INS, 1):
        text = text.replace(colour, f"var(--series-{place})")
    view = re.search(r'viewBox="[^"]*"', text)
    opening = '<svg xmlns="http://www.w3.org/2000/svg" class="plot" fill="currentColor" role="img" '
    opening += view.group() if view else ""
    opening += f' aria-labelledby="{name}-title {name}-desc">\n <title id="{name}-title">{escape(panel.title)}</title>'
    opening += f'\n <desc id="{name}-desc">{escape(panel.description)}</desc>'
    return re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1, flags=re.DOTALL)


def figure_files(drawing: Drawing) -> dict[str, bytes]:
    """The drawing as SVG, PNG and PDF files that include the legend, by file name."""
    with _style(LIGHT):
        figure = _figure(drawing)
        found = {}
        for kind, metadata in METADATA.items():
            stream = io.BytesIO()
            figure.savefig(stream, format=kind, metadata=metadata, dpi=PIXELS_PER_INCH)
            found[f"{drawing.name}.{kind}"] = stream.getvalue()
    return found


def _figure(drawing: Drawing) -> Figure:
    """The legend, and below it the panels in rows of two."""
    columns = min(2, len(drawing.panels))
    rows = math.ceil(len(drawing.panels) / columns)
    labels = [drawable(entry.label) for entry in drawing.legend]
    width, panel = SIZE[0] * columns, SIZE[1] + HEADING
    per_line = max(1, int(width / (0.7 + 0.075 * max(map(len, labels), default=0))))
    top = LEGEND_LINE * math.ceil(len(labels) / per_line) + 0.1
    height = top + rows * panel
    figure = Figure(figsize=(width, height))
    for place, one in enumerate(drawing.panels):
        row, column = divmod(place, columns)
        bottom = height - top - (row + 1) * panel + MARGINS["bottom"] * SIZE[1]
        box = (
            (column + MARGINS["left"]) / columns,
            bottom / height,
            (MARGINS["right"] - MARGINS["left"]) / columns,
            (MARGINS["top"] - MARGINS["bottom"]) * SIZE[1] / height,
        )
        axes = figure.add_axes(box)
        one.draw(axes)
        axes.set_title(drawable(one.heading), loc="left", fontsize=9.0)
    lines = [Line2D([], [], color=colour_of(e.place), linestyle=dashes_of(e.place)) for e in drawing.legend]
    legend = figure.legend(
        lines, [" "] * len(lines), loc="upper left", ncols=per_line, frameon=False, borderaxespad=0.4, handlelength=2.8
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)  # set as text: a line whose label begins with an underscore would be left out
    return figure


def drawable(text: str, longest: int = 60) -> str:
    """Text that the font can show, short enough for a legend; unknown characters become question marks.

    >>> drawable("naïve \\U00020000")
    'naïve ?'
    """
    known = _characters()
    line = "".join(one if ord(one) in known else "?" for one in " ".join(text.split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


@cache
def _characters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
