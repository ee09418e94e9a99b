"""The engine of a Ray cluster: a Ray task for each stack, run again by Ray itself where a worker or a node dies.

The driver hears of progress, and workers hear that they shall stop, through one small actor on the driver's node.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dropconnectpp
from dropconnectpp.errors import DropConnectError, MissingPackageError
from dropconnectpp.lab.runs.engines.engine import Began, Died, Ended, EngineError, Event, Tell, Told, Worker
from dropconnectpp.lab.runs.engines.worker import Limits, Orders, Station, free_bytes
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.tasks import Failed, Interrupted, Outcome, Task, Workplace

RETRIES = 10
"""How often Ray runs a task again whose worker or node died."""
COURIER_S = 0.25
"""Seconds between two messages of a worker, and so until it hears that it shall stop."""
PATIENCE_S = 60.0
"""How long a worker waits for the driver's actor before it takes the driver for dead."""
LOOK_S = 2.0
"""Seconds between two looks at how large the cluster is."""
PROBE_S, STRAGGLE_S = 120.0, 10.0
"""How long the first node may take for its first task, which imports torch, and the others after it."""


def ray_package() -> Any:
    """Ray, imported when it is needed.

    Raises:
        MissingPackageError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would ask, or send
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray advises: it warns otherwise
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError(
            "--engine ray needs Ray. Install it with: pip install 'dropconnectpp[cluster]'"
        ) from error
    return ray


# ------------------------------------------------------------------------------------------- in a worker


class Desk:
    """The actor through which workers report and hear that they shall stop."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Event]] = []
        self._stopping = False

    def hear(self, events: list[tuple[str, Event]]) -> bool:
        """Take events, each with the name of the attempt that sends it; whether the worker shall stop."""
        self._events += events
        return self._stopping

    def take(self) -> list[tuple[str, Event]]:
        """What was heard since the last time."""
        events, self._events = self._events, []
        return events

    def stop(self) -> None:
        """Let every worker stop."""
        self._stopping = True


class _Courier:
    """Carries a worker's words to the desk, and back that it shall stop."""

    def __init__(self, desk: Any, number: int, interruption: Interruption) -> None:
        self._desk, self._number, self._interruption = desk, number, interruption
        self._attempt = uuid.uuid4().hex
        self._lock, self._events = threading.Lock(), list[tuple[str, Event]]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def tell(self, what: str, arguments: tuple[Any, ...]) -> None:
        with self._lock:
            self._events.append((self._attempt, Told(self._number, what, arguments)))

    def begin(self) -> None:
        """Say who works; known is then whether it is too late to begin."""
        ray = ray_package()
        node = ray.get_runtime_context().get_node_id()[:8]
        device = f"cuda {os.environ.get('CUDA_VISIBLE_DEVICES', '')}" if ray.get_gpu_ids() else "cpu"
        worker = Worker(f"node {node}", socket.gethostname(), os.getpid(), device)
        self._events.append((self._attempt, Began(self._number, worker)))
        self._flush()
        self._thread.start()

    def end(self) -> None:
        """Send what is left."""
        self._over.set()
        self._thread.join()
        self._flush()

    def _carry(self) -> None:
        while not self._over.wait(COURIER_S):
            self._flush()

    def _flush(self) -> None:
        ray = ray_package()
        with self._lock:
            events, self._events = self._events, []
        try:
            stopping = ray.get(self._desk.hear.remote(events), timeout=PATIENCE_S)
        except ray.exceptions.RayError:
            stopping = True  # the driver is gone; what is finished waits for the next
        if stopping:
            self._interruption.requested = True


_STATIONS: dict[bytes, Station] = {}
"""Of this process, which Ray uses for one task after the other."""


def run_task(desk: Any, number: int, task: Task, orders: Orders, limits: Limits) -> Outcome:
    """Carry a task out inside a Ray task."""
    interruption = Interruption()
    key = pickle.dumps(orders)
    if key not in _STATIONS:
        _STATIONS[key] = Station(orders, device_here(), interruption)
    station = _STATIONS[key]
    station.interruption = interruption
    courier = _Courier(desk, number, interruption)
    courier.begin()
    try:
        return station.carry_out(task, limits, courier.tell)
    finally:
        courier.end()


def device_here() -> torch.device:
    """The GPU that Ray gave this task, else the CPU."""
    return torch.device("cuda" if ray_package().get_gpu_ids() else "cpu")


