"""Compare methods measure by measure: accuracy, NLL, calibration, and accuracy after pruning.

    python tools/compare_measures.py records/cifar10/results.jsonl.xz --methods "DropConnect++ (sparse)"
    python tools/compare_measures.py search.sqlite --held-out --against "DropConnect, rate 0.7, step size 0.005" ...

A method has the name that the report gives it, on held-out data its step size too; a wrong name lists the right ones.
p is Welch's, or paired for a network against itself; beside it, adjusted by Holm for all rows. Several stores count as
one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import record
from list_settings import described, ranks, tried

from dropconnectpp.lab.report.selection import select_experiments
from dropconnectpp.lab.report.statistics import Comparison, holm, paired, welch
from dropconnectpp.lab.report.views.cells import trust_notes
from dropconnectpp.lab.runs.store import Row

SHARES = (0.1, 0.05)
"""Of the dense weights that a pruned network keeps."""
HEADER = ("Method", "Measure", "Against", "Mean", "The other's", "Difference", "95% interval", "p", "Adjusted", "n")
Results = Mapping[str, Any]
Measure = Callable[[Results], float]


def kept(share: float, score: str) -> Measure:
    """Accuracy of what is left of a network by a score of its weights."""
    return lambda results: next(
        one["accuracy"] for one in results["pruning"] if (one["score"], one["share"]) == (score, share)
    )


MEASURES: dict[str, tuple[Measure, int]] = {
    "accuracy, %": (lambda results: results["accuracy"], 2),
    "NLL": (lambda results: results["nll"], 4),
    "NLL, averaged predictions": (lambda results: results["uncertainty"]["nll"], 4),
    "Brier score": (lambda results: results["brier"], 4),
    "calibration error": (lambda results: results["ece"], 4),
}
"""By name, with the digits that are shown."""
WHOLE = MEASURES["accuracy, %"][0]


@dataclass(frozen=True)
class Line:
    """One measure of a method beside another's, or beside another measure of its own."""

    method: str
    measure: str
    against: str
    means: tuple[float, float]
    comparison: Comparison
    digits: int

    def cells(self, adjusted: float) -> list[str]:
        """As the table shows it."""
        found, digits = self.comparison, self.digits
        low, high = found.interval
        return [
            self.method,
            self.measure,
            self.against,
            *(f"{mean:.{digits}f}" for mean in self.means),
            f"{found.difference:+.{digits}f}",
            f"{low:.{digits}f} to {high:.{digits}f}",
            *("\\< 0.0001" if p < 0.0001 else f"{p:.4f}" for p in (found.p, adjusted)),
            str(found.n_a) if found.n_a == found.n_b else f"{found.n_a} and {found.n_b}",
        ]


def networks(stores: Sequence[Path], dataset: str, held_out: bool) -> dict[str, dict[int, Results]]:
    """Results on the test set, or on held-out training data, by method and replica."""
    if held_out:
        found = {named(rows): rows for rows in tried(stores) if rows[0].protocol.settings["data"] == dataset}
    else:
        rows: list[Row] = []
        notes: dict[tuple[str, str], Any] = {}
        for path in stores:
            stored = record.read(path)
            rows += stored.rows
            notes |= stored.notes
        found = {
            one.label: list(one.rows) for one in select_experiments(rows, notes).experiments if one.data == dataset
        }
    done = {name: [row for row in rows if row.status == "done"] for name, rows in found.items()}
    return {name: {row.key.replica: row.results for row in rows} for name, rows in done.items()}


def trust(stores: Sequence[Path], dataset: str) -> tuple[str, ...]:
    """What the report says below tables of data without the official checksums."""
    rows = [row for path in stores for row in record.read(path).rows if row.protocol.settings["data"] == dataset]
    return trust_notes([{"data": dataset, "trusted": row.provenance.get("verified") is not False} for row in rows])


def named(rows: Sequence[Row]) -> str:
    """A setting that was tried: there may be the same method with another step size."""
    return f"{described(rows)}, step size {rows[0].protocol.settings['training']['step_size']}"


def line(
    named: tuple[str, str, str], mine: Mapping[int, float], other: Mapping[int, float], digits: int, pairs: bool = False
) -> Line:
    """Two samples by replica, compared."""
    samples = list(mine.values()), list(other.values())
    comparison = paired(mine, other) if pairs else welch(*samples)
    return Line(*named, (fmean(samples[0]), fmean(samples[1])), comparison, digits)


def lines(found: Mapping[str, Mapping[int, Results]], methods: Sequence[str], others: Sequence[str]) -> list[Line]:
    """Every measure of every method; a pair of methods once, whichever is named first."""

    def values(method: str, measure: Measure) -> dict[int, float]:
        return {replica: measure(results) for replica, results in found[method].items()}

    table = []
    for place, method in enumerate(methods):
        before = methods[:place] if method in others else []  # each of them was compared with this one
        table += [
            line((method, name, other), values(method, measure), values(other, measure), digits)
            for other in others
            if other != method and other not in before
            for name, (measure, digits) in MEASURES.items()
        ]
        if not all(map(ranks, found[method].values())):
            continue
        for share in SHARES:
            name, cut = f"accuracy with {share:.0%} kept by π̃, %", values(method, kept(share, "keep_probability"))
            size = kept(share, "magnitude")
            table += [line((method, name, f"{other}, by size"), cut, values(other, size), 2) for other in others]
            for how, measure in (("by size", size), ("by π̃·size", kept(share, "product")), ("whole", WHOLE)):
                table.append(line((method, name, f"itself, {how}"), cut, values(method, measure), 2, pairs=True))
    return table


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs="+", type=Path, metavar="STORE", help="packed or not")
    options.add_argument("--dataset", default="cifar10", help="(default: cifar10)")
    options.add_argument(
        "--against", nargs="+", default=["DropConnect"], metavar="METHOD", help="compare with (default: DropConnect)"
    )
    options.add_argument("--methods", nargs="+", required=True, metavar="METHOD", help="which to compare")
    options.add_argument("--held-out", action="store_true", help="on held-out training data, not on the test set")
    options.add_argument(
        "--call",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "SHORT"),
        help="a shorter name in the table; may be repeated",
    )
    options.add_argument(
        "--trust-notes", action="store_true", help="say below the table if files lack the official checksums"
    )
    options.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there too")
    given = options.parse_args()
    found = networks(given.stores, given.dataset, given.held_out)
    short = dict(given.call)
    missing = [method for method in (*given.against, *given.methods, *short) if method not in found]
    if missing:
        known = ", ".join(found) or "none"
        stores = ", ".join(map(str, given.stores))
        raise SystemExit(f"Not in {stores} on {given.dataset}: {', '.join(missing)}. There are: {known}.")
    found = {short.get(name, name): networks for name, networks in found.items()}
    table = lines(found, *([short.get(name, name) for name in names] for names in (given.methods, given.against)))
    adjusted = holm([one.comparison.p for one in table])
    rows = [HEADER, (":--", ":--", ":--", *["--:"] * (len(HEADER) - 3))]
    rows += [tuple(one.cells(p)) for one, p in zip(table, adjusted, strict=True)]
    text = "## Measure by measure\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    text += (
        "\n\np: Welch's test, or paired where a network is compared with itself; then adjusted by Holm for this table. "
    )
    text += "Intervals are not adjusted. A posterior that learned nothing is not cut by.\n"
    if given.trust_notes:
        text += "".join(f"\n{note}\n" for note in trust(given.stores, given.dataset))
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
