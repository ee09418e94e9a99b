"""How the tests of benchmarks read what one printed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from scripts import run


def tables(script: str, folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Run a benchmark and read its JSON back: rows by title, each a mapping by column."""
    out = folder / "result.json"
    found = run(script, *options, "--out", str(out))
    assert found.returncode == 0, found.stderr[-2000:]
    result = json.loads(out.read_text())
    assert set(result["provenance"]) == {"date", "device", "threads", "torch", "commit"}
    for table in result["tables"]:
        assert f"### {table['title']}" in found.stdout
        for row in table["rows"]:
            assert f"| {row[0]} " in found.stdout
            assert all(math.isfinite(cell) for cell in row if isinstance(cell, int | float))
    return {
        table["title"]: [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        for table in result["tables"]
    }
