"""Damage files of one kind, thousands of times, and see what reading them comes to.

    python tests/faults/mutations.py models --count 10000     goes on where it stopped; counts are in build/faults
    python tests/faults/mutations.py models --one 4711        one damage again
    python tests/faults/mutations.py models --again           every damage that was a fault, once it is mended

All of a damage follows from its number. They run in batches, each in a process of its own with little memory, so that
absurd sizes fail there and do not fill the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests"), str(ROOT / "tests" / "lab")]

import torch  # noqa: E402
from damage import Found  # noqa: E402
from tally import Tally  # noqa: E402

KINDS = {
    "checkpoints": "checkpoint_mutations.Checkpointed",
    "stores": "store_mutations.Stores",
    "models": "model_mutations.Models",
    "experiments": "toml_mutations.Experiments",
}
BATCH = 100
LONGEST_S = 300
MEMORY = 1 << 31
"""Bytes that a process may take beyond what it has: a file of a few kilobytes needs none."""
FAULT = "fault"


class Attack(Protocol):
    """What damages files of one kind."""

    title: str
    kinds: tuple[str, ...]
    harmless: frozenset[str]

    def __init__(self, folder: Path) -> None:
        """Make the files that are damaged."""

    def attack(self, number: int) -> Found:
        """Damage one and read it."""


def attack_of(kind: str) -> type[Attack]:
    """What damages such files."""
    module, _, name = KINDS[kind].partition(".")
    found: type[Attack] = getattr(importlib.import_module(module), name)
    return found


def batch(attack: Attack, numbers: range) -> Iterator[Found]:
    """Damages in a process of their own; a damage that ends it is one more outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(attack, numbers, writing)
    os.close(writing)
    told = 0
    with os.fdopen(reading) as stream:
        for line in stream:
            told += 1
            yield Found(*json.loads(line))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        number = numbers.start + told
        yield Found(attack.kinds[number % len(attack.kinds)], "", f"the process ended with {code}")


def _work(attack: Attack, numbers: range, writing: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    try:
        with os.fdopen(writing, "w") as stream:
            for number in numbers:
                signal.alarm(LONGEST_S)
                found = attack.attack(number)
                stream.write(json.dumps([found.kind, found.victim, found.outcome]) + "\n")
                stream.flush()
    except BaseException:
        os._exit(1)
    os._exit(0)


def run(kind: str, count: int, tally: Tally) -> None:
    """Go on until so many damages are counted."""
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        attack = attack_of(kind)(Path(folder))
        while (start := tally.total) < count:
            for at, found in enumerate(batch(attack, range(start, min(start + BATCH, count)))):
                harmless = found.outcome in attack.harmless
                tally.add(found.kind, found.outcome if harmless else FAULT)
                if not harmless:
                    tally.faults.append(f"{kind} {start + at}, {found.kind} of {found.victim}: {found.outcome}")
            tally.keep()


def again(kind: str, tally: Tally) -> None:
    """Do the damages again that were faults, and count what comes of them now."""
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        attack, faults = attack_of(kind)(Path(folder)), tally.faults
        tally.faults = []
        for fault in faults:
            number = int(fault.removeprefix(f"{kind} ").partition(",")[0])
            (found,) = batch(attack, range(number, number + 1))
            tally.add(found.kind, FAULT, -1)
            harmless = found.outcome in attack.harmless
            tally.add(found.kind, found.outcome if harmless else FAULT)
            if not harmless:
                tally.faults.append(f"{kind} {number}, {found.kind} of {found.victim}: {found.outcome}")
        tally.keep()


@contextmanager
def _one_thread() -> Iterator[None]:
    """A fork does not have its parent's threads, and other numbers of threads round in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Damage until so many are counted, or one again."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("kind", choices=list(KINDS))
    options.add_argument("--count", type=int, default=10_000, help="go on until so many are counted")
    options.add_argument("--one", type=int, help="the number of one damage to do again")
    options.add_argument("--again", action="store_true", help="do the damages again that were faults")
    options.add_argument("--tally", type=Path, help="where the counts are kept")
    given = options.parse_args()
    if given.one is not None:
        with tempfile.TemporaryDirectory() as folder, _one_thread():
            print(attack_of(given.kind)(Path(folder)).attack(given.one))
        return
    tally = Tally(given.tally or ROOT / "build" / "faults" / f"{given.kind}.json")
    if given.again:
        again(given.kind, tally)
    else:
        run(given.kind, given.count, tally)
    for row, counts in tally.counts.items():
        print(f"{row:32}", *(f"{number:,} {name};" for name, number in sorted(counts.items())))
    if tally.faults:
        raise SystemExit("\n".join(tally.faults))


if __name__ == "__main__":
    main()
