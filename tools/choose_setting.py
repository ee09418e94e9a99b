"""Choose the setting that goes to the test set among those tried on held-out training data, by a rule fixed before.

    python tools/choose_setting.py search.sqlite --searches experiments/search/lighter_search.toml \\
        --below "DropConnect, rate 0.7, step size 0.005" --write cifar10 chosen.toml

Of the methods that every search has and that learn it takes those with a lower NLL than that setting on the same data,
and of these the one with the highest accuracy, averaged over the searches. Where a search tries several step sizes, a
method has the most accurate of those with that lower NLL. `--below` names a setting for each search, in their order; a
search without one has no limit. `--write DATASET FILE.toml` writes the experiment on that data set's test set: 50
networks, with the step size that its search chose among several, or else chosen as in Table 1.
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

from dropconnectpp.lab.config.experiments import Experiment, from_file
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Protocol, paper
from dropconnectpp.lab.runs.store import Row

STILL = 1e-6
"""A logit step below which nothing is learned."""


@dataclass(frozen=True)
class Outcome:
    """What a method gave in one search, at one step size."""

    accuracy: float
    nll: float
    step_size: float | None


@dataclass(frozen=True)
class Candidate:
    """A method, with what it gave in each search; None where no step size leaves its NLL below the limit."""

    method: Method
    outcomes: tuple[Outcome | None, ...]

    @property
    def accuracy(self) -> float:
        """Averaged over the searches; none where one has nothing to offer."""
        known = [one.accuracy for one in self.outcomes if one is not None]
        return fmean(known) if len(known) == len(self.outcomes) else math.nan

    @property
    def described(self) -> str:
        """As it is printed."""
        each = [
            f"{one.accuracy:.2f}%, NLL {one.nll:.4f}, step size {one.step_size}" if one else "NLL not below"
            for one in self.outcomes
        ]
        mean = f"accuracy {self.accuracy:.2f}%" if math.isfinite(self.accuracy) else "out"
        return f"{self.method.label}: {mean} ({'; '.join(each)})"


def mean(rows: Sequence[Row], measure: str) -> float:
    """Over replicas; a network that diverged has no such number, and the setting is out."""
    return fmean(row.results.get(measure, float("nan")) for row in rows)


def rows_of(protocol: Protocol, experiment: Experiment, found: dict[str, list[Row]]) -> list[Row]:
    """As many networks of a setting as its search asks for."""
    rows = [row for row in found.get(protocol.digest, []) if row.key.replica in experiment.replicas]
    if len(rows) < experiment.repeats:
        raise SystemExit(f"{protocol.data}, {protocol.method.label}: {len(rows)} of {experiment.repeats} networks.")
    return rows


def outcome(tried: Sequence[Outcome], limit: float) -> Outcome | None:
    """The most accurate with an NLL below the limit."""
    good = [one for one in tried if one.nll < limit and math.isfinite(one.accuracy)]
    return max(good, key=lambda one: one.accuracy, default=None)


def candidates(searches: Sequence[Experiment], found: dict[str, list[Row]], limits: Sequence[float]) -> list[Candidate]:
    """The methods that every search has and that learn, the most accurate first."""
    by_method: list[dict[Method, list[Outcome]]] = []
    for search in searches:
        by_method.append({})
        for protocol in search.protocols:
            rows = rows_of(protocol, search, found)
            given = Outcome(mean(rows, "accuracy"), mean(rows, "nll"), protocol.training.step_size)
            by_method[-1].setdefault(protocol.method, []).append(given)
    shared = [method for method in by_method[0] if all(method in search for search in by_method[1:])]
    offered = [
        Candidate(method, tuple(outcome(one[method], limit) for one, limit in zip(by_method, limits, strict=True)))
        for method in shared
        if method.kind == "dropconnect++" and (method.logit_step or 0.0) > STILL
    ]
    return sorted(offered, key=lambda one: one.accuracy if math.isfinite(one.accuracy) else -math.inf, reverse=True)


def experiment_on(dataset: str, method: Method, step_size: float | None) -> str:
    """The text of a file for `dcpp run`."""
    given = {f.name: getattr(method, f.name) for f in fields(method) if getattr(method, f.name) != f.default}
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]  # numbers and words, as in TOML
    hidden = paper(dataset, method).architecture.hidden
    wide = f"\n[protocol.architecture]\nhidden = {hidden}\n" if hidden != Protocol().architecture.hidden else ""
    step = f"\n[protocol.training]\nstep_size = {step_size}\n" if step_size is not None else ""
    return (
        "# What a search on held-out training data chose, on the test set.\nrepeats = 50\n\n"
        f'[protocol]\ndata = "{dataset}"\n{wide}{step}\n[[methods]]\n' + "\n".join(lines) + "\n"
    )


def reference(name: str, data: str, found: dict[str, list[Row]]) -> list[Row]:
    """The networks of the setting to be below."""
    named_so = [rows for rows in found.values() if named(rows) == name and rows[0].protocol.settings["data"] == data]
    if len(named_so) != 1:
        raise SystemExit(f"{len(named_so)} settings on {data} are called {name!r}; one is needed.")
    return named_so[0]


def main() -> None:
    """Print what there is to choose from and what is chosen."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs="+", type=Path, metavar="STORE", help="results of the searches, packed or not")
    options.add_argument(
        "--searches",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE.toml",
        help="the experiments, one for each data set",
    )
    options.add_argument(
        "--below", nargs="+", required=True, metavar="SETTING", help="whose NLL must not be reached, for each search"
    )
    options.add_argument(
        "--write",
        nargs=2,
        action="append",
        default=[],
        metavar=("DATASET", "FILE.toml"),
        help="write the experiment with the choice on that test set; may be repeated",
    )
    given = options.parse_args()
    searches = [from_file(path) for path in given.searches]
    data = [one.protocols[0].data for one in searches]
    if len(set(data)) < len(data):
        raise SystemExit("Two searches have the same data.")
    if len(given.below) > len(searches):
        raise SystemExit(f"{len(given.below)} settings to be below, {len(searches)} searches.")
    found = {rows[0].key.digest: rows for rows in tried(given.stores)}
    limits = [math.inf] * len(searches)
    for place, name in enumerate(given.below):
        rows = reference(name, data[place], found)
        limits[place] = mean(rows, "nll")
        print(f"{name}: accuracy {mean(rows, 'accuracy'):.2f}%, NLL {limits[place]:.4f} on {data[place]}")
    offered = candidates(searches, found, limits)
    print(*(one.described for one in offered), sep="\n")
    if not offered or not math.isfinite(offered[0].accuracy):
        raise SystemExit("None has a lower NLL.")
    chosen = offered[0]
    print(f"chosen: {chosen.method.label}")
    steps = {
        name: one.step_size
        for name, one, search in zip(data, chosen.outcomes, searches, strict=True)
        if one is not None and len({p.training.step_size for p in search.protocols}) > 1
    }
    for dataset, path in given.write:
        Path(path).write_text(experiment_on(dataset, chosen.method, steps.get(dataset)))


if __name__ == "__main__":
    main()
