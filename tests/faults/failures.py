"""Let every write, sync, rename and removal of every command fail, one after the other, resume, and compare.

    python tests/faults/failures.py                   goes on where it stopped; counts are in build/faults/failures.json
    python tests/faults/failures.py --only "data fetch" --most 20

A call fails once, or there is no space from there on, or half of a write arrives. The command must say so in a line of
its own; nothing may be lost or half; and the same command, once the disk works again, must end as if nothing had been.
"""

from __future__ import annotations

import random
from typing import get_args

from injection import Fault, How
from kill_cases import CASES, Case
from tally import Tally, long_test
from workshop import ROOT, Workshop, workshop

HOWS: tuple[How, ...] = tuple(how for how in get_args(How) if how != "kill")
FAULT = "fault"


def fail(case: Case, shop: Workshop, seed: int, fault: Fault) -> tuple[str, list[str]]:
    """Let one call of a command fail: what came of it, and what should not have."""
    with shop.place() as place:
        draw = random.Random(seed)
        case.begin(place, draw)
        work = case.work(place, draw)
        end = shop.faulty.run(work[0], *work[1], root=place, fault=fault)
        if not end.failed:
            return "not reached", []
        said, found = shop.said(), case.faults(place)
        if end.killed or (end.error and not end.ours) or "Traceback" in said:
            found.append(f"a raw error: {end.error or end.failed} {said[-500:]}")
        elif end.well and end.value == 0:  # what failed was not needed
            return "went on", [*found, *(one for one in case.differences(place) if not _stays(end.failed, one))]
        elif end.well and "Error:" not in said:
            found.append(f"ended with {end.value} and no word: {said[-300:]}")
        return "resumed", [*found, *shop.resumed(case, place, work)]


def _stays(failed: str, difference: str) -> bool:
    """Whether a difference is a file that could not be removed."""
    return failed.startswith(("unlink", "rmdir")) and difference.startswith("different: left")


def run(tally: Tally, shop: Workshop, only: str | None = None, most: int | None = None) -> None:
    """Let every call fail in every way that was not tried before; of each command at most ``most``, evenly spaced."""
    for name, (kind, _) in reversed(CASES.items()):  # those of few calls first
        if only not in (None, name):
            continue
        case = kind(shop.world)
        trials = [
            (seed, Fault(at, how))
            for seed in kind.seeds
            for at in range(1, shop.learn(case, seed)[0] + 1)
            for how in HOWS
        ]
        random.Random(0).shuffle(trials)  # so that a part of them is spread over the whole
        tally.counts.setdefault(name, {})["of"] = len(trials)
        done = tally.get(name, "resumed", "went on", "not reached", FAULT)
        for seed, fault in trials[done:most]:
            outcome, found = fail(case, shop, seed, fault)
            tally.add(name, FAULT if found else outcome)
            tally.faults += [f"{name}, seed {seed}, {fault.how} at call {fault.at}: {one[:600]}" for one in found]
            tally.keep()


def main() -> None:
    """Fail until all is done."""

    def work(tally: Tally, only: str | None, amount: int | None) -> None:
        with workshop() as shop:
            run(tally, shop, only, amount)

    path = ROOT / "build" / "faults" / "failures.json"
    long_test(__doc__, list(CASES), path, work, ("--most", None, "try so many calls of a command, spread over all"))


if __name__ == "__main__":
    main()
