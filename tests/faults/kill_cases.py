"""For each command: what it starts from, what a kill may leave, and what it must end with."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import killed_commands

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab import data
from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store, StoreError

Work = tuple[Callable[..., int], tuple[Any, ...]]
STORE = "results.sqlite"


@dataclass(frozen=True)
class World:
    """What the commands share: a folder of prepared things, and the address of the site that publishes the data."""

    folder: Path
    address: str

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def dcpp(self, *arguments: object) -> Work:
        """A command as work; what it prints goes beside the prepared things."""
        return killed_commands.call, ([str(one) for one in arguments], self.folder / "said.txt", self.address)


@dataclass
class Case(ABC):
    """A command in folders of its own; `whole` is what an undisturbed one ends with."""

    name: ClassVar[str]
    seeds: ClassVar[tuple[int, ...]] = (0,)
    """Seeds with which it begins in each of its ways."""
    world: World
    whole: Any = field(default=None)

    def begin(self, place: Path, draw: random.Random) -> None:  # noqa: B027 (some start from nothing)
        """Put into an empty folder what the command starts from."""

    @abstractmethod
    def work(self, place: Path, draw: random.Random) -> Work:
        """The command; the same to begin with and to resume."""

    @abstractmethod
    def found(self, place: Path) -> Any:
        """What is compared at the end."""

    def faults(self, place: Path) -> list[str]:
        """What must not be after a kill."""
        return []

    def differences(self, place: Path) -> list[str]:
        """What is not as an undisturbed command leaves it."""
        return _differences(self.found(place), self.whole)


def _differences(found: Any, whole: Any) -> list[str]:
    if not isinstance(found, dict) or not isinstance(whole, dict):
        return [] if found == whole else [f"different: {found!r:.200} instead of {whole!r:.200}"]
    lost = [f"lost: {key}" for key in whole.keys() - found.keys()]
    more = [f"doubled: {key}" for key in found.keys() - whole.keys()]
    other = [key for key in whole.keys() & found.keys() if whole[key] != found[key]]
    return [*lost, *more, *(f"different: {key}, {found[key]!r:.200} instead of {whole[key]!r:.200}" for key in other)]


def _rows(path: Path) -> dict[str, Any]:
    """All that a store says, but for times and the processes that wrote it."""
    if not path.exists() or not path.stat().st_size:  # the power failed before the first transaction
        return {}
    try:
        opened = Store.open(path, read_only=True)
    except StoreError as error:
        if "it is empty" not in str(error):  # within the first transaction: SQLite takes back what is there of it
            raise
        return {}
    with opened as store:
        rows = {
            f"row {row.key.digest} {row.key.replica}": (
                row.status,
                json.dumps(row.results, sort_keys=True),
                row.device,
                row.versions,
                row.provenance,
                row.protocol.label,
            )
            for row in store.rows()
            if row.status != "running"
        }
        notes = {f"note {key}": json.dumps(value) for key, value in store.notes().items() if key[1] != "command"}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        (sound,) = connection.execute("PRAGMA integrity_check").fetchone()
    return rows | notes | {"sound": sound}


def _part_of(found: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    return [one for one in _differences(found, whole) if not one.startswith("lost")]


def _files(folder: Path) -> dict[str, bytes]:
    """Every file that is no other's unfinished one."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if not _unfinished(path.name)}


def _unfinished(name: str) -> bool:
    return (name.startswith(".") and name != ".report-files") or name.endswith(".new")


# ------------------------------------------------------------------------------------------ commands


class Run(Case):
    """Networks trained, stored, reported; a checkpoint after every epoch."""

    name = "run"

    def begin(self, place: Path, draw: random.Random) -> None:
        (place / "mine.toml").write_text(killed_commands.EXPERIMENT)

    def work(self, place: Path, draw: random.Random) -> Work:
        own = ("--data-dir", self.world.data, "--device", "cpu", "--replicas-at-once", 2)
        return self.world.dcpp("run", place / "mine.toml", "--out", place / "out", *own)

    def found(self, place: Path) -> dict[str, Any]:
        page = place / "out" / "index.html"
        left = [path.name for path in (place / "out" / "checkpoints").glob("*.pt*") if not _unfinished(path.name)]
        pages = {"page": page.read_text().rstrip().endswith("</html>"), "checkpoints": left}
        return _rows(place / "out" / STORE) | pages

    def faults(self, place: Path) -> list[str]:
        return _part_of(_rows(place / "out" / STORE), self.whole)


class Train(Case):
    """One network, written as a model."""

    name = "train"
    seeds = (0, 1)

    def begin(self, place: Path, draw: random.Random) -> None:
        if draw.random() < 0.5:
            (place / "net").write_bytes(b"an older network")

    def work(self, place: Path, draw: random.Random) -> Work:
        own = ("--dataset", "tiny", "--data-dir", self.world.data, "--device", "cpu", "--epochs", 2)
        return self.world.dcpp("train", "--model", place / "net", *own)

    def found(self, place: Path) -> dict[str, Any]:
        return _files(place)

    def faults(self, place: Path) -> list[str]:
        found = _files(place)
        older = {"net": b"an older network"}
        return [] if found in ({}, older) else _differences(found, self.whole)


