"""The table of what networks with few connections have in common, as a reader sees it."""

from __future__ import annotations

from typing import Literal

from dropconnectpp.lab.report.formats import DASH, kept, p_value, significant
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
    title,
    trust_notes,
)

SurvivorsName = Literal["agreement"]


def lay_out_survivors(found: dict[str, Table]) -> list[TableView]:
    """The tables of this module, including those without rows."""
    return [_agreement(found["agreement"])]


def _agreement(rows: Table) -> TableView:
    def make(row: TableRow) -> tuple[Cell, ...]:
        return cells(
            method(row),
            DASH if row["asked"] is None else kept(row["asked"]),
            row["layer"],
            f"{row['places']:,}",
            Cell(f"×{significant(row['common'])}", value=row["common"]),
            number(row["w"], 3),
            Cell(p_value(row["adjusted_p"]), value=row["adjusted_p"]),
            count(row["n"]),
        )

    return TableView(
        name="agreement",
        caption="Whether networks with different starts keep connections at the same places",
        columns=("Method", "Kept", "Layer", "Places", "In common", "W", "p", "n"),
        groups=grouped(rows, title, make),
        notes=(
            "Places are pixels of an image, points of a map, or those of a filter; maps and units have no order that "
            "networks with different starts share. In common: connections that two networks both keep, as a multiple "
            "of what two random supports of the same sizes would; 1 is chance. W: Kendall's coefficient of concordance "
            "between the networks' counts by place, 0 without and 1 with full agreement; p by its χ² approximation, "
            "adjusted by Holm over all rows of one data set and network.",
            *trust_notes(rows),
        ),
        words=(2,),
    )
