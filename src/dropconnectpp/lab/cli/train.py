"""`dcpp train`: train one network and save it as a model."""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dropconnectpp
from dropconnectpp.errors import DropConnectError
from dropconnectpp.lab.cli.console import say
from dropconnectpp.lab.cli.options import DataDirectory, DatasetName, DeviceName, Epochs, Seed
from dropconnectpp.lab.config.method import METHODS, PRESETS, Method
from dropconnectpp.lab.config.settings import ProtocolError

if TYPE_CHECKING:
    from torch import nn


def train(
    model: Annotated[Path, typer.Option("--model", help="File for the trained network, in safetensors format.")],
    dataset: DatasetName = "fashion-mini",
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "dropconnect++",
    estimator: Annotated[
        str | None,
        typer.Option(help="Gradient estimator of the keep probabilities (default: bbvi, or the preset's)."),
    ] = None,
    hyper: Annotated[
        str | None,
        typer.Option(help="Beta posterior of DropConnect++: learned or optimal (default: learned, or the preset's)."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Share that Dropout or DropConnect drops (default: one half).")
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(help="Step size of Adagrad (default: 0.01; for a preset 0.005, with which it was measured)."),
    ] = None,
    epochs: Epochs = 10,
    seed: Seed = 0,
    device: DeviceName = "auto",
    data_dir: DataDirectory = None,
) -> None:
    """Train one network and save it as a model that `dropconnectpp.load` reads.

    Example:

      dcpp train --model net.safetensors --dataset fashion-mini --method dropconnect++ --epochs 10
    """
    from dropconnectpp.lab import data
    from dropconnectpp.lab import device as devices
    from dropconnectpp.lab.cli.display import run_display
    from dropconnectpp.lab.config.protocol import paper
    from dropconnectpp.lab.replicas import evaluation, modules
    from dropconnectpp.lab.replicas.network import Unit
    from dropconnectpp.lab.replicas.stack import Stack

    protocol = paper(dataset, method)
    chosen = _with_options(protocol.method, method, estimator=estimator, hyper=hyper, rate=rate)
    if step_size is None:
        step_size = 0.005 if method in PRESETS else 0.01
    protocol = replace(
        protocol, method=chosen, training=replace(protocol.training, step_size=step_size, epochs=epochs), root_seed=seed
    )
    _require_writable(model)
    found = data.load(dataset, directory=data_dir)
    found.begin_check()
    stack = Stack([Unit(protocol, 0)], found, devices.choose(device))
    with run_display() as display:
        display.group(f"{dataset}: {chosen.label}", 1, epochs, 0)
        for epoch in range(1, epochs + 1):
            loss = float(stack.train_epoch()[0])
            last = epoch == epochs
            point = evaluation.along_the_way(stack, replace(protocol.evaluation, curve_samples=0))[0] if last else {}
            display.epoch(epoch, loss, point.get("accuracy"))
    if not math.isfinite(loss):
        raise ProtocolError(
            f"the training diverged at step size {step_size}, and nothing was written. Use a smaller step size."
        )
    found.require_whole()
    _save(modules.to_module(stack, 0), model)
    say(f"Test accuracy {point['accuracy']:.2f}% by Eq. (19). Written: {model}")


def _require_writable(model: Path) -> None:
    """Raise now what would keep the network from being written after hours of training."""
    if not model.parent.is_dir():
        raise ProtocolError(f"{model}: its folder does not exist. Make it, or give another path.")
    if model.is_dir():
        raise ProtocolError(f"{model}: is a folder. Give the path of a file in it.")
    try:
        with tempfile.NamedTemporaryFile(dir=model.parent, prefix=".dcpp-"):
            pass
        with suppress(FileNotFoundError), model.open("rb+"):
            pass
    except OSError as error:
        raise ProtocolError(
            f"{model}: cannot be written ({error.strerror}). Give another path, or change the permissions."
        ) from error


def _save(network: nn.Module, model: Path) -> None:
    """Write the network or, where that is no longer possible, keep it elsewhere and say where."""
    try:
        dropconnectpp.save(network, model)
    except (DropConnectError, OSError) as error:
        kept = Path(tempfile.mkdtemp(prefix="dropconnectpp-")) / "network.safetensors"
        dropconnectpp.save(network, kept)
        raise ProtocolError(f"{error} The trained network is not lost: {kept} holds it.") from error


def _with_options(chosen: Method, name: str, **options: Any) -> Method:
    """The method with the options of the command line, and with a rate if it needs one."""
    given = {option: value for option, value in options.items() if value is not None}
    unused = [one for one in given if not (chosen.has_rate if one == "rate" else chosen.kind == "dropconnect++")]
    if unused:
        raise ProtocolError(f"{name} has no {unused[0]}. Leave out --{unused[0]}, or choose another --method.")
    return replace(chosen, **({"rate": 0.5} if chosen.has_rate else {}) | given)
