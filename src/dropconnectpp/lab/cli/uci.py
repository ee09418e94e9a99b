"""`dcpp run uci`: the field's regression benchmark, set by set and method by method."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from dropconnectpp.lab.cli.options import duration
from dropconnectpp.lab.cli.workers import ALONE, Team
from dropconnectpp.lab.config.notes import COMMAND
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.config.uci import KINDS, Regression, Training

if TYPE_CHECKING:
    from dropconnectpp.lab.data.dataset import RegressionSet

NOT_FOR_IT = ("epochs", "first_replica", "replicas_at_once", "device", "threads")
"""Options of `dcpp run` that it does not take, besides those of other experiments."""
ADVICE = "It trains on the CPU, with the same settings for every set of a size."


def run_uci(
    name: str | None,
    methods: Sequence[str] | None,
    splits: int | None,
    seed: int,
    out: Path,
    time_limit: str | None,
    data_dir: Path | None,
    command: str,
    team: Team = ALONE,
) -> bool:
    """Run what is missing. Return whether everything is there.

    Args:
        name: uci:NAME; None or "uci": every set that was fetched.
        methods: which of `KINDS`; None: all.
        splits: how many of the published splits, from the first; None: all.
        seed: root seed of all random numbers.
        out: the folder of results.
        time_limit: after which no stack of networks begins.
        data_dir: where prepared sets are stored.
        command: noted for the report.
        team: the processes that train.
    """
    for kind in methods or ():
        if kind not in KINDS:
            raise ProtocolError(f"dcpp run uci has no method {kind!r}. Choose from {', '.join(KINDS)}.")
    deadline = None if time_limit is None else time.monotonic() + duration(time_limit)
    sets = _sets(name, data_dir)
    experiments = [
        (one, Regression(data=one.name, kind=kind, training=Training.usual(one.name, len(one.y)), root_seed=seed))
        for one in sets
        for kind in KINDS
        if methods is None or kind in methods
    ]
    return _run(experiments, splits, out, deadline, command, team)


def _sets(name: str | None, data_dir: Path | None) -> list[RegressionSet]:
    """Open the sets before anything is written."""
    from dropconnectpp.lab.data import regression

    if name is not None and name != "uci":
        return [regression.load(name, directory=data_dir)]
    ready = [one for one in regression.names_of("uci") if regression.is_ready(one, data_dir)]
    if not ready:
        regression.load(regression.names_of("uci")[0], directory=data_dir)  # says how to get it
    return [regression.load(one, directory=data_dir) for one in ready]


def _run(
    experiments: Sequence[tuple[RegressionSet, Regression]],
    splits: int | None,
    out: Path,
    deadline: float | None,
    command: str,
    team: Team,
) -> bool:
    from dropconnectpp.lab.cli.display import run_display
    from dropconnectpp.lab.cli.results import make_folder
    from dropconnectpp.lab.data import load
    from dropconnectpp.lab.runs.interruption import Interruption
    from dropconnectpp.lab.runs.owner import Owner
    from dropconnectpp.lab.runs.store import Store
    from dropconnectpp.lab.runs.uci_splits import Plan, run_all

    make_folder(out)
    interruption = Interruption()
    plans = [
        Plan(experiment, data, range(len(data.splits) if splits is None else min(splits, len(data.splits))))
        for data, experiment in experiments
    ]
    workers = team.gather(out, "cpu", load)
    with Store.open(out / "results.sqlite") as store, run_display() as display, closing(workers):
        for _, experiment in experiments:
            store.write_note(store.add(experiment), COMMAND, command)
        try:
            with interruption.caught() if workers.several else nullcontext():
                complete = run_all(
                    plans,
                    store,
                    Owner.here(),
                    display=display,
                    deadline=deadline,
                    engine=workers,
                    storage=team.storage_for(out),
                    interruption=interruption,
                )
        except KeyboardInterrupt:
            display.note("Stopped. The splits that were finished are kept; the same command goes on from here.")
            raise
        if deadline is not None and time.monotonic() >= deadline and not complete:
            display.note("The time limit is near: stopped. The same command goes on from here.")
    return complete
