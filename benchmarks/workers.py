"""What several workers bring, what a task costs beside its work, and what 10,000 tasks cost the driver.

    python benchmarks/workers.py                                  one and two workers on this machine
    python benchmarks/workers.py --engines host --workers 1 2 4   without Ray
    python benchmarks/workers.py --tasks 10000 --skip scaling

scaling    networks on fashion-mini, one thread each worker: seconds once the workers run, speed-up over one process,
           and whether the rows are those of one process, bit for bit
overhead   tasks that train nothing: claimed, sent, answered, stored
10,000     the same, so often: time of the driver, its memory, and the store's size

Starting workers is a column of its own: they import torch, and Ray starts its own processes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from reporting import Cell, Report, Table, parser

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab import data
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Protocol, Training
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.board import Board
from dropconnectpp.lab.runs.checkpoints import Checkpoints
from dropconnectpp.lab.runs.dispatch import Dispatcher
from dropconnectpp.lab.runs.engines.cluster import Cluster
from dropconnectpp.lab.runs.engines.engine import Engine
from dropconnectpp.lab.runs.engines.here import Here
from dropconnectpp.lab.runs.engines.host import Host
from dropconnectpp.lab.runs.engines.worker import Orders
from dropconnectpp.lab.runs.interruption import Interruption
from dropconnectpp.lab.runs.outbox import Outbox
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.predictions import Predictions
from dropconnectpp.lab.runs.progress import Display
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.storage import CHECKPOINTS, FINISHED, Storage
from dropconnectpp.lab.runs.store import Key, Store
from dropconnectpp.lab.runs.tasks import DataSets, Finished, Task, Workplace

CPU = torch.device("cpu")
LOAD = partial(data.load, directory=None)
ENGINES = ("process", "host", "ray")
PARTS = ("scaling", "overhead", "many")


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    engines: tuple[str, ...]
    workers: tuple[int, ...]
    networks: int
    epochs: int
    tasks: int
    overhead_tasks: int
    skip: tuple[str, ...]

    @property
    def crews(self) -> list[tuple[str, int]]:
        """Engines with their workers."""
        several = [(name, count) for name in self.engines if name != "process" for count in self.workers]
        return [("process", 1), *several]


@contextmanager
def engine_of(name: str, workers: int, out: Path) -> Iterator[Engine]:
    """An engine whose workers have one thread each."""
    orders = Orders(LOAD, Storage.given(None, out), out / "predictions", 1)
    made: Engine
    if name == "process":
        made = Here(CPU)
    elif name == "host":
        made = Host(["cpu"] * workers, orders)
    else:
        made = Cluster("local", orders, "cpu", workers, shared=False)
    with closing(made):
        yield made


# -------------------------------------------------------------------------------------------- scaling


def experiment(networks: int, epochs: int) -> list[Unit]:
    """Small convolutional networks of two methods."""
    base = Protocol(
        data="fashion-mini",
        architecture=Architecture(maps=(8, 16), pooled=(True, True), hidden=32),
        training=Training(step_size=0.02, batch_size=64, epochs=epochs),
        evaluation=Evaluation(every=epochs, curve_samples=0, samples=(1,), shares=(1.0,), predictive_samples=0),
    )
    methods = (Method(kind="none"), Method(kind="dropconnect", rate=0.5))
    return [Unit(replace(base, method=method), r) for method in methods for r in range(networks // len(methods))]


def rows(out: Path) -> list[object]:
    """What must be the same whoever trains."""
    with Store.open(out / "results.sqlite", read_only=True) as store:
        return [(row.key, row.status, json.dumps(row.results, sort_keys=True), row.device) for row in store.rows()]


def scaling(settings: Settings) -> Table:
    """Seconds and rows of each engine."""
    lines: list[list[Cell]] = []
    alone_s, alone_rows = 0.0, list[object]()
    for name, workers in settings.crews:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            begun = time.perf_counter()
            with engine_of(name, workers, out) as engine:
                warm = experiment(2, 1)  # other epochs are other rows
                Runner(out / "warm", CPU, LOAD, engine=engine).run(warm)
                start_s = time.perf_counter() - begun
                units = experiment(settings.networks, settings.epochs)
                begun = time.perf_counter()
                Runner(out, CPU, LOAD, engine=engine).run(units)
                train_s = time.perf_counter() - begun
            found = rows(out)
            if name == "process":
                alone_s, alone_rows = train_s, found
            same = "yes" if found == alone_rows else "NO"
            lines.append([f"{name}, {workers}", start_s, train_s, alone_s / train_s, same])
    columns = ["engine, workers", "start, s", "train, s", "speed-up", "the same rows"]
    note = (
        f"{settings.networks} networks, {settings.epochs} epochs each, on fashion-mini, {cores()} cores, one thread "
        "each worker. Start: until the first networks, of one epoch, are stored."
    )
    return Table("Scaling", columns, lines, note)


def cores() -> int:
    """CPU cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------- tasks without training


