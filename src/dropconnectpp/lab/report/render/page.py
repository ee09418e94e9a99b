"""The report as one web page that opens from disk and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

from dropconnectpp.lab.report.provenance import Evidence
from dropconnectpp.lab.report.render import drawing
from dropconnectpp.lab.report.render.drawing import Drawing, FigureKind
from dropconnectpp.lab.report.sentences import Sentences
from dropconnectpp.lab.report.state import State
from dropconnectpp.lab.report.views.cells import TableView


def render(
    *,
    summary: str,
    findings: Sentences,
    tables: Mapping[str, TableView],
    drawings: Mapping[FigureKind, Sequence[Drawing]],
    evidence: Sequence[Evidence],
    anchors: Mapping[str, str],
    trials: Sequence[str],
    commands: Sequence[str],
    warnings: Sequence[str] = (),
    state: State | None = None,
    files: Sequence[str],
    refresh_s: int | None = None,
) -> str:
    """The page's HTML. ``anchors`` are the ids of the protocols by digest; ``files`` are the report's other files."""
    environment = Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        summary=summary,
        findings=findings,
        tables=tables,
        drawings=drawings,
        evidence=evidence,
        anchors=anchors,
        trials=trials,
        commands=commands,
        warnings=warnings,
        state=state,
        files=files,
        refresh_s=refresh_s,
        palettes={"light": drawing.LIGHT, "dark": drawing.DARK},
        script_hash=_script_hash(),
    )


def _source(name: str) -> str:
    """The text of `page.html`, `page.css` or `page.js`."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script_hash() -> str:
    """The hash by which the page's security policy allows its one script, and nothing else, to run."""
    script = "\n" + _source("page.js")  # what stands between <script> and </script>
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
