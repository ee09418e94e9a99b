"""The demo's figures: accuracy by share, what is kept as a picture, doubt about foreign images, bytes and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dropconnectpp.lab.report.formats import fixed, kept, significant
from dropconnectpp.lab.report.render.drawing import Drawing, LegendEntry, Panel, colour_of, dashes_of
from dropconnectpp.lab.report.squares import squares
from dropconnectpp.lab.report.tables.demo import GRADUAL, METHODS, PLAIN, PLAN, POSTERIOR
from dropconnectpp.lab.report.tables.rows import Table

PLACES = {PLAIN: 0, GRADUAL: 1, PLAN: 3, POSTERIOR: 3}
"""Colours and line styles; DropConnect++ has the ones that it has in every figure."""


def demo_drawings(found: Mapping[str, Table]) -> list[Drawing]:
    """The figures that have numbers, in the order of the page."""
    made = [
        _accuracy(found["demo"]),
        _pixels(found["demo_pixels"], found["demo_connections"]),
        _doubt(found["demo_doubt"]),
        _sizes(found["demo_sizes"]),
    ]
    return [drawing for drawing in made if drawing is not None]


def _legend(methods: Iterable[str]) -> tuple[LegendEntry, ...]:
    return tuple(LegendEntry(METHODS[method], PLACES[method]) for method in methods)


def _accuracy(rows: Table) -> Drawing | None:
    """Accuracy against the share of weights kept, the plain network as a band."""
    sparse = {
        method: sorted(
            (
                row
                for row in rows
                if row["kind"] == method and row["mean"] is not None and row["kept"]["mean"] and row["asked"] > 0.0
            ),
            key=lambda row: float(row["asked"]),
        )
        for method in (PLAN, GRADUAL)
    }
    plain = [row for row in rows if row["kind"] == PLAIN and row["mean"] is not None]
    if not any(sparse.values()):
        return None

    def draw(axes: Axes) -> None:
        for row in plain:
            colour = colour_of(PLACES[PLAIN])
            low, high = row["interval"] or (row["mean"], row["mean"])
            axes.axhspan(low, high, color=colour, alpha=0.18, linewidth=0)
            axes.axhline(row["mean"], color=colour, linestyle=dashes_of(PLACES[PLAIN]))
        for apart, (method, mine) in zip((0.97, 1.03), sparse.items(), strict=True):  # else one bar hides the other
            x, means = [100.0 * apart * row["asked"] for row in mine], [row["mean"] for row in mine]
            ends = [row["interval"] or (row["mean"], row["mean"]) for row in mine]
            spread = [[m - low for m, (low, _) in zip(means, ends, strict=True)]]
            spread.append([high - m for m, (_, high) in zip(means, ends, strict=True)])
            place = PLACES[method]
            axes.errorbar(
                x, means, yerr=spread, color=colour_of(place), linestyle=dashes_of(place), marker="o", capsize=2.0
            )
        ticks = sorted({100.0 * row["asked"] for mine in sparse.values() for row in mine})
        axes.set_xscale("log")
        axes.set_xlim(0.75 * ticks[0], 1.35 * ticks[-1])
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}%"))
        axes.set(xlabel="weights to keep", ylabel="accuracy, %")

    shown = [row for mine in (*sparse.values(), plain) for row in mine]
    about = "; ".join(f"{row['method']} {fixed(row['mean'])}% at {kept(row['asked'])}" for row in shown) + "."
    methods = [*(PLAIN for _ in plain[:1]), *(method for method, mine in sparse.items() if mine)]
    n = sorted({int(row["n"]) for row in shown})
    caption = (
        "Accuracy against the share of weights kept. Bars, and the band of the plain network, are 95% intervals of the "
        f"mean; n = {' to '.join(map(str, dict.fromkeys((n[0], n[-1]))))} networks each."
    )
    panel = Panel("demo-accuracy-panel", "Accuracy", "Accuracy by the share of weights kept", about, draw)
    return Drawing("demo-accuracy", caption, (panel,), _legend(sorted(methods, key=list(METHODS).index)))


# ------------------------------------------------------------------------------------- what was kept


def _pixels(pixels: Table, connections: Table) -> Drawing | None:
    """How many connections each pixel keeps, and which units read which behind the first layer."""
    panels = []
    for method in (PLAN, GRADUAL):
        mine = [row for row in pixels if row["kind"] == method]
        if mine:
            read = sum(row["connections"] > 0 for row in mine)
            about = f"{read} of {len(mine)} pixels are read in at least one network."
            heading = f"Pixels: {METHODS[method]}"
            panels.append(
                Panel(f"demo-kept-{method}", heading, "Connections of each pixel", about, squares(PLACES[method], mine))
            )
    for method in (PLAN, GRADUAL):
        mine = [row for row in connections if row["kind"] == method]
        if mine:
            layers = sorted({row["layer"] for row in mine})
            counts = ", ".join(f"{sum(row['layer'] == layer for row in mine)} in layer {layer}" for layer in layers)
            heading = f"Units: {METHODS[method]}"
            about = f"Connections kept: {counts}."
            panels.append(
                Panel(f"demo-wires-{method}", heading, "Which unit reads which unit", about, _wires(method, mine))
            )
    if not panels:
        return None
    asked = kept((pixels or connections)[0]["asked"])
    caption = (
        f"What was kept, at {asked} of the weights. Pixels: the stronger the colour, the more connections, "
        "averaged over networks; a pixel without a connection is empty. Units: one network of each method, its first "
        "hidden layer at the bottom, the classes at the top, a line for each weight that is not zero."
    )
    methods = [method for method in (PLAN, GRADUAL) if any(row["kind"] == method for row in pixels + connections)]
    return Drawing("demo-kept", caption, tuple(panels), _legend(methods))


def _wires(method: str, rows: Sequence[Mapping[str, Any]]) -> Callable[[Axes], None]:
    """Rows of units, and lines between those that are joined."""
    layers = sorted({int(row["layer"]) for row in rows})
    widths = {layers[0] - 1: 1 + max(row["from"] for row in rows if row["layer"] == layers[0])}
    for layer in layers:
        after = [row["from"] for row in rows if row["layer"] == layer + 1]
        widths[layer] = 1 + max([row["to"] for row in rows if row["layer"] == layer] + after)

    def at(layer: int, unit: int) -> tuple[float, float]:
        return (unit + 0.5) / widths[layer], float(layer)

    joined = {
        layer: [(at(layer - 1, row["from"]), at(layer, row["to"])) for row in rows if row["layer"] == layer]
        for layer in layers
    }
    units = sorted({end for lines in joined.values() for line in lines for end in line})

    def draw(axes: Axes) -> None:
        colour = colour_of(PLACES[method])
        for lines in joined.values():
            ends = [end for line in lines for end in line]
            path = Path(ends, [Path.MOVETO, Path.LINETO] * len(lines))
            alpha = min(0.6, max(0.1, 200.0 / len(lines)))
            axes.add_patch(PathPatch(path, facecolor="none", edgecolor=colour, alpha=alpha, linewidth=0.5))
        axes.plot([x for x, _ in units], [y for _, y in units], "o", color=colour, markersize=1.6, linestyle="none")
        low, high = layers[0] - 1, layers[-1]
        axes.set(xlim=(0, 1), ylim=(low - 0.15, high + 0.15), xticks=[], yticks=range(low, high + 1))
        names = [f"hidden {layer}" for layer in range(low, high)]
        axes.set_yticklabels([*names, "classes"], rotation=90, va="center")
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(left=False)

    return draw


# ------------------------------------------------------------------------------- doubt, bytes and time


def _bars(
    axes: Axes, groups: Sequence[str], values: Mapping[int, Sequence[Mapping[str, Any]]], unit: str, digits: int
) -> None:
    """Groups of bars with intervals and their numbers; ``values`` are statistics by place among the colours."""
    width = 0.8 / len(values)
    for number, (place, statistics) in enumerate(values.items()):
        for group, found in enumerate(statistics):
            if found["mean"] is None:
                continue
            x = group + (number - (len(values) - 1) / 2) * width
            axes.bar(x, found["mean"], 0.9 * width, color=colour_of(place), alpha=0.55)
            low, high = found["interval"] or (found["mean"], found["mean"])
            spread = [[found["mean"] - low], [high - found["mean"]]]
            axes.errorbar(x, found["mean"], yerr=spread, color=colour_of(place), capsize=2.0)
            axes.annotate(
                significant(found["mean"], digits),
                (x, high),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8.0,
            )
    axes.set(xticks=range(len(groups)), ylabel=unit, xlim=(-0.6, len(groups) - 0.4))
    axes.set_xticklabels(groups)
    axes.set_ylim(0.0, 1.12 * axes.get_ylim()[1])
    axes.grid(visible=False, axis="x")


def _doubt(rows: Table) -> Drawing | None:
    """Entropy on the data's own images and on foreign ones, and the AUROC."""
    if not rows:
        return None
    known = {row["kind"]: row for row in rows}

    def draw_entropy(axes: Axes) -> None:
        values = {PLACES[kind]: [row["entropy"], row["foreign_entropy"]] for kind, row in known.items()}
        _bars(axes, ("clothes", "handwritten digits"), values, "mean entropy, nats", 2)

    def draw_auroc(axes: Axes) -> None:
        _bars(axes, ("digits against clothes",), {PLACES[kind]: [row] for kind, row in known.items()}, "AUROC", 3)
        axes.set_ylim(0.5, 1.05)

    about = "; ".join(f"{row['method']}: AUROC {fixed(row['mean'], 3)}" for row in rows) + "."
    panels = (
        Panel("demo-doubt-entropy", "Entropy", "Entropy by kind of image", about, draw_entropy),
        Panel("demo-doubt-auroc", "Told apart", "AUROC of the entropy", about, draw_auroc),
    )
    caption = (
        "Doubt about foreign images: networks trained on clothes are shown handwritten digits. 0.5 is guessing. Bars "
        "are 95% intervals of the mean."
    )
    return Drawing("demo-doubt", caption, panels, _legend(known))


