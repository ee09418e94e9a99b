"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from dropconnectpp.lab.config.settings import ProtocolError

DataDirectory = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", envvar="DCPP_DATA", help="Where prepared data sets are stored (default: your cache folder)."
    ),
]
DatasetName = Annotated[str, typer.Option("--dataset", help="A name listed by `dcpp data list`, or folder:PATH.")]
DeviceName = Annotated[str, typer.Option("--device", help="One of auto, cpu, cuda and cuda:N.")]
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Passes over the training set.")]
Out = Annotated[
    Path, typer.Option("--out", help="Folder for results and checkpoints. Give the same folder to resume a run.")
]
ReplicasAtOnce = Annotated[
    int | None,
    typer.Option(
        "--replicas-at-once", min=1, help="Most networks to train at once (default: as many as fit in memory)."
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Root seed of all random numbers.")]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time-limit", help="Stop before this time is over and keep everything: 90s, 9m, 1h30m. Run again to resume."
    ),
]


def duration(text: str) -> float:
    """Seconds of a time such as 90s, 9m or 1h30m; a bare number means seconds.

    >>> duration("1h30m")
    5400.0
    """
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not text or found is None:
        raise ProtocolError(f"time-limit must look like 90s, 9m or 1h30m, got {text!r}.")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds
