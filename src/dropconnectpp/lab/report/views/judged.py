"""The tables of probabilities, foreign and corrupted images as a reader sees them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, Literal

from dropconnectpp.lab.config.corruptions import SEVERITIES
from dropconnectpp.lab.report.formats import DASH, interval, p_value, signed
from dropconnectpp.lab.report.statistics import SIGNIFICANCE
from dropconnectpp.lab.report.tables.judged import DETECTION, ENSEMBLE, HIGHER, NETWORKS, SCORES, TESTED
from dropconnectpp.lab.report.tables.rows import Table, short
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

JudgedName = Literal["probabilities", "detection", "corruptions", "corruption_kinds", "probability_tests"]
TITLES = {
    "accuracy": "Accuracy, %",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "auroc": "AUROC",
    "fpr95": "FPR95",
    "corrupted_nll": "NLL, corrupted",
    "corrupted_ece": "ECE, corrupted",
}
DIGITS = {"accuracy": 2, "nll": 4, "corrupted_nll": 4}
"""Of a measure; four for the others."""
WORDS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "auroc": "AUROC",
    "corrupted_nll": "NLL on corrupted images",
    "corrupted_ece": "ECE on corrupted images",
}
MEASURES = (
    "NLL: negative log-likelihood in nats per image. ECE: expected calibration error over 15 bins. Brier: squared "
    "error of the class probabilities. Lower is better for all three. Intervals are 95%, of the mean."
)


def lay_out_judged(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    return [
        _probabilities(found["probabilities"]),
        _detection(found["detection"]),
        _corruptions(found["corruptions"]),
        _kinds(found["corruption_kinds"]),
        _tests(found["probability_tests"]),
    ]


def prediction(way: object, networks: object) -> str:
    """How a prediction was made, in words.

    >>> prediction("networks", 30), prediction("one pass", 1), prediction("ensemble", 5)
    ('30 networks', 'one pass', '5 members')
    """
    return {NETWORKS: f"{networks} networks", ENSEMBLE: f"{networks} members"}.get(str(way), str(way))


def _way(row: TableRow) -> str:
    return prediction(row["prediction"], row["count"])


def _mean(line: Mapping[str, Any], name: str) -> tuple[Cell, Cell]:
    digits = DIGITS.get(name, 4)
    return number(line["mean"], digits), span(line["interval"], digits)


def _probabilities(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        parts = [cell for name in SCORES for cell in _mean(row[name], name)]
        return cells(method(row), _way(row), *parts, count(max(row[name]["n"] for name in SCORES)))

    return TableView(
        name="probabilities",
        caption="How good are the probabilities on the test set?",
        columns=("Method", "Predicts by", *(one for name in SCORES for one in (TITLES[name], "95% interval")), "n"),
        groups=grouped(rows, title, make),
        notes=(
            f"{MEASURES} One pass is the mean network; networks are drawn whole and their probabilities averaged: MC "
            "dropout, MC DropConnect. An ensemble averages over networks that were trained apart. n is how many were "
            "measured, networks or ensembles.",
            *trust_notes(rows),
        ),
        words=(1,),
    )


def _detection(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        parts = [cell for name in DETECTION for cell in _mean(row[name], name)]
        return cells(method(row), _way(row), row["images"], *parts, count(row["auroc"]["n"]))

    return TableView(
        name="detection",
        caption="Are foreign images told from the test set, by the entropy of the prediction?",
        columns=("Method", "Predicts by", "Foreign", "AUROC", "95% interval", "FPR95", "95% interval", "n"),
        groups=grouped(rows, title, make),
        notes=(
            "AUROC: the chance that a foreign image has more entropy than a test image, 0.5 is a coin. FPR95: the "
            "share of foreign images that pass where 95% of the test images do; lower is better.",
            *trust_notes(rows),
        ),
        words=(1, 2),
    )


def _corruptions(rows: Table) -> TableView:
    """A group for each measure; a line for each method, the severities side by side."""
    places = (0, *SEVERITIES, None)
    groups = []
    for heading, members in _by(rows, lambda row: f"{title(row)}: {TITLES[row['measure']]}"):
        lines = []
        for (_, way), found in _by(members, lambda row: (row["digest"], _way(row))):
            by_place = {row["severity"]: row for row in found}
            first, last = found[0], by_place[None]
            digits = DIGITS.get(first["measure"], 4)
            means = [number(by_place[place]["mean"], digits) for place in places]
            lines.append(cells(method(first), way, *means, span(last["interval"], digits), count(last["n"])))
        groups.append(RowGroup(heading, tuple(lines)))
    return TableView(
        name="corruptions",
        caption="Corrupted test images: means over all corruptions, by severity",
        columns=("Method", "Predicts by", "None", *map(str, SEVERITIES), "1 to 5", "95% interval", "n"),
        groups=tuple(groups),
        notes=(
            "Corruptions and severities are those of CIFAR-10-C that need no files of others, with noise of our own: "
            "Gaussian noise, impulse noise, defocus blur, contrast, brightness, JPEG, pixelate.",
            *trust_notes(rows),
        ),
        words=(1,),
        long=True,
    )


def _by(rows: Any, key: Any) -> list[tuple[Any, list[TableRow]]]:
    """Rows by a key, each group at the place of its first row."""
    found: dict[Any, list[TableRow]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.items())


def _kinds(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        parts = [cell for name in SCORES for cell in _mean(row[name], name)]
        return cells(method(row), _way(row), *parts, count(max(row[name]["n"] for name in SCORES)))

    groups = [
        RowGroup(heading, tuple(make(row) for row in members))
        for heading, members in _by(rows, lambda row: f"{title(row)}: {str(row['corruption']).replace('_', ' ')}")
    ]
    return TableView(
        name="corruption_kinds",
        caption="Corrupted test images, each corruption by itself: means over five severities",
        columns=("Method", "Predicts by", *(one for name in SCORES for one in (TITLES[name], "95% interval")), "n"),
        groups=tuple(groups),
        notes=(MEASURES, *trust_notes(rows)),
        words=(1,),
        long=True,
    )


# --------------------------------------------------------------------------------- ours against the others


def _tests(rows: Table) -> TableView:
    shown = [name for name in TESTED if any(row[name] is not None for row in rows)]

    def make(row: TableRow) -> tuple[Cell, ...]:
        other = f"{row['other']}, {prediction(row['other_prediction'], row['other_count'])}"
        return cells(Cell(other, protocol=row["other_digest"]), *(cell for name in shown for cell in _test(row, name)))

    return TableView(
        name="probability_tests",
        caption="DropConnect++ less each other method",
        columns=("Other method", *(one for name in shown for one in (TITLES[name], "p"))),
        groups=grouped(rows, lambda row: f"{title(row)}: {row['method']}, {_way(row)}", make),
        notes=(
            "In brackets the 95% interval. Pairs have one start and order of examples; ensembles, which have no "
            "partners, are compared by Welch's test. p is adjusted by Holm over all pairs of a column and data set; "
            "sentences call a difference one where it is below 0.05.",
            *trust_notes(rows),
        ),
        sentences=tuple(
            (name, tuple(filter(None, (verdict(row) for row in members))))
            for name, members in ((name, list(found)) for name, found in groupby(rows, title))
        ),
        long=True,
    )


def _test(row: TableRow, name: str) -> tuple[Cell, Cell]:
    test = row[name]
    if test is None:
        return Cell(DASH), Cell(DASH)
    digits = DIGITS.get(name, 4)
    shown = f"{signed(test['difference'], digits)} ({interval(test['interval'], digits)})"
    return Cell(shown, value=test["difference"]), Cell(p_value(test["adjusted_p"]), value=test["adjusted_p"])


def verdict(row: TableRow) -> str:
    """In which measures DropConnect++ is better than another method, worse, or neither is shown."""
    tested = [name for name in TESTED if row[name] is not None]
    if not tested or short([row["epochs"]]):
        return ""
    sure = {name: row[name]["adjusted_p"] < SIGNIFICANCE for name in tested}
    ahead = [name for name in tested if (row[name]["difference"] > 0) == (name in HIGHER)]
    parts = {
        "better in": [name for name in tested if sure[name] and name in ahead],
        "worse in": [name for name in tested if sure[name] and name not in ahead],
        "not distinguishable in": [name for name in tested if not sure[name]],
    }
    told = "; ".join(f"{words} {', '.join(WORDS[name] for name in names)}" for words, names in parts.items() if names)
    sizes = row[tested[0]]
    other = f"{row['other']}, {prediction(row['other_prediction'], row['other_count'])}"
    return f"{row['method']}, {_way(row)}, against {other}: {told} (n = {sizes['n']} and {sizes['other_n']})."
