"""What every benchmark prints around its numbers: where they come from, and tables people can read."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Cell = str | int | float | None
"""A number, a word, or None where there is nothing to say."""


def provenance(device: torch.device) -> dict[str, Cell]:
    """Date, machine, versions and commit: the evidence a number carries."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    """The CPU's name, as well as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or 'unknown'} ({platform.machine()} CPU)"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


@dataclass(frozen=True)
class Table:
    """A title, what the columns hold, the rows, and a note that explains them."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""

    def markdown(self) -> str:
        """A Markdown table whose source is aligned too: words to the left, numbers to the right."""
        cells = [[_text(cell) for cell in row] for row in self.rows]
        widths = [max(len(row[i]) for row in [self.columns, *cells]) for i in range(len(self.columns))]
        numeric = [all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))]

        def line(row: list[str]) -> str:
            padded = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)]
            return f"| {' | '.join(padded)} |"

        rule = ["-" * (w - 1) + ":" if n else "-" * w for w, n in zip(widths, numeric, strict=True)]
        table = "\n".join([line(self.columns), line(rule), *(line(row) for row in cells)])
        return f"### {self.title}\n\n{table}\n" + (f"\n{self.note}\n" if self.note else "")


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


@dataclass
class Report:
    """The tables of one run: shown as they come, and written where asked."""

    title: str
    device: torch.device
    settings: Any  # a dataclass
    tables: list[Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.provenance = provenance(self.device)
        print(self._head(), flush=True)

    def _head(self) -> str:
        return f"## {self.title}\n\n{', '.join(f'{key} {value}' for key, value in self.provenance.items())}\n"

    def add(self, table: Table) -> None:
        self.tables.append(table)
        print(table.markdown(), flush=True)

    def write(self, out: Path | None) -> None:
        """To a .json file with every digit, or to any other file as Markdown."""
        if out is None:
            return
        if out.suffix == ".json":
            tables = [asdict(table) for table in self.tables]
            content = {"provenance": self.provenance, "settings": asdict(self.settings), "tables": tables}
            out.write_text(json.dumps(content, indent=1, default=str) + "\n")
        else:
            out.write_text("\n".join([self._head(), *(table.markdown() for table in self.tables)]))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    made.add_argument("--out", type=Path, help="also write the tables: to a .json file with every digit, else Markdown")
    return made
