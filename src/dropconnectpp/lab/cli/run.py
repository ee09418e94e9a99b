"""`dcpp run` and `demo`: train the networks of an experiment, then report."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import dropconnectpp
from dropconnectpp.lab.cli.options import (
    DataDirectory,
    DatasetName,
    DeviceName,
    Out,
    ReplicasAtOnce,
    Seed,
    TimeLimit,
    duration,
)
from dropconnectpp.lab.cli.results import make_folder, write_report
from dropconnectpp.lab.cli.workers import ALONE, Address, EngineName, StorageRoot, Team, Threads, Workers
from dropconnectpp.lab.config.method import METHODS, PAPER_METHODS
from dropconnectpp.lab.config.population import MEMBERS as POPULATION_MEMBERS
from dropconnectpp.lab.config.population import USUAL as POPULATION_METHODS
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.config.sparsity import NAMES as SPARSE_METHODS
from dropconnectpp.lab.config.uci import KINDS as REGRESSION_METHODS

if TYPE_CHECKING:
    from dropconnectpp.lab.config.experiments import Experiment
    from dropconnectpp.lab.runs.runner import Runner


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"dropconnectpp {dropconnectpp.__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run the experiments of the DropConnect++ paper, or your own, and report their results."""


def run(
    what: Annotated[
        str,
        typer.Argument(
            help="table1, table2, table3, figure1, uncertainty, small-data, sparsity, population, uci, or a TOML file "
            "of your own.",
            show_default=False,
        ),
    ],
    context: typer.Context,
    dataset: DatasetName = "cifar10",
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Networks of each method, from different random starts (default: 50; of uncertainty, small-data and "
            "sparsity 20; of a file as it says; of uci all published splits, or so many of the first).",
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Methods to train, separated by commas; from {', '.join(METHODS)} (default: "
            f"{','.join(PAPER_METHODS)}). Of sparsity from {', '.join(SPARSE_METHODS)}, of uci from "
            f"{', '.join(REGRESSION_METHODS)} (default: all). Of population by default {','.join(POPULATION_METHODS)}."
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs for each network (default: the paper's 100; lenet-5-caffe has 60)."),
    ] = None,
    step_size: Annotated[
        float | None, typer.Option(help="Step size of Adagrad (default: chosen as in the paper).")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Share that Dropout and DropConnect drop (default: chosen on held-out training data)."),
    ] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together", help="Choose step size and rate jointly, on held-out training data; fair to high rates."
        ),
    ] = False,
    hyper: Annotated[
        str | None, typer.Option(help="Beta posterior of DropConnect++: learned (the paper's) or optimal.")
    ] = None,
    seed: Seed = 0,
    foreign: Annotated[
        str | None, typer.Option(help="Another data set, on which the networks' uncertainty is measured too.")
    ] = None,
    examples: Annotated[
        str | None,
        typer.Option(
            help="Numbers of training examples of small-data, separated by commas (default: "
            "250,500,1000,2500,5000,10000,25000,all)."
        ),
    ] = None,
    network: Annotated[
        str, typer.Option(help="The network of sparsity: lenet-300-100 or lenet-5-caffe.")
    ] = "lenet-300-100",
    keep: Annotated[
        str | None,
        typer.Option(help="Shares of weights that sparsity keeps, separated by commas (default: 0.05,0.02,0.01)."),
    ] = None,
    structured: Annotated[
        bool, typer.Option("--structured", help="Sparsity by whole inputs, units and filters, of DropConnect++ alone.")
    ] = False,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls",
            help="Train what DropConnect++ must beat too: its support drawn at random, by size, not learned.",
        ),
    ] = False,
    tries: Annotated[
        int, typer.Option(min=1, help="Networks of each setting that sparsity tries on held-out training data.")
    ] = 2,
    members: Annotated[
        int,
        typer.Option(min=2, help="Networks of each population (default: a fifth of a grid of 72 networks)."),
    ] = POPULATION_MEMBERS,
    every: Annotated[int, typer.Option(min=1, help="Epochs after which the worst of a population take over.")] = 5,
    first_replica: Annotated[
        int,
        typer.Option(min=0, help="Number of the first network. Machines that share no folder need different ones."),
    ] = 0,
    device: DeviceName = "auto",
    out: Out = Path("dcpp-results"),
    replicas_at_once: ReplicasAtOnce = None,
    workers: Workers = None,
    engine: EngineName = None,
    address: Address = None,
    threads: Threads = None,
    storage: StorageRoot = None,
    time_limit: TimeLimit = None,
    data_dir: DataDirectory = None,
) -> None:
    """Run an experiment of the paper, or your own, and write its tables and a page.

    table1, table2, table3 and figure1 are the paper's. uncertainty judges probabilities by one pass, over drawn
    networks and of ensembles of 5, on the test set, on corrupted images and against foreign ones; small-data does so
    with few training examples, each network with its own. sparsity compares methods that keep few connections, error
    against the share of weights kept: DropConnect++, pruning by size, Sparse VD and L0, each tried with as many
    settings on held-out training data; the best at each share goes to the test set. population finds step size and
    rate, or the price of a connection, by epoch: networks of one stack, of which the worst take over weights and
    settings of the best every few epochs, judged on held-out training images; then --repeats fresh networks train by
    what was found, on all training images. uci compares methods on the regression benchmark's sets that were fetched,
    on all published splits; settings are chosen within each training split, as many for each method.

    If it is stopped or killed, the same command resumes it. Several processes may share a folder.

    Examples:

      dcpp run table1 --dataset cifar10 --repeats 50 --device cuda

      dcpp run table1 --dataset fashion-mini --epochs 5 --repeats 3

      dcpp run table1 --dataset cifar10 --engine host --device cuda

      dcpp run uncertainty --dataset fashion-mnist --foreign mnist --device cuda

      dcpp run small-data --dataset fashion-mnist --examples 250,1000,all --device cuda

      dcpp run sparsity --dataset mnist --network lenet-300-100 --keep 0.05,0.02,0.01 --device cuda

      dcpp run population --dataset cifar10 --methods dropconnect --members 14 --device cuda

      dcpp run uci --dataset uci:yacht

      dcpp run mine.toml --out results --time-limit 9m
    """
    from dropconnectpp.lab.config import experiments, small_data, uncertainty
    from dropconnectpp.lab.runs import execution

    if what != "small-data":
        _refuse(what, context, ("examples",), "It is for dcpp run small-data.")
    if what == "uci":
        team = Team(workers, engine, storage, 1, address)
        _run_uci(context, dataset, methods, repeats, seed, out, time_limit, data_dir, team)
        return
    if what not in experiments.NAMES and (what.endswith(".toml") or Path(what).is_file()):
        experiment = experiments.from_file(Path(what))
        _refuse(what, context, (*SHARED, *PAPER_ONLY, *SPARSITY_ONLY, *POPULATION_ONLY), f"Write it into {what}.")
        experiment = experiment if repeats is None else replace(experiment, repeats=repeats)
    elif what == "population":
        _refuse(what, context, (*PAPER_ONLY, *SPARSITY_ONLY), "It finds step size and rate on held-out training data.")
        experiment = experiments.population(
            dataset,
            methods=POPULATION_METHODS if methods is None else _listed(methods),
            members=members,
            every=every,
            repeats=50 if repeats is None else repeats,
            epochs=epochs,
            root_seed=seed,
        )
    elif what == "sparsity":
        _refuse(what, context, (*PAPER_ONLY, *POPULATION_ONLY), "Its settings are tried on held-out training data.")
        experiment = experiments.sparsity(
            dataset,
            network,
            search=experiments.sparsity_search(keep, tries=tries, structured=structured, controls=controls),
            methods=None if methods is None else _listed(methods),
            structured=structured,
            repeats=20 if repeats is None else repeats,
            epochs=epochs,
            root_seed=seed,
        )
    elif what in ("uncertainty", "small-data"):
        not_for_it = (*SPARSITY_ONLY, *POPULATION_ONLY, "hyper")
        _refuse(what, context, not_for_it, "It compares methods as they are, by --methods.")
        experiment = uncertainty.uncertainty(
            dataset,
            fewer=None if what == "uncertainty" else small_data.given(examples),
            methods=uncertainty.METHODS if methods is None else _listed(methods),
            repeats=20 if repeats is None else repeats,
            epochs=epochs,
            step_size=step_size,
            rate=rate,
            root_seed=seed,
            foreign=foreign,
            together=together,
        )
    else:
        _refuse(what, context, SPARSITY_ONLY, "It is for dcpp run sparsity.")
        _refuse(what, context, POPULATION_ONLY, "It is for dcpp run population.")
        experiment = experiments.of_the_paper(
            what,
            dataset,
            methods=list(PAPER_METHODS) if methods is None else _listed(methods),
            repeats=50 if repeats is None else repeats,
            epochs=epochs,
            step_size=step_size,
            rate=rate,
            hyper=hyper,
            root_seed=seed,
            foreign=foreign,
            together=together,
        )
    experiment = replace(experiment, first_replica=first_replica)
    if what == "table2":
        _refuse(what, context, TEAM, "It times methods in turn, on one device.")
    team = Team(workers, engine, storage, threads, address)
    with _runner(out, device, data_dir, replicas_at_once, time_limit, team) as runner:
        execution.check_data(experiment, runner)
        make_folder(out)
        execution.remember_command(experiment, runner, _command(), timing=what == "table2")
        if what == "table2":
            _time(experiment, runner)
        elif not execution.train(experiment, runner):
            raise typer.Exit(3)
    shown = "sparsity" if experiment.sparsity is not None else "uncertainty" if experiment.judged else what
    write_report(out, "small-data" if experiment.fewer else shown)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the results and the page.")] = Path("dcpp-demo"),
    repeats: Annotated[int, typer.Option(min=1, help="Networks of each method.")] = 4,
    epochs: Annotated[
        int,
        typer.Option(min=1, help="Epochs of the networks of Table 1. Those with few connections take twice as many."),
    ] = 5,
    device: DeviceName = "auto",
) -> None:
    """Show what the library is for, on images that come with the package; it takes minutes on a laptop.

    First, few connections: a network that learns which to keep, beside a plain one and gradual magnitude pruning. What
    was kept, its doubt about foreign images, and the model before and after compact. Then the paper's Table 1 in
    small, which ranks no methods: for that, use `dcpp run table1`.

    If it is stopped, the same command resumes it.
    """
    from dropconnectpp.lab.config import experiments
    from dropconnectpp.lab.runs import demo as library
    from dropconnectpp.lab.runs import execution

    experiment = experiments.demo(repeats, epochs)
    settings = library.Settings(seeds=repeats, epochs=2 * epochs)
    with _runner(out, device, None, None, None) as runner:
        make_folder(out)
        execution.check_data(experiment, runner)
        execution.remember_command(experiment, runner, _command())
        first = experiment.protocols[0]
        library.show(settings, runner.dataset(first.data), runner.store, first.digest, runner.display.steps)
        if not execution.train(experiment, runner):
            raise typer.Exit(3)
        _time(experiment, runner, rounds=3, steps=5)
    write_report(out, "demo")


