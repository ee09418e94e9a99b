"""Damages to the checkpoints of an unfinished run, which is then resumed to its end and its rows compared.

Disks and networks damage the bytes, and files are exchanged: then the rows must be those of an undisturbed run, and
the display must have told of the damage. Somebody who knows the format can write other content with the right digest:
then a run may end with other rows, but not with an error that is none of ours.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from damage import BYTES, SILENT, Found, changed_json, damaged
from tiny_cases import tiny
from torch import Tensor

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture, Evaluation, Protocol, Training
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.checkpoints import Checkpoints
from dropconnectpp.lab.runs.progress import Display
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Store

PROTOCOL = Protocol(
    data="tiny",
    architecture=Architecture(maps=(2,), pooled=(True,), filter_size=3, padding=1, hidden=3),
    training=Training(step_size=0.05, batch_size=16, epochs=3),
    evaluation=Evaluation(every=2, curve_samples=1, samples=(1,), shares=(1.0, 0.5), predictive_samples=1),
)
UNITS = [Unit(replace(PROTOCOL, method=method), 0) for method in (Method(kind="dropconnect", rate=0.5), Method())]
OTHERS = [Unit(PROTOCOL, replica) for replica in (5, 6)]
"""Another stack, whose checkpoint must not be taken for this one's."""
SLOWEST_S = 20.0
Damage = Callable[["Checkpointed", Path, random.Random], bool]
"""Damages the files of a run; whether somebody must be told."""


class _StoppedError(Exception):
    pass


class _Diary(Display):
    """Remembers what was shown, and stops a run when an epoch is done."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.notes: list[str] = []
        self.stop_at = stop_at

    def note(self, text: str) -> None:
        self.notes.append(text)

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        if done == self.stop_at:
            raise _StoppedError


def _run(out: Path, units: list[Unit], stop_at: int | None = None) -> list[str]:
    display = _Diary(stop_at)
    runner = Runner(out, torch.device("cpu"), tiny, display, checkpoint_s=0.0)
    with suppress(_StoppedError):
        runner.run(units)
    return display.notes


def _rows(out: Path) -> list[tuple[Any, ...]]:
    with Store.open(out / "results.sqlite", read_only=True) as store:
        return [(row.key, row.status, json.dumps(row.results, sort_keys=True)) for row in store.rows()]


def sealed(content: dict[str, Any]) -> bytes:
    """A checkpoint's file with the digest that its content needs."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    return data + b"\ndropconnectpp sha256 %s\n" % hashlib.sha256(data).hexdigest().encode()


def _state(kind: str) -> Damage:
    """The last state is damaged."""

    def damage(case: Checkpointed, folder: Path, rng: random.Random) -> bool:
        (folder / case.name).write_bytes(damaged(kind, case.files[case.name], rng))
        return True

    return damage


def _several(case: Checkpointed, folder: Path, rng: random.Random) -> bool:
    """Some of the files are damaged, missing or empty."""
    told = False
    for name in rng.sample(sorted(case.files), rng.randint(1, len(case.files))):
        way = rng.randrange(5)
        if way < 3:
            (folder / name).write_bytes(damaged(list(BYTES)[way], case.files[name], rng))
        elif way == 3:
            (folder / name).write_bytes(b"")
        else:
            (folder / name).unlink()
        told |= name == case.name and way < 4
    return told and (folder / case.name).exists()


def _listed(case: Checkpointed, folder: Path, rng: random.Random) -> bool:
    """The list of replicas beside a checkpoint says something else."""
    path = (folder / case.name).with_suffix(".json")
    path.write_text(json.dumps(changed_json(json.loads(path.read_bytes()), rng)))
    return False  # it may say the same


def _exchanged(case: Checkpointed, folder: Path, rng: random.Random) -> bool:
    """Another stack's checkpoint, or parts of it, lies under this one's name."""
    place = folder / rng.choice([case.name, f"{case.name}.before"])
    content = case.others
    if rng.random() < 0.5:  # the beginning of one and the end of the other
        cut = rng.randrange(1, min(len(content), len(case.files[case.name])))
        content = content[:cut] + case.files[case.name][cut:]
    place.write_bytes(content)
    # Both begin alike: cut there, the pieces make the file that was.
    return place.name == case.name and content != case.files[case.name]


