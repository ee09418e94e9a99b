"""Kill every command with -9, at any of its writes and at any moment, resume it, and compare with an undisturbed one.

    python tests/faults/kills.py --kills 1000      goes on where it stopped; the counts are in build/faults/kills.json
    python tests/faults/kills.py --only run --kills 50

The commands are forks of a process that has imported all they need. A round starts a command in a new folder, kills
it, looks at what is left, and starts it again: sometimes it is killed again, at the end it is not. Then nothing may be
lost, doubled or different.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
from pathlib import Path

from injection import End, Fault
from kill_cases import CASES, Case, Work
from tally import Tally, long_test
from workshop import ROOT, Workshop, killed, workshop

MOST_KILLS = 3
"""Kills in a row before a command may end."""


class Killer:
    """Kills commands."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop

    def at_call(self, work: Work, root: Path, at: int) -> End:
        """Kill it at its n-th write, sync, rename or removal."""
        return self.shop.faulty.run(work[0], *work[1], root=root, fault=Fault(at, "kill"))

    def at_moment(self, work: Work, root: Path, after_s: float) -> End:
        """Kill it from outside after a time."""
        number, over = self.shop.world.folder / "said.pid", threading.Event()
        number.unlink(missing_ok=True)
        thread = threading.Thread(target=_kill, args=(number, after_s, over))
        thread.start()
        try:
            return self.shop.faulty.run(work[0], *work[1], root=root)
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

    def __init__(self, case: Case, shop: Workshop, tally: Tally) -> None:
        self.case, self.shop, self.tally, self.killer = case, shop, tally, Killer(shop)
        self.calls, self.seconds = shop.learn(case)

    def round(self, number: int) -> None:
        """Kill and resume until a command ends, and compare."""
        case, draw = self.case, random.Random(f"{self.case.name} {number}")
        with self.shop.place() as place:
            case.begin(place, draw)
            work, found = case.work(place, draw), []
            for attempt in range(draw.choice([1, 1, 1, 2, MOST_KILLS])):
                gone = self._kill(work, place, draw, number + attempt)
                found += case.faults(place) if gone else []
                if not gone:
                    found += case.differences(place)
                    break
            else:
                found += self.shop.resumed(case, place, work)
            self._count("rounds")
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
        gone = killed(end)
        if not gone and (end.error or end.value != 0):
            self.tally.faults.append(f"{self.case.name}: {end.error or self.shop.said()[-300:]}")
            self._count("not resumed")
        self._count(("at a write" if by_call else "at a moment") if gone else "ended first")
        return gone

    def _count(self, column: str) -> None:
        self.tally.add(self.case.name, column)


FAULTS = ("lost", "doubled", "different", "not resumed")


def kill(kills: int, tally: Tally, shop: Workshop, only: str | None = None) -> None:
    """Go on until so many kills are counted, of the command that has the fewest of its share."""
    wanted = {name: kills if only else kills * share for name, (_, share) in CASES.items() if only in (None, name)}
    rounds: dict[str, Rounds] = {}

    def done(name: str) -> float:
        return tally.get(name, "at a write", "at a moment") / wanted[name]

    while done(name := min(wanted, key=done)) < 1.0:
        if name not in rounds:
            rounds[name] = Rounds(CASES[name][0](shop.world), shop, tally)
        rounds[name].round(tally.get(name, "rounds"))


def main() -> None:
    """Kill until so many are counted."""

    def work(tally: Tally, only: str | None, amount: int | None) -> None:
        with workshop() as shop:
            kill(amount or 0, tally, shop, only)

    path = ROOT / "build" / "faults" / "kills.json"
    long_test(__doc__, list(CASES), path, work, ("--kills", 1000, "go on until so many are counted"))


if __name__ == "__main__":
    main()
