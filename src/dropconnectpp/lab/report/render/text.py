"""Tables as aligned plain text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dropconnectpp.lab.report.views.cells import TableView

WIDTH = 80
"""Notes below a table are as wide as the table, and at least this wide."""


def as_text(table: TableView) -> str:
    """One table as aligned plain text; the best is marked with an asterisk."""
    lines = [[cell.text + "*" * cell.strong for cell in row] for group in table.groups for row in group.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *lines, strict=True)]

    def aligned(cells: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if place == 0 or place in table.words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(parts).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    text = [table.caption, rule, aligned(table.columns), rule]
    rest = iter(lines)
    for group in table.groups:
        text += [group.title] if group.title else []
        text += [aligned(next(rest)) for _ in group.rows]
    width = max(WIDTH, len(rule))
    said = []
    for heading, sentences in table.sentences:
        start = f"{heading}: " if heading and len(table.sentences) > 1 else ""
        said += [textwrap.fill(start + line, width) for line in sentences]
    return "\n".join([*text, rule, *said, *(textwrap.fill(note, width) for note in table.notes)])