# -------------------------------------------------------------------------- the steps of an experiment


def _run_uci(
    context: typer.Context,
    dataset: str,
    methods: str | None,
    splits: int | None,
    seed: int,
    out: Path,
    time_limit: str | None,
    data_dir: Path | None,
    team: Team,
) -> None:
    from dropconnectpp.lab.cli.uci import ADVICE, NOT_FOR_IT, run_uci

    _refuse("uci", context, (*PAPER_ONLY, *SPARSITY_ONLY, *POPULATION_ONLY, *NOT_FOR_IT), ADVICE)
    name = dataset if _given(context, "dataset") else None
    listed = None if methods is None else _listed(methods)
    complete = run_uci(name, listed, splits, seed, out, time_limit, data_dir, _command(), team)
    write_report(out, "uci")
    if not complete:
        raise typer.Exit(3)


@contextmanager
def _runner(
    out: Path,
    device: str,
    data_dir: Path | None,
    at_once: int | None,
    time_limit: str | None,
    team: Team = ALONE,
) -> Iterator[Runner]:
    from dropconnectpp.lab import data
    from dropconnectpp.lab.cli.display import run_display
    from dropconnectpp.lab.data import cache
    from dropconnectpp.lab.runs.interruption import Interruption
    from dropconnectpp.lab.runs.runner import Runner

    deadline = None if time_limit is None else time.monotonic() + duration(time_limit)
    chosen = team.driver_device(device)
    if out.exists() and not out.is_dir():
        raise ProtocolError(f"{out}: is a file. Give a folder.")

    interruption = Interruption()
    load = partial(data.load, directory=cache.data_directory(data_dir).absolute())  # workers may have another home
    workers = team.gather(out, device, load)
    try:
        with interruption.caught(), run_display() as display, closing(workers):
            yield Runner(
                out,
                chosen,
                load,
                display,
                group=at_once,
                deadline=deadline,
                interruption=interruption,
                engine=workers,
                storage=team.storage_for(out),
            )
    except KeyboardInterrupt:
        Console(stderr=True).print("Stopped. What was finished or checkpointed is kept; the same command resumes.")
        raise


