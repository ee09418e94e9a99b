"""Compare two stores of one experiment: test accuracy and NLL by method, and how far the means are apart.

    python tools/compare_stores.py records/kernels/mixed.jsonl.xz records/kernels/float32.jsonl.xz

Made for one question: does accuracy move with the fused kernels? One store has mixed precision, which they have, the
other float32, which plain PyTorch computes; start, order of the examples and masks of a replica are the same in both.
Intervals are Welch's, for 95%: zero inside says that the means are not distinguishable.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import record

from dropconnectpp.lab.report.statistics import summarise, welch
from dropconnectpp.lab.runs.store import Row

MEASURES = {"accuracy": ("accuracy, %", ".2f"), "nll": ("NLL, nats", ".4f")}


def by_method(path: Path) -> dict[str, list[Row]]:
    """A store's finished rows."""
    rows = [row for row in record.read(path).rows if row.status == "done"]
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.protocol.label, []).append(row)
    return found


def _evidence(row: Row) -> str:
    return f"{row.device}, " + ", ".join(f"{name} {version}" for name, version in row.versions.items())


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs=2, type=Path, metavar="STORE", help="packed or not")
    options.add_argument("--names", nargs=2, metavar="NAME", help="what the table calls them (default: as the files)")
    options.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there too")
    given = options.parse_args()
    groups = [by_method(path) for path in given.stores]
    names = given.names or [record.name(path) for path in given.stores]
    header = ["method", "measure", *names, "difference", "95% interval", "p"]
    lines = []
    methods = [method for method in groups[0] if method in groups[1]]
    if not methods:
        raise SystemExit("The stores have no method in common.")
    for method in methods:
        for key, (measure, digits) in MEASURES.items():
            values = [[row.results[key] for row in group[method]] for group in groups]
            test = welch(*values)
            each = [f"{s.mean:{digits}} ± {s.standard_deviation:{digits}} (n={s.n})" for s in map(summarise, values)]
            low, high = test.interval
            lines.append(
                [
                    method,
                    measure,
                    *each,
                    f"{test.difference:+{digits}}",
                    f"{low:+{digits}} to {high:+{digits}}",
                    f"{test.p:.2f}",
                ]
            )
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *lines])
    said = [f"{name}: {_evidence(group[methods[0]][0])}" for name, group in zip(names, groups, strict=True)]
    text = "## Two stores compared\n\n" + "\n\n".join([*said, table]) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
