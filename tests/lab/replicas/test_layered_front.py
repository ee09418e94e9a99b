"""The convolutions of a network given as layers through the paper's: which fit, and that they compute the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layered_cases import METHODS, PROTOCOL, train, unit
from tiny_cases import tiny
from torch import Tensor

from dropconnectpp.lab.config.layers import NETWORKS, Layer, LayeredShape
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas import layered_evaluation, layered_stack
from dropconnectpp.lab.replicas.layered_front import fitting_front, front_of
from dropconnectpp.lab.replicas.layered_network import apply_weights, predict, run_layers, start
from dropconnectpp.lab.replicas.layered_stack import LayeredStack

PAPER = NETWORKS["paper-dense"]
PAPERS = replace(PROTOCOL, architecture=Architecture(name="paper-dense"), precision="mixed")
IMAGES = tiny(channels=3, side=32)
CHANGES = {
    "another filter": (3, replace(PAPER[3], size=3)),
    "another padding": (3, replace(PAPER[3], padding=1)),
    "a stride": (0, replace(PAPER[0], stride=2)),
    "another pool": (4, replace(PAPER[4], size=2)),
    "tanh": (5, Layer(kind="activation", function="tanh")),
}


def test_the_papers_network_is_the_papers() -> None:
    found = front_of(PAPER)
    assert found is not None
    assert found.architecture == Architecture()
    assert (found.layers, found.weight_layers) == (8, 3)
    shape = LayeredShape(PAPER, 3, 32, 10)
    dense = shape.weight_layers()[3]
    assert (dense.inputs, dense.units, dense.weights) == (4096, 64, 262_144)
    assert [one.layer.gated for one in shape.weight_layers()] == [False, False, False, True, False]


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_kernels_would_compute_otherwise_stays_with_the_layers(name: str) -> None:
    place, layer = CHANGES[name]
    assert front_of((*PAPER[:place], layer, *PAPER[place + 1 :])) is None


def test_a_network_without_convolutions_has_none() -> None:
    assert front_of(NETWORKS["lenet-300-100"]) is None


@pytest.mark.parametrize(("name", "fits"), [("paper-dense", True), ("paper-gated", True), ("lenet-5-caffe", False)])
def test_the_kernels_take_maps_of_certain_sizes(name: str, fits: bool) -> None:
    assert (fitting_front(LayeredShape(NETWORKS[name], 3, 32, 10)) is not None) == fits


def parameters(shape: LayeredShape, replicas: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    weights = start(shape.weight_layers(), 0, replicas, torch.float64)
    draw = Stream(0, "biases")
    biases = [draw.uniform(replicas, n, w.shape[2], dtype=torch.float64) - 0.5 for n, w in enumerate(weights)]
    return weights, biases


@pytest.mark.parametrize("name", ["paper-dense", "lenet-5-caffe"])
def test_it_computes_what_the_layers_compute(name: str) -> None:
    """Maps, logits and gradients, in float64."""
    shape = LayeredShape(NETWORKS[name], 3, 16, 10)
    front, replicas = front_of(shape.layers), torch.arange(2)
    assert front is not None
    images = Stream(1, "images").uniform(replicas, 0, 2 * 16 * 16 * 3, dtype=torch.float64).view(2, 2, 16, 16, 3)
    found = []
    for done in (0, front.layers):
        weights, biases = parameters(shape, replicas)
        leaves = [one.requires_grad_() for one in (*weights, *biases)]
        layers = shape.weight_layers()

        def affine(number: int, x: Tensor, with_bias: bool, given=(layers, weights, biases)) -> Tensor:
            layers, weights, biases = given
            return apply_weights(layers[number], x, weights[number], biases[number] if with_bias else None)

        maps = front.run(images, weights, biases) if done else images
        logits = run_layers(shape, maps, affine, biases, done)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_it_predicts_what_the_layers_predict() -> None:
    shape, replicas = LayeredShape(PAPER, 1, 14, 3), torch.arange(3)
    weights, biases = parameters(shape, replicas)
    images = Stream(1, "images").uniform(replicas[:1], 0, 4 * 14 * 14, dtype=torch.float64).view(4, 14, 14, 1)
    found = [predict(shape, images, weights, biases, front) for front in (None, front_of(PAPER))]
    torch.testing.assert_close(*found)


def test_on_a_cpu_there_is_none() -> None:
    stack = LayeredStack([unit("plan")], tiny(), torch.device("cpu"))
    assert stack.front is None


@pytest.mark.parametrize("name", ["plan", "gradual", "by layer", "sparse vd", "l0"])
def test_a_stack_trains_the_same_with_it_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where nobody takes it, in float64."""
    units = [unit(name, replica, replace(PAPERS, precision="float64")) for replica in range(2)]
    stacks = []
    for find in (lambda shape, *_: fitting_front(shape), lambda *_: None):
        monkeypatch.setattr(layered_stack, "supported_front", find)
        stacks.append(LayeredStack(units, IMAGES, torch.device("cpu")))
        stacks[-1].train_epoch()
    assert stacks[0].front is not None
    assert stacks[1].front is None
    for one, other in zip(stacks[0].weights, stacks[1].weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    found = [layered_evaluation.final(stack, PAPERS.evaluation) for stack in stacks]
    assert [row["accuracy"] for row in found[0]] == [row["accuracy"] for row in found[1]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in METHODS if name != "random"])
def test_a_gpu_trains_the_same_with_it_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 maps: losses agree to their rounding."""
    device = torch.device("cuda")
    units = [unit(name, replica, PAPERS) for replica in range(2)]
    with_it = LayeredStack(units, IMAGES, device)
    assert with_it.front is not None
    monkeypatch.setattr(layered_stack, "supported_front", lambda *_: None)
    without = LayeredStack(units, IMAGES, device)
    assert without.front is None
    for one, other in zip(with_it.train_epoch(), without.train_epoch(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_on_a_gpu_gates_on_the_convolutions_take_it_without_noise_of_their_own() -> None:
    gated = replace(PAPERS, architecture=Architecture(name="paper-gated"))
    device = torch.device("cuda")
    for name, fits in (("plan", True), ("sparse vd", False), ("dropout", False), ("l0", True)):
        assert (LayeredStack([unit(name, 0, gated)], IMAGES, device).front is not None) == fits
    stack = train(LayeredStack([unit("plan", 0, gated)], IMAGES, device))
    assert layered_evaluation.final(stack, gated.evaluation)[0]["weights_kept"] > 0
