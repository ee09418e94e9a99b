"""`dcpp train` as a user types it: a network becomes a model that loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_cases import made
from safetensors.torch import load_file

import dropconnectpp
from dropconnectpp.lab.config.method import METHODS
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.replicas.modules import build
from dropconnectpp.lab.replicas.network import Shape


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in METHODS),
        ("dropout", {"rate": 0.3}),
        ("dropconnect++", {"hyper": "optimal", "estimator": "disarm"}),
        ("sparse", {"estimator": "concrete"}),
    ],
)
def test_a_trained_network_is_a_model_that_loads(dcpp, kind, options):
    said = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    code, out, err = dcpp(
        *("train", "--model", "net.safetensors", "--dataset", "tiny", "--method", kind, "--epochs", "2", *said)
    )
    assert code == 0
    assert err.splitlines()[0].endswith("1 replica, 2 epochs")
    assert out.endswith("Written: net.safetensors\n")
    method = replace(METHODS[kind], **({"rate": 0.5} if METHODS[kind].has_rate else {}) | options)
    assert err.splitlines()[0].startswith(f"tiny: {method.label}")
    model = dropconnectpp.load("net.safetensors", build(Shape(Architecture(), 1, 8, 3), method)).eval()
    images = torch.from_numpy(made("tiny").test.images).float()
    images = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)
    with torch.no_grad():
        right = model(images).argmax(1) == torch.from_numpy(made("tiny").test.labels)
    assert out.startswith(f"Test accuracy {100 * float(right.float().mean()):.2f}% by Eq. (19).")


def test_the_same_seed_trains_the_same_network(dcpp):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        dcpp("train", "--model", name, "--dataset", "tiny", "--epochs", "1", "--seed", seed)
    one, same, other = (load_file(name) for name in "abc")
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["dense.weight"], other["dense.weight"])


def test_a_training_that_diverged_is_told_and_not_written(dcpp):
    code, out, err = dcpp("train", "--model", "net", "--dataset", "tiny", "--epochs", "2", "--step-size", "1e30")
    assert (code, out) == (1, "")
    assert "Error: the training diverged at step size 1e+30, and nothing was written. Use a smaller step size." in err
    assert not Path("net").exists()
