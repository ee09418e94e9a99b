"""The four regularisers of a stack: against their written formulas, and DropConnect++ against the library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.kernels.dense import linear
from dropconnectpp.lab.kernels.noise import draw_gamma
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.dropconnectpp import DropConnectPP, estimator_of
from dropconnectpp.lab.replicas.network import KINDS, log_likelihoods, same_segment
from dropconnectpp.lab.replicas.regularisers import Regulariser
from dropconnectpp.ops.drawn import Draw

SEED, STEP, NUM_DATA = 7, torch.tensor(11), 50
REPLICAS = torch.tensor([3, 8])
UNITS, INPUTS, BATCH, CLASSES = 3, 4, 5, 3
NAMES = ("weight", "bias")
LARGEST_Z = 5.0
"""One false alarm in two million checks."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(*methods: Method, rates: Sequence[float] = (0.0, 0.0), replicas: Tensor = REPLICAS) -> Regulariser:
    """Of a method for each replica, or one for all; with these rates, where there are rates."""
    each = methods if len(methods) > 1 else methods * len(replicas)
    each = tuple(replace(m, rate=rate) if m.has_rate else m for m, rate in zip(each, rates, strict=True))
    return KINDS[each[0].kind](each, replicas, (UNITS, INPUTS), NUM_DATA, SEED, torch.float64)


def layer() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (R, B, I), as a ReLU leaves them, weights (R, O, I) and biases (R, O)."""
    return numbers(2, BATCH, INPUTS, seed=1).relu(), numbers(2, UNITS, INPUTS, seed=2), numbers(2, UNITS, seed=3)


def slow(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Sums written out."""
    result = torch.zeros(len(x), x.shape[1], UNITS, dtype=torch.float64)
    for r, b, o in np.ndindex(*result.shape):
        result[r, b, o] = bias[r, o] + sum(weight[r, o, i] * x[r, b, i] for i in range(INPUTS))
    return result


def mask(purpose: str, name: str, keep: Tensor, step: Any = STEP, draw: int = 0) -> Tensor:
    return Stream(SEED, f"{purpose}:{name}").bernoulli(keep, REPLICAS, step, draw).double()


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def every_mask(count: int) -> list[Tensor]:
    return [torch.tensor(bits, dtype=torch.float64) for bits in itertools.product((0.0, 1.0), repeat=count)]


# ------------------------------------------------------------------------------------- without learning


def test_without_regularisation_every_pass_is_the_same_plain_layer():
    plain, (x, weight, bias) = make(Method(kind="none")), layer()
    expected = slow(x, weight, bias).relu()
    close(plain.train_pass(x, weight, bias, STEP, 0), expected)
    close(plain.mean_pass(x, weight, bias), expected)
    close(plain.sampler(x, weight, bias)(4), expected)
    assert plain.passes == 1
    assert not plain.needs_mean_network
    assert plain.gradients(torch.zeros(1, 2), None) == {}
    assert plain.kl().tolist() == [0.0, 0.0]
    assert plain.keep_probability("bias").tolist() == [[1.0] * UNITS] * 2
    plain.after_step()


def test_dropout_drops_units_of_each_example_and_scales_up_the_rest():
    rates = (0.5, 0.2)
    dropout, (x, weight, bias) = make(Method(kind="dropout"), rates=rates), layer()
    hidden = slow(x, weight, bias).relu()
    keep = (1 - torch.tensor(rates, dtype=torch.float64))[:, None, None]
    gates = Stream(SEED, "dropout").bernoulli(keep.expand_as(hidden), REPLICAS, STEP, 0).double()
    assert 0 < gates.mean() < 1
    close(dropout.train_pass(x, weight, bias, STEP, 0), hidden * gates / keep)
    close(dropout.mean_pass(x, weight, bias), hidden)


