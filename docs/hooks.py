"""What `mkdocs build` needs beyond its settings: the records as pages of the site, and doctests as code.

Pages in docs/ link to ../records/, which is right in the repository; in the site the records lie beside the pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension, Object
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
SHOWN = (".md", ".toml", ".json", ".svg")


def on_files(files: Any, config: Any) -> Any:
    """Add the records to the site."""
    for path in sorted((ROOT / "records").rglob("*")):
        if path.suffix in SHOWN:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to the records to where they are in the site; write \\< as this Markdown understands it."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./records/", r"](\1records/", markdown).replace("\\<", "&lt;")


def as_markdown(text: str) -> str:
    """A docstring whose doctests are code blocks and whose shapes, such as (B, *), stay as they are."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        f"```pycon\n{part}\n```" if part.startswith(">>> ") else part.replace(", *)", ", \\*)") for part in paragraphs
    )


class Doctests(Extension):
    """Turns the doctests of all docstrings into code blocks before they are rendered."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            given = obj.docstring
            obj.docstring = Docstring(as_markdown(given.value), lineno=given.lineno, parent=given.parent)
