"""Write README and pages of the documentation from their templates, with tables and numbers as the records have them.

    python tools/fill_docs.py           after a new record, or a change of a template
    python tools/fill_docs.py --check   say which pages are not what templates and records say, and write nothing

The template of PAGE.md is PAGE.md.in beside it; edit that one. A line `{{ table: NAME }}` stands for a recorded table,
`{{ folded: NAME }}` for one that opens on a click, under its own title, and `{{ value: NAME ; CELL ; CELL ; COLUMN ;
DIGITS }}` for a number, without its sign: from that column of the one row with these cells. NAME is that of a table in
any folder of records/, without `.md`. `{{ file: PATH }}` stands for a script of the repository, as a block of `py`: the
tests run the script itself.
"""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^\{\{ table: ([\w-]+) \}\}$", re.MULTILINE)
FOLDED = re.compile(r"^\{\{ folded: ([\w-]+) \}\}$", re.MULTILINE)
FILE = re.compile(r"^\{\{ file: ([\w/-]+\.py) \}\}$", re.MULTILINE)
VALUE = re.compile(r"\{\{ value: ([\w-]+) ; ([^{}]*?) ; ([^;{}]*?) ; (\d) \}\}")


def templates() -> list[Path]:
    """The pages' templates."""
    return sorted([*ROOT.glob("*.md.in"), *ROOT.glob("docs/**/*.md.in")])


def page_of(template: Path) -> Path:
    """The page that a template is for."""
    return template.with_suffix("")


def titled(name: str) -> tuple[str, str]:
    """The title of the table of that name, and what stands below it, headings one level lower."""
    found = sorted(ROOT.glob(f"records/*/{name}.md"))
    if len(found) != 1:
        folders = ", ".join(path.parent.name for path in found) or "none"
        raise LookupError(f"one folder of records/ must have {name}.md; it is in {folders}.")
    title, _, body = found[0].read_text().partition("\n")
    return title.lstrip("# "), re.sub(r"^### ", "#### ", body.strip(), flags=re.MULTILINE)


def recorded(name: str) -> str:
    """The table of that name, without its title."""
    return titled(name)[1]


def folded(name: str) -> str:
    """The table under its title and the number of its rows, closed until a reader opens it."""
    title, body = titled(name)
    rows = sum(line.startswith("| ") for line in body.splitlines()) - 2 * len(
        re.findall(r"^\| :?-", body, re.MULTILINE)
    )
    return f'<details markdown="1">\n<summary>{title} ({rows} rows)</summary>\n\n{body}\n\n</details>'


def filled(template: str) -> str:
    """The page, with every table and number as the records have them."""
    page = TABLE.sub(lambda m: recorded(m[1]), template)
    page = FILE.sub(lambda m: f"```py\n{(ROOT / m[1]).read_text().rstrip()}\n```", page)
    page = FOLDED.sub(lambda m: folded(m[1]), page)
    page = VALUE.sub(lambda m: value(recorded(m[1]), m[2].split(" ; "), m[3], int(m[4])), page)
    unknown = re.search(r"\{\{.*", page)
    if unknown is not None:
        raise ValueError(
            f"{unknown[0][:80]!r} is neither a table or a file on a line of its own nor a value of a table."
        )
    return page


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
    number = abs(Decimal(found[0].strip("*").split()[0]))  # the best of a table is bold
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
    pages = {page_of(one): filled(one.read_text()) for one in templates()}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'stale' if given.check else 'filled'} {path.relative_to(ROOT)}")
        if not given.check:
            path.write_text(pages[path])
    if given.check and stale:
        raise SystemExit("Run: python tools/fill_docs.py")


if __name__ == "__main__":
    main()