def test_a_sampled_network_of_dropout_has_one_mask_of_units_for_all_examples():
    rates = (0.5, 0.2)
    dropout, (x, weight, bias) = make(Method(kind="dropout"), rates=rates), layer()
    hidden = slow(x, weight, bias).relu()
    keep = (1 - torch.tensor(rates, dtype=torch.float64))[:, None]
    for draw in (0, 9):
        gates = Stream(SEED, "evaluation:dropout").bernoulli(keep.expand(-1, UNITS), REPLICAS, 0, draw).double()
        expected = hidden * gates[:, None] / keep[:, None]
        close(dropout.sampler(x, weight, bias)(draw), expected)
        some = dropout.sampler(x[:, 2:4], weight, bias)(draw)
        close(some, expected[:, 2:4])


def test_dropouts_prediction_is_the_expectation_over_all_masks():
    rate, hidden = 0.3, slow(*layer()).relu()
    total = torch.zeros_like(hidden)
    for gates in every_mask(UNITS):
        probability = (gates * (1 - rate) + (1 - gates) * rate).prod()
        total += probability * hidden * gates / (1 - rate)
    close(make(Method(kind="dropout"), rates=(rate, rate)).mean_pass(*layer()), total)


def test_dropconnect_masks_weights_and_biases():
    rates = (0.5, 0.2)
    connect, (x, weight, bias) = make(Method(kind="dropconnect"), rates=rates), layer()
    for purpose, step, run in (
        ("mask", STEP, lambda: connect.train_pass(x, weight, bias, STEP, 0)),
        ("evaluation", 0, lambda: connect.sampler(x, weight, bias)(6)),
    ):
        draw = 6 if purpose == "evaluation" else 0
        gates = [mask(purpose, name, connect.keep_probability(name), step, draw) for name in NAMES]
        assert 0 < gates[0].mean() < 1
        close(run(), slow(x, weight * gates[0], bias * gates[1]).relu())
    assert connect.keep_probability("weight")[1].unique().tolist() == [0.8]


def test_dropconnects_mean_network_has_the_expected_input_of_every_unit():
    rate, (x, weight, bias) = 0.3, layer()
    x, weight, bias = x.abs(), weight.abs(), bias.abs()  # nothing is cut off by the ReLU
    total = torch.zeros(2, BATCH, UNITS, dtype=torch.float64)
    for gates in every_mask(INPUTS + 1):  # the units do not share synapses
        probability = (gates * (1 - rate) + (1 - gates) * rate).prod()
        total += probability * slow(x, weight * gates[:-1], bias * gates[-1])
    close(make(Method(kind="dropconnect"), rates=(rate, rate)).mean_pass(x, weight, bias), total)


def test_dropconnects_gaussian_prediction_is_the_librarys():
    rates = (0.5, 0.2)
    x, weight, bias = layer()
    found = make(Method(kind="dropconnect", evaluation="gaussian"), rates=rates).mean_pass(x, weight, bias)
    for r, rate in enumerate(rates):
        own = dcpp.DropConnectLinear(
            INPUTS, UNITS, activation=nn.ReLU(), keep_probability=1 - rate, evaluation="gaussian"
        ).double()
        own.load_state_dict({"weight": weight[r], "bias": bias[r]})
        close(found[r], own.eval()(x[r]).detach())


def test_what_regularisers_share_is_none_by_itself():
    with pytest.raises(TypeError, match="abstract"):
        Regulariser([Method(kind="none")], REPLICAS[:1], (UNITS, INPUTS), NUM_DATA, SEED, torch.float64)


def test_a_rate_of_zero_drops_nothing():
    x, weight, bias = layer()
    expected = slow(x, weight, bias).relu()
    for method in (Method(kind="dropout"), Method(kind="dropconnect")):
        close(make(method).train_pass(x, weight, bias, STEP, 0), expected)
    close(make(Method(kind="dropconnect", evaluation="gaussian")).mean_pass(x, weight, bias), expected, 1e-6)


