"""Which processes train: the options of a run, and the engine that they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dropconnectpp.lab.config.settings import ProtocolError

if TYPE_CHECKING:
    import torch

    from dropconnectpp.lab.data.dataset import Dataset
    from dropconnectpp.lab.runs.engines.engine import Engine
    from dropconnectpp.lab.runs.storage import Storage

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Processes that train side by side, each on a GPU of its own, or on a part of the CPU (default: 1; with "
        "--engine host one for each GPU or core).",
    ),
]
EngineName = Annotated[
    Literal["process", "host"] | None,
    typer.Option(
        "--engine",
        help="Where networks train: process is this one, host several of this machine (default: process; host where "
        "--workers is above 1).",
    ),
]
StorageRoot = Annotated[
    str | None,
    typer.Option(
        "--storage",
        help="Where workers keep checkpoints: a folder, or an address of fsspec (default: the folder of results).",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="CPU threads of each worker (default: all cores divided by the workers). They move a row's last digits.",
    ),
]


@dataclass(frozen=True)
class Team:
    """What a user says of the processes that train."""

    workers: int | None = None
    engine: Literal["process", "host"] | None = None
    storage: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.engine == "process" and (self.workers or 1) > 1:
            raise ProtocolError(f"--engine process is one worker, got --workers {self.workers}. Use --engine host.")

    @property
    def name(self) -> str:
        """The engine."""
        return self.engine or ("host" if (self.workers or 1) > 1 else "process")

    def storage_for(self, out: Path) -> Storage:
        """Where checkpoints and finished rows are kept."""
        from dropconnectpp.lab.runs.storage import Storage

        return Storage.given(self.storage, out)

    def gather(self, out: Path, device: torch.device, load: Callable[[str], Dataset]) -> Engine:
        """The engine, ready to be opened."""
        import torch

        from dropconnectpp.lab.runs.engines.here import Here
        from dropconnectpp.lab.runs.engines.host import Host, default_threads, every_device
        from dropconnectpp.lab.runs.engines.worker import Orders
        from dropconnectpp.lab.runs.runner import PREDICTIONS

        if self.name == "process":
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            return Here(device)
        devices = every_device(device, self.workers)
        threads = self.threads or default_threads(len(devices))
        return Host(devices, Orders(load, self.storage_for(out), out.absolute() / PREDICTIONS, threads))


ALONE = Team()
"""This process."""
