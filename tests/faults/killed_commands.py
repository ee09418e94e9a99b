"""Commands that are killed, as work for a process that has imported all they need: `injection.Faulty` forks it."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.lab.cli import main as cli
from dropconnectpp.lab.data import catalogue
from dropconnectpp.lab.report.render import drawing
from dropconnectpp.lab.runs import runner

matplotlib.use("agg")
runner.commit()  # asks git once; each fork knows the answer
IMPORTS = [
    __name__,
    *(f"dropconnectpp.lab.cli.{name}" for name in ("console", "data", "display", "results", "run", "train", "tune")),
    *("dropconnectpp.lab.report", "dropconnectpp.lab.runs.execution", "dropconnectpp.lab.config.experiments"),
    *("matplotlib.backends.backend_svg", "matplotlib.backends.backend_pdf", "dropconnectpp.io", "safetensors.torch"),
    *("PIL.PngImagePlugin", "requests", "filelock", "sklearn.linear_model", "scipy.stats"),
]
TRAIN, TEST, SIDE = 140, 30, 28  # train needs a minibatch of 128
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
EXPERIMENT = """
repeats = 2

[protocol]
data = "tiny"

[protocol.architecture]
maps = [2]
pooled = [true]
filter_size = 3
padding = 1
hidden = 3

[protocol.training]
step_size = 0.05
batch_size = 30
epochs = 2

[protocol.evaluation]
every = 1
curve_samples = 1
samples = [1, 2]
shares = [1.0, 0.5]
predictive_samples = 2

[[methods]]
kind = "none"

[[methods]]
kind = "dropconnect++"
"""


def published(seed: int) -> dict[str, bytes]:
    """A data set as a site publishes it: four gzipped idx files, whose images a seed makes."""
    random = np.random.default_rng(seed)
    files = {}
    for images, labels, count in ((NAMES[0], NAMES[1], TRAIN), (NAMES[2], NAMES[3], TEST)):
        pixels = random.integers(0, 256, (count, SIDE, SIDE), dtype=np.uint8)
        files[images] = struct.pack(">4I", 0x803, count, SIDE, SIDE) + pixels.tobytes()
        files[labels] = struct.pack(">2I", 0x801, count) + (np.arange(count) % 10).astype(np.uint8).tobytes()
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}


def entry(address: str) -> catalogue.Entry:
    """The data set of `published(1)`, with its checksums."""
    official = {
        name.removesuffix(".gz"): tuple(
            hashlib.md5(part, usedforsecurity=False).hexdigest() for part in (content, gzip.decompress(content))
        )
        for name, content in published(1).items()
    }
    return replace(
        catalogue.CATALOGUE["mnist"],
        name="tiny",
        counts=(TRAIN, TEST),
        address=address,
        official=official,  # type: ignore[arg-type]
        system_folder=None,
    )


def call(arguments: list[str], said: Path, address: str = "") -> int:
    """The command as a user types it; its process's number stands in a file beside ``said`` from the start."""
    _begin(said)
    catalogue.CATALOGUE["tiny"] = entry(address)
    drawing.METADATA = {"svg": drawing.METADATA["svg"]}  # figures in three forms would take most of the time
    # A checkpoint after every epoch, not every minute.
    runner.Runner = partial(runner.Runner, checkpoint_s=0.0)  # type: ignore[assignment, misc]
    sys.argv = ["dcpp", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def model(seed: int) -> nn.Module:
    """A network whose file holds packed tensors, others, and masks."""
    torch.manual_seed(seed)
    found = dcpp.convert(nn.Sequential(nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 10)))
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return dcpp.prune(found, keep=0.1)


def save(seed: int, path: Path, said: Path) -> int:
    """`dropconnectpp.save`, over whatever is there."""
    _begin(said)
    dcpp.save(model(seed), path)
    return 0


def _begin(said: Path) -> None:
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    number = said.with_suffix(".pid")
    number.with_suffix(".new").write_text(str(os.getpid()))
    os.replace(number.with_suffix(".new"), number)  # whoever reads it finds all of it
