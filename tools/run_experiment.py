"""Run an experiment file where the packages of the command line are not installed: torch and numpy are enough.

    python tools/run_experiment.py experiments/sparsity/lenet_300_100.toml --out results --device cuda --time-limit 520s

It does what `dcpp run FILE.toml` does, but for the report: results go to `results.sqlite` in the output folder, and the
same command goes on where it was stopped (exit code 3 where the time limit came first). `--raw mnist FOLDER` prepares a
data set from its published files first; then `dcpp report --out FOLDER`, on any machine, makes the tables and the page.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab import data
from dropconnectpp.lab import device as devices
from dropconnectpp.lab.config.experiments import from_file
from dropconnectpp.lab.data.access import fetch, is_ready
from dropconnectpp.lab.runs import execution
from dropconnectpp.lab.runs.progress import Display
from dropconnectpp.lab.runs.runner import Runner

LINE_EVERY_S = 10.0
"""Seconds between two lines on one stack, at least."""


class Lines(Display):
    """Plain lines on stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def note(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"{self._last - self._began:7.1f} s  {text}", file=sys.stderr, flush=True)

    def group(self, title: str, replicas: int, epochs: int, done: int) -> None:
        self.note(f"{title}: {replicas} networks, {epochs} epochs" + (f", resumed after {done}" if done else ""))

    def epoch(self, done: int, loss: float, accuracy: float | None) -> None:
        if time.monotonic() - self._last >= LINE_EVERY_S or accuracy is not None:
            self.note(f"  epoch {done}, loss {loss:.3f}" + (f", accuracy {accuracy:.2f}%" if accuracy else ""))

    def group_finished(self) -> None:
        self.note("  stored")


def seconds(text: str) -> float:
    """Seconds of 90s or 9m."""
    return float(text[:-1]) * {"s": 1.0, "m": 60.0}[text[-1]]


def main() -> None:
    """Run an experiment."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="+", type=Path, metavar="FILE.toml", help="experiments, one after the other")
    options.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results and checkpoints")
    options.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    options.add_argument("--data-dir", type=Path, metavar="FOLDER", help="where prepared data sets are stored")
    options.add_argument(
        "--raw",
        nargs=2,
        action="append",
        default=[],
        metavar=("DATASET", "FOLDER"),
        help="prepare a data set from its published files, where it is not prepared yet",
    )
    options.add_argument(
        "--repeats", type=int, metavar="N", help="networks of each setting (default: as the file says)"
    )
    options.add_argument("--replicas-at-once", type=int, metavar="N", help="most networks of a stack")
    options.add_argument(
        "--time-limit", type=seconds, metavar="TIME", help="stop in time and keep everything: 520s, 9m"
    )
    given = options.parse_args()
    deadline = None if given.time_limit is None else time.monotonic() + given.time_limit
    try:
        for name, folder in given.raw:
            if not is_ready(name, directory=given.data_dir):
                fetch(name, source_path=folder, directory=given.data_dir)
        runner = Runner(
            given.out,
            devices.choose(given.device),
            lambda name: data.load(name, directory=given.data_dir),
            Lines(),
            group=given.replicas_at_once,
            deadline=deadline,
        )
        given.out.mkdir(parents=True, exist_ok=True)
        for path in given.files:
            experiment = from_file(path)
            experiment = experiment if given.repeats is None else replace(experiment, repeats=given.repeats)
            execution.check_data(experiment, runner)
            execution.remember_command(
                experiment, runner, shlex.join(["dcpp", "run", str(path), "--device", given.device])
            )
            if not execution.train(experiment, runner):
                raise SystemExit(3)
            runner.display.note(f"{path}: finished")
    except DropConnectError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
