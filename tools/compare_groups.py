"""Compare groups of replicas with each other and with the pilot: test accuracy by method in several stores.

    python tools/compare_groups.py records/replicas/pilot_seed0.jsonl.xz records/replicas/pilot_seed1.jsonl.xz

Each store is a group, run with its own seed and number of replicas at once. Welch's test compares the first two
groups method by method: with four methods one p below 0.05 is no surprise, so Holm's adjusted p is shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import record

from dropconnectpp.lab.report.statistics import holm, summarise, welch
from dropconnectpp.lab.runs.store import Row

PILOT = {  # CIFAR-10, two pools, step 0.005: percent, four replicas each, 60 epochs (DropConnect++: 53)
    "No regularization": 73.88,
    "Dropout": 75.72,
    "DropConnect": 77.31,
    "DropConnect++": 76.75,
}


def groups(path: Path) -> tuple[str, dict[str, list[Row]]]:
    """A name for the store, and its finished rows by method."""
    rows = [row for row in record.read(path).rows if row.status == "done"]
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.protocol.label.partition(" (")[0], []).append(row)
    seeds = sorted({row.protocol.settings["root_seed"] for row in rows})
    return f"seed {', '.join(map(str, seeds))}", found


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs="+", type=Path, metavar="STORE", help="a group each, packed or not")
    options.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there too")
    given = options.parse_args()
    named = [groups(path) for path in given.stores]
    methods = [method for method in PILOT if all(method in found for _, found in named)]
    accuracies = {
        method: [[row.results["accuracy"] for row in found[method]] for _, found in named] for method in methods
    }
    tests = {method: welch(values[0], values[1]) for method, values in accuracies.items() if len(values) > 1}
    adjusted = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
    header = [
        "method",
        *(name for name, _ in named),
        "all",
        "95% interval",
        "pilot",
        "all - pilot",
        "groups: difference",
        "p",
        "Holm p",
    ]
    lines = []
    for method, values in accuracies.items():
        whole = summarise([value for group in values for value in group])
        each = [summarise(group) for group in values]
        line = [method, *(f"{s.mean:.2f} ± {s.standard_deviation:.2f} (n={s.n})" for s in each)]
        line += [f"{whole.mean:.2f} ± {whole.standard_deviation:.2f} (n={whole.n})"]
        line += [f"{whole.interval[0]:.2f} to {whole.interval[1]:.2f}" if whole.interval else "-"]
        line += [f"{PILOT[method]:.2f}", f"{whole.mean - PILOT[method]:+.2f}"]
        test = tests.get(method)
        line += [f"{test.difference:+.2f}", f"{test.p:.3f}", f"{adjusted[method]:.3f}"] if test else ["-"] * 3
        lines.append(line)
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *lines])
    first = next(iter(next(iter(named))[1].values()))[0]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    text = f"## Groups of replicas\n\n{first.device}, {versions}\n\n{table}\n"
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
