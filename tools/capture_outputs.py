"""Run the code of the pages and store what it prints below it, and the figures that it draws.

    python tools/capture_outputs.py                       every page that shows outputs
    python tools/capture_outputs.py docs/tutorial.md      one page
    python tools/capture_outputs.py --check               say which pages no longer show what their code prints

A block of Python that prints is followed by a block of text with what it printed. An image that follows a block, under
its output, is the variable `figure` after that block. A page with a template is changed in the template; fill_docs.py
then writes the page. Trainings end elsewhere on another machine: `--check` and the tests let numbers differ by
`TOLERANCE`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n```text\n(?P<text>.*?)```\n", re.DOTALL)
IMAGE = re.compile(r"\n!\[[^\]]*\]\((?P<path>[^)]+\.svg)\)\n")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
TOLERANCE = {"README.md": (0.02, 0.005), "docs/how-to/prune-and-export.md": (0.5, 0.05)}
"""By page, how far a number may be from the one shown: as a share of it, and at least. Others have `USUAL`.

How many units a training leaves is a small whole number, which moves by more than an accuracy.
"""
USUAL = (0.25, 0.05)


def pages() -> list[Path]:
    """The pages that show what their code prints."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if any(after_block(page.read_text()))]


def after_block(page: str) -> Iterator[tuple[re.Match[str], re.Match[str] | None, re.Match[str] | None]]:
    """Each block that shows an output or an image, with both."""
    for block in BLOCK.finditer(page):
        output = OUTPUT.match(page, block.end())
        image = IMAGE.match(page, output.end() if output else block.end())
        if output or image:
            yield block, output, image


def run(page: str, name: str, namespace: dict[str, Any]) -> Iterator[str]:
    """What each block prints, one after the other; ``namespace`` is as the block leaves it."""
    import torch

    torch.manual_seed(0)
    for number, block in enumerate(BLOCK.finditer(page)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], f"{name}, block {number}", "exec"), namespace)
        lines = printed.getvalue().rstrip("\n").split("\n")
        yield "".join(f"{line.rstrip()}\n" for line in lines) if printed.getvalue() else ""


def captured(path: Path) -> tuple[str, dict[Path, bytes]]:
    """The page with its outputs, and its figures by their files."""
    page = path.read_text()
    parts: list[str] = []
    figures: dict[Path, bytes] = {}
    place = 0
    namespace: dict[str, Any] = {"__name__": path.stem}
    for block, printed in zip(BLOCK.finditer(page), run(page, path.name, namespace), strict=True):
        parts.append(page[place : block.end()])
        place = block.end()
        output = OUTPUT.match(page, place)
        place = output.end() if output else place
        parts.append(f"\n```text\n{printed}```\n" if printed else "")
        image = IMAGE.match(page, place)
        if image:
            figures[(path.parent / image["path"]).resolve()] = drawn(namespace["figure"])
    return "".join([*parts, page[place:]]), figures


def drawn(figure: Any) -> bytes:
    """A figure as SVG on white, without a date."""
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "dropconnectpp", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return stream.getvalue()


def difference(shown: str, printed: str, tolerance: tuple[float, float] = USUAL) -> str | None:
    """What a printed text has else than the page: other words, or a number that is too far away. None if nothing.

    >>> difference("loss 0.50, layer 4", "loss 0.51, layer 4") is None
    True
    >>> difference("loss 0.50", "loss 5.0")
    "'loss 0.50' became 'loss 5.0'"
    """
    one, other = shown.splitlines(), printed.splitlines()
    if len(one) != len(other):
        return f"{len(one)} lines became {len(other)}"
    for line, now in zip(one, other, strict=True):
        words, now_words = (re.sub(r"\s+|[-▁-█]+", "", NUMBER.sub("#", text)) for text in (line, now))
        pairs = zip(NUMBER.findall(line), NUMBER.findall(now), strict=False)
        if words != now_words or not all(_close(a, b, tolerance) for a, b in pairs):
            return f"{line.strip()!r} became {now.strip()!r}"
    return None


def _close(shown: str, printed: str, tolerance: tuple[float, float]) -> bool:
    a, b = (float(text.replace(",", "")) for text in (shown, printed))
    relative, least = tolerance
    return abs(a - b) <= max(relative * abs(a), least)


def check(path: Path, namespace: dict[str, Any] | None = None) -> list[str]:
    """What the code of a page prints else than the page says."""
    page = path.read_text()
    tolerance = TOLERANCE.get(path.relative_to(ROOT).as_posix(), USUAL)
    shown = {block.start(): (output, image) for block, output, image in after_block(page)}
    found: list[str] = []
    names: dict[str, Any] = {"__name__": path.stem} if namespace is None else namespace
    for number, (block, printed) in enumerate(zip(BLOCK.finditer(page), run(page, path.name, names), strict=True)):
        output, image = shown.get(block.start(), (None, None))
        wrong = None if output is None else difference(output["text"], printed, tolerance)
        if wrong:
            found.append(f"block {number}: {wrong}")
        if image and not hasattr(names.get("figure"), "savefig"):
            found.append(f"block {number}: there is no `figure` for {image['path']}")
        if image and not (path.parent / image["path"]).exists():
            found.append(f"block {number}: {image['path']} is not there")
    return found


def write(path: Path) -> Mapping[Path, str]:
    """Store the outputs in the page or its template, and the figures; return what changed."""
    template = path.with_suffix(".md.in")
    page, figures = captured(path)
    changed: dict[Path, str] = {}
    target = template if template.exists() else path
    text = page if target is path else _into_template(page, template.read_text())
    if target.read_text() != text:
        target.write_text(text)
        changed[target] = "captured"
    for place, content in figures.items():
        if not place.exists() or place.read_bytes() != content:
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)
            changed[place] = "drawn"
    return changed


def _into_template(page: str, template: str) -> str:
    """The template with the outputs of the page: their blocks of Python are the same."""
    outputs = [OUTPUT.match(page, block.end()) for block in BLOCK.finditer(page)]
    parts, place = [], 0
    for block, output in zip(BLOCK.finditer(template), outputs, strict=True):
        parts.append(template[place : block.end()])
        place = block.end()
        old = OUTPUT.match(template, place)
        place = old.end() if old else place
        parts.append(output[0] if output else "")
    return "".join([*parts, template[place:]])


def main() -> None:
    """Capture, or check."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("pages", nargs="*", type=Path, help="pages (default: all that show outputs)")
    options.add_argument("--check", action="store_true", help="write nothing; fail if a page shows something else")
    given = options.parse_args()
    wrong = False
    for path in [one.resolve() for one in given.pages] or pages():
        name = path.relative_to(ROOT)
        if given.check:
            for told in check(path):
                print(f"{name}, {told}")
                wrong = True
            continue
        for place, what in write(path).items():
            print(f"{what} {place.relative_to(ROOT)}")
    if wrong:
        raise SystemExit("Run: python tools/capture_outputs.py")


if __name__ == "__main__":
    main()
