"""Kill every command with -9, at any of its writes and at any moment, resume it, and compare with an undisturbed one.

    python tests/faults/kills.py --kills 1000      goes on where it stopped; the counts are in build/faults/kills.json
    python tests/faults/kills.py --only run --kills 50
    python tests/faults/kills.py --record records/reliability/kills.md

The commands are forks of a process that has imported all they need. A round starts a command in a new folder, kills
it, looks at what is left, and starts it again: sometimes it is killed again, at the end it is not. Then nothing may be
lost, doubled or different.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "lab" / "data")]

import killed_commands  # noqa: E402
from file_server import FileServer, serving  # noqa: E402
from injection import End, Fault, Faulty  # noqa: E402
from kill_cases import CASES, Case, Work, World, fill  # noqa: E402
from tally import Tally, table  # noqa: E402

from dropconnectpp.lab.data import catalogue  # noqa: E402

MOST_KILLS = 3
"""Kills in a row before a command may end."""
SLOWLY_S = 0.0004
"""Pause of the server after each kilobyte, so that kills hit downloads."""


class OtherKillError(Exception):
    """The programme itself cannot go on."""


@dataclass
class Killer:
    """Starts commands and kills them."""

    faulty: Faulty
    world: World

    def whole(self, work: Work, root: Path) -> tuple[End, float]:
        """Let a command end; how many calls it made and how long it took."""
        begun = time.monotonic()
        end = self.faulty.run(work[0], *work[1], root=root)
        return end, time.monotonic() - begun

    def at_call(self, work: Work, root: Path, at: int) -> End:
        """Kill it at its n-th write, sync, rename or removal."""
        return self.faulty.run(work[0], *work[1], root=root, fault=Fault(at, "kill"))

    def at_moment(self, work: Work, root: Path, after_s: float) -> End:
        """Kill it from outside after a time."""
        number, over = self.world.folder / "said.pid", threading.Event()
        number.unlink(missing_ok=True)
        thread = threading.Thread(target=_kill, args=(number, after_s, over))
        thread.start()
        try:
            return self.faulty.run(work[0], *work[1], root=root)
        finally:
            over.set()
            thread.join()


def _kill(number: Path, after_s: float, over: threading.Event) -> None:
    while not number.exists():
        if over.wait(0.0005):
            return
    try:
        process = os.pidfd_open(int(number.read_text()))
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(process, select.POLLIN)
    if not poll.poll(1000 * after_s):  # it still runs
        signal.pidfd_send_signal(process, signal.SIGKILL)
    os.close(process)


class Rounds:
    """Rounds of one command, numbered: all that happens in one follows from its number and from time."""

    def __init__(self, case: Case, killer: Killer, tally: Tally) -> None:
        self.case, self.killer, self.tally = case, killer, tally
        with tempfile.TemporaryDirectory(dir=case.world.folder) as folder:
            place = Path(folder)
            draw = random.Random(0)
            case.begin(place, draw)
            end, self.seconds = killer.whole(case.work(place, draw), place)
            if not end.well or end.value != 0:
                raise OtherKillError(f"{case.name} does not work undisturbed: {end} {self._said()}")
            self.calls = end.calls
            case.whole = case.found(place)

    def round(self, number: int) -> None:
        """Kill and resume until a command ends, and compare."""
        case, draw = self.case, random.Random(f"{self.case.name} {number}")
        with tempfile.TemporaryDirectory(dir=case.world.folder) as folder:
            place = Path(folder)
            case.begin(place, draw)
            work, found = case.work(place, draw), []
            for attempt in range(draw.choice([1, 1, 1, 2, MOST_KILLS])):
                killed = self._kill(work, place, draw, number + attempt)
                found += case.faults(place) if killed else []
                if not killed:
                    break
            else:
                end, _ = self.killer.whole(work, place)
                if not end.well or end.value != 0:
                    found.append(f"not resumed: {end.error or end.value} {self._said()[-300:]}")
            self._count("rounds")
            found += case.differences(place)
            for fault in found:
                kind = fault.partition(":")[0]
                self._count(kind if kind in FAULTS else "different")
                self.tally.faults.append(f"{case.name}, round {number}: {fault[:500]}")
        self.tally.keep()

    def _kill(self, work: Work, place: Path, draw: random.Random, number: int) -> bool:
        """Kill a command; whether it was still running."""
        by_call = number % 2 == 0
        if by_call:
            end = self.killer.at_call(work, place, draw.randint(1, self.calls))
        else:
            end = self.killer.at_moment(work, place, draw.uniform(0.0, self.seconds))
        if end.killed and end.failed != f"ended with {-signal.SIGKILL}":
            raise OtherKillError(f"{self.case.name} was ended by something else: {end}")
        if end.error:
            self.tally.faults.append(f"{self.case.name}: raised {end.error[:300]}")
            self._count("not resumed")
        self._count(("at a write" if by_call else "at a moment") if end.killed else "ended first")
        return end.killed

    def _count(self, column: str) -> None:
        self.tally.add(self.case.name, column)

    def _said(self) -> str:
        return (self.case.world.folder / "said.txt").read_text(errors="replace")


FAULTS = ("lost", "doubled", "different", "not resumed")


def build(world: World, killer: Killer) -> None:
    """What the commands start from."""
    for seed, name in ((1, "files"), (2, "older files")):
        (world.folder / name).mkdir()
        for file, content in killed_commands.published(seed).items():
            (world.folder / name / file).write_bytes(content)
    fetch = ("data", "fetch", "tiny", "--accept-unverified", "--from")
    save = [
        (killed_commands.save, (seed, world.folder / f"model-{seed}", world.folder / "said.txt")) for seed in (1, 2)
    ]
    earlier, later = world.folder / "earlier", world.folder / "later"
    fill(earlier, range(2))
    fill(later, range(4))
    for name, replicas in (("ours", range(2)), ("first", range(1, 4)), ("second", range(3, 6))):
        fill(world.folder / name, replicas)
    for work in (
        world.dcpp(*fetch, world.files, "--data-dir", world.data),
        world.dcpp(*fetch, world.folder / "older files", "--data-dir", world.folder / "older"),
        world.dcpp("report", "--out", earlier),
        *save,
    ):
        end, _ = killer.whole(work, world.folder)
        if not end.well or end.value != 0:
            said = (world.folder / "said.txt").read_text(errors="replace")
            raise OtherKillError(f"{work} failed: {end} {said}")


def kill(kills: int, tally: Tally, only: str | None = None) -> None:
    """Go on until so many kills are counted."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(FileServer(killed_commands.published(1), delay_s=SLOWLY_S)) as server,
        Faulty(killed_commands.IMPORTS, OMP_NUM_THREADS="1", MPLBACKEND="agg", COLUMNS="200") as faulty,
    ):
        world = World(Path(folder), server.address)
        killer = Killer(faulty, world)
        catalogue.CATALOGUE["tiny"] = killed_commands._entry(server.address)
        build(world, killer)
        for name, (case, share) in CASES.items():
            if only not in (None, name):
                continue
            rounds = Rounds(case(world), killer, tally)
            wanted = kills if only else round(kills * share)
            while tally.get(name, "at a write", "at a moment") < wanted:
                rounds.round(tally.get(name, "rounds"))
            shutil.rmtree(world.folder / name, ignore_errors=True)


