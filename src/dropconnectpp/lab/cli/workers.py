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
    Literal["process", "host", "ray"] | None,
    typer.Option(
        "--engine",
        help="Where networks train: process is this one, host several of this machine, ray a cluster (default: "
        "process; host where --workers is above 1).",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="The Ray cluster, HOST:PORT (default: that of RAY_ADDRESS, else one that runs here, else a new one).",
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
        help="CPU threads of each worker (default: all cores by all workers; of ray 1). Last digits depend on them.",
    ),
]


@dataclass(frozen=True)
class Team:
    """What a user says of the processes that train."""

    workers: int | None = None
    engine: Literal["process", "host", "ray"] | None = None
    storage: str | None = None
    threads: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.address is not None and self.engine != "ray":
            raise ProtocolError(f"--address {self.address} is of a Ray cluster. Add --engine ray.")
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

    def driver_device(self, name: str) -> torch.device:
        """The device of this process; a cluster may have GPUs where this machine has none."""
        from dropconnectpp.lab import device as devices

        return devices.choose("auto" if self.name == "ray" and name.startswith("cuda") else name)

    def gather(self, out: Path, device: str, load: Callable[[str], Dataset]) -> Engine:
        """The engine, ready to be opened, for a device as the user names it."""
        import torch

        from dropconnectpp.lab.runs.engines.here import Here
        from dropconnectpp.lab.runs.engines.host import Host, default_threads, every_device
        from dropconnectpp.lab.runs.engines.worker import Orders

        here = self.driver_device(device)
        if self.name == "process":
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            return Here(here)
        storage = self.storage_for(out)
        predictions = storage.predictions(out)
        if self.name == "ray":
            from dropconnectpp.lab.runs.engines.cluster import Cluster

            orders = Orders(load, storage, predictions, self.threads or 1)
            return Cluster(self.address, orders, device, self.workers, shared=self.storage is not None)
        devices = every_device(here, self.workers)
        threads = self.threads or default_threads(len(devices))
        return Host(devices, Orders(load, storage, predictions, threads))


ALONE = Team()
"""This process."""
