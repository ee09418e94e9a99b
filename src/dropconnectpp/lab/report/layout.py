"""The tables as a reader sees them, on the page and in a terminal: captions, rounded cells, notes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from dropconnectpp.lab.report import paper_values, tables
from dropconnectpp.lab.report.number_formats import (
    DASH,
    fixed,
    interval,
    p_value,
    percent,
    ranges,
    setting,
    signed,
    significant,
)
from dropconnectpp.lab.report.plain_text import Cell, Group, Laid, without_empty_columns

UNVERIFIED = "†"
UNVERIFIED_NOTE = (
    f"{UNVERIFIED} The files of this data set do not have the official checksums: the pictures may differ from "
    "those the paper used, and so may the numbers."
)
TESTS = {"student": "Student", "welch": "Welch", "paired": "Paired"}
PREDICTIONS = {
    "none": "No regularization",
    "dropout": "Dropout",
    "mean": "Mean network, Eq. (19)",
    "folded": "Eq. (19), folded",
    "mc30": "Eq. (18), 30 samples",
}


def lay_out(found: dict[str, tables.Table]) -> dict[str, Laid]:
    """The tables that have rows, by name, in the report's order."""
    laid = [
        _overview(found["accuracy"]),
        _accuracy(found["accuracy"]),
        _significance(found["significance"]),
        _time(found["time"]),
        _prediction(found["time"]),
        _samples(found["samples"]),
        _shares(found["shares"]),
        _calibration(found["calibration"]),
        _pruning(found["pruning"]),
        _correlation(found["correlation"]),
        _uncertainty(found["uncertainty"]),
    ]
    return {table.name: without_empty_columns(table) for table in laid if table.groups}


def _row(*cells: str | Cell) -> tuple[Cell, ...]:
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)


def _grouped(rows: Iterable[dict[str, Any]], title: Any, cells: Any) -> tuple[Group, ...]:
    return tuple(Group(name, tuple(cells(row) for row in group)) for name, group in groupby(rows, title))


def _title(row: dict[str, Any]) -> str:
    return str(row["title"])


# ------------------------------------------------------------------------------------------- Table 1


def _overview(rows: tables.Table) -> Laid:
    """Method by data set as in the paper, where there are several sets."""
    titles = list(dict.fromkeys(map(_title, rows)))
    methods = list(dict.fromkeys(row["method"] for row in rows)) if len(titles) > 1 else []
    by_place = {(row["method"], row["title"]): row for row in rows}
    unsure = {row["title"] for row in rows if not row["verified"]}

    def cell(method: str, title: str) -> Cell:
        row = by_place.get((method, title))
        if row is None:
            return Cell(DASH)
        beside = "" if row["paper"] is None else f" ({fixed(row['paper'])})"
        return Cell(fixed(row["mean"]) + beside, row["best"])

    body = tuple(_row(method, *(cell(method, title) for title in titles)) for method in methods)
    return Laid(
        name="overview",
        caption="Table 1. Accuracy on the test set in percent, the paper's in brackets",
        columns=("Method", *(title + f" {UNVERIFIED}" * (title in unsure) for title in titles)),
        groups=(Group("", body),) if body else (),
        notes=(UNVERIFIED_NOTE,) if unsure else (),
    )


def _accuracy(rows: tables.Table) -> Laid:
    def title(row: dict[str, Any]) -> str:
        unsure = any(not one["verified"] for one in rows if one["title"] == row["title"])
        return _title(row) + f" {UNVERIFIED}" * unsure

    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        return _row(
            row["method"],
            Cell(fixed(row["mean"]), row["best"]),
            interval(row["interval"]),
            fixed(row["standard_deviation"]),
            str(row["n"]),
            fixed(row["paper"]),
            signed(row["difference"]),
            _remarks(row),
        )

    notes = [
        "The best is marked where it is better than every other method on that data by Welch's test, with p adjusted "
        "by Holm. Intervals are of the mean, by Student's t; diverged replicas are not in them."
    ]
    if any(row["paper"] is not None for row in rows):
        notes.append(
            f"The paper's values are means of {paper_values.REPEATS} repetitions of {paper_values.EPOCHS} epochs; "
            "it does not give their spread."
        )
    for name, group in groupby(rows, _title):
        epochs = {int(row["epochs"]) for row in group if row["epochs"] and row["paper"] is not None}
        if epochs - {paper_values.EPOCHS}:
            notes.append(f"{name}: trained for {ranges(epochs)} epochs here.")
    if any(not row["verified"] for row in rows):
        notes.append(UNVERIFIED_NOTE)
    return Laid(
        name="accuracy",
        caption="Table 1. Accuracy on the test set in percent, by one pass: Eq. (19)",
        columns=("Method", "Mean", "95% interval", "SD", "n", "Paper", "Difference", "Remarks"),
        groups=_grouped(rows, title, cells),
        notes=tuple(notes),
        words=(7,),
    )