@pytest.mark.parametrize("kind", ["dropout", "dropconnect", "dropconnect++"])
def test_noise_of_a_replica_does_not_depend_on_the_others(kind):
    x, weight, bias = layer()
    both = make(Method(kind=kind), rates=(0.5, 0.2))
    alone = make(Method(kind=kind), rates=(0.2,), replicas=REPLICAS[1:])
    for one, other in (
        (both.train_pass(x, weight, bias, STEP, 0), alone.train_pass(x[1:], weight[1:], bias[1:], STEP, 0)),
        (both.sampler(x, weight, bias)(2), alone.sampler(x[1:], weight[1:], bias[1:])(2)),
    ):
        close(one[1:], other, 1e-14)
        assert torch.equal(one[1:] == 0, other == 0)


@pytest.mark.parametrize("kind", ["dropout", "dropconnect", "dropconnect++"])
def test_noise_changes_with_the_step_and_the_draw(kind):
    own, args = make(Method(kind=kind), rates=(0.5, 0.5)), layer()
    passes = [own.train_pass(*args, torch.tensor(step), 0) for step in range(4)]
    sampled = [own.sampler(*args)(draw) for draw in range(4)]
    for one, other in itertools.combinations([*passes, *sampled], 2):
        assert not torch.equal(one, other)


# ----------------------------------------------------------------- the posterior, against the library

CASES: dict[str, Method] = {
    "bbvi, running": Method(),
    "bbvi, running, L=2": Method(num_samples=2, decay=0.7),
    "bbvi, mean-network": Method(baseline="mean-network"),
    "bbvi, mean-network, L=2": Method(baseline="mean-network", num_samples=2),
    "bbvi, leave-one-out": Method(baseline="leave-one-out", num_samples=2),
    "bbvi, leave-one-out, L=3": Method(baseline="leave-one-out", num_samples=3),
    "eq16, running": Method(estimator="eq16"),
    "eq16, running, L=2": Method(estimator="eq16", num_samples=2),
    "eq16, same-sample": Method(estimator="eq16", baseline="same-sample"),
    "eq16, same-sample, L=2": Method(estimator="eq16", baseline="same-sample", num_samples=2),
    "straight-through": Method(estimator="straight-through"),
    "straight-through, L=2": Method(estimator="straight-through", num_samples=2),
    "local": Method(estimator="local"),
    "local, L=2": Method(estimator="local", num_samples=2),
    "concrete": Method(estimator="concrete"),
    "concrete, L=2": Method(estimator="concrete", num_samples=2, temperature=0.3),
    "disarm": Method(estimator="disarm"),
    "disarm, L=2": Method(estimator="disarm", num_samples=2),
}
GRID = [
    pytest.param(name, hyper, parameterisation, id=f"{name}, {hyper}, {parameterisation}")
    for name, method in CASES.items()
    for hyper in ("learned", "optimal")
    for parameterisation in ("logit", "probability")
    if method.estimator != "eq16" or hyper == "learned"
]


def posterior(*methods: Method) -> DropConnectPP:
    """Parameters and moments as training might have left them."""
    own = make(*methods)
    assert isinstance(own, DropConnectPP)
    for number, (name, value) in enumerate(own.parameters.items()):
        noise = numbers(*value.shape, seed=20 + number)
        value.copy_(torch.sigmoid(noise) if name.endswith("probability") else noise)
    if own.moments is not None:
        own.moments.copy_(torch.tensor([[-2.0, -3.0], [1.5, 0.5]]))
    return own


