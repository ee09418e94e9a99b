"""Counts of a long test that is interrupted and goes on: a small file, written after every step."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Tally:
    """Counts by row and column, and what went wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.counts: dict[str, dict[str, int]] = found.get("counts", {})
        self.faults: list[str] = found.get("faults", [])
        self.day: str = found.get("day", "")
        """When it was last written."""

    def add(self, row: str, column: str, number: int = 1) -> None:
        """Count."""
        counts = self.counts.setdefault(row, {})
        counts[column] = counts.get(column, 0) + number

    def get(self, row: str, *columns: str) -> int:
        """The sum of some counts."""
        return sum(self.counts.get(row, {}).get(column, 0) for column in columns)

    @property
    def total(self) -> int:
        """The sum of all counts."""
        return sum(sum(row.values()) for row in self.counts.values())

    def keep(self) -> None:
        """Write all counts, so that a killed test goes on from here."""
        self.day = datetime.now(UTC).date().isoformat()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"day": self.day, "counts": self.counts, "faults": self.faults}, indent=1))
        os.replace(new, self.path)