def _remarks(row: dict[str, Any]) -> str:
    """What became of replicas that are not in the mean."""
    parts = []
    if row["diverged"]:
        parts.append(f"{len(row['diverged'])} diverged ({ranges(row['diverged'])})")
    if row["missing"]:
        states = [f"{row[state]} {state}" for state in ("running", "failed") if row[state]]
        parts.append(f"{len(row['missing'])} missing ({'; '.join([ranges(row['missing']), *states])})")
    if row["not_finite"]:
        parts.append(f"{len(row['not_finite'])} without a finite accuracy ({ranges(row['not_finite'])})")
    return "; ".join(parts)


def _significance(rows: tables.Table) -> Laid:
    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        test = row["welch"] or {}
        return _row(
            f"{row['method']} vs {row['other']}",
            signed(row["difference"]),
            interval(test.get("interval")),
            *(p_value(row[name] and row[name]["adjusted_p"]) for name in TESTS),
            row["paper"] or DASH,
        )

    return Laid(
        name="significance",
        caption="Is the difference more than chance? Holm-adjusted p of three tests",
        columns=("Pair", "Difference", "95% interval", *TESTS.values(), "Paper says"),
        groups=_grouped(rows, _title, cells),
        notes=(
            "Student is the paper's test. Welch lets the spreads differ; the interval is its own. Paired compares "
            "replicas with the same start and order of examples. p is adjusted for the pairs of one data set. "
            "A pair with fewer than two replicas on a side is not tested.",
        ),
        words=(6,),
    )


# ------------------------------------------------------------------------------------ Tables 2 and 3


def _time(rows: tables.Table) -> Laid:
    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        return _row(
            row["method"],
            significant(row["seconds_per_epoch"]),
            fixed(row["ratio"]),
            setting(row["replicas"]) if row["replicas"] is not None else DASH,
            DASH if row["paper"] is None else f"{row['paper']:g}",  # the paper gives whole seconds
            fixed(row["paper_ratio"]),
            row["device"] or DASH,
        )

    compared = ["The ratio is to no regularization with as many at once on the same device."]
    if any(row["paper"] is not None for row in rows):
        compared.append("The paper's seconds are per iteration, read as an epoch, on a Tesla K40: compare the ratios.")
    return Laid(
        name="time",
        caption="Table 2. Seconds per epoch of training",
        columns=("Method", "Seconds", "Ratio", "At once", "Paper, seconds", "Paper, ratio", "Device"),
        groups=_grouped([row for row in rows if row["seconds_per_epoch"] is not None], _title, cells),
        notes=("Seconds are of one network, where so many are trained at once.", *compared),
        words=(6,),
    )


def _prediction(rows: tables.Table) -> Laid:
    rules = [rule for rule in PREDICTIONS if any(row[f"prediction_{rule}"] is not None for row in rows)]
    measured = [row for row in rows if any(row[f"prediction_{rule}"] is not None for rule in rules)]

    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        return _row(row["method"], *(significant(row[f"prediction_{rule}"]) for rule in rules))

    return Laid(
        name="prediction",
        caption="Seconds per 10,000 predictions of one network",
        columns=("Trained with", *(PREDICTIONS[rule] for rule in rules)),
        groups=_grouped(measured, _title, cells),
        notes=("The paper says that Eq. (19) costs exactly as much as Dropout; it gives no seconds.",),
    )


def _samples(rows: tables.Table) -> Laid:
    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        one_pass = "Eq. (19)" if row["kind"] == tables.OURS else "One pass"
        return _row(
            one_pass if row["samples"] is None else str(row["samples"]),
            fixed(row["mean"]),
            interval(row["interval"]),
            str(row["n"]),
            fixed(row["paper"]),
            signed(row["difference"]),
        )

    return Laid(
        name="samples",
        caption="Table 3. Accuracy in percent by number of Monte Carlo samples, Eq. (18)",
        columns=("Samples", "Mean", "95% interval", "n", "Paper", "Difference"),
        groups=_grouped(rows, lambda row: f"{row['title']}: {row['method']}", cells),
    )


