"""Copying tables and numbers into pages: from the one record of that name, and only where a page would change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT, call

TABLE = "## Title\n\n| Method | Measure | Mean |\n| :-- | :-- | --: |\n| A | NLL | -0.126 ± 0.02 |\n"
TEMPLATE = "x {{ value: some ; A ; NLL ; Mean ; 2 }} y\n\n{{ table: some }}\n\nend\n"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with one record, a template that shows it, and a page without one."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    fill_docs: Any = __import__("fill_docs")
    monkeypatch.setattr(fill_docs, "ROOT", tmp_path)
    for folder in ("records/one", "records/other", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "records" / "one" / "some.md").write_text(TABLE)
    (tmp_path / "docs" / "page.md.in").write_text(TEMPLATE)
    (tmp_path / "docs" / "page.md").write_text("old\n")
    (tmp_path / "README.md").write_text("no template {{ table: some }}\n")
    return tmp_path


def test_a_page_gets_what_the_record_says(pages: Path) -> None:
    found = call("tools/fill_docs.py", "--check")
    assert (found.returncode, found.stdout) == (1, "stale docs/page.md\n")
    assert (pages / "docs" / "page.md").read_text() == "old\n", "checked and not written"
    assert call("tools/fill_docs.py").stdout == "filled docs/page.md\n"
    body = TABLE.partition("\n")[2].strip()
    assert (pages / "docs" / "page.md").read_text() == f"x 0.13 y\n\n{body}\n\nend\n"
    assert call("tools/fill_docs.py").stdout == ""
    assert call("tools/fill_docs.py", "--check").returncode == 0


def test_a_long_table_is_folded_under_its_title(pages: Path) -> None:
    (pages / "docs" / "page.md.in").write_text("x\n\n{{ folded: some }}\n\nend\n")
    call("tools/fill_docs.py")
    body = TABLE.partition("\n")[2].strip()
    opened = f'<details markdown="1">\n<summary>Title (1 rows)</summary>\n\n{body}\n\n</details>'
    assert (pages / "docs" / "page.md").read_text() == f"x\n\n{opened}\n\nend\n"


def test_a_script_is_shown_as_it_is(pages: Path) -> None:
    (pages / "examples").mkdir()
    (pages / "examples" / "one.py").write_text("print(1)\n")
    (pages / "docs" / "page.md.in").write_text("x\n\n{{ file: examples/one.py }}\n\nend\n")
    call("tools/fill_docs.py")
    assert (pages / "docs" / "page.md").read_text() == "x\n\n```py\nprint(1)\n```\n\nend\n"


def test_the_best_of_a_table_is_a_number_too(pages: Path) -> None:
    (pages / "records" / "one" / "some.md").write_text(TABLE.replace("-0.126 ± 0.02", "**77.72**"))
    call("tools/fill_docs.py")
    assert (pages / "docs" / "page.md").read_text().startswith("x 77.72 y")


def test_a_page_that_is_not_there_yet_is_written(pages: Path) -> None:
    (pages / "docs" / "page.md").unlink()
    assert call("tools/fill_docs.py", "--check").returncode == 1
    assert call("tools/fill_docs.py").stdout == "filled docs/page.md\n"


@pytest.mark.parametrize("mark", ["{{ tables: some }}", "see {{ table: some }}", "{{ value: some ; A ; Mean }}"])
def test_a_mark_that_is_not_understood_is_named(pages: Path, mark: str) -> None:
    (pages / "docs" / "page.md.in").write_text(f"x\n{mark} z\n")
    with pytest.raises(ValueError, match="is neither a table or a file on a line of its own nor a value"):
        call("tools/fill_docs.py")
    assert (pages / "docs" / "page.md").read_text() == "old\n"


def test_a_name_stands_for_one_table(pages: Path) -> None:
    (pages / "records" / "other" / "some.md").write_text(TABLE)
    with pytest.raises(LookupError, match=r"must have some\.md; it is in one, other\."):
        call("tools/fill_docs.py")
    for folder in ("one", "other"):
        (pages / "records" / folder / "some.md").unlink()
    with pytest.raises(LookupError, match=r"must have some\.md; it is in none\."):
        call("tools/fill_docs.py")
