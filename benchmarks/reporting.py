"""What every benchmark prints around its numbers: where they come from, and tables people can read."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path

import torch


def provenance(device: torch.device) -> str:
    """Date, machine, versions and commit: the evidence a number carries."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"{date}, {name}{threads}, torch {torch.__version__}, commit {commit or 'unknown'}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose source is aligned too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"  # noqa: E731
    return "\n".join([line(header), line(["-" * w for w in widths]), *(line(row) for row in rows)])


def publish(text: str, out: Path | None) -> None:
    """Print, and where asked also write."""
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")
