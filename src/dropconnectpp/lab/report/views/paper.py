"""The paper's tables as a reader sees them, and `lay_out`, which returns all tables in the report's order."""

from __future__ import annotations

from itertools import groupby
from typing import Literal, get_args

from dropconnectpp.lab.report import paper_values, sentences
from dropconnectpp.lab.report.formats import DASH, finite, fixed, p_value, ranges, setting, signed, significant
from dropconnectpp.lab.report.tables.paper import PairTest, TimedPrediction
from dropconnectpp.lab.report.tables.rows import OURS, Table
from dropconnectpp.lab.report.views.cells import (
    Cell,
    RowGroup,
    TableRow,
    TableView,
    cells,
    count,
    grouped,
    method,
    method_title,
    number,
    span,
    title,
    trust_notes,
    without_empty_columns,
)
from dropconnectpp.lab.report.views.connections import ConnectionsName, lay_out_connections
from dropconnectpp.lab.report.views.demo import DemoName, lay_out_demo
from dropconnectpp.lab.report.views.further import FurtherName, lay_out_further
from dropconnectpp.lab.report.views.judged import JudgedName, lay_out_judged
from dropconnectpp.lab.report.views.population import PopulationName, lay_out_population
from dropconnectpp.lab.report.views.small_data import SmallDataName, lay_out_small_data
from dropconnectpp.lab.report.views.survivors import SurvivorsName, lay_out_survivors
from dropconnectpp.lab.report.views.uci import UciName, lay_out_uci

PaperName = Literal["overview", "accuracy", "significance", "time", "prediction", "samples"]
TableName = (
    PaperName
    | FurtherName
    | JudgedName
    | SmallDataName
    | PopulationName
    | ConnectionsName
    | SurvivorsName
    | DemoName
    | UciName
)
"""A table that a report may show."""
TABLES: tuple[str, ...] = (
    *get_args(PaperName),
    *get_args(FurtherName),
    *get_args(JudgedName),
    *get_args(SmallDataName),
    *get_args(PopulationName),
    *get_args(ConnectionsName),
    *get_args(SurvivorsName),
    *get_args(DemoName),
    *get_args(UciName),
)
TESTS: dict[PairTest, str] = {"student": "Student", "welch": "Welch", "paired": "Paired"}
PREDICTIONS: dict[TimedPrediction, str] = {
    "none": "No regularization",
    "dropout": "Dropout",
    "mean": "Mean network, Eq. (19)",
    "folded": "Eq. (19), folded",
    "mc30": "Eq. (18), 30 samples",
}


def lay_out(found: dict[str, Table]) -> dict[str, TableView]:
    """The tables that have rows, by name, in the report's order."""
    laid = [
        _overview(found["accuracy"]),
        _accuracy(found["accuracy"]),
        _significance(found["significance"], found["accuracy"]),
        _time(found["time"]),
        _prediction(found["time"]),
        _samples(found["samples"]),
        *lay_out_further(found),
        *lay_out_judged(found),
        *lay_out_small_data(found),
        *lay_out_population(found),
        *lay_out_connections(found),
        *lay_out_survivors(found),
        *lay_out_demo(found),
        *lay_out_uci(found),
    ]
    return {table.name: without_empty_columns(table) for table in laid if table.groups}


# ------------------------------------------------------------------------------------------- Table 1


def _overview(rows: Table) -> TableView:
    """Table 1 as the paper prints it, methods by data sets, if there are several sets."""
    titles = {row["title"]: title(row) for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows)) if len(titles) > 1 else []
    by_place = {(row["method"], row["title"]): row for row in rows}

    def cell(name: str, data: str) -> Cell:
        row = by_place.get((name, data))
        if row is None:
            return Cell(DASH)
        beside = "" if row["paper"] is None else f" ({fixed(row['paper'])})"
        return Cell(fixed(row["mean"]) + beside, row["best"], row["mean"], row["digest"])

    body = tuple(cells(name, *(cell(name, data) for data in titles)) for name in methods)
    return TableView(
        name="overview",
        caption="Table 1. Accuracy on the test set in percent, the paper's in brackets",
        columns=("Method", *titles.values()),
        groups=(RowGroup("", body),) if body else (),
        notes=trust_notes(rows),
    )


def _accuracy(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            method(row),
            number(row["mean"], strong=row["best"]),
            span(row["interval"]),
            number(row["standard_deviation"]),
            count(row["n"]),
            number(row["paper"]),
            number(row["difference"], write=signed),
            _remarks(row),
        )

    notes = [
        "The best is marked where it is better than every other method shown for that data by Welch's test, with p "
        "adjusted by Holm for all pairs. Intervals are of the mean, by Student's t; diverged replicas are not in them."
    ]
    if any(row["paper"] is not None for row in rows):
        notes.append(
            f"The paper's values are means of {paper_values.REPEATS} repetitions of {paper_values.EPOCHS} epochs; "
            "it does not give their spread."
        )
    for name, group in groupby(rows, lambda row: str(row["title"])):
        epochs = {int(row["epochs"]) for row in group if row["epochs"] and row["paper"] is not None}
        if epochs - {paper_values.EPOCHS}:
            notes.append(f"{name}: trained for {ranges(epochs)} epochs here.")
    return TableView(
        name="accuracy",
        caption="Table 1. Accuracy on the test set in percent, by one pass: Eq. (19)",
        columns=("Method", "Mean", "95% interval", "SD", "n", "Paper", "Difference", "Remarks"),
        groups=grouped(rows, title, make),
        notes=(*notes, *trust_notes(rows)),
        words=(7,),
    )


