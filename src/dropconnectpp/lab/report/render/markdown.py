"""Tables as Markdown: one document, or one section for each table."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dropconnectpp.lab.report.sentences import Sentences
from dropconnectpp.lab.report.views.cells import Cell, TableView

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&!])")


def escaped(text: str) -> str:
    r"""Text that Markdown shows literally, on one line, also within a table.

    >>> print(escaped("a|b *c*\n<d>"))
    a\|b \*c\* \<d\>
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def document(summary: str, findings: Sentences, tables: Iterable[TableView], warnings: Iterable[str] = ()) -> str:
    """All tables, with the sentences that go with them."""
    parts = ["# DropConnect++: results", escaped(summary), *map(escaped, warnings), *_said(findings)]
    return "\n\n".join(parts + list(map(section, tables))) + "\n"


def section(table: TableView) -> str:
    """One table under its heading, with its sentences and notes."""
    parts = [f"## {escaped(table.caption)}", *_said(table.sentences), *_groups(table), *map(escaped, table.notes)]
    return "\n\n".join(parts)


def _said(sentences: Sentences) -> list[str]:
    lines = [f"- {escaped(heading)}: {escaped(line)}" for heading, said in sentences for line in said]
    return ["\n".join(lines)] if lines else []


def _groups(table: TableView) -> list[str]:
    """A table for each group, since Markdown has no groups of rows."""
    numbers = [place > 0 and place not in table.words for place in range(len(table.columns))]
    head = [_line(map(escaped, table.columns)), _line("--:" if right else ":--" for right in numbers)]
    parts = []
    for group in table.groups:
        parts += [f"**{escaped(group.title)}**"] if group.title else []
        parts.append("\n".join([*head, *(_line(map(_cell, row)) for row in group.rows)]))
    return parts


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    text = escaped(cell.text)
    return f"**{text}**" if cell.strong else text