class Report(Case):
    """Tables, figures and a page from a store, over those of an earlier state of it."""

    name = "report"

    def begin(self, place: Path, draw: random.Random) -> None:
        shutil.copytree(self.world.folder / "earlier", place, dirs_exist_ok=True)
        shutil.copy(self.world.folder / "later" / STORE, place / STORE)

    def work(self, place: Path, draw: random.Random) -> Work:
        return self.world.dcpp("report", "--out", place)

    def found(self, place: Path) -> dict[str, Any]:
        return _files(place)

    def faults(self, place: Path) -> list[str]:
        earlier = _files(self.world.folder / "earlier")
        found = _files(place)
        return [f"half: {name}" for name, one in found.items() if one not in (earlier.get(name), self.whole.get(name))]


class Merge(Case):
    """Two stores into a third."""

    name = "store merge"
    parts: ClassVar[tuple[str, ...]] = ("ours", "first", "second")

    def begin(self, place: Path, draw: random.Random) -> None:
        for part in self.parts:
            shutil.copytree(self.world.folder / part, place / part)

    def work(self, place: Path, draw: random.Random) -> Work:
        return self.world.dcpp("store", "merge", *(place / part for part in self.parts))

    def found(self, place: Path) -> dict[str, Any]:
        others = {
            f"{part} {key}": value for part in self.parts[1:] for key, value in _rows(place / part / STORE).items()
        }
        return _rows(place / "ours" / STORE) | others

    def faults(self, place: Path) -> list[str]:
        found = _rows(place / "ours" / STORE)
        ours = _rows(self.world.folder / "ours" / STORE)
        first = ours | _rows(self.world.folder / "first" / STORE)
        allowed = (ours, first, first | _rows(self.world.folder / "second" / STORE))
        return [] if found in allowed else ["half of a merge"]


class Fetch(Case):
    """A data set, downloaded or read from a folder, sometimes over one that is there."""

    name = "data fetch"
    seeds = (0, 1, 3, 10)

    def begin(self, place: Path, draw: random.Random) -> None:
        self.again = draw.random() < 0.5
        self.source = [] if draw.random() < 0.6 else ["--from", str(self.world.files)]
        if self.again:
            shutil.copytree(self.world.folder / "older", place / "data")

    def work(self, place: Path, draw: random.Random) -> Work:
        force = ["--force"] if self.again else []
        return self.world.dcpp("data", "fetch", "tiny", "--data-dir", place / "data", *self.source, *force)

    def found(self, place: Path) -> dict[str, Any]:
        found = _files(place / "data" / "tiny")
        found.pop("description.json", None)  # says where the files came from
        dataset = self._opened(place / "data")
        left = [path.name for path in (place / "data").rglob("*") if path.is_file() and path.suffix != ".lock"]
        expected = {"train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy", "description.json"}
        return found | {"content": dataset.provenance.content, "left": sorted(set(left) - expected)}

    def faults(self, place: Path) -> list[str]:
        try:
            content = self._opened(place / "data").provenance.content
        except DropConnectError as error:
            missing = not (place / "data" / "tiny").exists() and not self.again
            return [] if missing else [f"lost: {error}"]
        older = [self._opened(self.world.folder / "older").provenance.content] if self.again else []
        return [] if content in (*older, self.whole["content"]) else ["different: content"]

    @staticmethod
    def _opened(place: Path) -> data.Dataset:
        return data.verify("tiny", directory=place)


class Save(Case):
    """`dropconnectpp.save` over another model's file."""

    name = "save"

    def begin(self, place: Path, draw: random.Random) -> None:
        shutil.copy(self.world.folder / "model-1", place / "net")

    def work(self, place: Path, draw: random.Random) -> Work:
        return killed_commands.save, (2, place / "net", self.world.folder / "said.txt")

    def found(self, place: Path) -> dict[str, Any]:
        return _files(place)

    def faults(self, place: Path) -> list[str]:
        older = {"net": (self.world.folder / "model-1").read_bytes()}
        return [] if _files(place) in (older, self.whole) else ["half a model"]


# `cluster_kills` kills the workers, the nodes and the driver of a run on a cluster.
CASES: dict[str, tuple[type[Case], float]] = {
    case.name: (case, share)
    for case, share in ((Run, 0.3), (Train, 0.1), (Report, 0.1), (Merge, 0.15), (Fetch, 0.2), (Save, 0.15))
}
"""The commands by name, with their shares of the kills."""


# ---------------------------------------------------------------------------------- what they start from


def fill(folder: Path, replicas: range) -> None:
    """A store of made-up results: some of two methods."""
    folder.mkdir()
    me = Owner.here()
    with Store.open(folder / STORE) as store:
        for protocol in experiments.demo().protocols[:2]:
            digest = store.add(protocol)
            store.write_note(digest, f"trial of {replicas.start}", [1.5, None])
            for key in store.claim([(digest, replica) for replica in replicas], me):
                results = {"accuracy": 50.0 + key.replica, "nll": 1.0 / (1 + key.replica), "losses": [1.0, 0.5]}
                store.finish(key, me, "done", results=results, seconds=1.0, device="none")