SHARED = ("dataset", "methods", "epochs", "seed")
PAPER_ONLY = ("step_size", "rate", "together", "hyper", "foreign")
SPARSITY_ONLY = ("network", "keep", "structured", "controls", "tries")
POPULATION_ONLY = ("members", "every")
"""Options by the experiments that take them; a file takes none of them."""
TEAM = ("workers", "engine", "address", "threads", "storage")
"""Options of the processes that train."""


def _refuse(what: str, context: typer.Context, names: tuple[str, ...], advice: str) -> None:
    """Raise if an option was given that this experiment does not take: it must not be ignored silently."""
    for name in names:
        if _given(context, name):
            raise ProtocolError(f"--{name.replace('_', '-')} is not for {what}. {advice}")


def _given(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _listed(names: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def _time(experiment: Experiment, runner: Runner, rounds: int = 31, steps: int = 30) -> None:
    from dropconnectpp.lab.replicas import timing

    protocols = experiment.protocols
    runner.display.note(f"timing in turn: {', '.join(protocol.method.label for protocol in protocols)}")
    dataset = runner.dataset(protocols[0].data)
    complete = [timing.complete(protocol) for protocol in protocols]
    told = runner.display.timing
    found = timing.measure(complete, dataset, runner.device, rounds=rounds, steps=steps, told=told)
    with runner.store() as store:
        for protocol, timings in zip(protocols, found, strict=True):
            store.add(protocol)
            store.write_note(protocol.digest, "timings", timings)


def _command() -> str:
    return shlex.join(["dcpp", *sys.argv[1:]])
