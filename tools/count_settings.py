"""Count the settings of DropConnect++ that were tried on held-out training data, and those seen on the test set too.

    python tools/count_settings.py records/cifar10/results.jsonl.xz --searches records/noise/search.jsonl.xz

A setting is a method with a step size. The first stores chose an estimator's settings with the paper's prior, the
searches looked for another prior. Trials that chose a step size by training loss had two epochs on the whole training
set and were evaluated on the test set as any run is; they are counted apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import record

from dropconnectpp.lab.config.json_values import canonical
from dropconnectpp.lab.runs.store import FINAL, Row

STILL = 1e-6
"""A logit step below this moves no keep probability: nothing is learned."""
HEADER = ("Settings", "Tried", "That learn", "On the test set", "Two epochs there")


def settings_of(row: Row) -> tuple[str, float, float]:
    """The method and the step size, which say what a setting is, and the logit step."""
    settings = row.protocol.settings
    logit_step = settings["method"]["logit_step"]
    return canonical(settings["method"]), settings["training"]["step_size"], 1.0 if logit_step is None else logit_step


def runs(stores: Sequence[Path], dataset: str) -> list[Row]:
    """Finished networks of DropConnect++."""
    return [
        row
        for path in stores
        for row in record.read(path).rows
        if row.status in FINAL
        and row.protocol.settings["data"] == dataset
        and row.protocol.settings["method"]["kind"] == "dropconnect++"
    ]


def main() -> None:
    """Print the counts."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs="+", type=Path, metavar="STORE", help="packed or not")
    options.add_argument("--searches", nargs="+", type=Path, required=True, metavar="STORE", help="of another prior")
    options.add_argument("--tested", nargs="*", type=Path, default=[], metavar="STORE", help="that used the test set")
    options.add_argument("--dataset", default="cifar10", help="(default: cifar10)")
    options.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there too")
    given = options.parse_args()
    everything = runs([*given.stores, *given.searches, *given.tested], given.dataset)
    on_test = [row for row in everything if not row.protocol.settings["training"]["holdout"]]
    longest = max(row.protocol.settings["training"]["epochs"] for row in on_test)
    whole = {settings_of(row) for row in on_test if row.protocol.settings["training"]["epochs"] == longest}
    brief = {settings_of(row) for row in on_test} - whole
    searched, others = (
        {settings_of(row) for row in runs(stores, given.dataset) if row.protocol.settings["training"]["holdout"]}
        for stores in (given.searches, given.stores)
    )
    lines = [HEADER, (":--", *["--:"] * (len(HEADER) - 1))]
    for name, tried in (
        ("estimator and logit step, the paper's prior", others - searched),
        ("in search of another prior", searched),
        ("all", others | searched),
    ):
        learning = {one for one in tried if one[2] > STILL}
        lines.append((name, *(str(len(one)) for one in (tried, learning, tried & whole, tried & brief))))
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    text = f"## Settings of DropConnect++ that were tried on held-out training data\n\n{table}\n"
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
