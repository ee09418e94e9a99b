"""List every setting that was tried on held-out training data, with what it gave: one row each, none left out.

    python tools/list_settings.py records/connectivity/search.jsonl.xz --least 12

Listed are all protocols of the stores with a holdout, trials for rates and logit steps among them, in the order of
accuracy; what diverged comes last. ± is half the 95% interval of the mean. The test set is in none of these numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import record

from dropconnectpp.lab.config.experiments import from_file
from dropconnectpp.lab.report.statistics import Summary, summarise
from dropconnectpp.lab.runs.store import FINAL, Row

SHARE = 0.1
"""Of the weights that a pruned network keeps."""
HEADER = (
    "Method",
    "Step size",
    "Epochs",
    "n",
    "Accuracy, %",
    "NLL",
    "NLL, averaged predictions",
    f"{SHARE:.0%} kept by π̃, %",
    f"{SHARE:.0%} kept by size, %",
    "mean π̃",
)


def tried(stores: Sequence[Path]) -> list[list[Row]]:
    """Finished replicas by setting."""
    found: dict[str, list[Row]] = {}
    for path in stores:
        for row in record.read(path).rows:
            if row.status in FINAL and row.protocol.settings["training"]["holdout"]:
                found.setdefault(row.key.digest, []).append(row)
    return list(found.values())


def summary_of(rows: Sequence[Row], value: Callable[[Mapping[str, Any]], float | None]) -> Summary | None:
    """Over replicas; None where one has no such number, or diverged."""
    values = [value(row.results) if row.status == "done" else None for row in rows]
    known = [one for one in values if one is not None]
    return summarise(known) if len(known) == len(values) else None


def shown(found: Summary | None, digits: int) -> str:
    """The mean, and how far its interval reaches."""
    if found is None:
        return "–"
    spread = f" ± {(found.interval[1] - found.mean):.{digits}f}" if found.interval else ""
    return f"{found.mean:.{digits}f}{spread}"


def ranks(results: Mapping[str, Any]) -> bool:
    """Whether there is a posterior that says more of one synapse than of another."""
    return any(one["score"] == "keep_probability" for one in results["pruning"] or ()) and (
        not results.get("posterior") or results["posterior"]["standard_deviation"] > 1e-6
    )


def pruned(results: Mapping[str, Any], score: str) -> float | None:
    """Accuracy of what is left of a network; None where the score ranks nothing."""
    if score == "keep_probability" and not ranks(results):
        return None
    found = [one["accuracy"] for one in results["pruning"] or () if (one["score"], one["share"]) == (score, SHARE)]
    return found[0] if found else None


def described(rows: Sequence[Row]) -> str:
    """What the setting is called; the rate is no part of a label."""
    rate = rows[0].protocol.settings["method"]["rate"]
    return rows[0].protocol.label + (f", rate {rate}" if rate is not None else "")


def line(rows: Sequence[Row]) -> tuple[float, list[str]]:
    """The mean accuracy, which sorts, and the cells of a setting."""
    accuracy, mean = summary_of(rows, lambda one: one["accuracy"]), lambda one: (one["posterior"] or {}).get("mean")
    values = [
        shown(accuracy, 2),
        shown(summary_of(rows, lambda one: one["nll"]), 4),
        shown(summary_of(rows, lambda one: (one["uncertainty"] or {}).get("nll")), 4),
        shown(summary_of(rows, lambda one: pruned(one, "keep_probability")), 2),
        shown(summary_of(rows, lambda one: pruned(one, "magnitude")), 2),
        shown(summary_of(rows, mean), 3).split(" ")[0],
    ]
    diverged = sum(row.status != "done" for row in rows)
    count = f"{len(rows)} ({diverged} diverged)" if diverged else str(len(rows))
    training = rows[0].protocol.settings["training"]
    how = [described(rows), str(training["step_size"]), str(training["epochs"])]
    return -1.0 if accuracy is None else accuracy.mean, [*how, count, *values]


def main() -> None:
    """Print the list."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs="+", type=Path, metavar="STORE", help="packed or not; several count as one")
    options.add_argument("--least", type=int, default=1, metavar="N", help="only settings with N networks or more")
    options.add_argument("--of", type=Path, metavar="FILE.toml", help="only settings of this experiment")
    options.add_argument("--dataset", metavar="NAME", help="only settings on this data set")
    options.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there too")
    given = options.parse_args()
    settings = [rows for rows in tried(given.stores) if len(rows) >= given.least]
    if given.of:
        wanted = {protocol.digest for protocol in from_file(given.of).protocols}
        settings = [rows for rows in settings if rows[0].key.digest in wanted]
    if given.dataset:
        settings = [rows for rows in settings if rows[0].protocol.settings["data"] == given.dataset]
    lines = sorted(map(line, settings), key=lambda one: -one[0])
    if not lines:
        raise SystemExit("No such setting was tried on held-out data in these stores.")
    rule = [":--", *["--:"] * (len(HEADER) - 1)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [HEADER, rule, *(cells for _, cells in lines)])
    which = f" with {given.least} networks or more" if given.least > 1 else ""
    text = f"## Settings that were tried on held-out training data\n\n{len(lines)} settings{which}.\n\n{table}\n"
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
