"""Counting settings: each once, in the search or before it, and apart what the test set has seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tool_cases import TRAINED, few, lines

from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.runner import Runner
from scripts import call


def _store(folder: Path, logit_steps: str, *, holdout: int, epochs: int) -> str:
    folder.mkdir(exist_ok=True)
    text = TRAINED.replace("[protocol.training]\n", f"[protocol.training]\nholdout = {holdout}\n")
    text = text.replace("epochs = 1\n", f"epochs = {epochs}\n")
    methods = f'[[methods]]\nestimator = "straight-through"\nlogit_step = {logit_steps}\n[[methods]]\nkind = "none"\n'
    (folder / "one.toml").write_text(f"repeats = 1\n{text}\n{methods}")
    protocols = [
        replace(p, training=replace(p.training, step_size=0.01))
        for p in experiments.from_file(folder / "one.toml").protocols
    ]
    assert Runner(folder, torch.device("cpu"), few).run([Unit(p, 0) for p in protocols]).left == 0
    return str(folder / "results.sqlite")


def test_settings_are_counted_once(tmp_path: Path) -> None:
    first = _store(tmp_path / "first", "[1, 2]", holdout=20, epochs=1)
    search = _store(tmp_path / "search", "[3, 4, 1e-9]", holdout=20, epochs=1)
    final = _store(tmp_path / "final", "[2, 3]", holdout=0, epochs=2)
    trials = _store(tmp_path / "final", "[4]", holdout=0, epochs=1)
    assert trials == final
    out = tmp_path / "counts.md"
    found = call(
        "tools/count_settings.py",
        *(first, "--searches", search, "--tested", final, "--dataset", "fashion-mini", "--out", str(out)),
    )
    assert found.returncode == 0, found.stderr
    assert lines(out.read_text()) == [
        ["estimator and logit step, the paper's prior", "2", "2", "1", "0"],
        ["in search of another prior", "3", "2", "1", "1"],
        ["all", "5", "4", "2", "1"],
    ]
