"""What tests of whole commands share: a process that has imported everything, a site with data, prepared folders."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), *(str(ROOT / "tests" / one) for one in ("", "lab", "lab/data"))]

import killed_commands  # noqa: E402
from file_server import FileServer, serving  # noqa: E402
from injection import End, Faulty  # noqa: E402
from kill_cases import Case, Work, World, fill  # noqa: E402

from dropconnectpp.lab.data import catalogue  # noqa: E402

SLOWLY_S = 0.0004
"""Pause of the server after each kilobyte, so that kills hit downloads."""


MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory: there syncs cost nothing, and neither kills nor logs depend on them."""


class UnfitError(Exception):
    """A command does not even work undisturbed."""


@dataclass
class Workshop:
    """Where commands run."""

    faulty: Faulty
    world: World
    _learned: dict[tuple[str, int], tuple[int, float, Any]] = field(default_factory=dict)

    def said(self) -> str:
        """What the last command printed."""
        return (self.world.folder / "said.txt").read_text(errors="replace")

    def well(self, work: Work, root: Path, log: Path | None = None) -> tuple[int, float]:
        """Let a command end well; how many calls it made and how long it took."""
        begun = time.monotonic()
        end = self.faulty.run(work[0], *work[1], root=root, log=log)
        if not end.well or end.value != 0:
            raise UnfitError(f"{work} failed: {end} {self.said()}")
        return end.calls, time.monotonic() - begun

    def resumed(self, case: Case, place: Path, work: Work) -> list[str]:
        """Let a command end that something stopped, and compare with an undisturbed one."""
        end = self.faulty.run(work[0], *work[1], root=place)
        if not end.well or end.value != 0:
            return [f"not resumed: {end.error or end.value} {self.said()[-300:]}"]
        return case.differences(place)

    def learn(self, case: Case, seed: int = 0) -> tuple[int, float]:
        """Find out what an undisturbed command ends with; how many calls it makes and how long it takes."""
        known = case.name, seed
        if known not in self._learned:
            with self.place() as place:
                draw = random.Random(seed)
                case.begin(place, draw)
                calls, seconds = self.well(case.work(place, draw), place)
                self._learned[known] = calls, seconds, case.found(place)
        calls, seconds, case.whole = self._learned[known]
        return calls, seconds

    @contextmanager
    def place(self) -> Iterator[Path]:
        """An empty folder."""
        with tempfile.TemporaryDirectory(dir=self.world.folder) as folder:
            yield Path(folder)


@contextmanager
def workshop() -> Iterator[Workshop]:
    """A workshop with all that the commands start from."""
    with (
        tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder,
        serving(FileServer(killed_commands.published(1), delay_s=SLOWLY_S)) as server,
        Faulty(killed_commands.IMPORTS, OMP_NUM_THREADS="1", MPLBACKEND="agg", COLUMNS="200") as faulty,
    ):
        catalogue.CATALOGUE["tiny"] = killed_commands.entry(server.address)
        try:
            found = Workshop(faulty, World(Path(folder), server.address))
            _build(found)
            yield found
        finally:
            del catalogue.CATALOGUE["tiny"]


def _build(shop: Workshop) -> None:
    world = shop.world
    for seed, name in ((1, "files"), (2, "older files")):
        (world.folder / name).mkdir()
        for file, content in killed_commands.published(seed).items():
            (world.folder / name / file).write_bytes(content)
    fetch = ("data", "fetch", "tiny", "--accept-unverified", "--from")
    earlier, later = world.folder / "earlier", world.folder / "later"
    fill(earlier, range(2))
    fill(later, range(4))
    for name, replicas in (("ours", range(2)), ("first", range(1, 4)), ("second", range(3, 6))):
        fill(world.folder / name, replicas)
    shop.well(world.dcpp(*fetch, world.files, "--data-dir", world.data), world.folder)
    shop.well(world.dcpp(*fetch, world.folder / "older files", "--data-dir", world.folder / "older"), world.folder)
    shop.well(world.dcpp("report", "--out", earlier), world.folder)
    for seed in (1, 2):
        model = world.folder / f"model-{seed}"
        shop.well((killed_commands.save, (seed, model, world.folder / "said.txt")), world.folder)


def killed(end: End) -> bool:
    """Whether a process was killed, and by nothing else than SIGKILL."""
    if end.killed and end.failed != "ended with -9":
        raise UnfitError(f"a command was ended by something else: {end}")
    return end.killed
