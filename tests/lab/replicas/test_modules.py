"""A trained replica as an ordinary model: it predicts what the stack predicts, and is saved, folded and loaded."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from tiny_cases import ONE_LAYER, TINY, tiny
from torch import nn

import dropconnectpp
from dropconnectpp.lab.config.method import PRESETS, EstimatorName, Method
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


def images(stack: Stack) -> torch.Tensor:
    """The test images as a network sees them."""
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
            agree(to_module(stack, replica)(images(stack)), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_becomes_the_same_network(name):
    stack = stack_of(Method(), architecture=ARCHITECTURES[name])
    stack.train_epoch()
    with torch.no_grad():
        agree(to_module(stack, 0)(images(stack)), stack_logits(stack)[0])


def test_each_replica_of_a_mixed_stack_becomes_its_own_method():
    stack = stack_of(METHODS["none"], METHODS["dropconnect"], METHODS["dropconnect++"], replicas=2)
    stack.train_epoch()
    modules = [to_module(stack, index) for index in range(6)]
    kinds = [type(module.get_submodule("dense")) for module in modules]
    linear, fixed, learned = nn.Linear, dropconnectpp.DropConnectLinear, dropconnectpp.DropConnectPPLinear
    assert kinds == [linear, linear, fixed, fixed, learned, learned]
    with torch.no_grad():
        for module, expected in zip(modules, stack_logits(stack), strict=True):
            agree(module(images(stack)), expected)


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
        assert not torch.equal(fresh(images(stack)), module(images(stack)))
        loaded = dropconnectpp.load(tmp_path / "net.safetensors", fresh)
        assert torch.equal(loaded(images(stack)), module(images(stack)))


@pytest.mark.parametrize("name", ["none", "dropconnect", "dropconnect++", "probability"])
def test_a_folded_module_is_plain_and_agrees(name):
    stack = stack_of(METHODS[name])
    stack.train_epoch()
    dense = dropconnectpp.to_dense(to_module(stack, 0))
    assert not any(hasattr(module, "keep_probability") for module in dense.modules())
    with torch.no_grad():
        agree(dense(images(stack)), stack_logits(stack)[0])


@pytest.mark.parametrize("name", ["none", "dropconnect", "dropconnect++"])
def test_a_module_predicts_by_sampling(name):
    stack = stack_of(METHODS[name])
    for average in ("activations", "probabilities"):
        found = dropconnectpp.predict(
            to_module(stack, 0), images(stack), num_samples=3, average=average, likelihood=dropconnectpp.categorical
        )
        assert found.probabilities.shape == (30, 3)
        agree(found.probabilities.sum(1), torch.ones(30, dtype=torch.float64))


@pytest.mark.parametrize("name", METHODS)
def test_the_state_of_a_module_loads_into_another(name):
    stack = stack_of(METHODS[name], replicas=2)
    stack.train_epoch()
    one, other = to_module(stack, 0), to_module(stack, 1)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(one(images(stack)), other(images(stack)))


# ------------------------------------------------------------------------------------- options go all the way

LAYER_OPTIONS = {
    "alpha",
    "beta",
    "keep_probability",
    "hyper",
    "estimator",
    "parameterisation",
    "kl_weight",
    "logit_step",
}
OPTIONS = {
    **{name: method for name, method in METHODS.items() if method.kind == "dropconnect++"},
    **PRESETS,
    "prior": Method(alpha=2.0, beta=7.0),
    "keep-probability": Method(keep_probability=0.8),
    "kl-weight": Method(kl_weight=0.25),
    "no-kl": Method(kl_weight=0.0),
    "logit-step": Method(logit_step=30.0),
    "decay": Method(decay=0.5),
    "mean-network": Method(baseline="mean-network", hyper="optimal"),
    "leave-one-out": Method(baseline="leave-one-out", num_samples=2),
    "eq16": Method(estimator="eq16", baseline="same-sample"),
    "straight-through": Method(estimator="straight-through", parameterisation="probability"),
    "local": Method(estimator="local"),
    "of-the-training": Method(
        slab=0.1, reward="random-sign", kl_warmup=1, learn_after=1, freeze_after=3, logit_step=3.0
    ),
}


def plain(layer: nn.Module) -> dict[str, Any]:
    """All options of a layer as data that can be compared."""
    return {**layer.options(), "activation": repr(layer.activation)}


def told(layer: nn.Module) -> dict[str, Any]:
    """A layer's options, the estimator's beside them, by the names that `Method` has for them."""
    options: dict[str, Any] = dict(layer.options())
    estimator = dict(options.pop("estimator"))
    found = {**options, "estimator": estimator.pop("name"), **estimator}
    return {name: found[name] for name in found.keys() & {item.name for item in fields(Method)}}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_saved_with_a_module_and_comes_back(name, tmp_path):
    method = OPTIONS[name]
    stack = stack_of(method)
    module = to_module(stack, 0)
    options = told(module.get_submodule("dense"))
    assert options.keys() >= LAYER_OPTIONS
    assert options == {key: getattr(method, key) for key in options}
    dropconnectpp.save(module, tmp_path / "net.safetensors")
    for fresh in (build(stack.shape, Method(kind="none")), build(stack.shape, method)):
        loaded = dropconnectpp.load(tmp_path / "net.safetensors", fresh)
        assert told(loaded.get_submodule("dense")) == options
        assert plain(loaded.get_submodule("dense")) == plain(module.get_submodule("dense"))


def test_the_options_above_try_every_option_of_a_layer():
    for option in LAYER_OPTIONS | {"baseline", "decay", "temperature"}:
        values = {getattr(method, option) for method in OPTIONS.values()}
        assert len(values) >= 2, option
    assert {method.estimator for method in OPTIONS.values()} == set(get_args(EstimatorName))


@pytest.mark.parametrize("name", PRESETS)
def test_a_loaded_preset_trains_on_as_the_preset_does(name, tmp_path):
    method = PRESETS[name]
    stack = stack_of(method)
    dropconnectpp.save(to_module(stack, 0), tmp_path / "net.safetensors")
    loaded = dropconnectpp.load(tmp_path / "net.safetensors", build(stack.shape, Method(kind="none"), torch.float64))
    dense = loaded.get_submodule("dense")
    terms = dropconnectpp.ELBO(loaded, dropconnectpp.categorical, num_data=64)(
        images(stack), target=stack.examples.test_labels
    )
    assert float(terms.log_likelihood - terms.elbo) == pytest.approx(method.kl_weight * float(terms.kl))
    steps = {id(p): group["lr"] for group in dropconnectpp.parameter_groups(loaded, 0.01) for p in group["params"]}
    assert steps[id(dense.weight_logit)] == pytest.approx(0.01 * method.gate_step)
    assert steps[id(dense.weight)] == 0.01


@pytest.mark.parametrize("kind", ["none", "dropout", "dropconnect"])
def test_a_fixed_rate_is_the_share_that_a_module_drops(kind, tmp_path):
    method = Method(kind=kind) if kind == "none" else Method(kind=kind, rate=0.25)
    stack = stack_of(method)
    module = to_module(stack, 0)
    if kind == "dropout":
        assert module.get_submodule("dropout").p == 0.25
    if kind != "dropconnect":
        assert method.layer_options() == {}
        return
    assert method.layer_options() == {"keep_probability": 0.75, "evaluation": "mean"}
    dropconnectpp.save(module, tmp_path / "net.safetensors")
    loaded = dropconnectpp.load(tmp_path / "net.safetensors", build(stack.shape, Method(kind="none")))
    assert plain(loaded.get_submodule("dense")) == plain(module.get_submodule("dense"))
    assert loaded.get_submodule("dense").options()["keep_probability"] == 0.75


def test_a_fresh_module_starts_where_the_method_says():
    method = Method(posterior_alpha=0.5, posterior_beta=3.0)
    stack = stack_of(method)
    dense, regulariser = build(stack.shape, method).double().get_submodule("dense"), stack.segments[0].regulariser
    for name, value in regulariser.parameters.items():
        torch.testing.assert_close(dense.get_parameter(name), value[0], rtol=1e-6, atol=0.0)


def test_a_fresh_network_has_the_papers_shape():
    module = build(Shape(Architecture(), 3, 32, 10), Method())
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    dense = module.get_submodule("dense")
    assert sum(getattr(dense, name).numel() for name in ("weight", "bias")) == 262_208
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