@dataclass(frozen=True)
class Probe:
    """What a node says of itself."""

    host: str
    version: str
    sees: bool
    """Whether it can read the file that the driver wrote."""


def probe(path: str) -> Probe:
    """Look at a node."""
    return Probe(socket.gethostname(), dropconnectpp.__version__, not path or Path(path).exists())


def free_here() -> int:
    """Memory that is free on the GPU of a task."""
    return free_bytes(device_here())


# ------------------------------------------------------------------------------------------ in the driver


@dataclass
class _Given:
    """A task that Ray has."""

    reference: Any
    attempt: str = ""
    worker: Worker | None = None


class Cluster:
    """Workers on the nodes of a Ray cluster.

    Args:
        address: of the cluster, HOST:PORT; local: a new one of this machine; None: that of RAY_ADDRESS, of a cluster
            that runs here, or a new one.
        orders: what workers have to know.
        device: auto, cpu or cuda.
        workers: most tasks at a time; None: as many as the cluster's GPUs or cores hold.
        shared: whether the user said that all nodes reach the storage.
    """

    name = "ray"
    several = True

    def __init__(self, address: str | None, orders: Orders, device: str, workers: int | None, *, shared: bool) -> None:
        self._ray = ray_package()
        self._orders, self._most, self._shared = orders, workers, shared
        self._tell: Tell = lambda _: None
        self._limits = Limits(None, 0.0)
        self._given: dict[int, _Given] = {}
        self._desk: Any = None
        self._size, self._looked = 1, -LOOK_S
        _connect(self._ray, address)
        gpus = self._ray.cluster_resources().get("GPU", 0.0)
        if device.startswith("cuda") and not gpus:
            self._ray.shutdown()
            raise EngineError(f"--device {device}: the Ray cluster has no GPU. Start nodes that have, or --device cpu.")
        self._gpu = bool(gpus) and device != "cpu"
        self._free: int | None = None

    @property
    def device_type(self) -> str:
        return "cuda" if self._gpu else "cpu"

    @property
    def workers(self) -> int:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:  # nodes come and go
            self._looked = now
            there = self._ray.cluster_resources()
            places = int(there.get("GPU", 0.0)) if self._gpu else int(there.get("CPU", 0.0)) // self._orders.threads
            self._size = max(1, places if self._most is None else min(places, self._most))
        return self._size

    def free_bytes(self) -> int:
        if self._free is None:
            look = self._ray.remote(free_here).options(num_gpus=1, scheduling_strategy="SPREAD")
            self._free = min(self._ray.get([look.remote() for _ in range(self.workers)]))
        return self._free

    def open(self, at: Workplace, tell: Tell) -> None:
        self._tell, self._limits = tell, Limits.of(at)
        if self._desk is None:
            self._check_nodes()
            self._desk = self._here(self._ray.remote(Desk)).remote()

    def _here(self, what: Any, node: str | None = None) -> Any:
        """An actor or a task on a node that takes nothing from it; None: this process's node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = self._ray.get_runtime_context().get_node_id() if node is None else node
        return what.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False))

    def _check_nodes(self) -> None:
        """Ask every node whether it has this package and sees the storage.

        Raises:
            EngineError: one has another version, or does not see what was said to be shared.
        """
        storage, token = self._orders.storage, ""
        if not storage.remote:
            place = Path(storage.root)
            try:
                place.mkdir(parents=True, exist_ok=True)
                token = str(place / f".reached-{uuid.uuid4().hex}")
                Path(token).touch()
            except OSError as error:
                raise EngineError(f"{place}: cannot be written ({error.strerror}). Give another --storage.") from error
        try:
            found = self._ask_nodes(token)
        finally:
            if token:
                Path(token).unlink(missing_ok=True)
        for one in found:
            if one.version != dropconnectpp.__version__:
                raise EngineError(
                    f"{one.host} has dropconnectpp {one.version}, this machine {dropconnectpp.__version__}. "
                    "Install the same on every node."
                )
        blind = sorted({one.host for one in found if not one.sees})
        if blind and self._shared:
            raise EngineError(f"--storage {storage.root}: not reached from {', '.join(blind)}. Give a shared folder.")
        if blind:
            text = (
                f"{', '.join(blind)} does not see {storage.root}: what moves to another node starts anew there. "
                "Give --storage, a folder or an address that all nodes reach."
            )
            self._tell(Told(0, "note", (text,)))

    def _ask_nodes(self, token: str) -> list[Probe]:
        """What each node says of itself; one that is silent may just have died, and is passed over."""
        look, errors = self._ray.remote(probe), self._ray.exceptions
        nodes = [one["NodeID"] for one in self._ray.nodes() if one["Alive"]]
        asked = [self._here(look, node).remote(token) for node in nodes]
        found: list[Probe] = []
        until = time.monotonic() + PROBE_S
        while asked and (left_s := until - time.monotonic()) > 0:
            over, asked = self._ray.wait(asked, num_returns=1, timeout=left_s)
            for one in over:
                try:
                    found.append(self._ray.get(one))
                except errors.RayTaskError as error:
                    said = str(error).strip().splitlines()[-1]
                    raise EngineError(
                        f"a node of the cluster cannot run tasks ({said}). Install the same dropconnectpp on all."
                    ) from error
                except errors.RayError:
                    continue
                until = min(until, time.monotonic() + STRAGGLE_S)
        if not found:
            raise EngineError("no node of the Ray cluster answers. Look at it with: ray status")
        return found

    def submit(self, number: int, task: Task) -> None:
        threads = self._orders.threads
        resources = {"num_gpus": 1, "num_cpus": 1} if self._gpu else {"num_cpus": threads}
        remote = self._ray.remote(run_task).options(
            max_retries=RETRIES, scheduling_strategy="SPREAD", name=task.title, **resources
        )
        self._given[number] = _Given(remote.remote(self._desk, number, task, self._orders, self._limits))

    def wait(self, timeout_s: float) -> None:
        by_reference = {given.reference: number for number, given in self._given.items()}
        references = list(by_reference)
        with self._cluster_there():
            over, _ = self._ray.wait(references, num_returns=1, timeout=timeout_s) if references else ([], [])
            over, _ = self._ray.wait(references, num_returns=len(references), timeout=0) if over else ([], [])
            heard = self._ray.get(self._desk.take.remote(), timeout=PATIENCE_S)
        for attempt, event in heard:
            self._hear(attempt, event)
        for reference in over:
            number = by_reference[reference]
            outcome = self._outcome(reference)
            del self._given[number]
            self._tell(Ended(number, outcome))

    @contextmanager
    def _cluster_there(self) -> Iterator[None]:
        """Say so where the node of this process is gone, and with it the cluster."""
        try:
            yield
        except self._ray.exceptions.RayError as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EngineError(
                f"the Ray cluster is gone ({said}). What was finished is kept: the same command goes on from there."
            ) from error

    def _hear(self, attempt: str, event: Event) -> None:
        given = self._given.get(event.number) if not isinstance(event, Died) and event.number is not None else None
        if given is None:
            return
        if isinstance(event, Began):
            if given.worker is not None:
                self._tell(Died(event.number, given.worker, "was lost", again=True))
            given.attempt, given.worker = attempt, event.worker
        if attempt == given.attempt:  # an attempt that was given up may still speak
            self._tell(event)

    def _outcome(self, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(reference)
        except errors.TaskCancelledError:
            return Interrupted()
        except (errors.RayError, DropConnectError) as error:
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            return Failed(f"{type(error).__name__}: {last}")
        return outcome

    def stop(self) -> None:
        with self._cluster_there():
            if self._desk is not None:
                self._desk.stop.remote()
            for given in self._given.values():
                if given.worker is None:  # it may never get a place
                    self._ray.cancel(given.reference)

    def close(self) -> None:
        given, self._given = self._given, {}
        for one in given.values():
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(one.reference, force=True)
        self._ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    """Join a cluster; without an address one that runs here, else a new one that ends with this process."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    given = address or os.environ.get("RAY_ADDRESS")
    with _signals_kept():
        try:
            alone = {"include_dashboard": False} if given == "local" else {}
            ray.init(address=given or "auto", **alone, **options)
        except ConnectionError as error:
            if given:
                raise EngineError(
                    f"no Ray cluster answers at {given} ({error!s:.200}). Start one with: ray start --head"
                ) from error
            ray.init(include_dashboard=False, **options)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"Ray cannot be joined at {given or 'auto'}: {error!s:.300}") from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes over how this process ends; we take it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
