"""The tables of Figure 1(b), and those that go beyond the paper, as a reader sees them."""

from __future__ import annotations

from itertools import groupby
from typing import Literal

from dropconnectpp.lab.report import paper_values
from dropconnectpp.lab.report.formats import DASH, fixed, percent
from dropconnectpp.lab.report.tables.further import SHARES
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
    method_title,
    number,
    span,
    title,
    trust_notes,
)

FurtherName = Literal[
    "shares", "shares_by_replica", "calibration", "lowest_nll", "pruning", "correlation", "uncertainty"
]
MEASURES = ("nll", "ece", "brier")
PARTS = ("Below 0.35", "0.4 to 0.6", "Above 0.6")
SCORES = {
    "random": "chance",
    "magnitude": "magnitude",
    "product": "keep probability x magnitude",
    "keep_probability": "keep probability",
}
"""What weights are ranked by, in words; the simplest first."""


def lay_out_further(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    return [
        _shares(found["shares"]),
        _shares_by_replica(found["shares_by_replica"]),
        _calibration(found["calibration"]),
        _lowest_nll(found["lowest_nll"]),
        _pruning(found["pruning"]),
        _correlation(found["correlation"]),
        _uncertainty(found["uncertainty"]),
    ]


# ---------------------------------------------------------------------------------------- Figure 1(b)


def _part(synapses: float, share: float) -> Cell:
    return Cell(f"{synapses * share:,.0f} ({percent(share)})", value=share)


def _shares(rows: Table) -> TableView:
    groups = []
    for name, group in groupby(rows, title):
        lines = []
        for row in group:
            found = [_part(row["synapses"], row[part]) for part in SHARES]
            synapses = Cell(f"{row['synapses']:,.0f}", value=row["synapses"])
            lines.append(cells(method(row), *found, synapses, count(row["n"])))
            paper = [row[f"paper_{part}"] for part in SHARES]
        if None not in paper:
            size = paper_values.SYNAPSES
            about = Cell(f"almost {size:,}", value=float(size))
            lines.append(cells("The paper, around", *(_part(size, share) for share in paper), about, DASH))
        groups.append(RowGroup(name, tuple(lines)))
    return TableView(
        name="shares",
        caption="Figure 1(b) in numbers. Synapses of a network by learned keep probability",
        columns=("Method", *PARTS, "Synapses", "n"),
        groups=tuple(groups),
        notes=(
            "Counts are of a network, shares of all synapses of all replicas together. What lies between 0.35 and 0.4 "
            "is in none of the columns.",
            *trust_notes(rows),
        ),
    )


def _shares_by_replica(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        size = row["synapses"]
        found = [_part(size, row[part] / size) for part in SHARES]
        return cells(count(row["replica"]), *found, count(size))

    return TableView(
        name="shares_by_replica",
        caption="Figure 1(b) in numbers, replica by replica",
        columns=("Replica", *PARTS, "Synapses"),
        groups=grouped(rows, method_title, make),
        notes=trust_notes(rows),
        long=True,
    )


# ------------------------------------------------------------------------------------ beyond the paper


def _calibration(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        parts: list[Cell] = []
        for name in MEASURES:
            parts += [number(row[name]["mean"], 4), span(row[name]["interval"], 4)]
        return cells(method(row), *parts, count(max(row[name]["n"] for name in MEASURES)))

    return TableView(
        name="calibration",
        caption="How good are the probabilities? Lower is better",
        columns=("Method", "NLL", "95% interval", "ECE", "95% interval", "Brier", "95% interval", "n"),
        groups=grouped(rows, title, make),
        notes=(
            # Recorded tables say "per picture": "per image" would change them.
            "NLL: negative log-likelihood in nats per picture. ECE: expected calibration error, the mean gap between "
            "confidence and correctness. Brier: squared error of the class probabilities.",
            *trust_notes(rows),
        ),
    )


def _lowest_nll(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            method(row),
            count(int(row["epoch"])),
            number(row["mean"], 4),
            span(row["interval"], 4),
            count(int(row["last_epoch"])),
            number(row["last_mean"], 4),
            span(row["last_interval"], 4),
            count(row["n"]),
        )

    return TableView(
        name="lowest_nll",
        caption="When is NLL lowest? Means by one pass, at the epoch where they are lowest and at the last",
        columns=("Method", "Epoch", "NLL", "95% interval", "Last epoch", "NLL there", "95% interval", "n"),
        groups=grouped(rows, title, make),
        notes=(
            "Which epoch is lowest was seen on the test set: that is no way to stop, but shows how much of a lead in "
            "NLL is a matter of when training stops.",
            *trust_notes(rows),
        ),
    )


def _pruning(rows: Table) -> TableView:
    shares = sorted({row["share"] for row in rows}, reverse=True)
    groups = []
    for name, group in groupby(rows, method_title):
        members = list(group)
        by_place = {(row["score"], row["share"]): row for row in members}
        scores = sorted({score for score, _ in by_place}, key=score_place, reverse=True)
        lines = [cells(score_title(one), *(_pruned(by_place.get((one, share))) for share in shares)) for one in scores]
        groups.append(RowGroup(name, tuple(lines), members[0]["digest"]))
    return TableView(
        name="pruning",
        caption="Accuracy in percent of networks that keep a share of the dense layer's weights, with 95% interval",
        columns=("Kept by", *map(percent, shares)),
        groups=tuple(groups),
        notes=trust_notes(rows),
        long=True,
    )


def _pruned(row: TableRow | None) -> Cell:
    if row is None:
        return Cell(DASH)
    ends = row["interval"]
    half = f" ± {fixed((ends[1] - ends[0]) / 2)}" if ends else ""
    return Cell(fixed(row["mean"]) + half, value=row["mean"])


def score_title(score: str) -> str:
    """What weights are ranked by, in words."""
    return SCORES.get(score, score)


def score_place(score: str) -> tuple[int, str]:
    """The sort key of a score: its place in `SCORES`, unknown ones last."""
    return (list(SCORES).index(score) if score in SCORES else len(SCORES)), score


def _correlation(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(method(row), number(row["mean"], 3), span(row["interval"], 3), count(row["n"]))

    return TableView(
        name="correlation",
        caption="Correlation of a synapse's keep probability with the magnitude of its weight",
        columns=("Method", "Mean", "95% interval", "n"),
        groups=grouped(rows, title, make),
        notes=trust_notes(rows),
    )


def _uncertainty(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        images = row["images"] or "its own test set"
        return cells(method(row), images, number(row["mean"], 4), span(row["interval"], 4), count(row["n"]))

    # Recorded tables say "pictures" here and in the heading: "images" would change them.
    foreign = ("On pictures of another data set it should be higher.",) if any(row["images"] for row in rows) else ()
    return TableView(
        name="uncertainty",
        caption="Mutual information of prediction and mask in nats: how unsure the network is of itself",
        columns=("Method", "Pictures", "Mean", "95% interval", "n"),
        groups=grouped(rows, title, make),
        notes=(*foreign, *trust_notes(rows)),
        words=(1,),
    )