def record(tally: Tally) -> str:
    """The counts as a page."""
    columns = ("at a write", "at a moment")
    rows: list[list[object]] = []
    for name in CASES:
        if name in tally.counts:
            here = [tally.get(name, column) for column in columns]
            rows.append(
                [f"`{name}`", sum(here), *here, tally.get(name, "rounds"), *(tally.get(name, f) for f in FAULTS)]
            )
    sums = [sum(row[i] for row in rows) for i in range(1, 5 + len(FAULTS))]  # type: ignore[misc]
    header = ["Command", "Kills", *("At a write", "At a moment"), "Compared", *(one.capitalize() for one in FAULTS)]
    day = datetime.now(UTC).date().isoformat()
    return (
        f"# Commands killed with -9 ({day})\n\n{table(header, [*rows, ['all', *sums]])}\n"
        "A command is killed at one of its writes, syncs, renames or removals, SQLite's included, or at any moment; "
        "then it is resumed, and in two of five rounds killed again. *Compared*: with what an undisturbed command "
        "leaves.\n"
    )


def main() -> None:
    """Kill, or write the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=1000, help="go on until so many are counted")
    options.add_argument("--only", choices=list(CASES), help="one command")
    options.add_argument("--tally", type=Path, default=ROOT / "build" / "faults" / "kills.json")
    options.add_argument("--record", type=Path, help="write the counts as a page, and kill nothing")
    given = options.parse_args()
    given.tally.parent.mkdir(parents=True, exist_ok=True)
    tally = Tally(given.tally)
    if given.record is not None:
        given.record.write_text(record(tally))
        return
    kill(given.kills, tally, given.only)
    print(record(tally))
    if tally.faults:
        raise SystemExit("\n".join(tally.faults))


if __name__ == "__main__":
    main()
