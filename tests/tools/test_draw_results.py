"""The figures of the results: what the records give, and no more than the networks that there are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import matplotlib
import pytest

from scripts import ROOT, call

sys.path.insert(0, str(ROOT / "tools"))
tool = importlib.import_module("draw_results")
sys.path.pop(0)


def test_the_figures_are_what_the_records_give() -> None:
    if matplotlib.__version__ != tool.DRAWN_BY:
        pytest.skip(f"the figures were drawn by matplotlib {tool.DRAWN_BY}")
    found = call("tools/draw_results.py", "--check")
    assert (found.returncode, found.stdout) == (0, ""), "run python tools/draw_results.py"


def test_a_figure_that_the_records_do_not_give_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "FIGURES", tmp_path)
    monkeypatch.setattr(tool, "DRAWINGS", {"one": lambda figure: figure.set_size_inches(1, 1)})
    monkeypatch.setattr(tool, "DRAWN_BY", matplotlib.__version__)
    found = call("tools/draw_results.py", "--check")
    assert (found.returncode, found.stdout) == (1, "stale one.svg\n")
    assert call("tools/draw_results.py").stdout == "drawn one.svg\n"
    assert call("tools/draw_results.py", "--check").returncode == 0
    monkeypatch.setattr(tool, "DRAWINGS", {"one": lambda figure: figure.set_size_inches(2, 1)})
    assert call("tools/draw_results.py", "--check").returncode == 1


def test_every_figure_is_drawn_and_nothing_else_is_there() -> None:
    assert {path.stem for path in tool.FIGURES.glob("*.svg")} >= set(tool.DRAWINGS)


def test_what_is_drawn_has_all_its_networks() -> None:
    for store, label in ((tool.CIFAR10, tool.SPARSE), (tool.FASHION, "DropConnect"), (tool.SVHN, tool.PAPER)):
        networks = tool.Networks(store, label)
        for share in tool.SHARES:
            assert len(networks.kept(tool.BY_SIZE, share)) == 50
    assert len(tool.TOGETHER.accuracies()) == len(tool.SVHN_RATE.accuracies()) == 50
    recorded = (ROOT / "records" / "cifar10" / "cifar10_pruning.md").read_text()
    mean = sum(tool.Networks(tool.CIFAR10, tool.SPARSE).kept(tool.BY_POSTERIOR, 0.1)) / 50
    assert f"| {mean:.2f} ± 0.12 |" in recorded


def test_networks_that_are_not_there_are_an_error() -> None:
    with pytest.raises(LookupError, match=r"has no finished network 'DropConnect', rate 0\.3"):
        _ = tool.Networks(tool.CIFAR10, "DropConnect", 0.3).rows
