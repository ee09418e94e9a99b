"""What tests of engines share: networks that train in a second, engines on tiny data, and rows to compare."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tiny_cases import EVALUATION, TINY, TWO_LAYERS, tiny

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.engines.host import Host
from dropconnectpp.lab.runs.engines.worker import Orders
from dropconnectpp.lab.runs.rows import FinalStatus, Key
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.storage import Storage
from dropconnectpp.lab.runs.store import Store
from dropconnectpp.lab.runs.tasks import Finished, Workplace

CPU = torch.device("cpu")
LONGER = replace(TINY, architecture=TWO_LAYERS, training=replace(TINY.training, epochs=4), evaluation=EVALUATION)
METHODS = (Method(kind="none"), Method())
GROUP = 4
"""Networks of a stack: all workers have some."""


def units(replicas: int = 4, **training: Any) -> list[Unit]:
    base = replace(LONGER, training=replace(LONGER.training, **training))
    return [Unit(replace(base, method=method), replica) for method in METHODS for replica in range(replicas)]


def orders(out: Path, storage: Storage | None = None) -> Orders:
    return Orders(tiny, storage or Storage.given(None, out), out.absolute() / "predictions", 1)


def host(out: Path, workers: int = 2, storage: Storage | None = None) -> Host:
    return Host(["cpu"] * workers, orders(out, storage))


def table(out: Path) -> list[tuple[Any, ...]]:
    """All of the rows but times and the processes that wrote them."""
    with Store.open(out / "results.sqlite", read_only=True) as store:
        return [
            (*row.key, row.status, json.dumps(row.results, sort_keys=True), row.device, row.versions, row.provenance)
            for row in store.rows()
        ]


def alone(out: Path, wanted: list[Unit]) -> list[tuple[Any, ...]]:
    """The rows that one process makes."""
    Runner(out, CPU, tiny, group=GROUP).run(wanted)
    return table(out)


@dataclass(frozen=True)
class Bare:
    """A task that trains nothing."""

    key: Key
    what: str = "work"
    title: str = "bare"
    epochs: int = 1

    @property
    def keys(self) -> tuple[Key, ...]:
        return (self.key,)

    def run(self, at: Workplace) -> list[Finished]:
        if self.what == "raise":
            raise RuntimeError("broken")
        at.display.group(self.title, 1, 1, 0)
        status: FinalStatus = "done"
        results = {"accuracy": float(self.key.replica)}
        return [
            Finished(
                key=self.key,
                status=status,
                results=results,
                seconds=0.0,
                device="none",
                versions={},
                provenance={},
                commit="",
            )
        ]
