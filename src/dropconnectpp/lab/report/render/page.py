"""The report as one web page that opens from disk: nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined

from dropconnectpp.lab.report.provenance import Evidence
from dropconnectpp.lab.report.render import drawing
from dropconnectpp.lab.report.render.drawing import Drawing
from dropconnectpp.lab.report.selection import Selected
from dropconnectpp.lab.report.sentences import Sentences, listed
from dropconnectpp.lab.report.views.cells import Laid


def render(
    *,
    summary: str,
    findings: Sentences,
    tables: Mapping[str, Laid],
    drawings: Mapping[str, Sequence[Drawing]],
    evidence: Sequence[Evidence],
    anchors: Mapping[str, str],
    trials: Sequence[str],
    commands: Sequence[str],
    files: Sequence[str],
    refresh_s: int | None = None,
) -> str:
    """The page's text. ``anchors`` are where the protocols stand, by digest; ``files`` are the other forms."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        summary=summary,
        findings=findings,
        tables=tables,
        drawings=drawings,
        evidence=evidence,
        anchors=anchors,
        trials=trials,
        commands=commands,
        files=files,
        refresh_s=refresh_s,
        palettes={"light": drawing.LIGHT, "dark": drawing.DARK},
        script_hash=_script_hash(template),
    )


def _script_hash(template: str) -> str:
    """What the page's policy allows to run: its one script, and nothing else."""
    (script,) = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def summary(selected: Selected) -> str:
    """What there is, in a sentence.

    >>> summary(Selected((), ()))
    'There are no results yet.'
    """
    experiments = selected.experiments
    done, diverged = sum(len(e.done) for e in experiments), sum(len(e.diverged) for e in experiments)
    if not done + diverged:
        return selected.absence
    methods, sets = len({e.label for e in experiments}), list(dict.fromkeys(e.title for e in experiments))
    text = f"{_count(methods, 'method')} on {listed(sets)}: {_count(done, 'network')} trained to the end"
    return text + (f", {diverged} diverged." if diverged else ", none diverged.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