def _older(case: Checkpointed, folder: Path, rng: random.Random) -> bool:
    """Both states are of format 1, which has no digest but sums of its own, and one is damaged."""
    (folder / f"{case.name}.before").write_bytes(case.format_1)
    (folder / case.name).write_bytes(damaged(rng.choice(list(BYTES)), case.format_1, rng))
    return False  # bytes that no sum covers hold nothing


def _retold(case: Checkpointed, folder: Path, rng: random.Random) -> bool:
    """The state has other content, with the right digest."""
    content = torch.load(io.BytesIO(case.files[case.name]), weights_only=True)
    content["keys"] = [list(key) for key in content["keys"]]
    for _ in range(rng.choice([1, 1, 2])):
        content = changed_json(content, rng) if rng.random() < 0.7 else _other_tensor(content, rng)
    (folder / case.name).write_bytes(sealed(content))
    return False


def _other_tensor(content: Any, rng: random.Random) -> Any:
    """One tensor has another shape, kind or content."""
    places = [content]
    tensors: list[tuple[Any, Any]] = []
    for place in places:  # grows
        inner = place.items() if isinstance(place, dict) else enumerate(place) if isinstance(place, list) else ()
        for key, value in inner:
            places.append(value)
            if isinstance(value, Tensor):
                tensors.append((place, key))
    if tensors:
        place, key = rng.choice(tensors)
        value = place[key]
        ways = (value[None], value.flatten()[:-1], value.double(), value.to(torch.int8), torch.full_like(value, 3))
        place[key] = rng.choice(ways)
    return content


ACCIDENTS: dict[str, Damage] = {
    **{kind: _state(kind) for kind in BYTES},
    "several files": _several,
    "another list": _listed,
    "another stack's": _exchanged,
    "format 1, damaged": _older,
}
DELIBERATE: dict[str, Damage] = {"other content, sealed": _retold}


class Checkpointed:
    """Damages the checkpoints of a run that was stopped after its second epoch of three."""

    title = "Checkpoints"
    kinds = (*ACCIDENTS, *DELIBERATE)
    harmless = frozenset({"told, the same rows", "the same rows", "other rows, sealed", "refused"})

    def __init__(self, folder: Path) -> None:
        self._start, self._place, others = folder / "start", folder / "attacked", folder / "others"
        _run(whole := folder / "whole", UNITS)
        self._rows = _rows(whole)
        _run(self._start, UNITS, stop_at=3)
        _run(others, OTHERS, stop_at=2)
        self.files = {path.name: path.read_bytes() for path in (self._start / "checkpoints").iterdir()}
        self.name = Checkpoints(folder).path([unit.key for unit in UNITS]).name
        (foreign,) = (others / "checkpoints").glob("*.pt")
        self.others = foreign.read_bytes()
        content = torch.load(io.BytesIO(self.files[self.name]), weights_only=True)
        del content["format"]
        buffer = io.BytesIO()
        torch.save(content, buffer)
        self.format_1 = buffer.getvalue()

    def attack(self, number: int) -> Found:
        """Damage the files and resume."""
        rng = random.Random(number)
        kind = self.kinds[number % len(self.kinds)]
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._start, self._place)
        told = {**ACCIDENTS, **DELIBERATE}[kind](self, self._place / "checkpoints", rng)
        begun = time.process_time()
        try:
            outcome = self._resumed(told, kind in DELIBERATE)
        except DropConnectError as error:
            outcome = "refused" if kind in DELIBERATE else f"not resumed: {error}"
        except Exception as error:
            outcome = f"a raw error: {type(error).__name__}: {error}, {traceback.extract_tb(error.__traceback__)[-1]}"
        if time.process_time() - begun > SLOWEST_S:
            outcome = f"slow: {time.process_time() - begun:.0f} s"
        return Found(kind, "", outcome)

    def _resumed(self, must_tell: bool, deliberate: bool) -> str:
        notes = _run(self._place, UNITS)
        if _rows(self._place) != self._rows:
            return "other rows, sealed" if deliberate else SILENT
        told = any("not used" in note for note in notes)
        if must_tell and not told:
            return "damage of which nobody was told"
        return "told, the same rows" if told else "the same rows"
