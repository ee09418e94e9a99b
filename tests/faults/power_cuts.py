"""Cut the power after every write, sync, rename and removal of every command, resume on what is left, and compare.

    python tests/faults/power_cuts.py               goes on where it stopped; counts are in build/faults
    python tests/faults/power_cuts.py --only save --most 20

A command runs once while its calls are logged. From the log follows, for each moment, what a disk may hold if it keeps
no more than was synced: see `power_loss`. Nothing that was finished may be lost, nothing may be half, and the same
command must end as if the power had not failed.
"""

from __future__ import annotations

import argparse
import copy
import random
from pathlib import Path

from kill_cases import CASES, Case
from power_loss import LOSSES, Disk, Loss, calls_in
from tally import Tally
from workshop import ROOT, Workshop, workshop

FAULT = "fault"


class Cuts:
    """The moments of one command that begins in one way."""

    def __init__(self, case: Case, shop: Workshop, seed: int) -> None:
        self.case, self.shop, self.seed = case, shop, seed
        with shop.place() as place:
            draw = random.Random(seed)
            case.begin(place, draw)
            self._disk = Disk(place)
            log = shop.world.folder / "log"
            shop.well(case.work(place, draw), place, log=log)
            case.whole = case.found(place)
            self._calls = calls_in(log, place)
            log.unlink()

    @property
    def trials(self) -> list[tuple[int, Loss]]:
        """After how many calls, and what is lost."""
        return [(at, loss) for at in range(len(self._calls) + 1) for loss in LOSSES]

    def cut(self, at: int, loss: Loss) -> list[str]:
        """Cut the power and resume; what should not have come of it."""
        disk, case = copy.deepcopy(self._disk), self.case
        for call in self._calls[:at]:
            disk.follow(call)
        with self.shop.place() as folder:
            draw, place = random.Random(self.seed), folder / "left"
            with self.shop.place() as other:
                case.begin(other, draw)  # so that the case knows how it began
            disk.after(loss, place, random.Random(f"{at} {loss}"))
            return [*case.faults(place), *self.shop.resumed(case, place, case.work(place, draw))]


def run(tally: Tally, shop: Workshop, only: str | None = None, most: int | None = None) -> None:
    """Try every moment that was not tried before; of each command at most ``most``, evenly spread."""
    for name, (kind, _) in reversed(CASES.items()):  # those of few calls first
        if only not in (None, name):
            continue
        cuts = [Cuts(kind(shop.world), shop, seed) for seed in kind.seeds]
        trials = [(one, at, loss) for one in cuts for at, loss in one.trials]
        random.Random(0).shuffle(trials)
        tally.counts.setdefault(name, {})["of"] = len(trials)
        done = tally.get(name, *LOSSES, FAULT)
        for one, at, loss in trials[done:most]:
            found = one.cut(at, loss)
            tally.add(name, FAULT if found else loss)
            tally.faults += [f"{name}, seed {one.seed}, {loss} after call {at}: {fault[:600]}" for fault in found]
            tally.keep()


def main() -> None:
    """Cut until all is done."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=list(CASES), help="one command")
    options.add_argument("--most", type=int, help="try so many moments of a command, spread over all")
    options.add_argument("--tally", type=Path, default=ROOT / "build" / "faults" / "power_cuts.json")
    given = options.parse_args()
    tally = Tally(given.tally)
    with workshop() as shop:
        run(tally, shop, given.only, given.most)
    for name, counts in tally.counts.items():
        print(f"{name:15}", *(f"{number:,} {what};" for what, number in counts.items()))
    if tally.faults:
        raise SystemExit("\n".join(tally.faults))


if __name__ == "__main__":
    main()
