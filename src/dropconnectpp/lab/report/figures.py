"""The figures as inline SVG: small panels that a phone shows at full width, coloured by the page's own variables.

Text from outside never enters a drawing: names stand in the legend, which is HTML.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.experiments import Experiment
from dropconnectpp.lab.report.layout import score_place, score_title
from dropconnectpp.lab.report.number_formats import finite, fixed
from dropconnectpp.lab.report.tables import Table, statistic

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dropconnectpp",
    "svg.image_inline": True,
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
COLOURS = ("#7f7f01", "#7f7f02", "#7f7f03", "#7f7f04", "#7f7f05", "#7f7f06", "#7f7f07", "#7f7f08")
"""Stand-ins: the page defines what each looks like, in light and in dark, as --series-1 and on."""
DASHES = ((0, (2, 1.5)), (0, (5, 2)), (0, (6, 2, 1, 2)), "solid")
"""In the paper's order of methods, so that DropConnect++ is the solid line."""
SIZE = (4.3, 2.9)
MARGINS = {"left": 0.135, "right": 0.96, "bottom": 0.165, "top": 0.97}
"""Of the size, the same for all panels: their axes line up, and no layout has to be searched for."""


@dataclass(frozen=True)
class Entry:
    """A line of the legend."""

    label: str
    series: int
    """From 1: --series-1 and on."""
    dashes: str
    """stroke-dasharray."""


@dataclass(frozen=True)
class Drawing:
    """Panels with one caption and one legend."""

    caption: str
    panels: tuple[tuple[str, str], ...]
    """Heading and SVG of each."""
    legend: tuple[Entry, ...]


@dataclass(frozen=True)
class _Line:
    """Points of a mean with its interval, where there is one."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @classmethod
    def of(cls, points: Mapping[float, Iterable[float]]) -> _Line:
        x = sorted(points)
        found = [statistic(points[place]) for place in x]
        ends = [line["interval"] or (line["mean"], line["mean"]) for line in found]
        return cls(x, [line["mean"] for line in found], [low for low, _ in ends], [high for _, high in ends])

    def draw(self, axes: Axes, place: int) -> None:
        colour, dashes = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        marker = "o" if len(self.x) < 12 else ""
        axes.plot(self.x, self.mean, color=colour, linestyle=dashes, marker=marker)
        axes.fill_between(self.x, self.low, self.high, color=colour, alpha=0.18, linewidth=0)


def _limits(lines: Iterable[_Line]) -> tuple[float, float]:
    """An axis of percent that holds all bands; those of two or three replicas may reach beyond what is possible."""
    ends = [min(100.0, max(0.0, end)) for line in lines for end in (*line.low, *line.high)]
    margin = 0.05 * (max(ends) - min(ends)) or 1.0
    return min(ends) - margin, max(ends) + margin


def _legend(labels: Mapping[int, str]) -> tuple[Entry, ...]:
    entries = []
    for place, label in labels.items():
        dashes = DASHES[place % len(DASHES)]
        pattern = "none" if isinstance(dashes, str) else " ".join(f"{1.5 * length:g}" for length in dashes[1])
        entries.append(Entry(label, place % len(COLOURS) + 1, pattern))
    return tuple(entries)


def convergence(column: Sequence[Experiment], name: str) -> Drawing | None:
    """Figure 1(a): accuracy against epoch, by Eq. (19) and by Monte Carlo."""
    panels: list[tuple[str, str, dict[int, _Line]]] = []
    for result, heading in (("accuracy", "One pass, Eq. (19)"), ("mc_accuracy", "Monte Carlo, Eq. (18)")):
        lines = {place: _curve(experiment, result) for place, experiment in enumerate(column)}
        lines = {place: line for place, line in lines.items() if line.x}
        if lines:
            panels.append((result, heading, lines))
    if not panels:
        return None
    limits = _limits(line for _, _, lines in panels for line in lines.values())
    drawn = []
    for result, heading, lines in panels:

        def draw(axes: Axes, lines: Mapping[int, _Line] = lines) -> None:
            for place, line in lines.items():
                line.draw(axes, place)
            axes.set(xlabel="epoch", ylabel="accuracy, %", ylim=limits)
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))

        last = "; ".join(f"{column[p].label} {fixed(line.mean[-1])}" for p, line in lines.items())
        drawn.append((heading, svg(f"{name}-{result}", f"Accuracy by epoch. {heading}", f"At the end: {last}.", draw)))
    caption = f"Figure 1(a), {column[0].title}. Accuracy against epoch; bands are 95% intervals of the mean."
    if any(experiment.diverged for experiment in column):
        caption += " Diverged replicas are left out."
    return Drawing(caption, tuple(drawn), _legend(dict(enumerate(e.label for e in column))))


def _curve(experiment: Experiment, result: str) -> _Line:
    points: dict[float, list[float]] = defaultdict(list)
    for _, point in experiment.entries("curve"):
        epoch, value = finite(point.get("epoch")), finite(point.get(result))
        if epoch is not None and value is not None:
            points[epoch].append(value)
    return _Line.of(points)


def keep_probabilities(column: Sequence[Experiment], name: str) -> Drawing | None:
    """Figure 1(b): histogram and sorted curve of the learned keep probabilities, pooled over replicas."""
    histograms: dict[int, list[float]] = {}
    quantiles: dict[int, list[float]] = {}
    for place, experiment in enumerate(column):
        pooled = _columns(experiment, "histogram")
        if pooled and sum(map(sum, pooled)):
            counts = [sum(values) for values in pooled]
            histograms[place] = [100.0 * count / sum(counts) for count in counts]
            quantiles[place] = [sum(values) / len(values) for values in _columns(experiment, "quantiles")]
    if not histograms:
        return None

    def draw_histogram(axes: Axes) -> None:
        for place, shares in histograms.items():
            edges = [i / len(shares) for i in range(len(shares) + 1)]
            colour, dashes = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
            axes.stairs(shares, edges, color=colour, fill=True, alpha=0.25, linewidth=0)
            axes.stairs(shares, edges, color=colour, linestyle=dashes, linewidth=1.4)
        axes.set(xlabel="keep probability", ylabel="synapses, %", xlim=(0, 1))

    def draw_sorted(axes: Axes) -> None:
        for place, values in quantiles.items():
            x = [100.0 * i / max(1, len(values) - 1) for i in range(len(values))]
            _Line(x, values, values, values).draw(axes, place)
        axes.set(xlabel="synapses, sorted, %", ylabel="keep probability", xlim=(0, 100), ylim=(0, 1))

    labels = {place: column[place].label for place in histograms}
    about = f"Learned by {', '.join(labels.values())}."
    panels = [("Histogram", svg(f"{name}-histogram", "Histogram of keep probabilities", about, draw_histogram))]
    if any(quantiles.values()):
        panels.append(("Sorted", svg(f"{name}-sorted", "Keep probabilities in rising order", about, draw_sorted)))
    caption = f"Figure 1(b), {column[0].title}. Learned keep probabilities of all synapses, replicas pooled."
    if column[0].paper_data == paper_values.FIGURE_1B_DATA:
        caption += " The paper: around 50K below 0.35, 200K from 0.4 to 0.6, 50K above 0.6, of almost 300K."
    return Drawing(caption, tuple(panels), _legend(labels))


def _columns(experiment: Experiment, name: str) -> list[tuple[float, ...]]:
    """The values of a list in the posterior, place by place, over the replicas whose list is as long as the first's."""
    found: list[list[float]] = []
    for row in experiment.done:
        posterior = row.results.get("posterior")
        values = posterior.get(name) if isinstance(posterior, Mapping) else None
        numbers = [finite(value) for value in values] if isinstance(values, list) else []
        if numbers and None not in numbers and (not found or len(numbers) == len(found[0])):
            found.append([number for number in numbers if number is not None])
    return list(zip(*found, strict=True))


