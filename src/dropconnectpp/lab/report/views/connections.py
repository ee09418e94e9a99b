"""The tables of networks with few connections as a reader sees them."""

from __future__ import annotations

from itertools import groupby
from typing import Literal

from dropconnectpp.lab.report import verdicts
from dropconnectpp.lab.report.formats import DASH, fixed, kept, p_value, ranges, signed
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.views.cells import (
    Cell,
    RowGroup,
    TableRow,
    TableView,
    cells,
    count,
    grouped,
    method,
    number,
    span,
    title,
    trust_notes,
)

ConnectionsName = Literal["connections", "connections_tests", "published", "units", "layers", "tried"]
NOT_BEATEN = "worse than published"
COUNTED = (
    "Kept is the share of weights that are not zero, ×N how many times fewer that is; biases are kept and not counted."
)


def lay_out_connections(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    return [
        _frontier(found["connections"], found["connections_tests"]),
        _tests(found["connections_tests"]),
        _published(found["published"]),
        _units(found["units"], found["published"]),
        _layers(found["layers"]),
        _tried(found["tried"]),
    ]


def _share(value: float | None) -> Cell:
    return Cell(DASH if value is None else kept(value), value=value)


def _times(value: float | None) -> Cell:
    return Cell(DASH if value is None else verdicts.times(value), value=value)


def _at(row: TableRow) -> str:
    """Data and the share that was asked for: one group of rows."""
    asked = row["asked"]
    return f"{title(row)}: " + ("whatever is kept" if asked is None else f"{kept(asked)} of the weights")


def _frontier(rows: Table, tests: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            method(row),
            _share(row["share"]),
            _times(row["times"]),
            number(row["error"]["mean"]),
            span(row["error"]["interval"]),
            number(row["nll"]["mean"], 4),
            span(row["nll"]["interval"], 4),
            number(row["ece"]["mean"], 4),
            span(row["ece"]["interval"], 4),
            count(row["error"]["n"]),
            _as_published(row),
            _remarks(row),
        )

    sizes = sorted({_size(row) for row in rows if row["weights"]})
    return TableView(
        name="connections",
        caption="Networks with few connections: error on the test set in percent, by the share of weights kept",
        columns=(
            "Method",
            "Kept",
            "×N",
            "Error",
            "95% interval",
            "NLL",
            "95% interval",
            "ECE",
            "95% interval",
            "n",
            "As published",
            "Remarks",
        ),
        groups=grouped(rows, _at, make),
        notes=(
            COUNTED,
            *sizes,
            "As published: the method's own figure, error at times fewer weights. A method that is not as good here "
            "with so few is worse than published and does not count as beaten. Intervals are of the mean, by Student's "
            "t. NLL is in nats per image.",
            *trust_notes(rows),
        ),
        words=(10, 11),
        sentences=verdicts.by_share(rows, tests),
    )


def _size(row: TableRow) -> str:
    """How many weights a network has, and of how many the share kept is."""
    text = f"{title(row)}: {row['weights']:,.0f} weights and {row['biases'] or 0:,.0f} biases."
    if row["gated"] in (None, row["weights"]):
        return text
    return f"{text} Kept is the share of the {row['gated']:,.0f} weights with gates; all others stay."


def _as_published(row: TableRow) -> str:
    figure = row["own_figure"]
    return DASH if figure is None else f"{fixed(figure['error'])} at {verdicts.times(figure['times'])}"


def _remarks(row: TableRow) -> str:
    parts = [] if row["reached"] else ["keeps more than was asked for"]
    parts += [NOT_BEATEN] if row["own_figure"] and not row["own_figure"]["reproduced"] else []
    parts += [f"{len(row['diverged'])} diverged ({ranges(row['diverged'])})"] if row["diverged"] else []
    parts += [f"{len(row['missing'])} missing ({ranges(row['missing'])})"] if row["missing"] else []
    return "; ".join(parts)


def _tests(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        error, nll, ece = (row[name] or {} for name in ("welch", "nll_welch", "ece_welch"))
        chances = [one.get("adjusted_p") for one in (error, row["paired"] or {})]
        return cells(
            method(row),
            method(row, "other", "other_digest"),
            number(error.get("difference"), write=signed),
            span(error.get("interval")),
            *(Cell(p_value(p), value=p) for p in chances),
            number(nll.get("difference"), 4, signed),
            Cell(p_value(nll.get("adjusted_p")), value=nll.get("adjusted_p")),
            number(ece.get("difference"), 4, signed),
            Cell(p_value(ece.get("adjusted_p")), value=ece.get("adjusted_p")),
            NOT_BEATEN if row["own_figure"] and not row["own_figure"]["reproduced"] else "",
        )

    return TableView(
        name="connections_tests",
        caption="DropConnect++ against the others at the same share: differences in error, NLL and ECE",
        columns=(
            "Method",
            "Against",
            "Error",
            "95% interval",
            "Welch",
            "Paired",
            "NLL",
            "Welch",
            "ECE",
            "Welch",
            "The other here",
        ),
        groups=grouped(rows, _at, make),
        notes=(
            "A negative difference is in favour of the first method. p by Welch's test and by pairs with the same "
            "start and order of examples, each adjusted by Holm over all pairs of one data set and network.",
            *trust_notes(rows),
        ),
        words=(1, 10),
    )


def _published(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            row["method"],
            number(row["error"]),
            _times(row["times"]),
            row["units"] or DASH,
            row["remark"],
            row["source"],
        )

    return TableView(
        name="published",
        caption="What others published for these networks: error on the test set in percent",
        columns=("Method", "Error", "×N", "Units left", "Remark", "Source"),
        groups=grouped(rows, title, make),
        notes=("One network each, or the source does not say how many; no intervals are given there.",) if rows else (),
        words=(3, 4, 5),
    )


def _units(rows: Table, published: Table) -> TableView:
    """Networks whose units were removed whole, beside the published ones; without such networks nothing."""
    groups = []
    for name, group in groupby([row for row in rows if row["structured"]], title):
        lines = [
            cells(
                method(row),
                "-".join(fixed(left, 0) for left in row["units"]),
                number(row["mean"]),
                span(row["interval"]),
                _share(row["share"]),
                _change(row["bytes"], 1e-3, 0),
                _change(row["ms"], 1.0, 3),
                count(row["n"]),
            )
            for row in group
        ]
        for row in published:
            if row["units"] and title(row) == name:
                about = f"{row['method']}, as published"
                lines.append(cells(about, row["units"], number(row["error"]), DASH, DASH, DASH, DASH, DASH))
        groups.append(RowGroup(name, tuple(lines)))
    return TableView(
        name="units",
        caption="Networks without whole inputs, units and filters: what is left of each layer, and error in percent",
        columns=("Method", "Left", "Error", "95% interval", "Weights kept", "kB", "ms", "n"),
        groups=tuple(groups),
        notes=(
            "Left, for each layer with weights: the inputs or maps that it still reads. Means over networks, rounded.",
            *((_measured(rows),) if any(row["bytes"] for row in rows) else ()),
            *trust_notes(rows),
        ),
        words=(1,),
    )


def _change(pair: list[float] | None, scale: float, digits: int) -> Cell:
    """Before and after `compact`."""
    if not pair:
        return Cell(DASH)
    before, after = (scale * value for value in pair)
    return Cell(f"{before:,.{digits}f} → {after:,.{digits}f}", value=after)


def _measured(rows: Table) -> str:
    images = sorted({row["images"] for row in rows if row["images"]})
    many = f"{images[0]:,}" if len(images) == 1 else "up to 128"
    return (
        "kB and ms, before and after `compact`: the parameters and buffers of the ordinary network, and one pass of "
        f"{many} images on the CPU of the machine that trained it. Times of different machines do not compare."
    )


def _layers(rows: Table) -> TableView:
    def left(row: TableRow, all_of: str, remaining: str) -> Cell:
        if row[all_of] is None or row[remaining] is None:
            return Cell(DASH)
        return Cell(f"{row[remaining]:,.0f} of {row[all_of]:,.0f}", value=row[remaining])

    def make(row: TableRow) -> tuple[Cell, ...]:
        share = row["kept"] / row["weights"] if row["weights"] and row["kept"] is not None else None
        return cells(
            method(row),
            row["layer"],
            left(row, "weights", "kept"),
            _share(share),
            left(row, "inputs", "inputs_left"),
            left(row, "units", "units_left"),
            count(row["n"]),
        )

    return TableView(
        name="layers",
        caption="What is left of each layer, means over networks",
        columns=("Method", "Layer", "Weights", "Kept", "Inputs", "Units", "n"),
        groups=grouped(rows, _at, make),
        notes=(
            "An input or a unit is left if a weight of it is. A map of a convolution is a unit.",
            *trust_notes(rows),
        ),
        words=(1,),
        long=True,
    )


def _tried(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            Cell(str(row["setting"]), strong=row["chosen"]),
            _share(row["share"]),
            Cell(DASH if row["error"] is None else fixed(row["error"]), row["chosen"], row["error"]),
            number(row["nll"], 4),
            "chosen" if row["chosen"] else "" if row["reached"] else "keeps too much",
            count(int(row["n"] or 0)),
        )

    return TableView(
        name="tried",
        caption="Every setting that was tried: error in percent on held-out training data",
        columns=("Setting", "Kept", "Error", "NLL", "", "n"),
        groups=grouped(rows, lambda row: f"{_at(row)}: {row['method']}", make),
        notes=(
            "Of the settings that keep the share asked for, to within a tenth of it, the one with the lowest error "
            "went to the test set; of equals the one with the lowest NLL. n: networks, of which the mean is shown.",
            *trust_notes(rows),
        ),
        words=(4,),
        long=True,
    )
