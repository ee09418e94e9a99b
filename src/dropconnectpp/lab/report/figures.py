"""The figures of a report, drawn from its tables: small panels that fit the width of a phone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.demo_figures import demo_drawings
from dropconnectpp.lab.report.formats import fixed
from dropconnectpp.lab.report.frontier import frontier
from dropconnectpp.lab.report.population_figures import population_drawings
from dropconnectpp.lab.report.render.drawing import Drawing, FigureKind, LegendEntry, Panel, colour_of, dashes_of
from dropconnectpp.lab.report.selection import ReportedExperiment, Selected
from dropconnectpp.lab.report.survivors import survivors
from dropconnectpp.lab.report.tables.further import NLL_RULES, RULES
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.uncertainty_figures import corruption_drawings, small_data_drawings
from dropconnectpp.lab.report.views.further import score_place, score_title

LEAST_SHARE = 0.001
"""Bins of confidence with a smaller share of the images are not drawn: they are noise."""
Column = Sequence[ReportedExperiment]
"""Experiments that are compared with each other."""
Tables = Mapping[str, Table]


@dataclass(frozen=True)
class _Line:
    """Points of a mean, with an interval where there is one."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], x: str, scale: float = 1.0) -> _Line:
        """The line through rows that hold a statistic."""
        ordered = sorted(rows, key=lambda row: row[x])
        ends = [row["interval"] or (row["mean"], row["mean"]) for row in ordered]
        means = [row["mean"] for row in ordered]
        return cls([scale * row[x] for row in ordered], means, [low for low, _ in ends], [high for _, high in ends])

    def draw(self, axes: Axes, place: int) -> None:
        colour = colour_of(place)
        marker = "o" if len(self.x) < 12 else ""
        axes.plot(self.x, self.mean, color=colour, linestyle=dashes_of(place), marker=marker)
        axes.fill_between(self.x, self.low, self.high, color=colour, alpha=0.18, linewidth=0)


def drawings(selected: Selected, found: Tables) -> dict[FigureKind, list[Drawing]]:
    """All figures by kind, one for each data set that has the numbers."""
    makers: dict[FigureKind, Callable[[Column, Tables, str], Drawing | None]] = {
        "convergence": convergence,
        "likelihood": likelihood,
        "keep_probabilities": keep_probabilities,
        "reliability": reliability,
        "pruning": pruning,
    }
    of_networks, selected = selected.of_other_networks, selected.of_the_papers_network.with_all_examples
    names = _slugs([" ".join(column) for column in selected.columns()])
    drawn: dict[FigureKind, list[Drawing]] = {}
    for kind, make in makers.items():
        made = [
            make(column, found, f"{kind.replace('_', '-')}-{name}")
            for name, column in zip(names, selected.columns().values(), strict=True)
        ]
        drawn[kind] = [drawing for drawing in made if drawing is not None]
    drawn["frontier"] = _frontiers(of_networks, found)
    drawn["population"] = population_drawings(found["population_history"], _slugs)
    drawn["corruptions"] = corruption_drawings(found["corruptions"], _slugs)
    drawn["small_data"] = small_data_drawings(found["small_data"], _slugs)
    drawn["demo"] = demo_drawings(found)
    return drawn


def _frontiers(experiments: Column, found: Tables) -> list[Drawing]:
    """Networks with few connections: a figure for each data set and network."""
    titles = list(dict.fromkeys(experiment.title for experiment in experiments))
    made = []
    for title, slug in zip(titles, _slugs(titles), strict=True):
        rows, others = ([row for row in found[name] if row["title"] == title] for name in ("connections", "published"))
        made.append(frontier(rows, others, f"frontier-{slug}"))
        made.append(survivors([row for row in found["survivors"] if row["title"] == title], f"survivors-{slug}"))
    return [drawing for drawing in made if drawing is not None]


def _slugs(texts: Sequence[str]) -> list[str]:
    """Unique names for files and elements.

    >>> _slugs(["cifar10 ", "folder:/My Cats", "folder:/my-cats"])
    ['cifar10', 'folder-my-cats', 'folder-my-cats-2']
    """
    slugs: list[str] = []
    for text in texts:
        slug = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "data"
        unique, number = slug, 1
        while unique in slugs:
            number += 1
            unique = f"{slug}-{number}"
        slugs.append(unique)
    return slugs


def _of(rows: Table, experiment: ReportedExperiment) -> Table:
    return [row for row in rows if row["digest"] == experiment.digest]


