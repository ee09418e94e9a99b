"""Cut the power after every write, sync, rename and removal of every command, resume on what is left, and compare.

    python tests/faults/power_cuts.py               goes on where it stopped; counts are in build/faults
    python tests/faults/power_cuts.py --only save --most 20

A command runs once while its calls are logged. From the log follows, for each moment, what a disk may hold if it keeps
no more than was synced: see `power_loss`. Nothing that was finished may be lost, nothing may be half, and the same
command must end as if the power had not failed.
"""

from __future__ import annotations

import copy
import random

from kill_cases import CASES, Case
from power_loss import LOSSES, Disk, Loss, calls_in
from tally import Tally, long_test
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

    def work(tally: Tally, only: str | None, amount: int | None) -> None:
        with workshop() as shop:
            run(tally, shop, only, amount)

    path = ROOT / "build" / "faults" / "power_cuts.json"
    long_test(__doc__, list(CASES), path, work, ("--most", None, "try so many moments of a command, spread over all"))


if __name__ == "__main__":
    main()
