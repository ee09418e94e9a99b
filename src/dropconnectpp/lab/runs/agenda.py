"""What is left to train, and the next stack of it: one that was left unfinished, or networks that nobody works on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.checkpoints import Checkpoints
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Key, Store
from dropconnectpp.lab.runs.tasks import Task

ASKED_FOR = 4
"""How many times as many rows as a stack has are asked for at once: others may hold some."""


@dataclass
class Agenda:
    """The networks of a run that are not done, as stacks that this process has claimed."""

    wanted: Mapping[Key, Unit]
    store: Store
    owner: Owner
    checkpoints: Checkpoints
    size_of: Callable[[Unit, int], int]
    """How many networks like this one may be in a stack, where so many are not done."""
    task_of: Callable[[list[Unit]], Task]
    """The task that trains a stack; it may raise instead."""
    _left: dict[Key, Unit] = field(init=False)
    """Neither done nor given out, in order."""
    _out: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        done = self.store.finished()
        self._left = {key: unit for key, unit in self.wanted.items() if key not in done}
        protocols = {id(unit.protocol): unit.protocol for unit in self._left.values()}  # few, for thousands of units
        self._kinds = _kinds(protocols.values())

    def __len__(self) -> int:
        return len(self._left)

    def next(self) -> Task | None:
        """The next stack, claimed; None if there is none now."""
        units = self._resumed() or self._fresh()
        if units is None:
            return None
        for unit in units:
            self._left.pop(Key(*unit.key), None)
            self._out.add(Key(*unit.key))
        return self.task_of(units)

    def done(self, task: Task) -> None:
        """The rows of a stack are stored."""
        self._out.difference_update(task.keys)

    def give_back(self, task: Task) -> None:
        """Take a stack back that is neither done nor to be given up."""
        back = set(task.keys)
        self._out -= back
        self._left = {key: unit for key, unit in self.wanted.items() if key in self._left or key in back}

    def _resumed(self) -> list[Unit] | None:
        """A stack that another process left unfinished, if all of it is ours to finish."""
        for _, listed in self.checkpoints.all():
            keys = [Key(*key) for key in listed]
            if not all(key in self.wanted for key in keys) or not self._out.isdisjoint(keys):
                continue
            done = self.store.finished()
            if done.issuperset(keys):
                self.checkpoints.forget(keys)
                continue
            mine = self.store.claim([key for key in keys if key not in done], self.owner)
            if done.union(mine).issuperset(keys):
                return [self.wanted[key] for key in keys]
            self.store.release(mine, self.owner)
        return None

    def _fresh(self) -> list[Unit] | None:
        """The next networks that no process works on and that fit one stack."""
        kinds: dict[int, list[Unit]] = {}
        for unit in self._left.values():
            kinds.setdefault(self._kinds[id(unit.protocol)], []).append(unit)
        for alike in kinds.values():
            if alike[0].protocol.population is not None:
                if members := self._population(alike):
                    return members
                continue
            size = self.size_of(alike[0], len(self._left) + len(self._out))
            mine: list[Unit] = []
            for some in _batched(alike, max(ASKED_FOR * size, 100)):
                keys = [unit.key for unit in some]
                mine += [self.wanted[key] for key in self.store.claim(keys, self.owner, limit=size - len(mine))]
                if len(mine) >= size:
                    break
            if mine:
                return mine
        return None

    def _population(self, missing: list[Unit]) -> list[Unit] | None:
        """All members of a population, also those with a row: none can be trained without the others."""
        digest = missing[0].protocol.digest
        mine = self.store.claim([unit.key for unit in missing], self.owner)
        if len(mine) == len(missing):
            return [unit for key, unit in self.wanted.items() if key.digest == digest]
        self.store.release(mine, self.owner)
        return None


def _kinds(protocols: Iterable[Protocol]) -> dict[int, int]:
    """Which protocols can share a stack: the same number for those that can, by the object's identity."""
    firsts: list[Protocol] = []
    found: dict[int, int] = {}
    for protocol in protocols:
        kind = next((i for i, first in enumerate(firsts) if first.stackable(protocol)), len(firsts))
        if kind == len(firsts):
            firsts.append(protocol)
        found[id(protocol)] = kind
    return found


def _batched(units: list[Unit], size: int) -> Iterator[list[Unit]]:
    for begin in itertools.count(0, size):
        if begin >= len(units):
            return
        yield units[begin : begin + size]
