"""Lay out what the tests found of models and tools as a table: records/ecosystem/outcomes.csv to outcomes.md.

    python tools/lay_out_outcomes.py records/ecosystem/outcomes.csv records/ecosystem

`make test-ecosystem` writes the rows. A cell that is neither yes nor empty has a note below the table.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

ASPECTS = ("converts", "trains", "saves", "torch.export", "ONNX", "to_dense")
TITLES = {"to_dense": "agrees with `to_dense`", "torch.export": "exports: `torch.export`", "ONNX": "exports: ONNX"}


def laid_out(rows: list[dict[str, str]]) -> str:
    """The table in Markdown, tools below models, with its notes."""
    versions = ", ".join(f"{row['name']} {row['outcome']}" for row in rows if row["kind"] == "package")
    found = {(row["kind"], row["name"], row["aspect"]): row["outcome"] for row in rows if row["kind"] != "package"}
    notes: list[str] = []
    lines = ["## What works with which model and tool", ""]
    header = ["model or tool", *(TITLES.get(aspect, aspect) for aspect in ASPECTS)]
    lines += [f"| {' | '.join(header)} |", f"| {' | '.join(['---'] * len(header))} |"]
    for kind in ("model", "tool"):
        for name in dict.fromkeys(row["name"] for row in rows if row["kind"] == kind):
            cells = [cell(found.get((kind, name, aspect), ""), f"{name}, {aspect}", notes) for aspect in ASPECTS]
            lines.append(f"| {' | '.join([name, *cells])} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join([*lines, "", f"Versions: {versions}.", ""])


def cell(outcome: str, place: str, notes: list[str]) -> str:
    """What the table says; the reason goes to the notes."""
    if outcome in ("", "yes"):
        return outcome or "-"
    word, _, reason = outcome.partition(": ")
    said = reason.partition(". ")[0].rstrip(".!")  # the advice behind it is for who calls
    notes.append(f"{place}: {said.replace('<', '&lt;')}.")
    return f"{word} ({len(notes)})"


def main() -> None:
    """Read the rows, write the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("rows", type=Path, help="the rows, a CSV file")
    options.add_argument("out", type=Path, help="the folder for outcomes.md")
    given = options.parse_args()
    with given.rows.open(newline="") as file:
        rows = list(csv.DictReader(file))
    (given.out / "outcomes.md").write_text(laid_out(rows))


if __name__ == "__main__":
    main()