def pruning(column: Sequence[Experiment], rows: Table, name: str) -> Drawing | None:
    """Accuracy against the share of weights that is kept, by what they are ranked by; a panel for each method."""
    shown = [row for row in rows if (row["data"], row["variant"]) == column[0].column]
    scores = sorted({row["score"] for row in shown}, key=score_place)
    panels = []
    for place, experiment in enumerate(column):
        mine = [row for row in shown if row["digest"] == experiment.digest]
        lines = {score: _pruned([row for row in mine if row["score"] == score]) for score in scores}
        lines = {score: line for score, line in lines.items() if line.x}
        if not lines:
            continue

        def draw(axes: Axes, lines: Mapping[str, _Line] = lines) -> None:
            for score, line in lines.items():
                line.draw(axes, scores.index(score))
            axes.set(xlabel="weights kept, %", ylabel="accuracy, %", xlim=(0, 102), ylim=_limits(lines.values()))

        about = f"Accuracy of {experiment.label} against the share of weights kept."
        panels.append((experiment.label, svg(f"{name}-{place}", "Accuracy of pruned networks", about, draw)))
    if not panels:
        return None
    caption = f"Pruning, {column[0].title}. Accuracy by the share of weights kept, and by what they are ranked by."
    return Drawing(caption, tuple(panels), _legend(dict(enumerate(map(score_title, scores)))))


def _pruned(rows: Table) -> _Line:
    rows = sorted(rows, key=lambda row: float(row["share"]))
    ends = [row["interval"] or (row["mean"], row["mean"]) for row in rows]
    x, mean = [100.0 * row["share"] for row in rows], [row["mean"] for row in rows]
    return _Line(x, mean, [low for low, _ in ends], [high for _, high in ends])


def svg(name: str, title: str, description: str, draw: Callable[[Axes], None]) -> str:
    """One panel as an <svg> element; the same drawing gives the same text. ``name`` keeps its ids its own."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the reader's own matplotlibrc must not change the page
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        figure = Figure(figsize=SIZE)
        figure.subplots_adjust(**MARGINS)
        axes = figure.add_subplot()
        draw(axes)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>|<style type=.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    # The white page behind the axes, and the axes' own.
    text = re.sub(r'\s*<g id="patch_[12]">\s*<path [^>]*fill: #ffffff[^>]*/>\s*</g>', "", text)
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text).replace("xlink:href", "href")
    text = text.replace("#000000", "currentColor")
    for place, colour in enumerate(COLOURS, 1):
        text = text.replace(colour, f"var(--series-{place})")
    view = re.search(r'viewBox="[^"]*"', text)
    opening = '<svg xmlns="http://www.w3.org/2000/svg" class="plot" fill="currentColor" role="img" '
    opening += view.group() if view else ""
    opening += f' aria-labelledby="{name}-title {name}-desc">\n <title id="{name}-title">{escape(title)}</title>'
    opening += f'\n <desc id="{name}-desc">{escape(description)}</desc>'
    return re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1, flags=re.DOTALL)
