"""Copies the recorded tables into README and documentation, between `<!-- table: NAME -->` and `<!-- end -->`.

Run `python benchmarks/fill_docs.py` after a new record; a test checks that the pages hold what the records say.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    """The page with every marked table as its newest record has it."""
    return MARKED.sub(lambda m: f"{m[1]}\n{latest(m[2])}\n\n{m[3]}", page)


if __name__ == "__main__":
    for path in pages():
        text = path.read_text()
        if MARKED.search(text):
            path.write_text(filled(text))
            print(f"filled {path.relative_to(ROOT)}")
