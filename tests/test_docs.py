"""README and docs: every Python block runs, top to bottom, every link leads somewhere, every page is in the site."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dropconnectpp.errors import MissingPackageError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
REPOSITORY = "https://github.com/dropconnectpp/dropconnectpp/blob/main/"
RAW = "https://raw.githubusercontent.com/dropconnectpp/dropconnectpp/main/"
TAUGHT = {
    "README.md": 1,
    "docs/index.md": 1,
    "docs/tutorial.md": 8,
    "docs/guide.md": 8,
    "docs/method.md": 2,
    "docs/results/all-findings.md": 1,
    "docs/how-to/convert.md": 5,
    "docs/how-to/choose-an-estimator.md": 2,
    "docs/how-to/train-a-sparse-model.md": 4,
    "docs/how-to/prune-and-export.md": 9,
    "docs/how-to/uncertainty.md": 5,
    "docs/how-to/regression.md": 4,
    "docs/how-to/training-loops.md": 3,
    "docs/how-to/own-data.md": 4,
    "docs/how-to/beyond-one-machine.md": 1,
    "docs/how-to/find-a-schedule.md": 2,
    "docs/how-to/read-the-report.md": 4,
}
"""The pages that teach, and how many blocks of code each has at least."""

PANE = 96
"""Columns of code that the site shows at a width of 1280 pixels."""
NARROW = {
    "README.md",
    "docs/index.md",
    "docs/tutorial.md",
    "docs/guide.md",
    "docs/how-to/convert.md",
    "docs/how-to/choose-an-estimator.md",
    "docs/how-to/train-a-sparse-model.md",
    "docs/how-to/own-data.md",
    "docs/how-to/find-a-schedule.md",
    "docs/how-to/read-the-report.md",
}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(NARROW))
def test_code_fits_the_pane_without_wrapping(page: str) -> None:
    """At the width of a small laptop's screen; the style sheet wraps what is wider."""
    text = (ROOT / page).read_text()
    code = re.findall(r"^```(?:python|console|toml)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert code
    assert [line for block in code for line in block.splitlines() if len(line) > PANE] == []


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name)
def test_every_code_block_runs_and_prints_what_the_page_shows(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = tool("capture_outputs").check(page)
    assert not found, f"{name(page)}: {found}; run python tools/capture_outputs.py {name(page)}"


def test_another_output_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = tool("capture_outputs")
    monkeypatch.setattr(capture, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    code = "```python\nprint('loss', 0.5, 'of layer', 4)\n```\n"
    for text, wrong in (
        ("loss 0.51 of layer 4", None),
        ("loss 0.9 of layer 4", "'loss 0.9 of layer 4' became 'loss 0.5 of layer 4'"),
        ("lost 0.5 of layer 4", "'lost 0.5 of layer 4' became 'loss 0.5 of layer 4'"),
        ("loss 0.5 of layer 4\nand more", "2 lines became 1"),
    ):
        page.write_text(f"{code}\n```text\n{text}\n```\n\nend\n")
        assert capture.check(page) == ([] if wrong is None else [f"block 0: {wrong}"])
    capture.write(page)
    assert page.read_text() == f"{code}\n```text\nloss 0.5 of layer 4\n```\n\nend\n"
    page.write_text(f"{code}\n![a figure](one.svg)\n")
    assert capture.check(page) == ["block 0: there is no `figure` for one.svg", "block 0: one.svg is not there"]


# ------------------------------------------------------------------------------------------- the README


def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_has_one_figure() -> None:
    assert len(readme().split()) < 700
    assert len(re.findall(r"^!\[", readme(), flags=re.MULTILINE)) == 1


def test_the_readme_shows_what_its_code_prints_within_two_hundredths() -> None:
    capture = tool("capture_outputs")
    assert capture.TOLERANCE["README.md"] == (0.02, 0.005)
    [(_, output, _)] = list(capture.after_block(readme()))
    before, after = re.search(r"bytes: ([\d,]+) -> ([\d,]+)", output["text"]).groups()
    thousands = [round(float(count.replace(",", "")) / 1000) for count in (before, after)]
    assert "from {} kB to {} kB".format(*thousands) in readme(), "the bullet and the output agree"


def test_every_link_of_the_readme_is_absolute_and_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(readme()))
    assert len(links) > 10
    for link in links:
        assert link.startswith((REPOSITORY, RAW)), f"{link} leads nowhere on PyPI"
        target, _, anchor = link.removeprefix(REPOSITORY).removeprefix(RAW).partition("#")
        assert (ROOT / target).is_file(), link
        assert not anchor or anchor in anchors(ROOT / target), link


# --------------------------------------------------------------------------------------------- the pages


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
        with contextlib.suppress(MissingPackageError):  # `make test-ecosystem` has the packages
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
    return tool("fill_docs")


def tool(script: str) -> Any:
    """A script of tools/, which is no module of the package."""
    spec = importlib.util.spec_from_file_location(script, ROOT / "tools" / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


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
