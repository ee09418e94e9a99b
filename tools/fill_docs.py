"""Copy recorded tables and single numbers into README and documentation, between marks.

    python tools/fill_docs.py           after a new record
    python tools/fill_docs.py --check   say which pages are not what the records say, and write nothing

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A number, without its sign, stands between
`<!-- value: NAME ; CELL ; CELL ; COLUMN ; DIGITS -->` and `<!-- end -->`: from that column of the one row with these
cells. Such a mark may stand in a table, but not at the start of a line: Markdown takes it for a block there. NAME is
that of a table in any folder of records/, without `.md`; a test checks that the pages hold what the records say.
"""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: ([\w-]+) ; ([^>]*?) ; ([^;>]*?) ; (\d) -->).*?(<!-- end -->)")


def pages() -> list[Path]:
    """The pages that may have marked tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def recorded(name: str) -> str:
    """The table of that name, without its title, headings one level lower."""
    found = sorted(ROOT.glob(f"records/*/{name}.md"))
    if len(found) != 1:
        folders = ", ".join(path.parent.name for path in found) or "none"
        raise LookupError(f"one folder of records/ must have {name}.md; it is in {folders}.")
    body = found[0].read_text().partition("\n")[2].strip()
    return re.sub(r"^### ", "#### ", body, flags=re.MULTILINE)


def filled(page: str) -> str:
    """The page with every marked table and number as the records have them."""
    page = MARKED.sub(lambda m: f"{m[1]}\n{recorded(m[2])}\n\n{m[3]}", page)
    return VALUE.sub(lambda m: f"{m[1]}{value(recorded(m[2]), m[3].split(' ; '), m[4], int(m[5]))}{m[6]}", page)


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


def main() -> None:
    """Fill the pages, or check them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    given = options.parse_args()
    stale = [path for path in pages() if filled(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{'stale' if given.check else 'filled'} {path.relative_to(ROOT)}")
        if not given.check:
            path.write_text(filled(path.read_text()))
    if given.check and stale:
        raise SystemExit("Run: python tools/fill_docs.py")


if __name__ == "__main__":
    main()