@dataclass(frozen=True)
class Nothing:
    """A task that makes a row and trains nothing."""

    key: Key
    title: str = "nothing"
    epochs: int = 1

    @property
    def keys(self) -> tuple[Key, ...]:
        return (self.key,)

    def run(self, at: Workplace) -> list[Finished]:
        """A row of the usual size."""
        results = {"accuracy": 10.0, "nll": 2.3, "losses": [2.3] * 100, "curve": [{"epoch": 1, "accuracy": 10.0}] * 20}
        return [
            Finished(
                key=self.key,
                status="done",
                results=results,
                seconds=0.0,
                device="none",
                versions={},
                provenance={},
                commit="",
            )
        ]


@dataclass
class Many:
    """So many of them, claimed one by one."""

    store: Store
    owner: Owner
    keys: Iterator[Key]
    back: list[Task] = field(default_factory=list)

    def next(self) -> Task | None:
        """The next one."""
        if self.back:
            return self.back.pop()
        key = next(self.keys, None)
        return Nothing(*self.store.claim([key], self.owner)) if key is not None else None

    def give_back(self, task: Task) -> None:
        """Nobody else wants it."""
        self.back.append(task)

    def stored(self, task: Task) -> None:
        """It is done."""

    def not_fitting(self, task: Task, message: str) -> DropConnectError | None:
        """It needs no memory."""
        raise AssertionError(message)


def run_tasks(engine: Engine, out: Path, count: int) -> float:
    """Seconds of the driver for so many tasks, all of whose rows are in the store at the end."""
    storage, interruption, owner = Storage.given(None, out), Interruption(), Owner.here()
    with Store.open(out / "results.sqlite") as store:
        digest = store.add(Protocol(data="fashion-mini", root_seed=count))
        board = Board(Display(), out, owner, engine.name, several=engine.several)
        board.begin(count, count)
        dispatcher = Dispatcher(store, owner, engine, board, interruption, Outbox(storage.place(FINISHED)))
        at = Workplace(
            CPU,
            DataSets(LOAD),
            Checkpoints(storage.place(CHECKPOINTS)),
            Display(),
            None,
            60.0,
            interruption,
            Predictions(out / "predictions", lambda _: None),
        )
        begun = time.perf_counter()
        dispatcher.work(at, Many(store, owner, (Key(digest, replica) for replica in range(count))))
        seconds = time.perf_counter() - begun
        board.close()
        assert sum(key.digest == digest for key in store.finished()) == count
    return seconds


def resident_mib() -> float | None:
    """Memory of this process now."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if statm.exists() else None


def overhead(settings: Settings) -> Table:
    """Milliseconds of a task that trains nothing."""
    lines: list[list[Cell]] = []
    for name, workers in settings.crews:
        with tempfile.TemporaryDirectory() as folder, engine_of(name, workers, Path(folder)) as engine:
            run_tasks(engine, Path(folder), 2 * workers)  # the workers start
            seconds = run_tasks(engine, Path(folder), settings.overhead_tasks)
            lines.append([f"{name}, {workers}", settings.overhead_tasks, 1e3 * seconds / settings.overhead_tasks])
    note = "Claimed, sent, run, written down by the worker, sent back, stored: each row in a transaction of its own."
    return Table("Overhead of a task", ["engine, workers", "tasks", "ms each"], lines, note)


def many(settings: Settings) -> Table:
    """Time and memory of the driver for many tasks."""
    lines: list[list[Cell]] = []
    for name, workers in settings.crews:
        with tempfile.TemporaryDirectory() as folder, engine_of(name, workers, Path(folder)) as engine:
            run_tasks(engine, Path(folder), 2 * workers)
            before = resident_mib()
            seconds = run_tasks(engine, Path(folder), settings.tasks)
            size = (Path(folder) / "results.sqlite").stat().st_size / 2**20
            lines.append([f"{name}, {workers}", settings.tasks, seconds, before, resident_mib(), size])
    columns = ["engine, workers", "tasks", "seconds", "driver before, MiB", "driver after, MiB", "store, MiB"]
    return Table(f"{settings.tasks:,} tasks", columns, lines, "The driver's resident memory, with torch in it.")


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="workers of each engine (default: 1 2)")
    options.add_argument("--networks", type=int, default=16, help="of the scaling (default: 16)")
    options.add_argument("--epochs", type=int, default=2, help="of each of them (default: 2)")
    options.add_argument("--tasks", type=int, default=10_000, help="how many are many (default: 10000)")
    options.add_argument("--overhead-tasks", type=int, default=300, help="of which the overhead is (default: 300)")
    options.add_argument("--skip", nargs="*", choices=PARTS, default=[], help="what to leave out")
    given = options.parse_args()
    torch.set_num_threads(1)
    settings = Settings(
        tuple(given.engines),
        tuple(given.workers),
        given.networks,
        given.epochs,
        given.tasks,
        given.overhead_tasks,
        tuple(given.skip),
    )
    report = Report("Several workers", CPU, settings)
    for name, measure in (("scaling", scaling), ("overhead", overhead), ("many", many)):
        if name not in settings.skip:
            report.add(measure(settings))
    report.write(given.out)


if __name__ == "__main__":
    main()