def _places(column: Column) -> dict[int, ReportedExperiment]:
    """Experiments by their place among colours and dashes: each of the paper's methods looks alike in every figure."""
    found: dict[int, ReportedExperiment] = {}
    for experiment in column:
        known = paper_values.KINDS.index(experiment.kind) if experiment.kind in paper_values.KINDS else 0
        free = known not in found and experiment.kind in paper_values.KINDS
        found[known if free else max([len(paper_values.KINDS) - 1, *found]) + 1] = experiment
    return dict(sorted(found.items()))


def _limits(lines: Iterable[_Line], most: float = 100.0) -> tuple[float, float]:
    """Limits that include all bands, cut where a band of two or three replicas exceeds what is possible."""
    ends = [min(most, max(0.0, end)) for line in lines for end in (*line.low, *line.high)]
    margin = 0.05 * (max(ends) - min(ends)) or 0.01 * min(most, 100.0)
    return min(ends) - margin, max(ends) + margin


def _legend(column: Column, places: Iterable[int]) -> tuple[LegendEntry, ...]:
    return tuple(LegendEntry(_places(column)[place].label, place) for place in places)


# -------------------------------------------------------------------------------------------- Figure 1


def convergence(column: Column, found: Tables, name: str) -> Drawing | None:
    """Figure 1(a): accuracy against epoch, by Eq. (19) and by Monte Carlo."""
    caption = f"Figure 1(a), {column[0].title}. Accuracy against epoch; bands are 95% intervals of the mean."
    return _along_epochs(column, found["convergence"], RULES, name, ("Accuracy", "accuracy, %", 2), caption)


def likelihood(column: Column, found: Tables, name: str) -> Drawing | None:
    """Negative log-likelihood against epoch: it rises where networks become overconfident."""
    caption = f"{column[0].title}. Negative log-likelihood against epoch; where it rises, networks grow too sure."
    return _along_epochs(column, found["likelihood"], NLL_RULES, name, ("NLL", "NLL, nats", 4), caption)


def _along_epochs(
    column: Column,
    table: Table,
    rules: Mapping[str, str],
    name: str,
    what: tuple[str, str, int],
    caption: str,
) -> Drawing | None:
    """A panel for each prediction rule; ``what`` is the measure's name, its axis label and its digits."""
    measure, axis, digits = what
    panels: list[tuple[str, str, dict[int, _Line]]] = []
    for result, heading in zip(rules, ("One pass, Eq. (19)", "Monte Carlo, Eq. (18)"), strict=True):
        rows = [row for row in table if row["rule"] == rules[result]]
        lines = {place: _Line.of(_of(rows, experiment), "epoch") for place, experiment in _places(column).items()}
        lines = {place: line for place, line in lines.items() if line.x}
        if lines:
            panels.append((result, heading, lines))
    if not panels:
        return None
    limits = _limits(
        (line for *_, lines in panels for line in lines.values()), 100.0 if axis.endswith("%") else math.inf
    )
    drawn = []
    for result, heading, lines in panels:

        def draw(axes: Axes, lines: Mapping[int, _Line] = lines) -> None:
            for place, line in lines.items():
                line.draw(axes, place)
            axes.set(xlabel="epoch", ylabel=axis, ylim=limits)
            axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))

        last = "; ".join(f"{_places(column)[p].label} {fixed(line.mean[-1], digits)}" for p, line in lines.items())
        about = f"At the end: {last}."
        drawn.append(Panel(f"{name}-{result}", heading, f"{measure} by epoch. {heading}", about, draw))
    if any(experiment.diverged for experiment in column):
        caption += " Diverged replicas are left out."
    places = sorted({place for _, _, lines in panels for place in lines})
    return Drawing(name, caption, tuple(drawn), _legend(column, places))


