"""The table of populations as a reader sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dropconnectpp.lab.config.by_epoch import WORDS
from dropconnectpp.lab.report.formats import DASH, kept, p_value, signed
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.views.cells import (
    Cell,
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

PopulationName = Literal["population", "population_tests"]


def lay_out_population(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    rows = found["population"]

    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            method(row),
            count(row["members"]),
            number(row["held_out"]),
            number(row["mean"]),
            span(row["interval"]),
            number(row["kept"]["mean"]),
            span(row["kept"]["interval"]),
            count(row["n"]),
            _way(row["first"], row["last"]),
            _minutes(row["population_s"]),
            _minutes(row["replay_s"]),
        )

    judged = sorted({row["keep"] for row in rows if row["keep"] is not None})
    few = [f"{kept(share)} of the weights" for share in judged]
    notes = (
        "Members train in one stack; every few epochs the worst take over weights and settings of the best, judged on "
        "held-out training images. Fresh networks then train by the settings behind the best member's weights, on all "
        "training images, and only they see the test set. Held out is the best member's last score: the best of so "
        "many, and so too high.",
        *(f"With few connections: {one}, by π̃ |W|, is what the judge saw." for one in few),
        "Minutes are of the device, of all members and of all fresh networks.",
    )
    return [
        TableView(
            name="population",
            caption="Populations: schedules found by networks that take over from each other, accuracy in percent",
            columns=(
                "Method",
                "Members",
                "Held out",
                "Test",
                "95% interval",
                "Few connections",
                "95% interval",
                "n",
                "First and last",
                "Population, min",
                "Fresh networks, min",
            ),
            groups=grouped(rows, title, make),
            notes=(*notes, *trust_notes(rows)),
            words=(8,),
        ),
        _tests(found["population_tests"]),
    ]


def _tests(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        test = row["test"] or {}
        return cells(
            method(row),
            method(row, "other", "other_digest"),
            number(test.get("difference"), write=signed),
            span(test.get("interval")),
            Cell(p_value(test.get("adjusted_p")), value=test.get("adjusted_p")),
            count(row["n"]),
            count(row["other_n"]),
        )

    return TableView(
        name="population_tests",
        caption="Schedules that were found against the same method with settings that stay: difference in accuracy",
        columns=("Method", "Against", "Points", "95% interval", "p", "n", "n of the other"),
        groups=grouped(rows, title, make),
        notes=("p by Welch's test, adjusted by Holm over all pairs of this table.", *trust_notes(rows)),
        words=(1,),
    )


def _way(first: Mapping[str, float], last: Mapping[str, float]) -> str:
    """Where each setting began and ended."""
    return ", ".join(f"{WORDS[name]} {first[name]:.3g} to {last[name]:.3g}" for name in WORDS if name in first) or DASH


def _minutes(seconds: float | None) -> Cell:
    return number(None if seconds is None else seconds / 60.0, 1)
