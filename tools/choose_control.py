"""Choose the control that goes to the test set among those tried on held-out training data, by a rule fixed before.

    python tools/choose_control.py results.sqlite --searches experiments/controls/rising_rate_search.toml \\
        --write chosen.toml

Of the settings of the searches that have a schedule or another scaling, it is the one with the highest mean accuracy on
the held-out images; of equals the one with the lowest NLL. The others are there to compare with, and are not chosen. A
setting with a network that diverged is out. `--write FILE.toml` writes the experiment with the choice on the test set:
50 networks on all training images.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from list_settings import tried

from dropconnectpp.lab.config.experiments import Experiment, from_file
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.runs.store import Row


@dataclass(frozen=True)
class Tried:
    """What a setting gave, means over its networks; not a number where one diverged."""

    protocol: Protocol
    accuracy: float
    nll: float
    n: int

    @property
    def eligible(self) -> bool:
        """Whether it is a control: by epoch, or scaled in training."""
        return self.protocol.by_epoch is not None or self.protocol.method.scaling != Method().scaling

    @property
    def described(self) -> str:
        """As it is printed."""
        rate = "" if self.protocol.by_epoch else f", rate {self.protocol.method.rate:g}"
        name = f"{self.protocol.label}{rate}, step size {self.protocol.training.step_size:g}"
        return f"{name}: accuracy {self.accuracy:.2f}%, NLL {self.nll:.4f}, n = {self.n}"


def outcomes(search: Experiment, found: dict[str, list[Row]]) -> list[Tried]:
    """Each setting with as many networks as its search asks for."""
    results = []
    for protocol in search.protocols:
        rows = [row for row in found.get(protocol.digest, []) if row.key.replica in search.replicas]
        if len(rows) < search.repeats:
            raise SystemExit(f"{protocol.label}: {len(rows)} of {search.repeats} networks.")
        accuracy, nll = (fmean(row.results.get(name, math.nan) for row in rows) for name in ("accuracy", "nll"))
        results.append(Tried(protocol, accuracy, nll, len(rows)))
    return results


def choose(offered: Sequence[Tried]) -> Tried | None:
    """The control with the highest accuracy, of equals with the lowest NLL; None if all have diverged."""
    good = [one for one in offered if one.eligible and math.isfinite(one.accuracy)]
    return max(good, key=lambda one: (one.accuracy, -one.nll), default=None)


def experiment_on(chosen: Protocol) -> str:
    """The text of a file for `dcpp run`."""
    left_out = ("rate",) if chosen.by_epoch is not None and chosen.by_epoch.rate else ()
    method = {f.name: getattr(chosen.method, f.name) for f in fields(Method) if f.name not in left_out}
    given: dict[str, Any] = {
        f.name: method[f.name] for f in fields(Method) if method.get(f.name, f.default) != f.default
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]  # numbers and words, as in TOML
    if chosen.by_epoch is not None:
        values = {"at": chosen.by_epoch.at, **chosen.by_epoch.values, "between": chosen.by_epoch.between}
        lines.append(f"by_epoch = {{{', '.join(f'{name} = {json.dumps(value)}' for name, value in values.items())}}}")
    return (
        "# What a search of controls on held-out training data chose, on the test set.\nrepeats = 50\n\n"
        f'[protocol]\ndata = "{chosen.data}"\n\n[protocol.training]\nstep_size = {chosen.training.step_size}\n\n'
        "[[methods]]\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    """Print what was tried and what is chosen."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("stores", nargs="+", type=Path, metavar="STORE", help="results of the searches, packed or not")
    options.add_argument("--searches", nargs="+", type=Path, required=True, metavar="FILE.toml", help="the experiments")
    options.add_argument("--write", type=Path, metavar="FILE.toml", help="write the experiment with the choice")
    given = options.parse_args()
    found = {rows[0].key.digest: rows for rows in tried(given.stores)}
    offered = [one for path in given.searches for one in outcomes(from_file(path), found)]
    for one in sorted(offered, key=lambda one: one.accuracy if math.isfinite(one.accuracy) else -1.0, reverse=True):
        print(one.described)
    chosen = choose(offered)
    if chosen is None:
        raise SystemExit("Every control diverged.")
    print(f"chosen: {chosen.described}")
    if given.write is not None:
        given.write.write_text(experiment_on(chosen.protocol))


if __name__ == "__main__":
    main()
