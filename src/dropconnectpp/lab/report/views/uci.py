"""The tables of the UCI benchmark as a reader sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from dropconnectpp.lab.config.uci import KINDS, LABELS
from dropconnectpp.lab.report.formats import DASH, fixed, interval, p_value, signed
from dropconnectpp.lab.report.statistics import SIGNIFICANCE
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.tables.uci import MEASURES, Measure
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
)

UciName = Literal["uci_log_likelihood", "uci_rmse", "uci_tests", "uci"]
DIGITS = {"naval": 5, "kin8nm": 4}
"""Of RMSE, where two are too few for the target's unit."""
CAPTIONS: dict[Measure, str] = {"log_likelihood": "log likelihood in nats, higher is better", "rmse": "RMSE"}
TITLES: dict[Measure, str] = {"log_likelihood": "Log likelihood", "rmse": "RMSE"}
OTHERS = {"plain": "a plain network", "ensemble": "an ensemble of 5 plain networks"}
"""Methods in a sentence, where their label is none."""


def lay_out_uci(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    rows, published = found["uci"], found["uci_published"]
    return [
        *(_by_set(rows, published, found["uci_tests"], name) for name in MEASURES),
        _tests(found["uci_tests"]),
        _details(rows),
    ]


def with_error(measured: dict[str, Any], digits: int, *, strong: bool = False) -> Cell:
    """A mean with its standard error."""
    if measured["mean"] is None:
        return Cell(DASH)
    error = measured["standard_error"]
    shown = fixed(measured["mean"], digits) + ("" if error is None else f" ± {fixed(error, digits)}")
    return Cell(shown, strong, measured["mean"])


def digits_of(row: TableRow) -> int:
    """Of RMSE in the target's unit."""
    return DIGITS.get(str(row["title"]), 2)


def _title(row: TableRow) -> str:
    if row["train"] is None or row["test"] is None:
        return str(row["title"])
    return f"{row['title']}, {row['train']:,.0f} examples to train on, {row['test']:,.0f} to test on"


def _by_set(rows: Table, published: Table, tests: Table, name: Measure) -> TableView:
    """A line for each set: what was measured, and what others published."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    seeds = list(dict.fromkeys((row["title"], row["seed"]) for row in rows))
    others = list(dict.fromkeys(row["method"] for row in published))
    lines = []
    for title, seed in seeds:
        members = [row for row in rows if (row["title"], row["seed"]) == (title, seed)]
        best = _best(rows, title)[name]
        line = [Cell(title if seed == seeds[0][1] else f"{title}, seed {seed}")]
        for kind in kinds:
            found = next((row for row in members if row["kind"] == kind), None)
            line.append(Cell(DASH) if found is None else _mean(found, name, found["digest"] in best))
        values = {row["method"]: row[name] for row in published if row["title"] == title}
        lines.append((*line, *(number(values.get(method)) for method in others)))
    return TableView(
        name=f"uci_{name}",
        caption=f"UCI regression: {CAPTIONS[name]}, mean ± standard error over the published splits",
        columns=("Set", *(LABELS[kind] for kind in kinds), *(f"{method}, published" for method in others)),
        groups=(RowGroup("", tuple(lines)),) if lines else (),
        notes=(
            "In the target's own unit. Bold is the best mean of those measured here, where all have every split. "
            f"Published: {'; '.join(dict.fromkeys(row['method'] + ', ' + row['source'] for row in published))}.",
        ),
        sentences=((TITLES[name], verdicts(tests, name)),) if tests else (),
    )


def _mean(row: TableRow, name: Measure, best: bool) -> Cell:
    cell = with_error(row[name], 3 if name == "log_likelihood" else digits_of(row), strong=best)
    return cell if row["complete"] else replace(cell, text=f"{cell.text} ({row['n']} of {row['splits']})")


def _details(rows: Table) -> TableView:
    best = {title: _best(rows, title) for title in {row["title"] for row in rows}}

    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            method(row),
            with_error(row["log_likelihood"], 3, strong=row["digest"] in best[row["title"]]["log_likelihood"]),
            with_error(row["rmse"], digits_of(row), strong=row["digest"] in best[row["title"]]["rmse"]),
            Cell(DASH if row["coverage"]["mean"] is None else f"{100 * row['coverage']['mean']:.0f}%"),
            _rates(row),
            number(row["factor"]["mean"]),
            number(row["keep_probability"]["mean"]),
            Cell(f"{row['n']} of {row['splits']}", value=float(row["n"])),
            count(row["settings"]) if row["settings"] else Cell(DASH),
        )

    diverged = [f"{row['method']} on {row['title']}: splits {row['diverged']}" for row in rows if row["diverged"]]
    return TableView(
        name="uci",
        caption="UCI regression, method by method",
        columns=(
            "Method",
            "Log likelihood, nats",
            "RMSE",
            "In the 90% interval",
            "Rates chosen",
            "Noise times",
            "Kept",
            "Splits",
            "Settings tried",
        ),
        groups=grouped(rows, _title, make),
        notes=(
            "Log likelihood is the log of the density averaged over draws, the mean over test examples: higher is "
            "better. Bold is the best mean of a set. Settings, and what the learned noise is multiplied by, were "
            "chosen within each training split; an ensemble takes the plain network's. Rates "
            "have the number of splits that chose each. Kept is the mean learned keep "
            "probability of the weights.",
            *([f"Diverged and left out: {'; '.join(diverged)}."] if diverged else ()),
        ),
        words=(4,),
        long=True,
    )


def _rates(row: TableRow) -> str:
    """How often each rate was chosen; nothing where none is tried."""
    if set(row["rates"]) <= {0.0}:
        return DASH
    return ", ".join(f"{rate:g}: {n}" for rate, n in row["rates"].items())


def _best(rows: Table, title: str) -> dict[Measure, set[str]]:
    """Digests of the methods with the best means of a set."""
    members = [row for row in rows if row["title"] == title]
    found: dict[Measure, set[str]] = {}
    for name in MEASURES:
        if not all(row["complete"] for row in members):
            found[name] = set()
            continue
        better: Callable[..., float] = max if name == "log_likelihood" else min
        means = {row["digest"]: row[name]["mean"] for row in members if row[name]["mean"] is not None}
        found[name] = {digest for digest, mean in means.items() if mean == better(means.values())}
    return found


def _tests(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(row["other"], *(cell for name in MEASURES for cell in _test(row, name)), count(_pairs(row)))

    return TableView(
        name="uci_tests",
        caption="UCI regression: DropConnect++ less each other method, split by split",
        columns=("Other method", "Log likelihood, nats", "p", "RMSE", "p", "n"),
        groups=grouped(rows, lambda row: str(row["title"]), make),
        notes=(
            "In brackets the 95% interval. Splits share most of their training examples, so the variance of the "
            "difference is multiplied by 1 + n times test over training examples (Nadeau and Bengio, 2003); p is "
            "adjusted by Holm over all pairs of a column.",
        ),
    )


def _pairs(row: TableRow) -> int:
    return max((row[name]["n"] for name in MEASURES if row[name] is not None), default=0)


def _test(row: TableRow, name: Measure) -> tuple[Cell, Cell]:
    test = row[name]
    if test is None:
        return Cell(DASH), Cell(DASH)
    digits = 3 if name == "log_likelihood" else digits_of(row)
    shown = f"{signed(test['difference'], digits)} ({interval(test['interval'], digits)})"
    return Cell(shown, value=test["difference"]), Cell(p_value(test["adjusted_p"]), value=test["adjusted_p"])


def verdicts(rows: Table, name: Measure) -> tuple[str, ...]:
    """For each other method, on which sets DropConnect++ is better by a measure, worse, or neither is shown."""
    found = [_verdict(rows, kind, name) for kind in dict.fromkeys(row["other_kind"] for row in rows)]
    return tuple(filter(None, found))


def _verdict(rows: Table, kind: str, name: Measure) -> str:
    tested = [row for row in rows if row["other_kind"] == kind and row[name] is not None]
    if not tested:
        return ""
    sign = 1.0 if name == "log_likelihood" else -1.0
    sure = {row["title"]: row[name]["adjusted_p"] < SIGNIFICANCE for row in tested}
    ahead = [row["title"] for row in tested if sign * row[name]["difference"] > 0]
    places = {
        "better on": [title for title in ahead if sure[title]],
        "worse on": [title for title in sure if sure[title] and title not in ahead],
        "not distinguishable on": [title for title in sure if not sure[title]],
    }
    parts = [f"{words} {', '.join(titles)}" for words, titles in places.items() if titles]
    sets = "1 set" if len(tested) == 1 else f"{len(tested)} sets"
    other = OTHERS.get(kind, tested[0]["other"])
    return f"DropConnect++ against {other}: {'; '.join(parts)}. Its mean is better on {len(ahead)} of {sets}."
