r"""Tables as LaTeX in the style of the paper: `tables.tex` to \input, and a small document that shows it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from dropconnectpp.lab.report.render.drawing import Drawing
from dropconnectpp.lab.report.views.cells import Cell, TableView

COMMANDS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    '"': "''",
    "'": "{'}",
    "`": "{`}",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
}
INTRODUCTION = r"""% Tables of a report by dcpp. In a document: \usepackage{graphicx} and \input{tables}.
% A table that is wider than the text is made as wide as the text.
\providecommand{\fitted}[1]{\sbox0{#1}\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi}
"""
DOCUMENT = r"""\documentclass[a4paper]{article}
\usepackage[margin=2.5cm]{geometry}
\usepackage{graphicx}
\title{DropConnect++: results}
\author{}
\date{}
\begin{document}
\maketitle
\input{tables}
\clearpage
FIGURES\end{document}
"""


def escaped(text: str) -> str:
    r"""Text that LaTeX prints literally, in any encoding and font; characters without an ASCII form become "?".

    >>> print(escaped("50% of $x_1$ – naïve"))
    50\% of \$x\_1\$ -- naive
    """
    single = " ".join(text.split())
    return "-{}-".join("".join(map(_character, part)) for part in single.split("--"))


def _character(character: str) -> str:
    if character in COMMANDS:
        return COMMANDS[character]
    if character.isascii():
        return character if character.isprintable() else ""
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return "".join(COMMANDS.get(one, one) for one in plain) or "?"


def document(drawings: Iterable[Drawing]) -> str:
    r"""A complete document: \input{tables}, and the figures."""
    parts = []
    for place, drawing in enumerate(drawings):
        parts += [r"\clearpage"] if place % 8 == 7 else []  # LaTeX can hold back only a limited number of figures
        parts += [r"\begin{figure*}[htbp]\centering"]
        width = "" if len(drawing.panels) > 1 else "0.5"
        parts += [rf"\includegraphics[width={width}\textwidth]{{figures/{drawing.name}.pdf}}"]
        parts += [rf"\caption{{{escaped(_caption(drawing.caption))}}}", r"\end{figure*}"]
    return DOCUMENT.replace("FIGURES", "".join(f"{part}\n" for part in parts))


def _caption(text: str) -> str:
    """A caption with the paper's number at its end, since LaTeX puts its own number first.

    >>> _caption("Table 1. Accuracy"), _caption("Figure 1(a), NORB. Accuracy"), _caption("Pruning")
    ('Accuracy (Table 1 of the paper)', 'NORB (Figure 1(a) of the paper). Accuracy', 'Pruning')
    """
    text = re.sub(r"^(Table \d)(?:, continued)?\. (.*)$", r"\2 (\1 of the paper)", text)
    text = re.sub(r"^(Figure 1\(b\)) in numbers(?:[.,]) (.*)$", r"\2 (\1 of the paper)", text)
    return re.sub(r"^(Figure 1\(.\)), (.*?)\. ", r"\2 (\1 of the paper). ", text)


def tables(views: Iterable[TableView]) -> str:
    """All tables except those that are too long for a page."""
    return INTRODUCTION + "".join(_table(table) for table in views if not table.long)


def _table(table: TableView) -> str:
    lines = [r"\begin{table*}[htbp]\centering", rf"\caption{{{escaped(_caption(table.caption))}}}", r"\fitted{%"]
    lines += [rf"\begin{{tabular}}{{|{'c|' * len(table.columns)}}}", r"\hline"]
    lines += [_line(escaped(column) for column in table.columns), r"\hline"]
    for group in table.groups:
        if group.title:
            lines.append(rf"\multicolumn{{{len(table.columns)}}}{{|l|}}{{\textbf{{{escaped(group.title)}}}}}\\\hline")
        lines += [_line(map(_cell, row)) for row in group.rows]
    lines += [r"\end{tabular}}", r"\par\medskip\begin{minipage}{\linewidth}\footnotesize"]
    for heading, sentences in table.sentences:
        lines += [rf"{escaped(heading)}: {escaped(sentence)}\par" for sentence in sentences]
    lines += [rf"{escaped(note)}\par" for note in table.notes]
    return "\n".join(["", *lines, r"\end{minipage}", r"\end{table*}", ""])


def _line(cells: Iterable[str]) -> str:
    return rf"{' & '.join(cells)} \\\hline"


def _cell(cell: Cell) -> str:
    text = escaped(cell.text)
    return rf"\textbf{{{text}}}" if cell.strong else text
