"""Carrying out an experiment: what a command line, or a plain script without one, does with it."""

from __future__ import annotations

from dropconnectpp.lab.config.experiments import Experiment
from dropconnectpp.lab.config.notes import COMMAND, COMMAND_TOGETHER, TIMING_COMMAND
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.runs.ensembles import judge_ensembles, missing
from dropconnectpp.lab.runs.frontier import train_frontier
from dropconnectpp.lab.runs.hyperparameters import choose_hyperparameters
from dropconnectpp.lab.runs.population import train_populations
from dropconnectpp.lab.runs.runner import Runner


def check_data(experiment: Experiment, runner: Runner) -> None:
    """Load every data set, before hours of training and before anything is written."""
    for protocol in experiment.protocols:
        shape = runner.dataset(protocol.data).shape
        foreign = protocol.evaluation.foreign
        if foreign and (other := runner.dataset(foreign).shape)[1:] != shape[1:]:
            raise ProtocolError(
                f"foreign images must be as large as those of {protocol.data}, {shape[1]} x {shape[2]}, and those of "
                f"{foreign} are {other[1]} x {other[2]}."
            )


def train(experiment: Experiment, runner: Runner) -> bool:
    """Choose open settings, then train. Return whether everything is finished."""
    if experiment.sparsity is not None:
        return train_frontier(experiment, runner)
    if experiment.population is not None:
        return train_populations(experiment, runner)
    complete = choose_hyperparameters(experiment.protocols, runner, experiment.selection)
    if complete is None:
        return False
    members = experiment.ensembles
    runner.keeps_predictions = members > 0
    protocols = list({p.digest: p for p in complete.values()}.values())

    def judge() -> bool:
        return not members or judge_ensembles(protocols, members, experiment.replicas, runner)

    outcome = runner.run([Unit(p, replica) for p in protocols for replica in experiment.replicas], judge)
    if outcome.left and not outcome.stopped:
        runner.display.note(f"Other processes train the rest: {outcome.left} left.")
        with runner.store(read_only=True) as store:
            for holder in store.holders():
                if holder.ahead:
                    runner.display.note(
                        f"The clock of {holder} is far ahead of this one's, or cannot be read. If that process is "
                        "gone, free its work with: dcpp store release"
                    )
    if not judge() and not outcome.left:
        for line in missing(protocols, members, experiment.replicas, runner):
            runner.display.note(line)
    return not outcome.left


def remember_command(experiment: Experiment, runner: Runner, command: str, *, timing: bool = False) -> None:
    """Note the command, so that the page can show it whoever builds it later; timings have a note of their own."""
    name = TIMING_COMMAND if timing else COMMAND_TOGETHER if experiment.selection.together else COMMAND
    with runner.store() as store:
        for protocol in experiment.protocols:
            store.add(protocol)
            store.write_note(protocol.digest, name, command)
