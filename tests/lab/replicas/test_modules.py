"""A trained replica as an ordinary model: it predicts what the stack predicts, and is saved, folded and loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_cases import ONE_LAYER, TINY, tiny
from torch import nn

import dropconnectpp
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Architecture
from dropconnectpp.lab.replicas.modules import build, to_module
from dropconnectpp.lab.replicas.network import Shape, Unit
from dropconnectpp.lab.replicas.stack import Stack

EXACT = replace(TINY, precision="float64")
METHODS = {
    "none": Method(kind="none"),
    "dropout": Method(kind="dropout", rate=0.4),
    "dropconnect": Method(kind="dropconnect", rate=0.3),
    "dropconnect-at-rate-0": Method(kind="dropconnect", rate=0.0),
    "gaussian": Method(kind="dropconnect", rate=0.3, evaluation="gaussian"),
    "dropconnect++": Method(),
    "optimal": Method(hyper="optimal", keep_probability=0.7),
    "probability": Method(parameterisation="probability", keep_probability=0.3),
    "own-posterior": Method(posterior_alpha=0.5, posterior_beta=3.0, alpha=2.0, beta=0.5),
    "concrete": Method(estimator="concrete", temperature=0.4),
    "disarm": Method(estimator="disarm"),
}
ARCHITECTURES = {
    "one-layer": ONE_LAYER,
    "paper-like": Architecture(maps=(2, 2, 3), pooled=(True, True, False), hidden=4),
    "unpooled": Architecture(maps=(2, 3), pooled=(False, True), filter_size=3, padding=0, ceil_mode=False, hidden=3),
}


def stack_of(*methods: Method, replicas: int = 1, **changes: Any) -> Stack:
    protocols = [replace(EXACT, method=method, **changes) for method in methods]
    units = [Unit(protocol, replica) for protocol in protocols for replica in range(replicas)]
    return Stack(units, tiny(channels=2), torch.device("cpu"))


def pictures(stack: Stack) -> torch.Tensor:
    """The test pictures as a network sees them."""
    return stack.examples.standardise(stack.examples.test_images, stack.dtype)


def stack_logits(stack: Stack) -> torch.Tensor:  # (R, b, K)
    inputs = stack.features_of(stack.examples.test_images)
    return torch.cat([stack.predict_segment(segment, inputs[segment.rows]) for segment in stack.segments])


def agree(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_module_gives_the_logits_of_the_stacks_mean_prediction(name, epochs):
    stack = stack_of(METHODS[name], replicas=2)
    for _ in range(epochs):
        stack.train_epoch()
    for replica, expected in enumerate(stack_logits(stack)):
        with torch.no_grad():
            agree(to_module(stack, replica)(pictures(stack)), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_becomes_the_same_network(name):
    stack = stack_of(Method(), architecture=ARCHITECTURES[name])
    stack.train_epoch()
    with torch.no_grad():
        agree(to_module(stack, 0)(pictures(stack)), stack_logits(stack)[0])


def test_each_replica_of_a_mixed_stack_becomes_its_own_method():
    stack = stack_of(METHODS["none"], METHODS["dropconnect"], METHODS["dropconnect++"], replicas=2)
    stack.train_epoch()
    modules = [to_module(stack, index) for index in range(6)]
    kinds = [type(module.get_submodule("dense")) for module in modules]
    linear, fixed, learned = nn.Linear, dropconnectpp.DropConnectLinear, dropconnectpp.DropConnectPPLinear
    assert kinds == [linear, linear, fixed, fixed, learned, learned]
    with torch.no_grad():
        for module, expected in zip(modules, stack_logits(stack), strict=True):
            agree(module(pictures(stack)), expected)


def test_replicas_with_different_rates_keep_theirs():
    stack = stack_of(Method(kind="dropconnect", rate=0.1), Method(kind="dropconnect", rate=0.6))
    rates = [to_module(stack, index).get_submodule("dense").options()["keep_probability"] for index in (0, 1)]
    assert rates == [0.9, 0.4]


def test_a_module_is_a_copy_in_eval_mode():
    stack = stack_of(METHODS["dropout"])
    module = to_module(stack, 0)
    assert not module.training
    before = module.get_parameter("dense.weight").clone()
    stack.train_epoch()
    assert torch.equal(module.get_parameter("dense.weight"), before)
    assert not torch.equal(stack.parameters["dense.weight"][0].detach(), before)


@pytest.mark.parametrize("name", ["dropconnect++", "optimal", "probability", "own-posterior"])
def test_the_layer_has_the_replicas_posterior(name):
    method = METHODS[name]
    stack = stack_of(method, replicas=2)
    stack.train_epoch()
    layer = to_module(stack, 1).get_submodule("dense")
    assert isinstance(layer, dropconnectpp.DropConnectPPLinear)
    regulariser = stack.segments[0].regulariser
    assert set(layer.posterior_names) == set(regulariser.parameters)
    for key, value in regulariser.parameters.items():
        assert torch.equal(layer.get_parameter(key), value[1])
    for synapses in ("weight", "bias"):
        agree(layer.keep_probability(synapses), regulariser.keep_probability(synapses)[1])
    agree(layer.kl("weight").sum() + layer.kl("bias").sum(), regulariser.kl()[1])
    assert (layer.alpha, layer.beta, layer.hyper) == (method.alpha, method.beta, method.hyper)


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_module_loads_into_a_fresh_one(name, tmp_path):
    stack = stack_of(METHODS[name])
    stack.train_epoch()
    module = to_module(stack, 0)
    dropconnectpp.save(module, tmp_path / "net.safetensors")
    fresh = build(stack.shape, METHODS[name], torch.float64).eval()
    with torch.no_grad():
        assert not torch.equal(fresh(pictures(stack)), module(pictures(stack)))
        loaded = dropconnectpp.load(tmp_path / "net.safetensors", fresh)
        assert torch.equal(loaded(pictures(stack)), module(pictures(stack)))


@pytest.mark.parametrize("name", ["none", "dropconnect", "dropconnect++", "probability"])
def test_a_folded_module_is_plain_and_agrees(name):
    stack = stack_of(METHODS[name])
    stack.train_epoch()
    dense = dropconnectpp.to_dense(to_module(stack, 0))
    assert not any(hasattr(module, "keep_probability") for module in dense.modules())
    with torch.no_grad():
        agree(dense(pictures(stack)), stack_logits(stack)[0])


@pytest.mark.parametrize("name", ["none", "dropconnect", "dropconnect++"])
def test_a_module_predicts_by_sampling(name):
    stack = stack_of(METHODS[name])
    for average in ("activations", "probabilities"):
        found = dropconnectpp.predict(to_module(stack, 0), pictures(stack), num_samples=3, average=average)
        assert found.probabilities.shape == (30, 3)
        agree(found.probabilities.sum(1), torch.ones(30, dtype=torch.float64))


@pytest.mark.parametrize("name", METHODS)
def test_the_state_of_a_module_loads_into_another(name):
    stack = stack_of(METHODS[name], replicas=2)
    stack.train_epoch()
    one, other = to_module(stack, 0), to_module(stack, 1)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(one(pictures(stack)), other(pictures(stack)))


def test_a_fresh_network_has_the_papers_shape():
    module = build(Shape(Architecture(), 3, 32, 10), Method())
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    dense = module.get_submodule("dense")
    assert sum(getattr(dense, name).numel() for name in ("weight", "bias")) == 262_208
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
