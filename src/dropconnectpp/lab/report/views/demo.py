"""The demo's tables as a reader sees them."""

from __future__ import annotations

from typing import Any, Literal

from dropconnectpp.lab.report.formats import DASH, interval, kept, p_value, signed, significant
from dropconnectpp.lab.report.tables.demo import PLAN
from dropconnectpp.lab.report.tables.rows import Table
from dropconnectpp.lab.report.views.cells import Cell, TableRow, TableView, cells, count, grouped, number, span

DemoName = Literal["demo", "demo_doubt", "demo_sizes"]
PAIRS = "The tests compare networks with the same start and order of examples; p is adjusted by Holm over this table."


def lay_out_demo(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    return [_shares(found["demo"]), _doubt(found["demo_doubt"]), _sizes(found["demo_sizes"])]


def _title(row: TableRow) -> str:
    train, test = (f"{row[name]:,.0f}" if row[name] is not None else DASH for name in ("train", "test"))
    return f"{row['title']}, {train} images to train on, {test} to test on"


def _test(test: dict[str, Any] | None, digits: int) -> tuple[Cell, Cell]:
    """A difference with its interval, and its chance."""
    if test is None:
        return Cell(DASH), Cell(DASH)
    shown = f"{signed(test['difference'], digits)} ({interval(test['interval'], digits)})"
    return Cell(shown, value=test["difference"]), Cell(p_value(test["adjusted_p"]), value=test["adjusted_p"])


def _shares(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        share = row["kept"]["mean"]
        return cells(
            row["method"],
            Cell(kept(row["asked"]), value=row["asked"]),
            Cell(DASH if share is None else kept(share), value=share),
            number(row["mean"]),
            span(row["interval"]),
            count(row["n"]),
            *_test(row["against_plain"], 2),
            *_test(row["against_gradual"], 2),
            number(row["read"]["mean"], 0),
        )

    return TableView(
        name="demo",
        caption="Few connections: accuracy on the test set in percent, by the share of weights kept",
        columns=(
            "Method",
            "Asked",
            "Kept",
            "Accuracy",
            "95% interval",
            "n",
            "Against the plain network",
            "p",
            "Against gradual pruning",
            "p",
            "Pixels read",
        ),
        groups=grouped(rows, _title, make),
        notes=(f"Kept is the share of weights that are not zero; biases are kept and not counted. {PAIRS}",),
    )


def _doubt(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            row["method"],
            number(row["accuracy"]["mean"]),
            number(row["entropy"]["mean"], 3),
            number(row["foreign_entropy"]["mean"], 3),
            number(row["mean"], 4),
            span(row["interval"], 4),
            count(row["n"]),
            *_test(row["against_plain"], 4),
        )

    return TableView(
        name="demo_doubt",
        caption="Foreign images: does entropy tell handwritten digits from clothes?",
        columns=(
            "Method",
            "Accuracy",
            "Entropy, clothes",
            "Entropy, digits",
            "AUROC",
            "95% interval",
            "n",
            "Against the plain network",
            "p",
        ),
        groups=grouped(rows, _title, make),
        notes=(
            "Entropy is in nats, of the class probabilities averaged over 20 drawn networks, or of the plain network's "
            "own. AUROC is the chance that a digit has the higher entropy; 0.5 is guessing. No network saw a digit in "
            f"training. {PAIRS}",
        ),
    )


def _sizes(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        def both(name: str, digits: int) -> list[Cell]:
            values = [row[f"{name}_{when}"]["mean"] for when in ("before", "after")]
            if digits:
                return [number(value, digits, significant) for value in values]
            return [Cell(DASH if value is None else f"{value:,.0f}", value=value) for value in values]

        return cells(
            row["method"] if row["kind"] == PLAN else DASH,
            Cell(kept(row["asked"]), value=row["asked"]),
            *both("bytes", 0),
            *both("parameters", 0),
            *both("ms", 3),
            count(row["bytes_after"]["n"]),
        )

    return TableView(
        name="demo_sizes",
        caption="Deployed: the plain network, and the one with few connections after compact() and save()",
        columns=(
            "Method",
            "Asked",
            "Bytes, plain",
            "Bytes, compact",
            "Parameters, plain",
            "Parameters, compact",
            "ms, plain",
            "ms, compact",
            "n",
        ),
        groups=grouped(rows, _title, make),
        notes=(
            "ms: one pass of all test images on one thread, the median of 15, both networks timed in turn. The plain "
            "file is torch.save's.",
        ),
    )