def _remarks(row: TableRow) -> str:
    """Why replicas are not in the mean."""
    parts = []
    if row["diverged"]:
        parts.append(f"{len(row['diverged'])} diverged ({ranges(row['diverged'])})")
    if row["missing"]:
        states = [f"{row[state]} {state}" for state in ("running", "failed") if row[state]]
        parts.append(f"{len(row['missing'])} missing ({'; '.join([ranges(row['missing']), *states])})")
    if row["not_finite"]:
        parts.append(f"{len(row['not_finite'])} without a finite accuracy ({ranges(row['not_finite'])})")
    return "; ".join(parts)


def _significance(rows: Table, accuracy: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        test = row["welch"] or {}
        chances = [row[name] and row[name]["adjusted_p"] for name in TESTS]
        return cells(
            method(row),
            method(row, "other", "other_digest"),
            number(row["difference"], write=signed),
            span(test.get("interval")),
            *(Cell(p_value(p), value=p) for p in chances),
            number(test.get("effect_size"), write=signed),
            row["paper"] or DASH,
        )

    return TableView(
        name="significance",
        caption="Is the difference more than chance? Holm-adjusted p of three tests",
        columns=("Method", "Against", "Difference", "95% interval", *TESTS.values(), "Effect size", "Paper says"),
        groups=grouped(rows, title, make),
        notes=(
            "Student is the paper's test. Welch lets the spreads differ; the interval is its own, and so is the effect "
            "size: the difference in standard deviations, Cohen's d. Paired compares replicas with the same start and "
            "order of examples. p is adjusted for the pairs of one data set. A pair with fewer than two replicas on a "
            "side is not tested.",
            *trust_notes(rows),
        ),
        words=(1, 8),
        sentences=sentences.pairs(rows, accuracy),
    )


# ------------------------------------------------------------------------------------ Tables 2 and 3


def _time(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            method(row),
            number(row["seconds_per_epoch"], 3, significant),
            number(row["ratio"]),
            Cell(setting(row["replicas"]) if row["replicas"] is not None else DASH, value=finite(row["replicas"])),
            # the paper gives whole seconds
            Cell(DASH if row["paper"] is None else f"{row['paper']:g}", value=row["paper"]),
            number(row["paper_ratio"]),
            row["device"] or DASH,
        )

    compared = ["The ratio is to no regularization with as many at once on the same device."]
    if any(row["paper"] is not None for row in rows):
        compared.append("The paper's seconds are per iteration, read as an epoch, on a Tesla K40: compare the ratios.")
    timed = [row for row in rows if row["seconds_per_epoch"] is not None]
    return TableView(
        name="time",
        caption="Table 2. Seconds per epoch of training",
        columns=("Method", "Seconds", "Ratio", "At once", "Paper, seconds", "Paper, ratio", "Device"),
        groups=grouped(timed, title, make),
        notes=("Seconds are of one network, where so many are trained at once.", *compared, *trust_notes(timed)),
        words=(6,),
    )


def _prediction(rows: Table) -> TableView:
    rules = [rule for rule in PREDICTIONS if any(row[f"prediction_{rule}"] is not None for row in rows)]
    measured = [row for row in rows if any(row[f"prediction_{rule}"] is not None for rule in rules)]

    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(method(row), *(number(row[f"prediction_{rule}"], 3, significant) for rule in rules))

    return TableView(
        name="prediction",
        caption="Table 2, continued. Seconds per 10,000 predictions of one network",
        columns=("Trained with", *(PREDICTIONS[rule] for rule in rules)),
        groups=grouped(measured, title, make),
        notes=(
            "The paper says that Eq. (19) costs exactly as much as Dropout; it gives no seconds. Ratios within 5% of 1 "
            "count as equal.",
            *trust_notes(measured),
        ),
        sentences=sentences.cost(rows),
    )


def _samples(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        one_pass = "Eq. (19)" if row["kind"] == OURS else "One pass"
        return cells(
            Cell(one_pass) if row["samples"] is None else count(row["samples"]),
            number(row["mean"]),
            span(row["interval"]),
            number(row["standard_deviation"]),
            count(row["n"]),
            number(row["paper"]),
            number(row["difference"], write=signed),
        )

    found = sentences.monte_carlo(rows)
    note = "The sentence compares most samples with one pass, replica by replica." if found else ""
    return TableView(
        name="samples",
        caption="Table 3. Accuracy in percent by number of Monte Carlo samples, Eq. (18)",
        columns=("Samples", "Mean", "95% interval", "SD", "n", "Paper", "Difference"),
        groups=grouped(rows, method_title, make),
        notes=(*filter(None, [note]), *trust_notes(rows)),
        sentences=found,
    )
