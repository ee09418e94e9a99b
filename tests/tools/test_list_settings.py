"""The list of settings that were tried: one row each, none left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tool_cases import TRAINED, few, lines

from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.runner import Runner
from scripts import call


def test_every_setting_that_was_tried_is_listed(tmp_path: Path) -> None:
    methods = '[[methods]]\nkind = "dropconnect"\nrate = 0.5\n\n'
    methods += '[[methods]]\nestimator = "straight-through"\nlogit_step = [1, 1e-9]\n'
    held_out = TRAINED.replace("[protocol.training]\n", "[protocol.training]\nholdout = 20\n")
    assert held_out != TRAINED
    (tmp_path / "search.toml").write_text(f"repeats = 2\n{held_out}\n{methods}")
    experiment = experiments.from_file(tmp_path / "search.toml")
    protocols = [
        replace(p, training=replace(p.training, step_size=0.01), evaluation=replace(p.evaluation, shares=(0.1,)))
        for p in experiment.protocols
    ]
    runner = Runner(tmp_path, torch.device("cpu"), few)
    units = [Unit(p, r) for p in protocols for r in (0, 1)]
    assert runner.run(units).left == 0
    found = call("tools/list_settings.py", str(tmp_path / "results.sqlite"), "--out", str(tmp_path / "tried.md"))
    assert found.returncode == 0, found.stderr
    rows = lines((tmp_path / "tried.md").read_text())
    learned = "DropConnect++ (estimator=straight-through)"
    still = learned.replace(")", ", logit_step=1e-09)")
    assert sorted(row[0] for row in rows) == [learned, still, "DropConnect, rate 0.5"]
    assert [row[1:4] for row in rows] == [["0.01", "1", "2"]] * 3
    accuracies = [[float(part) for part in row[4].split(" ± ")] for row in rows]
    assert accuracies[0][0] >= accuracies[1][0]
    assert all(len(one) == 2 and one[1] >= 0.0 for one in accuracies)
    by_posterior = {row[0]: row[7] for row in rows}
    assert by_posterior["DropConnect, rate 0.5"] == by_posterior[still] == "–"
    assert 0.0 <= float(by_posterior[learned].split(" ")[0]) <= 100.0
    more = call("tools/list_settings.py", str(tmp_path / "results.sqlite"), "--least", "3")
    assert more.returncode == 1
    empty = call("tools/list_settings.py", "records/kernels/mixed.jsonl.xz")
    assert empty.returncode == 1
    assert "No such setting" in empty.stderr