def keep_probabilities(column: Column, found: Tables, name: str) -> Drawing | None:
    """Figure 1(b): histogram and sorted curve of the learned keep probabilities, pooled over replicas."""
    histograms = {place: _of(found["keep_histogram"], experiment) for place, experiment in _places(column).items()}
    histograms = {place: rows for place, rows in histograms.items() if rows}
    curves = {place: _of(found["keep_sorted"], _places(column)[place]) for place in histograms}
    if not histograms:
        return None

    def draw_histogram(axes: Axes) -> None:
        for place, rows in histograms.items():
            shares = [100.0 * row["share"] for row in rows]
            edges = [row["low"] for row in rows] + [1.0]
            axes.stairs(shares, edges, color=colour_of(place), fill=True, alpha=0.25, linewidth=0)
            axes.stairs(shares, edges, color=colour_of(place), linestyle=dashes_of(place), linewidth=1.4)
        axes.set(xlabel="keep probability", ylabel="synapses, %", xlim=(0, 1))

    def draw_sorted(axes: Axes) -> None:
        for place, rows in curves.items():
            values = [row["keep_probability"] for row in rows]
            _Line([100.0 * row["share"] for row in rows], values, values, values).draw(axes, place)
        axes.set(xlabel="synapses, sorted, %", ylabel="keep probability", xlim=(0, 100), ylim=(0, 1))

    about = f"Learned by {', '.join(entry.label for entry in _legend(column, histograms))}."
    title = "Histogram of keep probabilities"
    panels = [Panel(f"{name}-histogram", "Histogram", title, about, draw_histogram)]
    if any(curves.values()):
        panels.append(Panel(f"{name}-sorted", "Sorted", "Keep probabilities in rising order", about, draw_sorted))
    caption = f"Figure 1(b), {column[0].title}. Learned keep probabilities of all synapses, replicas pooled."
    if column[0].paper_data == paper_values.FIGURE_1B_DATA:
        caption += " The paper: around 50K below 0.35, 200K from 0.4 to 0.6, 50K above 0.6, of almost 300K."
    return Drawing(name, caption, tuple(panels), _legend(column, histograms))


# ------------------------------------------------------------------------------------ beyond the paper


def reliability(column: Column, found: Tables, name: str) -> Drawing | None:
    """Accuracy against confidence, and the distribution of confidence."""
    by_place = {place: _of(found["reliability"], experiment) for place, experiment in _places(column).items()}
    by_place = {place: rows for place, rows in by_place.items() if rows}
    if not by_place:
        return None

    def draw(axes: Axes) -> None:
        axes.plot([0, 100], [0, 100], color="#000000", alpha=0.5, linewidth=0.8)
        for place, rows in by_place.items():
            shown = [row for row in rows if row["share"] >= LEAST_SHARE]
            accuracy = [100.0 * row["accuracy"] for row in shown]
            _Line([100.0 * row["confidence"] for row in shown], accuracy, accuracy, accuracy).draw(axes, place)
        axes.set(xlabel="confidence, %", ylabel="accuracy, %", xlim=(0, 100), ylim=(0, 100))

    def draw_counts(axes: Axes) -> None:
        for place, rows in by_place.items():
            middle = [50.0 * (row["low"] + row["high"]) for row in rows]
            shares = [100.0 * row["share"] for row in rows]
            _Line(middle, shares, shares, shares).draw(axes, place)
        axes.set(xlabel="confidence, %", ylabel="images, %", xlim=(0, 100))
        axes.set_ylim(bottom=0)

    names = ", ".join(entry.label for entry in _legend(column, by_place))
    panels = (
        Panel(f"{name}-accuracy", "Reliability", "Accuracy by confidence", f"Of {names}.", draw),
        Panel(f"{name}-images", "How sure", "Share of images by confidence", f"Of {names}.", draw_counts),
    )
    caption = (
        f"Reliability, {column[0].title}. On the diagonal a network is right as often as it says; below it, it is too "
        "sure. Replicas are pooled; bins with fewer than 0.1% of the images are left out."
    )
    return Drawing(name, caption, panels, _legend(column, by_place))


def pruning(column: Column, found: Tables, name: str) -> Drawing | None:
    """Accuracy against the share of weights kept, for each score that ranks them; a panel for each method."""
    shown = [row for experiment in column for row in _of(found["pruning"], experiment)]
    scores = sorted({row["score"] for row in shown}, key=score_place)
    by_place = {}
    for place, experiment in _places(column).items():
        mine = _of(shown, experiment)
        lines = {score: _Line.of([row for row in mine if row["score"] == score], "share", 100.0) for score in scores}
        by_place[place] = {score: line for score, line in lines.items() if line.x}
    if not shown:
        return None
    limits = _limits(line for lines in by_place.values() for line in lines.values())
    panels = []
    for place, lines in by_place.items():
        if not lines:
            continue

        def draw(axes: Axes, lines: Mapping[str, _Line] = lines) -> None:
            for score, line in lines.items():
                line.draw(axes, scores.index(score))
            axes.set(xlabel="weights kept, %", ylabel="accuracy, %", xlim=(0, 102), ylim=limits)

        label = _places(column)[place].label
        about = f"Accuracy of {label} against the share of weights kept."
        panels.append(Panel(f"{name}-{place}", label, "Accuracy of pruned networks", about, draw))
    caption = (
        f"Pruning, {column[0].title}. Accuracy by the share of weights kept, and by what they are ranked by; bands are "
        "95% intervals of the mean."
    )
    legend = tuple(LegendEntry(score_title(score), place) for place, score in enumerate(scores))
    return Drawing(name, caption, tuple(panels), legend)