def stack_gradients(own: DropConnectPP) -> tuple[Tensor, dict[str, Tensor]]:
    """Rewards (P, R) and the loss's gradient by everything, as a training step has them."""
    x, weight, bias = layer()
    out_weight, out_bias = numbers(2, CLASSES, UNITS, seed=4), numbers(2, CLASSES, seed=5)
    labels = torch.arange(2 * BATCH).view(2, BATCH) % CLASSES
    weights = {"0.weight": weight, "0.bias": bias, "1.weight": out_weight, "1.bias": out_bias}
    leaves = {**weights, **{f"0.{name}": value for name, value in own.parameters.items()}}
    for value in leaves.values():
        value.requires_grad_()
    rewards = torch.stack(
        [
            log_likelihoods(linear(own.train_pass(x, weight, bias, STEP, p), out_weight, out_bias), labels).mean(1)
            for p in range(own.passes)
        ]
    )
    found = torch.autograd.grad(
        -rewards.mean(0).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    gradients = dict(zip(leaves, found, strict=True))
    mean_reward = None
    if own.needs_mean_network:
        logits = linear(own.mean_pass(x, weight, bias), out_weight, out_bias)
        mean_reward = log_likelihoods(logits, labels).mean(1).detach()
    for name, value in own.gradients(rewards.detach(), mean_reward).items():
        gradients[f"0.{name}"] = gradients[f"0.{name}"] + value
    return rewards.detach(), {name: value.detach() for name, value in gradients.items()}


@pytest.mark.parametrize("name", ["bbvi, running", "bbvi, mean-network, L=2", "eq16, running", "disarm"])
def test_the_control_keeps_the_size_of_the_reward_and_throws_its_sign(name):
    usual = posterior(replace(CASES[name], kl_weight=0.0))
    signs = []
    for step in range(30):
        control = posterior(replace(CASES[name], kl_weight=0.0, reward="random-sign"))
        coefficients, number = numbers(usual.method.num_samples, 2, seed=30 + step), torch.tensor(step)
        assert usual._signed(coefficients, number) is coefficients
        ratio = control._signed(coefficients, number) / coefficients
        assert bool((ratio.abs() == 1.0).all())
        signs.append(ratio)
    thrown = torch.stack(signs)  # (30, L, R)
    assert bool((thrown == 1.0).any(0).all())
    assert bool((thrown == -1.0).any(0).all())
    assert not torch.equal(thrown[..., 0], thrown[..., 1])  # replicas throw their own


def test_the_control_learns_as_much_in_another_direction():
    (rewards, usual), (same, control) = (
        stack_gradients(posterior(Method(kl_weight=0.0, hyper="optimal", reward=reward)))
        for reward in ("likelihood", "random-sign")
    )
    assert torch.equal(rewards, same)
    for name, value in usual.items():
        agrees, opposes = (torch.isclose(control[name], sign * value).flatten(1).all(1) for sign in (1.0, -1.0))
        assert bool((agrees | opposes).all()), name


def library(own: DropConnectPP, r: int) -> tuple[nn.Sequential, dcpp.ELBO]:
    """An ordinary model with replica r's weights and posterior."""
    method = own.methods[r]
    gated = dcpp.DropConnectPPLinear(INPUTS, UNITS, activation=nn.ReLU(), **method.layer_options())
    model = nn.Sequential(gated, nn.Linear(UNITS, CLASSES)).double()
    _, weight, bias = layer()
    state = {"0.weight": weight, "0.bias": bias, **{f"0.{name}": v for name, v in own.parameters.items()}}
    state |= {"1.weight": numbers(2, CLASSES, UNITS, seed=4), "1.bias": numbers(2, CLASSES, seed=5)}
    model.load_state_dict({name: value[r].detach() for name, value in state.items()})
    elbo = dcpp.ELBO(model, dcpp.categorical, NUM_DATA, method.num_samples)
    if own.moments is not None:
        elbo.moments.get_buffer("0/layer").copy_(own.moments[:, r])
    return model, elbo


def uniforms(name: str, shape: torch.Size, sample: int, r: int) -> Tensor:
    count = math.prod(shape)
    return (
        Stream(SEED, f"mask:{name}").uniform(REPLICAS[r : r + 1], STEP, count, sample, dtype=torch.float64).view(shape)
    )


def force(own: DropConnectPP, model: nn.Sequential, r: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the library draw what the streams give replica r; returns a context."""
    gated, samples, estimator = model[0], own.method.num_samples, own.method.estimator
    replica = REPLICAS[r : r + 1]
    if estimator == "local":
        noise = [
            Stream(SEED, "local").normal(replica, STEP, BATCH * UNITS, sample, dtype=torch.float64).view(BATCH, UNITS)
            for sample in range(samples)
        ]
        monkeypatch.setattr(torch, "randn", lambda *shape, **options: noise.pop(0))
    if estimator == "concrete":
        queue = [uniforms(name, getattr(gated, name).shape, s, r) for s in range(samples) for name in NAMES]
        monkeypatch.setattr(Draw, "uniform", lambda *_: queue.pop(0))
    if estimator in ("local", "concrete"):
        return nullcontext()
    if estimator == "eq16":
        gammas = [
            draw_gamma(value.detach()[None], Stream(SEED, f"{kind}:{name}"), replica, STEP).flatten()
            for name in NAMES
            for kind, value in zip(("heads", "tails"), gated.hyper_posterior(name), strict=True)
        ]
        monkeypatch.setattr(torch, "_standard_gamma", lambda value, generator=None: gammas.pop(0))
    passes = []
    for sample in range(samples):
        noise_of = {name: uniforms(name, getattr(gated, name).shape, sample, r) for name in NAMES}
        keep = {name: gated.keep_probability(name).detach() for name in NAMES}
        passes.append({f"0.{name}": noise_of[name] < keep[name] for name in NAMES})
        if estimator == "disarm":
            passes.append({f"0.{name}": 1 - noise_of[name] < keep[name] for name in NAMES})
    return dcpp.forced_masks(model, passes)


@pytest.mark.parametrize(("name", "hyper", "parameterisation"), GRID)
def test_the_gradient_is_the_librarys(name, hyper, parameterisation, monkeypatch):
    changes = {"hyper": hyper, "parameterisation": parameterisation, "alpha": 2.0, "beta": 0.7}
    own = posterior(*(replace(CASES[name], kl_weight=weight, **changes) for weight in (3.0, 0.4)))
    models = [library(own, r) for r in range(2)]
    rewards, gradients = stack_gradients(own)
    x, labels = layer()[0], torch.arange(2 * BATCH).view(2, BATCH) % CLASSES
    for r, (model, elbo) in enumerate(models):
        with monkeypatch.context() as patched, force(own, model, r, patched):
            terms = elbo(x[r], target=labels[r])
        terms.loss.backward()
        close(rewards[:, r].mean(), terms.log_likelihood / NUM_DATA)
        close(own.kl()[r], terms.kl, 1e-10)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(
                gradients[key][r], parameter.grad, rtol=0, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}"
            )
        if own.moments is not None:
            close(own.moments[:, r], elbo.moments.get_buffer("0/layer"))


@pytest.mark.parametrize("hyper", ["learned", "optimal"])
@pytest.mark.parametrize("prior", [(1.0, 1.0), (2.0, 0.7)])
def test_the_kl_and_its_mean_network_are_the_librarys(hyper, prior):
    own = posterior(Method(hyper=hyper, alpha=prior[0], beta=prior[1]))
    x, weight, bias = layer()
    for r in range(2):
        model, _ = library(own, r)
        close(own.kl()[r], dcpp.kl_divergence(model).detach(), 1e-10)
        close(own.mean_pass(x, weight, bias)[r], model[0].eval()(x[r]).detach())
        close(own.keep_probability("bias")[r], model[0].keep_probability("bias").detach())


def test_a_sampled_network_has_the_masks_of_the_learned_probabilities():
    own, (x, weight, bias) = posterior(Method()), layer()
    gates = [mask("evaluation", name, torch.sigmoid(own.parameters[f"{name}_logit"]), 0, 5) for name in NAMES]
    close(own.sampler(x, weight, bias)(5), slow(x, weight * gates[0], bias * gates[1]).relu())


@pytest.mark.parametrize("parameterisation", ["logit", "probability"])
def test_the_posterior_starts_where_the_method_says(parameterisation):
    own = make(Method(keep_probability=0.3, alpha=2.0, parameterisation=parameterisation))
    for name in NAMES:
        close(own.keep_probability(name), torch.full_like(own.keep_probability(name), 0.3))
        close(F.softplus(own.parameters[f"{name}_alpha"]), torch.full((2, *own.shapes[name]), 2.3, dtype=torch.float64))
        close(F.softplus(own.parameters[f"{name}_beta"]), torch.full((2, *own.shapes[name]), 1.7, dtype=torch.float64))
    elsewhere = make(Method(posterior_alpha=4.0, posterior_beta=5.0))
    close(F.softplus(elsewhere.parameters["bias_alpha"]), torch.full((2, UNITS), 4.0, dtype=torch.float64))
    close(F.softplus(elsewhere.parameters["bias_beta"]), torch.full((2, UNITS), 5.0, dtype=torch.float64))


def test_probabilities_are_brought_back_inside_after_a_step():
    own = make(Method(parameterisation="probability"))
    own.parameters["weight_probability"][0, 0, :2] = torch.tensor([-0.5, 1.5])
    own.after_step()
    assert own.parameters["weight_probability"][0, 0, :2].tolist() == [1e-6, 1 - 1e-6]


def test_without_earlier_minibatches_the_running_baseline_leaves_the_kl_alone():
    own = posterior(Method(hyper="optimal"))
    own.moments.zero_()
    _, gradients = stack_gradients(own)
    for r in range(2):
        model, _ = library(own, r)
        (expected,) = torch.autograd.grad(dcpp.kl_divergence(model), [model[0].weight_logit])
        close(gradients["0.weight_logit"][r], expected / NUM_DATA)
    assert (own.moments[1] > 0).all()


@pytest.mark.parametrize("method", [*CASES.values(), Method(kind="none"), Method(kind="dropout", rate=0.1)])
def test_a_methods_estimator_is_the_librarys(method):
    options = estimator_of(method).options()
    assert options == {name: value for name, value in options.items() if getattr(method, name, value) == value}
    assert options["name"] == method.estimator


def test_methods_share_a_segment_where_they_differ_in_what_a_row_holds():
    assert same_segment(Method(kind="dropout", rate=0.1), Method(kind="dropout", rate=0.9))
    assert not same_segment(Method(kind="dropout", rate=0.1), Method(kind="dropconnect", rate=0.1))
    shared = {"rate", "logit_step", "kl_weight", "kl_warmup", "learn_after", "freeze_after"}
    for changes in (
        {"logit_step": 2.0},
        {"kl_weight": 0.0},
        {"kl_weight": 30.0, "kl_warmup": 5},
        {"freeze_after": 1},
        {"learn_after": 1},
        {"alpha": 2.0},
        {"slab": 0.1},
        {"keep_probability": 0.6},
        {"hyper": "optimal"},
        {"decay": 0.5},
        {"num_samples": 2},
        {"estimator": "eq16"},
        {"reward": "random-sign"},
    ):
        assert same_segment(Method(), Method(**changes)) == (changes.keys() <= shared), changes
        assert same_segment(Method(**changes), Method(**changes))


# ------------------------------------------------------------------------ what epochs change, and the slab


def test_an_epoch_sets_each_replicas_numbers_in_place():
    own = make(
        Method(kl_weight=3.0, kl_warmup=2, freeze_after=4, logit_step=5.0), Method(kl_weight=0.7, freeze_after=1)
    )
    kl_scale, gate_step = own.kl_scale, own.gate_step
    found = [(kl_scale.tolist(), gate_step.tolist())]
    for epoch in range(6):
        own.begin_epoch(epoch)
        found.append((kl_scale.tolist(), gate_step.tolist()))
    assert own.kl_scale is kl_scale
    assert own.gate_step is gate_step
    weights, steps = (0.0, 0.0, 1.5, 3.0, 3.0, 3.0, 3.0), [(5.0, 1.0)] * 2 + [(5.0, 0.0)] * 3 + [(0.0, 0.0)] * 2
    expected = [([weight / NUM_DATA, 0.7 / NUM_DATA], [*step]) for weight, step in zip(weights, steps, strict=True)]
    assert found == expected, "the first are epoch 0's, before any began"


@pytest.mark.parametrize("parameterisation", ["logit", "probability"])
def test_the_slab_weighs_weights_and_biases_by_how_often_they_are_on(parameterisation):
    methods = [Method(kind="dropconnect", slab=0.2), Method(slab=0.2, parameterisation=parameterisation)]
    for method, own in zip(methods, (make(methods[0], rates=(0.5, 0.2)), posterior(methods[1])), strict=True):
        for name, value in zip(NAMES, layer()[1:], strict=True):
            keep = own.keep_probability(name)
            loss = own.slab_loss(name, value.requires_grad_())
            close(loss, (keep * value**2 / (2 * 0.2**2 * NUM_DATA)).sum())
            (by_value,) = torch.autograd.grad(loss, value)
            close(by_value, keep * value / (0.2**2 * NUM_DATA))
        assert make(replace(method, slab=None)).slab_loss("weight", layer()[1]) is None


def test_kernels_are_told_of_slab_and_prior():
    fixed = make(Method(kind="dropconnect", slab=0.2), rates=(0.5, 0.2)).gate()
    learned = make(Method(slab=0.2, hyper="optimal", alpha=2.0, beta=0.7, kl_weight=3.0)).gate()
    assert fixed.slab_scale == learned.slab_scale == pytest.approx(1 / (0.04 * NUM_DATA))
    assert (learned.prior_alpha, learned.prior_beta, learned.kl_scale.tolist()) == (2.0, 0.7, [3.0 / NUM_DATA] * 2)
    assert make(Method(hyper="optimal", beta=0.2)).gate() is None
    assert make(Method(hyper="learned", beta=0.2)).gate() is not None


# --------------------------------------------------------------------------------------- gamma numbers


@pytest.mark.parametrize("shape", [0.3, 1.0, 1.5, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_numbers_have_their_mean_and_variance(shape, dtype):
    count = 20_000
    drawn = draw_gamma(torch.full((1, count), shape, dtype=dtype), Stream(1, "heads"), torch.tensor([0]), 0)[0].double()
    fourth = 3 * shape**2 + 6 * shape  # the central moment
    z_mean = (drawn.mean() - shape) / (shape / count) ** 0.5
    z_variance = ((drawn - shape).square().mean() - shape) / ((fourth - shape**2) / count) ** 0.5
    assert abs(z_mean) < LARGEST_Z
    assert abs(z_variance) < LARGEST_Z
    wrong = (drawn.mean() - 1.1 * shape) / (1.1 * shape / count) ** 0.5
    assert abs(wrong) > LARGEST_Z, "a shape that is off by a tenth would be caught"


def test_gamma_numbers_of_a_replica_are_its_own_and_never_zero():
    shape = torch.rand(2, 3, 4, dtype=torch.float64) + 0.1
    both = draw_gamma(shape, Stream(1, "heads"), REPLICAS, STEP)
    assert torch.equal(both[1:], draw_gamma(shape[1:], Stream(1, "heads"), REPLICAS[1:], STEP))
    assert not torch.equal(both, draw_gamma(shape, Stream(1, "heads"), REPLICAS, STEP + 1))
    assert (draw_gamma(torch.full((1, 1000), 1e-4), Stream(1, "heads"), REPLICAS[:1], 0) > 0).all()
