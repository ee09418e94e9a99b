"""Counts of a long test that is interrupted and goes on: a small file, written after every step."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
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


def long_test(
    doc: str | None,
    rows: Sequence[str],
    path: Path,
    work: Callable[[Tally, str | None, int | None], None],
    amount: tuple[str, int | None, str],
) -> None:
    """The command line of a long test: goes on from its tally, prints it, and fails if anything went wrong.

    ``work`` is given the tally, the one row that is asked for, and how much is; ``amount`` is that option's name,
    default and help.
    """
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    name, default, explained = amount
    options.add_argument(name, dest="amount", type=int, default=default, help=explained)
    options.add_argument("--only", choices=list(rows), help="one command")
    options.add_argument("--tally", type=Path, default=path, help="where the counts are kept")
    given = options.parse_args()
    tally = Tally(given.tally)
    work(tally, given.only, given.amount)
    for row, counts in tally.counts.items():
        print(f"{row:15}", *(f"{number:,} {what};" for what, number in counts.items()))
    if tally.faults:
        raise SystemExit("\n".join(tally.faults))
