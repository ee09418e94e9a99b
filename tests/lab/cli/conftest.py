"""The command in a folder with the tiny data sets and an experiment of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_cases import MINE, SIZES, made

from dropconnectpp.lab import data
from dropconnectpp.lab.report.render import drawing


@pytest.fixture
def dcpp(dcpp, monkeypatch, tmp_path):
    """The command where the tiny data sets and a file of one's own are.

    A report's figures are written as SVG alone: in three forms they would take most of these tests' time.
    """
    monkeypatch.setattr(drawing, "METADATA", {"svg": drawing.METADATA["svg"]})
    real = data.load
    monkeypatch.setattr(
        data, "load", lambda name, directory=None: made(name) if name in SIZES else real(name, directory=directory)
    )
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(MINE)
    return dcpp
