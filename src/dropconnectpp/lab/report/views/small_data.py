"""The tables of small data as a reader sees them."""

from __future__ import annotations

from typing import Any, Literal

from dropconnectpp.lab.report.formats import DASH, interval, p_value, signed
from dropconnectpp.lab.report.statistics import SIGNIFICANCE
from dropconnectpp.lab.report.tables.judged import HIGHER
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.tables.small_data import MEASURES, TESTED
from dropconnectpp.lab.report.views.cells import (
    Cell,
    TableRow,
    TableView,
    cells,
    count,
    grouped,
    mark,
    method,
    number,
    span,
    trust_notes,
)
from dropconnectpp.lab.report.views.judged import prediction

SmallDataName = Literal["small_data", "small_data_tests"]
TITLES = {"accuracy": "Accuracy, %", "nll": "NLL", "ece": "ECE"}
WORDS = {"accuracy": "accuracy", "nll": "NLL"}
DIGITS = {"accuracy": 2}


def lay_out_small_data(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    return [_results(found["small_data"]), _tests(found["small_data_tests"])]


def size(row: TableRow) -> str:
    """The number of training examples, in words.

    >>> size({"examples": 2500}), size({"examples": None})
    ('2,500', 'all')
    """
    return "all" if row["examples"] is None else f"{row['examples']:,}"


def _heading(row: TableRow) -> str:
    return f"{row['title']} {mark(row)}".rstrip() + f", {size(row)} training examples"


def _results(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        parts: list[Cell] = []
        for name in MEASURES:
            parts += [number(row[name]["mean"], DIGITS.get(name, 4)), span(row[name]["interval"], DIGITS.get(name, 4))]
        return cells(method(row), prediction(row["prediction"], row["count"]), *parts, count(row["nll"]["n"]))

    return TableView(
        name="small_data",
        caption="With how many training examples?",
        columns=("Method", "Predicts by", *(one for name in MEASURES for one in (TITLES[name], "95% interval")), "n"),
        groups=grouped(rows, _heading, make),
        notes=(
            "Each network has examples of its own, so intervals count which ones they are. Networks with one number "
            "have the same ones under every method. NLL in nats; lower is better, for ECE too.",
            *trust_notes(rows),
        ),
        words=(1,),
    )


def _tests(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        other = f"{row['other']}, {prediction(row['other_prediction'], row['other_count'])}"
        return cells(
            Cell(other, protocol=row["other_digest"]),
            method(row),
            *(cell for name in TESTED for cell in _test(row, name)),
        )

    return TableView(
        name="small_data_tests",
        caption="DropConnect++ less each other method, by the number of training examples",
        columns=("Other method", "Less", *(one for name in TESTED for one in (TITLES[name], "p"))),
        groups=grouped(rows, _heading, make),
        notes=(
            "In brackets the 95% interval. Pairs have the same training examples, start and order; ensembles are "
            "compared by Welch's test. p is adjusted by Holm over all pairs of a column and data set.",
            *trust_notes(rows),
        ),
        words=(1,),
        sentences=verdicts(rows),
        long=True,
    )


def _test(row: TableRow, name: str) -> tuple[Cell, Cell]:
    test = row[name]
    if test is None:
        return Cell(DASH), Cell(DASH)
    digits = DIGITS.get(name, 4)
    shown = f"{signed(test['difference'], digits)} ({interval(test['interval'], digits)})"
    return Cell(shown, value=test["difference"]), Cell(p_value(test["adjusted_p"]), value=test["adjusted_p"])


def verdicts(rows: Table) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """For each data set, with how many examples DropConnect++ is better than each other method, or worse."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(str(row["title"]), [])
    for title, lines in found.items():
        mine = [row for row in rows if row["title"] == title]
        pairs = dict.fromkeys((row["method"], row["other"]) for row in mine)
        for ours, other in pairs:
            members = [row for row in mine if (row["method"], row["other"]) == (ours, other)]
            lines += filter(None, (_verdict(members, ours, other, name) for name in TESTED))
    return tuple((title, tuple(lines)) for title, lines in found.items())


def _verdict(rows: list[dict[str, Any]], ours: str, other: str, name: str) -> str:
    tested = [row for row in rows if row[name] is not None]
    if not tested:
        return ""
    places: dict[str, list[str]] = {"better with": [], "worse with": [], "not distinguishable with": []}
    for row in tested:
        test = row[name]
        ahead = (test["difference"] > 0) == (name in HIGHER)
        sure = test["adjusted_p"] < SIGNIFICANCE
        places["not distinguishable with" if not sure else "better with" if ahead else "worse with"].append(size(row))
    told = "; ".join(f"{words} {' / '.join(sizes)}" for words, sizes in places.items() if sizes)
    return f"{ours} against {other}, {WORDS[name]}: {told}."
