"""Which of the settings that were tried on held-out training data goes to the test set? A rule fixed beforehand says.

    python benchmarks/choose_setting.py search.sqlite --searches experiments/lighter_search.toml \\
        --below "DropConnect, rate 0.7, step size 0.005" --write cifar10 chosen.toml

Of the methods that every search has and that learn it takes those with a lower NLL than that setting on the first
search's data, and of these the one with the highest accuracy, averaged over the searches. `--write DATASET FILE.toml`
writes its experiment on that data set's test set: 50 networks, the step size chosen as in Table 1.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

from compare_measures import named
from list_settings import tried

from dropconnectpp.lab.experiments import Experiment, from_file
from dropconnectpp.lab.protocol import Method, Protocol, paper
from dropconnectpp.lab.store import Row

STILL = 1e-6
"""A logit step below which nothing is learned."""


@dataclass(frozen=True)
class Candidate:
    """A method, with what it gave in each search."""

    method: Method
    accuracies: tuple[float, ...]
    nll: float
    """On the data of the first search."""

    @property
    def accuracy(self) -> float:
        """Averaged over the searches."""
        return fmean(self.accuracies)


def mean(rows: Sequence[Row], measure: str) -> float:
    """Over replicas; a network that diverged has no such number, and the setting is out."""
    return fmean(row.results.get(measure, float("nan")) for row in rows)


def rows_of(protocol: Protocol, experiment: Experiment, found: dict[str, list[Row]]) -> list[Row]:
    """As many networks of a setting as its search asks for."""
    rows = [row for row in found.get(protocol.digest, []) if row.key.replica in experiment.replicas]
    if len(rows) < experiment.repeats:
        raise SystemExit(f"{protocol.data}, {protocol.method.label}: {len(rows)} of {experiment.repeats} networks.")
    return rows


def candidates(searches: Sequence[Experiment], found: dict[str, list[Row]]) -> list[Candidate]:
    """The methods that every search has and that learn."""
    by_method = [{p.method: rows_of(p, search, found) for p in search.protocols} for search in searches]
    shared = [method for method in by_method[0] if all(method in search for search in by_method[1:])]
    return [
        Candidate(method, tuple(mean(one[method], "accuracy") for one in by_method), mean(by_method[0][method], "nll"))
        for method in shared
        if method.kind == "dropconnect++" and (method.logit_step or 0.0) > STILL
    ]


def choose(offered: Sequence[Candidate], limit: float) -> Candidate:
    """The most accurate of those with an NLL below the limit."""
    good = [one for one in offered if one.nll < limit and math.isfinite(one.accuracy)]
    if not good:
        raise SystemExit(f"None has an NLL below {limit:.4f}.")
    return max(good, key=lambda one: one.accuracy)


def experiment_on(dataset: str, method: Method) -> str:
    """The text of a file for `dcpp run`."""
    given = {f.name: getattr(method, f.name) for f in fields(method) if getattr(method, f.name) != f.default}
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]  # numbers and words, as in TOML
    hidden = paper(dataset, method).architecture.hidden
    wide = f"\n[protocol.architecture]\nhidden = {hidden}\n" if hidden != Protocol().architecture.hidden else ""
    return (
        "# What a search on held-out training data chose, on the test set.\nrepeats = 50\n\n"
        f'[protocol]\ndata = "{dataset}"\n{wide}\n[[methods]]\n' + "\n".join(lines) + "\n"
    )


def main() -> None:
    """Print what there is to choose from and what is chosen."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs="+", type=Path)
    options.add_argument("--searches", nargs="+", type=Path, required=True, metavar="FILE.toml")
    options.add_argument("--below", required=True, metavar="SETTING")
    options.add_argument("--write", nargs=2, action="append", default=[], metavar=("DATASET", "FILE.toml"))
    given = options.parse_args()
    searches = [from_file(path) for path in given.searches]
    data = searches[0].protocols[0].data
    found = {rows[0].key.digest: rows for rows in tried(given.stores)}
    limits = [
        rows for rows in found.values() if named(rows) == given.below and rows[0].protocol.settings["data"] == data
    ]
    if len(limits) != 1:
        raise SystemExit(f"{len(limits)} settings on {data} are called {given.below!r}; one is needed.")
    limit = mean(limits[0], "nll")
    offered = sorted(candidates(searches, found), key=lambda one: -one.accuracy)
    print(f"{given.below}: accuracy {mean(limits[0], 'accuracy'):.2f}%, NLL {limit:.4f} on {data}")
    for one in offered:
        each = ", ".join(f"{accuracy:.2f}" for accuracy in one.accuracies)
        print(f"{one.method.label}: accuracy {one.accuracy:.2f}% ({each}), NLL {one.nll:.4f}")
    chosen = choose(offered, limit)
    print(f"chosen: {chosen.method.label}")
    for dataset, path in given.write:
        Path(path).write_text(experiment_on(dataset, chosen.method))


if __name__ == "__main__":
    main()
