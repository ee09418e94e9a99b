"""Table 2: seconds per epoch of each method, and what a prediction costs; measured warm and in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import dropconnectpp
from dropconnectpp.lab import device as devices
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.replicas import evaluation, modules
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

PREDICTIONS = 10_000
PATIENCE_S = 60.0
"""After which no round begins, except for the first five."""
MC_SAMPLES = 30

Runs = dict[str, Callable[[], object]]


def measure(
    protocols: Sequence[Protocol],
    dataset: Dataset,
    device: torch.device,
    *,
    replicas: int = 1,
    rounds: int = 31,
    steps: int = 30,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Timings of complete protocols on one data set: medians over the rounds, and what each round took.

    A round times each protocol once, so that a rising clock or a busy neighbour affects all alike: rounds of one
    ``session`` may be compared in pairs. An epoch is scaled from its first `steps`. ``told`` is called with the number
    of rounds that are over, and of all.
    """
    stacks = [
        Stack([Unit(protocol, replica) for replica in range(replicas)], dataset, device) for protocol in protocols
    ]
    epochs = [len(stack.batches) for stack in stacks]
    for stack in stacks:
        stack.examples = stacks[0].examples  # one copy of the images, the same for all
        stack.batches = stack.batches[:steps]
        stack.train_epoch()
    runs = [{"shuffle": stack.shuffle, "steps": stack.repeat_batches, **_predictions(stack)} for stack in stacks]
    session = str(time.time_ns())
    return [
        _found(stack, epoch, replicas, taken) | {"device": devices.describe(device), "session": session}
        for stack, epoch, taken in zip(stacks, epochs, all_rounds(runs, device, rounds, told), strict=True)
    ]


def _found(stack: Stack, epoch: int, replicas: int, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Seconds of an epoch of one network and of 10,000 predictions: their medians, and round by round."""
    shuffles, steps = taken.pop("shuffle"), taken.pop("steps")
    scale = PREDICTIONS / _examples(stack)

    def an_epoch(shuffle: float, some: float) -> float:
        return (shuffle + some / len(stack.batches) * epoch) / replicas

    each = {name: [scale * one for one in several] for name, several in taken.items()}
    return {
        "seconds_per_epoch": an_epoch(statistics.median(shuffles), statistics.median(steps)),
        "replicas": replicas,
        "prediction": {name: statistics.median(several) for name, several in each.items()},
        "rounds": {"epoch": [an_epoch(*one) for one in zip(shuffles, steps, strict=True)], **each},
    }


def in_rounds(
    runs: Sequence[Runs],
    device: torch.device,
    rounds: int,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, float]]:
    """Median seconds of calls that take turns; each has run once before."""
    found = all_rounds(runs, device, rounds, told)
    return [{name: statistics.median(several) for name, several in times.items()} for times in found]


def all_rounds(
    runs: Sequence[Runs],
    device: torch.device,
    rounds: int,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, list[float]]]:
    """Seconds of calls that take turns, for each round; each has run once before."""
    taken: list[dict[str, list[float]]] = [{name: [] for name in one} for one in runs]
    for one in runs:
        for run in one.values():
            run()
    start = time.monotonic()
    for done in range(rounds):
        if done >= 5 and time.monotonic() - start > PATIENCE_S:
            break
        for one, times in zip(runs, taken, strict=True):
            for name, run in one.items():
                times[name].append(seconds(run, device))
        told(done + 1, rounds)
    return taken


def _examples(stack: Stack) -> int:
    """Images predicted in a round: a CPU takes long for 10,000."""
    return min(PREDICTIONS if stack.device.type == "cuda" else 1_000, len(stack.examples.test_images))


def _predictions(stack: Stack) -> Runs:
    """The ways in which the first replica can predict, as an ordinary module."""
    module = modules.to_module(stack, 0).to(stack.device)
    images = stack.examples.test_images[: _examples(stack)]
    batches = [stack.examples.standardise(part, stack.dtype) for part in images.split(evaluation.CHUNK)]

    def of(model: Callable[[Any], Any]) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            for batch in batches:
                model(batch)

        return run

    kind = stack.protocol.method.kind
    if kind in ("none", "dropout"):
        return {kind: of(module)}
    found: Runs = {"mean": of(module)}
    if stack.protocol.method.evaluation == "mean":  # no plain layer does what "gaussian" does
        found["folded"] = of(dropconnectpp.to_dense(module))
    found[f"mc{MC_SAMPLES}"] = of(
        lambda batch: dropconnectpp.predict(
            module,
            batch,
            num_samples=MC_SAMPLES,
            average="activations",
            likelihood=dropconnectpp.categorical,
            batch_size=None,
        )
    )
    return found


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call on a device, over the repeats."""
    return statistics.median(seconds(run, device) for _ in range(repeats))


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call on a device, once everything queued there is done."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def complete(protocol: Protocol) -> Protocol:
    """The protocol with some step size and rate: the time does not depend on them."""
    method = (
        replace(protocol.method, rate=0.5)
        if protocol.method.has_rate and protocol.method.rate is None
        else protocol.method
    )
    return replace(
        protocol, method=method, training=replace(protocol.training, step_size=protocol.training.step_size or 0.005)
    )
