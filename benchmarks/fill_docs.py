"""Copies recorded tables and single numbers into README and documentation, between marks.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A number, without its sign, stands between
`<!-- value: NAME ; CELL ; CELL ; COLUMN ; DIGITS -->` and `<!-- end -->`: from that column of the one row with these
cells. Such a mark may stand in a table, but not at the start of a line: Markdown takes it for a block there.
Run `python benchmarks/fill_docs.py` after a new record; a test checks that the pages hold what the records say.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: ([\w-]+) ; ([^>]*?) ; ([^;>]*?) ; (\d) -->).*?(<!-- end -->)")


def pages() -> list[Path]:
    """The pages that may have marked tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def latest(name: str) -> str:
    """The newest record of that name, without its title, headings one level lower."""
    found = sorted(ROOT.glob(f"records/*/{name}.md"))
    if not found:
        raise FileNotFoundError(f"no record {name}.md under {ROOT / 'records'}")
    body = found[-1].read_text().partition("\n")[2].strip()
    return re.sub(r"^### ", "#### ", body, flags=re.MULTILINE)


def filled(page: str) -> str:
    """The page with every marked table and number as its newest record has it."""
    page = MARKED.sub(lambda m: f"{m[1]}\n{latest(m[2])}\n\n{m[3]}", page)
    return VALUE.sub(lambda m: f"{m[1]}{value(latest(m[2]), m[3].split(' ; '), m[4], int(m[5]))}{m[6]}", page)


def value(table: str, keys: list[str], column: str, digits: int) -> str:
    """The size of the number in ``column`` of the one row that has all the cells ``keys``."""
    header: list[str] = []
    found = []
    for line in table.replace("\\", "").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if cells and column in cells:
            header = cells
        elif cells and set(keys) <= set(cells):
            found.append(cells[header.index(column)])
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have the cells {keys}; one is needed.")
    number = abs(Decimal(found[0].split()[0]))
    shown = round(number, digits)
    if abs(number - shown) == Decimal(5).scaleb(-digits - 1):
        # The table's number is rounded already, and which way it went decides.
        raise ValueError(f"{found[0]} in {keys} cannot be rounded to {digits} digits: show one more, or one fewer.")
    return f"{shown}"


if __name__ == "__main__":
    for path in pages():
        text = path.read_text()
        if MARKED.search(text) or VALUE.search(text):
            path.write_text(filled(text))
            print(f"filled {path.relative_to(ROOT)}")
