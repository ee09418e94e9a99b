"""Tables of the long tests of failures, from the counts that they keep.

    python tools/fault_tables.py build/faults OUT     what is counted so far
    cp build/faults/*.json records/reliability && python tools/rebuild_records.py reliability --write

`make test-faults` makes the counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

Counts = Mapping[str, Mapping[str, int]]
MUTATIONS = {
    "checkpoints": "checkpoints, resumed",
    "stores": "stores, read, reported, merged",
    "models": "model files, loaded",
    "experiments": "TOML files, read",
}
"""By the file of their counts: what is damaged, and what is done with it."""
TOLD = frozenset({"refused", "named", "told, the same rows"})
SAME = frozenset({"the same", "the same rows"})
OTHER = frozenset({"another model", "another store", "other rows, sealed", "an experiment"})
FAULT = "fault"
LOST = ("lost", "doubled", "different", "not resumed")


def counts_of(path: Path) -> Counts:
    """The counts of a long test, by row and column."""
    found: Counts = json.loads(path.read_text())["counts"]
    return found


def counted(folder: Path, *names: str) -> str:
    """A line that says when."""
    days = [json.loads((folder / f"{name}.json").read_text())["day"] for name in names]
    return f"\nCounted until {max(days)}.\n"


def of(counts: Mapping[str, int], *names: str) -> int:
    """The sum of some counts."""
    return sum(counts.get(name, 0) for name in names)


def killed(counts: Counts) -> str:
    """Commands killed with -9."""
    header = ["Command", "Kills", "At a write", "At any moment", "Compared", *(one.capitalize() for one in LOST)]
    rows = []
    for name, one in counts.items():
        at = [of(one, column) for column in ("at a write", "at a moment")]
        rows.append([f"`{name}`", sum(at), *at, of(one, "rounds"), *(of(one, what) for what in LOST)])
    return table(header, with_sum(rows))


def failed(counts: Counts, ways: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """Calls of commands that failed, or after which the power did."""
    header = ["Command", "Of", "Tried", *(title for title, _ in ways), "Faults"]
    rows = []
    for name, one in counts.items():
        found = [of(one, *columns) for _, columns in ways]
        rows.append([f"`{name}`", of(one, "of"), sum(found) + of(one, FAULT), *found, of(one, FAULT)])
    return table(header, with_sum(rows))


def damaged(of_files: Mapping[str, Counts]) -> str:
    """Files that were damaged."""
    header = ["Files", "Damages", "Told", "The same", "Shown as unverified", "Other, with its digest", "Faults"]
    rows = []
    for name, counts in of_files.items():
        sums: dict[str, int] = {}
        for one in counts.values():
            for outcome, number in one.items():
                sums[outcome] = sums.get(outcome, 0) + number
        groups = [of(sums, *group) for group in (TOLD, SAME, ("unverified",), OTHER)]
        if unknown := sums.keys() - TOLD - SAME - OTHER - {"unverified", FAULT}:
            raise ValueError(f"{name}: {', '.join(sorted(unknown))} is in no column")
        rows.append([MUTATIONS[name], sum(sums.values()), *groups, of(sums, FAULT)])
    return table(header, rows)


def with_sum(rows: list[list[object]]) -> list[list[object]]:
    """The rows, and one of their sums."""
    sums: list[object] = [sum(int(str(row[i])) for row in rows) for i in range(1, len(rows[0]))]
    return [*rows, ["all", *sums]]


def table(header: list[str], rows: list[list[object]]) -> str:
    """A table as Markdown: words to the left, numbers to the right."""
    align = [":--" if all(isinstance(row[i], str) for row in rows) else "--:" for i in range(len(header))]
    cells = [[f"{one:,}" if isinstance(one, int) else str(one) for one in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, align, *cells))


def tables(folder: Path) -> dict[str, str]:
    """Every table, by its file's name."""
    failures = (("Went on", ("went on",)), ("Told and resumed", ("resumed",)), ("Not reached", ("not reached",)))
    losses = (("Dropped", ("dropped",)), ("Names kept", ("empty",)), ("Torn", ("torn",)))
    found = {
        "kills": ("Commands killed with -9", killed(counts_of(folder / "kills.json")), ("kills",)),
        "failures": ("Calls that failed", failed(counts_of(folder / "failures.json"), failures), ("failures",)),
        "power": ("Power that failed", failed(counts_of(folder / "power_cuts.json"), losses), ("power_cuts",)),
        "mutations": (
            "Files that were damaged",
            damaged({name: counts_of(folder / f"{name}.json") for name in MUTATIONS}),
            tuple(MUTATIONS),
        ),
    }
    return {
        f"faults_{name}": f"# {title}\n\n{text}{counted(folder, *of_names)}"
        for name, (title, text, of_names) in found.items()
    }


def main() -> None:
    """Write the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("counts", type=Path, help="the folder of the counts")
    options.add_argument("out", type=Path, help="the folder of the tables")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, text in tables(given.counts).items():
        (given.out / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
