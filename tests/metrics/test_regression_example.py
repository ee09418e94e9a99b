"""`examples/regression.py` trains, calibrates, judges and draws."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import call


def test_the_example_runs(tmp_path: Path) -> None:
    found = call("examples/regression.py", "--steps", "60", "--figure", str(tmp_path / "bands.svg"))
    assert found.returncode == 0, found.stderr
    assert re.search(r"Noise times \d\.\d\d: held-out NLL", found.stdout)
    assert "1,000 examples, 100 networks, gaussian" in found.stdout
    assert "in the gap" in found.stdout
    assert "</svg>" in (tmp_path / "bands.svg").read_text()
