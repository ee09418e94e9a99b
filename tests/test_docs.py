"""README and docs: every Python block runs, top to bottom, every link leads somewhere, every page is in the site."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TAUGHT = {
    "README.md": 2,
    "docs/index.md": 1,
    "docs/tutorial.md": 8,
    "docs/guide.md": 8,
    "docs/method.md": 2,
    "docs/results/all-findings.md": 1,
    "docs/how-to/convert.md": 5,
    "docs/how-to/choose-an-estimator.md": 2,
    "docs/how-to/train-a-sparse-model.md": 4,
    "docs/how-to/prune-and-export.md": 5,
    "docs/how-to/own-data.md": 4,
    "docs/how-to/read-the-report.md": 4,
}
"""The pages that teach, and how many blocks of code each has at least."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name)
def test_every_code_block_runs(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": page.stem}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{name(page)}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", without_code(page.read_text())):
        found = page.parent / target if target else page
        assert found.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{name(page)} links to {target}#{anchor}"


def test_the_site_names_every_page_once() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    navigation = settings[settings.index("\nnav:\n") : settings.index("\nvalidation:")]
    listed = re.findall(r": (\S+\.md)$", navigation, flags=re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES[1:])


def test_the_site_loads_nothing_from_elsewhere() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "http" not in settings
    assert re.search(r"^  font: false$", settings, flags=re.MULTILINE)
    for page in PAGES[1:]:
        assert not re.search(r"!\[[^\]]*\]\(http|<(?:script|img|link|iframe)\b", page.read_text()), name(page)


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="make docs installs what builds the site")
def test_the_built_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in tmp_path.rglob("*.html"):
        assert not re.search(
            r"""<(?:script|img|link|iframe)\b[^>]*(?:src|href)=["']?(?:https?:)?//""", page.read_text()
        )
    assert "DropConnectPPLinear" in (tmp_path / "api" / "library.html").read_text()
    assert (tmp_path / "records" / "replicas" / "groups_cuda.html").exists()


def test_the_reference_names_what_is_public() -> None:
    import dropconnectpp

    reference = (DOCS / "api" / "library.md").read_text() + (DOCS / "api" / "laboratory.md").read_text()
    for public in dropconnectpp.__all__:
        assert re.search(rf"\b{public}\b", reference), f"docs/api has no {public}"
    for named in re.findall(r"^::: (\S+)$", reference, flags=re.MULTILINE):
        assert _resolve(named).__doc__, f"{named} has no docstring"


def _resolve(dotted: str) -> object:
    """The module or the object in one, by its full name."""
    if importlib.util.find_spec(dotted.rpartition(".")[0]) is None or dotted.count(".") == 1:
        return importlib.import_module(dotted)
    home, _, last = dotted.rpartition(".")
    found: object = getattr(importlib.import_module(home), last)
    return found


def test_the_pages_that_teach_have_code() -> None:
    for page, least in TAUGHT.items():
        assert len(blocks(ROOT / page)) >= least, page


def test_the_results_are_told_in_short() -> None:
    page = (DOCS / "results.md").read_text()
    assert len(page.split()) <= 900
    assert len(re.findall(r"^!\[", page, flags=re.MULTILINE)) == 3
    for other in sorted((DOCS / "results").glob("*.md")):
        assert other.name in page, f"docs/results.md does not lead to {other.name}"
        opening = other.read_text().split("\n\n")[1]
        assert opening.startswith("!["), f"{name(other)} does not open with a figure"


def test_a_number_is_looked_up_in_one_row() -> None:
    table = "| Method | Measure | Mean |\n| :-- | :-- | --: |\n| A | NLL | -0.126 ± 0.02 |\n| A | size | 3 |\n"
    assert filler().value(table, ["A", "NLL"], "Mean", 2) == "0.13"
    with pytest.raises(LookupError, match="2 rows have the cells"):
        filler().value(table, ["A"], "Mean", 2)
    with pytest.raises(LookupError, match="0 rows have the cells"):
        filler().value(table, ["C"], "Mean", 2)


def filler() -> Any:
    """tools/fill_docs.py, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("fill_docs", ROOT / "tools" / "fill_docs.py")
    assert spec is not None
    assert spec.loader is not None
    fill_docs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill_docs)
    return fill_docs


def test_the_pages_are_what_templates_and_records_say() -> None:
    fill_docs = filler()
    templates = fill_docs.templates()
    assert len(templates) >= 3
    for template in templates:
        page = fill_docs.page_of(template)
        assert page in PAGES, f"{name(template)} is the template of no page"
        told = f"{name(page)} is made from {name(template)}: edit that one and run python tools/fill_docs.py"
        assert fill_docs.filled(template.read_text()) == page.read_text(), told
    for page in PAGES:
        assert "<!--" not in page.read_text(), f"{name(page)} has a comment, which readers of the file see"