# --------------------------------------------------------------------- Figure 1(b), and beyond the paper


def _shares(rows: tables.Table) -> Laid:
    groups = []
    for title, group in groupby(rows, _title):
        lines = []
        for row in group:
            found = [percent(row[name]) for name in tables.SHARES]
            lines.append(_row(row["method"], *found, f"{row['synapses']:,.0f}", str(row["n"])))
            paper = [row[f"paper_{name}"] for name in tables.SHARES]
        if None not in paper:
            about = f"almost {paper_values.SYNAPSES:,}"
            lines.append(_row("The paper, around", *(percent(share) for share in paper), about, DASH))
        groups.append(Group(title, tuple(lines)))
    return Laid(
        name="shares",
        caption="Figure 1(b) in numbers. Share of synapses by learned keep probability",
        columns=("Method", "Below 0.35", "0.4 to 0.6", "Above 0.6", "Synapses", "n"),
        groups=tuple(groups),
        notes=("Synapses of all replicas are pooled. What lies between 0.35 and 0.4 is in none of the columns.",),
    )


def _calibration(rows: tables.Table) -> Laid:
    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        parts = []
        for name in ("nll", "ece", "brier"):
            parts += [fixed(row[name]["mean"], 4), interval(row[name]["interval"], 4)]
        return _row(row["method"], *parts, str(max(row[name]["n"] for name in ("nll", "ece", "brier"))))

    return Laid(
        name="calibration",
        caption="How good are the probabilities? Lower is better",
        columns=("Method", "NLL", "95% interval", "ECE", "95% interval", "Brier", "95% interval", "n"),
        groups=_grouped(rows, _title, cells),
        notes=(
            "NLL: negative log-likelihood in nats per picture. ECE: expected calibration error, the mean gap between "
            "confidence and correctness. Brier: squared error of the class probabilities.",
        ),
    )


def _pruning(rows: tables.Table) -> Laid:
    shares = sorted({row["share"] for row in rows}, reverse=True)
    groups = []
    for title, group in groupby(rows, lambda row: f"{row['title']}: {row['method']}"):
        by_place = {(row["score"], row["share"]): row for row in group}
        scores = sorted({score for score, _ in by_place}, key=score_place, reverse=True)
        lines = [_row(score_title(one), *(_pruned(by_place.get((one, share))) for share in shares)) for one in scores]
        groups.append(Group(title, tuple(lines)))
    return Laid(
        name="pruning",
        caption="Accuracy in percent of networks that keep a share of the dense layer's weights, with 95% interval",
        columns=("Kept by", *map(percent, shares)),
        groups=tuple(groups),
    )


def _pruned(row: dict[str, Any] | None) -> str:
    if row is None:
        return DASH
    ends = row["interval"]
    return fixed(row["mean"]) + (f" ± {fixed((ends[1] - ends[0]) / 2)}" if ends else "")


SCORES = {
    "random": "chance",
    "magnitude": "magnitude",
    "product": "keep probability x magnitude",
    "keep_probability": "keep probability",
}
"""What weights are ranked by, in words, from the plainest."""


def score_title(score: str) -> str:
    """What weights are ranked by, in words."""
    return SCORES.get(score, score)


def score_place(score: str) -> tuple[int, str]:
    """To sort scores by."""
    return (list(SCORES).index(score) if score in SCORES else len(SCORES)), score


def _correlation(rows: tables.Table) -> Laid:
    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        return _row(row["method"], fixed(row["mean"], 3), interval(row["interval"], 3), str(row["n"]))

    return Laid(
        name="correlation",
        caption="Correlation of a synapse's keep probability with the magnitude of its weight",
        columns=("Method", "Mean", "95% interval", "n"),
        groups=_grouped(rows, _title, cells),
    )


def _uncertainty(rows: tables.Table) -> Laid:
    def cells(row: dict[str, Any]) -> tuple[Cell, ...]:
        pictures = row["pictures"] or "its own test set"
        return _row(row["method"], pictures, fixed(row["mean"], 4), interval(row["interval"], 4), str(row["n"]))

    return Laid(
        name="uncertainty",
        caption="Mutual information of prediction and mask in nats: how unsure the network is of itself",
        columns=("Method", "Pictures", "Mean", "95% interval", "n"),
        groups=_grouped(rows, _title, cells),
        notes=("On pictures of another data set it should be higher.",) if any(row["pictures"] for row in rows) else (),
        words=(1,),
    )
