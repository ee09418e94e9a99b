"""Tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dropconnectpp.lab.report.sentences import Sentences
from dropconnectpp.lab.report.views.cells import Cell, Laid

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&!])")


def escaped(text: str) -> str:
    r"""Text that Markdown shows as it is, on one line, in a table too.

    >>> print(escaped("a|b *c*\n<d>"))
    a\|b \*c\* \<d\>
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def document(summary: str, findings: Sentences, tables: Iterable[Laid]) -> str:
    """All tables, with what they say."""
    parts = ["# DropConnect++: results", escaped(summary), *_said(findings)]
    return "\n\n".join(parts + list(map(section, tables))) + "\n"


def section(table: Laid) -> str:
    """One table under its heading, with what it says."""
    parts = [f"## {escaped(table.caption)}", *_said(table.sentences), *_groups(table), *map(escaped, table.notes)]
    return "\n\n".join(parts)


def _said(sentences: Sentences) -> list[str]:
    lines = [f"- {escaped(heading)}: {escaped(line)}" for heading, said in sentences for line in said]
    return ["\n".join(lines)] if lines else []


def _groups(table: Laid) -> list[str]:
    """A table for each group: Markdown has no groups of rows."""
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
