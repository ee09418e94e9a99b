"""Table 2: seconds per epoch of each method, and what a prediction costs. Measured warm, one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import dropconnectpp
from dropconnectpp.lab import device as devices
from dropconnectpp.lab import evaluation, modules
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.protocol import Protocol
from dropconnectpp.lab.training import Stack, Unit

PREDICTIONS = 10_000
STEPS = 30
"""Training steps that are timed; an epoch is as many times that."""
MC_SAMPLES = 30


def measure(
    protocol: Protocol,
    dataset: Dataset,
    device: torch.device,
    *,
    replicas: int = 1,
    repeats: int = 5,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Timings of one complete protocol: medians over the repeats, warm."""
    stack = Stack([Unit(protocol, replica) for replica in range(replicas)], dataset, device)
    whole = len(stack.batches)
    stack.batches = stack.batches[:steps]
    stack.train_epoch()
    shuffled = median_seconds(stack.shuffle, device, repeats)
    taken = median_seconds(stack.train_batches, device, repeats)
    return {
        "seconds_per_epoch": (shuffled + taken / len(stack.batches) * whole) / replicas,
        "replicas": replicas,
        "prediction": _prediction(stack, device, repeats),
        "device": devices.describe(device),
    }


def _prediction(stack: Stack, device: torch.device, repeats: int) -> dict[str, float]:
    """Seconds per 10,000 predictions of the first replica as an ordinary module."""
    module = modules.to_module(stack, 0).to(device)
    images = stack.examples.test_images[: min(1_000, len(stack.examples.test_images))]
    batches = [stack.examples.standardise(part, stack.dtype) for part in images.split(evaluation.CHUNK // 4)]
    scale = PREDICTIONS / len(images)

    @torch.no_grad()
    def run(model: Callable[[Any], Any]) -> None:
        for batch in batches:
            model(batch)

    def timed(model: Callable[[Any], Any]) -> float:
        run(model)
        return scale * median_seconds(lambda: run(model), device, repeats)

    kind = stack.protocol.method.kind
    if kind in ("none", "dropout"):
        return {kind: timed(module)}
    found = {"mean": timed(module)}
    if stack.protocol.method.evaluation == "mean":  # no plain layer does what "gaussian" does
        found["folded"] = timed(dropconnectpp.to_dense(module))
    found[f"mc{MC_SAMPLES}"] = timed(lambda batch: dropconnectpp.predict(module, batch, num_samples=MC_SAMPLES))
    return found


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of a call on a device, once everything queued there is done."""
    taken = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def complete(protocol: Protocol) -> Protocol:
    """A protocol with any step size and rate: time does not depend on them."""
    method = (
        replace(protocol.method, rate=0.5)
        if protocol.method.has_rate and protocol.method.rate is None
        else protocol.method
    )
    return replace(
        protocol, method=method, training=replace(protocol.training, step_size=protocol.training.step_size or 0.005)
    )


def in_turn(protocols: Sequence[Protocol]) -> list[Protocol]:
    """No regularisation first: it is what the others are compared with."""
    return sorted(protocols, key=lambda protocol: protocol.method.kind != "none")
