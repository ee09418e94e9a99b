"""README and docs: every Python block runs, top to bottom, and every link to a file leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_every_code_block_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_pages_that_teach_have_code() -> None:
    assert len(blocks(ROOT / "README.md")) >= 2
    assert len(blocks(ROOT / "docs" / "guide.md")) >= 8


def test_the_tables_are_those_of_the_records() -> None:
    spec = importlib.util.spec_from_file_location("fill_docs", ROOT / "benchmarks" / "fill_docs.py")
    assert spec is not None
    assert spec.loader is not None
    fill_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill_docs)
    marked = [page for page in PAGES if fill_docs.MARKED.search(page.read_text())]
    assert len(marked) == 3
    for page in marked:
        assert fill_docs.filled(page.read_text()) == page.read_text(), f"run python benchmarks/fill_docs.py for {page}"