def _sizes(rows: Table) -> Drawing | None:
    """A file's kilobytes and a pass's milliseconds, before and after `compact`."""
    if not rows:
        return None
    row = rows[-1]
    panels = []
    for name, heading, unit, scale in (("bytes", "File", "kB", 1e-3), ("ms", "One pass of all test images", "ms", 1.0)):
        both = [_scaled(row[f"{name}_{when}"], scale) for when in ("before", "after")]
        if any(one["mean"] is None for one in both):
            continue

        def draw(axes: Axes, both: Sequence[Mapping[str, Any]] = both, unit: str = unit) -> None:
            _bars(axes, ("",), {PLACES[PLAIN]: both[:1], PLACES[PLAN]: both[1:]}, unit, 3)

        about = f"{significant(both[0]['mean'])} {unit} before, {significant(both[1]['mean'])} {unit} after."
        panels.append(Panel(f"demo-sizes-{name}", heading, f"{heading}, before and after compact", about, draw))
    caption = (
        f"Deployed: the plain network, and the network with {kept(row['asked'])} of its weights after compact() and "
        "save(). Bars are 95% intervals of the mean."
    )
    return Drawing("demo-sizes", caption, tuple(panels), _legend((PLAIN, PLAN))) if panels else None


def _scaled(found: Mapping[str, Any], scale: float) -> dict[str, Any]:
    ends = found["interval"]
    return {
        "mean": None if found["mean"] is None else scale * found["mean"],
        "interval": None if ends is None else (scale * ends[0], scale * ends[1]),
    }
