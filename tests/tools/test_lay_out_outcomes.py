"""The table of models and tools, from rows."""

from __future__ import annotations

from pathlib import Path

from scripts import call


def test_reasons_stand_below_the_table(tmp_path: Path) -> None:
    rows = [
        "kind,name,aspect,outcome",
        "package,torch,version,2.13",
        "tool,Ignite,trains,yes",
        "model,BERT,trains,yes",
        "model,BERT,ONNX,refused: <op> is missing. Do without.",
        "model,BERT,converts,in part: 25% of the weights",
    ]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    assert call("tools/lay_out_outcomes.py", str(tmp_path / "rows.csv"), str(tmp_path)).returncode == 0
    lines = (tmp_path / "outcomes.md").read_text().splitlines()
    assert lines[4:] == [
        "| BERT | in part (1) | yes | - | - | refused (2) | - |",
        "| Ignite | - | yes | - | - | - | - |",
        "",
        "1. BERT, converts: 25% of the weights.",
        "2. BERT, ONNX: &lt;op> is missing.",
        "",
        "Versions: torch 2.13.",
    ]
