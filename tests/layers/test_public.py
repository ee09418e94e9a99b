"""The layers do what their `nn` counterparts do, with masks: passes, parameters, starts and state."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.functional import expected_activation

KINDS = ("DropConnectPP", "DropConnect")
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# constructor arguments and an input's shape for each counterpart
CASES: list[tuple[type[nn.Module], tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    (nn.Linear, (5, 4), {}, (6, 5)),
    (nn.Linear, (5, 4, False), {}, (2, 3, 5)),
    (nn.Conv1d, (4, 6, 3), {}, (3, 4, 9)),
    (nn.Conv1d, (4, 6, 3, 2, 1), {}, (3, 4, 9)),
    (nn.Conv1d, (4, 6, 4), {"padding": "same", "dilation": 2}, (3, 4, 11)),
    (nn.Conv1d, (4, 6, 3), {"padding": 2, "padding_mode": "circular", "groups": 2}, (3, 4, 9)),
    (nn.Conv2d, (4, 6, (3, 2)), {"stride": (2, 1), "padding": (1, 0), "groups": 2}, (2, 4, 7, 6)),
    (nn.Conv2d, (3, 2, 3), {"padding": "same", "padding_mode": "reflect", "bias": False}, (2, 3, 5, 5)),
    (nn.Conv2d, (3, 6, 3), {"padding": "valid", "dilation": (1, 2), "groups": 3}, (2, 3, 6, 7)),
    (nn.Conv3d, (2, 3, 2), {"stride": 2, "padding": 1}, (2, 2, 4, 3, 4)),
    (nn.Conv3d, (2, 4, (1, 2, 3)), {"padding": "same", "padding_mode": "replicate", "groups": 2}, (2, 2, 3, 3, 4)),
]
NAMES = [f"{plain.__name__}-{i}" for i, (plain, *_) in enumerate(CASES)]


def twin(kind: str, plain: nn.Module, *arguments: Any, **options: Any) -> Any:
    """Our layer of the same geometry with the same weights."""
    layer = getattr(dcpp, kind + type(plain).__name__)(*arguments, dtype=torch.float64, **options)
    layer.load_state_dict(plain.state_dict(), strict=True)
    return layer


def scatter_posterior(layer: nn.Module) -> None:
    """Give every synapse its own keep probability, so that a mix-up shows."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("_logit"):
                parameter.normal_()


def all_ones(layer: Any, batch: int | None = None) -> dict[str, Tensor]:
    lead = () if batch is None else (batch,)
    return {name: torch.ones(*lead, *getattr(layer, name).shape) for name in layer.synapse_names}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", PLAIN)
def test_constructor_begins_as_the_plain_one_does(kind: str, plain: type[nn.Module]) -> None:
    theirs = inspect.signature(plain).parameters
    ours = inspect.signature(getattr(dcpp, kind + plain.__name__)).parameters
    shared = [name for name in theirs if name not in ("device", "dtype")]
    assert list(ours)[: len(shared)] == shared
    assert [ours[name].default for name in shared] == [theirs[name].default for name in shared]
    assert {"device", "dtype"} <= set(ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("plain", "arguments", "options", "shape"), CASES, ids=NAMES)
def test_all_ones_mask_is_the_plain_layer(kind: str, plain: Any, arguments: Any, options: Any, shape: Any) -> None:
    theirs = plain(*arguments, **options, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    for mask in ("batch", "example"):
        layer = twin(kind, theirs, *arguments, **options, mask=mask)
        scatter_posterior(layer)
        for masks in (all_ones(layer), *([all_ones(layer, shape[0])] if mask == "example" else [])):
            with dcpp.forced_masks(layer, masks):
                torch.testing.assert_close(layer(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("plain", "arguments", "options", "shape"), CASES, ids=NAMES)
def test_eval_is_one_pass_with_the_mean_weights(
    kind: str, plain: Any, arguments: Any, options: Any, shape: Any
) -> None:
    theirs = plain(*arguments, **options, dtype=torch.float64)
    layer = twin(kind, theirs, *arguments, **options, keep_probability=0.3).eval()
    scatter_posterior(layer)
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        for name in layer.synapse_names:
            pi = torch.sigmoid(getattr(layer, f"{name}_logit")) if kind == "DropConnectPP" else 0.3
            getattr(theirs, name).mul_(pi)
    torch.testing.assert_close(layer(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", PLAIN)
def test_examples_without_a_batch_axis_pass_where_one_mask_serves_all(kind: str, plain: type[nn.Module]) -> None:
    dimensions = PLAIN.index(plain)
    layer = getattr(dcpp, kind + plain.__name__)(3, 2, *([2] if dimensions else []), dtype=torch.float64).eval()
    x = torch.randn(3, *[4] * dimensions, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["batch", "example"])
def test_train_mode_draws_each_mask_as_often_as_its_probability(kind: str, mask: str) -> None:
    draws, keep = 4000, 0.3
    layer = getattr(dcpp, kind + "Linear")(2, 1, bias=False, keep_probability=keep, mask=mask)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        if mask == "example":
            sums = layer(torch.ones(draws, 2)).flatten()
        else:
            sums = torch.cat([layer(torch.ones(1, 2)).flatten() for _ in range(draws)])
            assert len(layer(torch.ones(50, 2)).unique()) == 1
    for gates in itertools.product((0, 1), repeat=2):
        p = math.prod(keep if gate else 1 - keep for gate in gates)
        share = float((sums == gates[0] + 2 * gates[1]).double().mean())
        assert abs(share - p) < 4.5 * math.sqrt(p * (1 - p) / draws)
    assert abs(share - 0.25) > 9 * math.sqrt(p * (1 - p) / draws)  # both on: a rate of 1/2 would be caught


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_applied_inside_in_both_modes(kind: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float64}
    layer = getattr(dcpp, kind + "Linear")(3, 8, activation=torch.tanh, **options)
    bare = getattr(dcpp, kind + "Linear")(3, 8, **options)
    bare.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, dtype=torch.float64)
    masks = {"weight": torch.rand(8, 3) < 0.5, "bias": torch.rand(8) < 0.5}
    with dcpp.forced_masks(layer, masks), dcpp.forced_masks(bare, masks):
        torch.testing.assert_close(layer(x), torch.tanh(bare(x)))
    torch.testing.assert_close(layer.eval()(x), torch.tanh(bare.eval()(x)))


# ------------------------------------------------------------------------- parameters and starts


def names_of(layer: nn.Module) -> list[str]:
    return [name for name, _ in layer.named_parameters()]


def test_parameter_names() -> None:
    layer = dcpp.DropConnectPPLinear
    assert names_of(layer(3, 2)) == ["weight", "bias", "weight_logit", "bias_logit"]
    assert names_of(layer(3, 2, bias=False)) == ["weight", "weight_logit"]
    assert names_of(layer(3, 2, False, parameterisation="probability")) == ["weight", "weight_probability"]
    learned = ["weight", "weight_logit", "weight_alpha", "weight_beta"]
    assert names_of(layer(3, 2, False, hyper="learned")) == learned
    assert names_of(dcpp.DropConnectLinear(3, 2)) == ["weight", "bias"]
    assert names_of(dcpp.DropConnectPPConv2d(3, 2, 3, hyper="learned")) == [
        *("weight", "bias", "weight_logit", "weight_alpha", "weight_beta"),
        *("bias_logit", "bias_alpha", "bias_beta"),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plain", PLAIN)
def test_weights_start_as_the_plain_layer_does(kind: str, plain: type[nn.Module]) -> None:
    arguments = (6, 4) if plain is nn.Linear else (6, 4, 3)
    torch.manual_seed(3)
    theirs = plain(*arguments)
    torch.manual_seed(3)
    layer = getattr(dcpp, kind + plain.__name__)(*arguments)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(layer, name), getattr(theirs, name))


@pytest.mark.parametrize("parameterisation", ["logit", "probability"])
def test_posterior_starts_at_the_keep_probability_and_can_be_reset(parameterisation: str) -> None:
    layer = dcpp.DropConnectPPLinear(
        3,
        2,
        keep_probability=0.3,
        alpha=2.0,
        beta=0.5,
        hyper="learned",
        parameterisation=parameterisation,
        dtype=torch.float64,
    )
    for name in ("weight", "bias"):
        alpha, beta = layer.hyper_posterior(name)
        torch.testing.assert_close(layer.keep_probability(name), torch.full_like(getattr(layer, name), 0.3))
        torch.testing.assert_close(alpha, torch.full_like(alpha, 2.3))
        torch.testing.assert_close(beta, torch.full_like(beta, 1.2))
    weight = layer.weight.clone()
    layer.reset_posterior(keep_probability=0.9, posterior_alpha=0.7)
    alpha, beta = layer.hyper_posterior()
    torch.testing.assert_close(layer.keep_probability("bias"), torch.full((2,), 0.9, dtype=torch.float64))
    torch.testing.assert_close(alpha, torch.full_like(alpha, 0.7))
    torch.testing.assert_close(beta, torch.full_like(beta, 0.6))
    layer.reset_posterior()
    torch.testing.assert_close(layer.keep_probability(), torch.full_like(layer.weight, 0.3))
    assert torch.equal(layer.weight, weight)
    with pytest.raises(dcpp.errors.ArgumentError, match=r"posterior_beta must be a finite number above 0, got -1"):
        layer.reset_posterior(posterior_beta=-1.0)


def test_the_two_parameterisations_are_one_model_up_to_the_chain_rule() -> None:
    """Same passes and KL; d/d pi~ is d/d logit over pi~ (1 - pi~), for every kind of estimator."""
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    for estimator in ("bbvi", "straight-through", "disarm", "local", "concrete"):
        found = {}
        for parameterisation in ("logit", "probability"):
            torch.manual_seed(0)
            layer = dcpp.DropConnectPPLinear(
                3, 2, keep_probability=0.7, estimator=estimator, parameterisation=parameterisation, dtype=torch.float64
            )
            elbo = dcpp.ELBO(layer, dcpp.categorical, num_data=10, generator=torch.Generator().manual_seed(1))
            for _ in range(2):  # the first step of a running baseline has no score gradient
                layer.zero_grad()
                terms = elbo(x, target=y)
                terms.loss.backward()
            found[parameterisation] = terms.kl, layer.gate_parameter("weight").grad
        torch.testing.assert_close(found["logit"][0], found["probability"][0])
        torch.testing.assert_close(found["logit"][1] / 0.21, found["probability"][1])


def test_probabilities_that_a_step_carried_outside_are_projected_back_and_can_return() -> None:
    layer = dcpp.DropConnectPPLinear(
        2, 1, bias=False, parameterisation="probability", estimator="straight-through", dtype=torch.float64
    )
    elbo = dcpp.ELBO(layer, dcpp.gaussian(1.0), num_data=4)
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    with torch.no_grad():
        layer.weight_probability.copy_(torch.tensor([[1.75, -0.5]]))
    margin = dcpp.functional.PROBABILITY_MARGIN
    edges = torch.tensor([[1 - margin, margin]], dtype=torch.float64)
    torch.testing.assert_close(layer.keep_probability(), edges)  # clamped before any projection
    elbo.eval()(x, target=y)
    assert layer.weight_probability[0, 0] == 1.75  # eval mode changes no parameter
    elbo.train()(x, target=y).loss.backward()
    torch.testing.assert_close(layer.weight_probability.detach(), edges)
    assert (layer.weight_probability.grad != 0).all()


# --------------------------------------------------------------- DropConnect's Gaussian evaluation


@pytest.mark.parametrize("activation", [nn.ReLU(), torch.relu, nn.Tanh()], ids=["ReLU", "relu", "tanh"])
@pytest.mark.parametrize("kind", ["Linear", "Conv1d"])
def test_gaussian_evaluation_is_the_mean_activation_over_masks(activation: Any, kind: str) -> None:
    """Against masks themselves: with 240 inputs at rate 1/2 the sum is Gaussian to 1/240 of its width."""
    options: dict[str, Any] = {"activation": activation, "mask": "example"}
    layer: Any
    if kind == "Linear":
        layer, x = dcpp.DropConnectLinear(240, 3, evaluation="gaussian", **options), torch.randn(240)
    else:
        layer, x = dcpp.DropConnectConv1d(80, 3, 3, evaluation="gaussian", **options), torch.randn(80, 3)
    draws = 2000
    batch = x.expand(draws, *x.shape)
    with torch.no_grad():
        layer.weight.mul_(4.0)  # so that the activation bends within the spread of its input
        sampled = layer(batch).reshape(draws, -1)
        expected = layer.eval()(batch[:1]).flatten()
        layer.evaluation = "mean"
        at_the_mean = layer(batch[:1]).flatten()
    error = sampled.std(0) / math.sqrt(draws)
    assert ((sampled.mean(0) - expected) / error).abs().max() < 4.5
    assert ((sampled.mean(0) - at_the_mean) / error).abs().max() > 9.0


def test_gaussian_evaluation_has_the_exact_moments_of_the_masks() -> None:
    layer = dcpp.DropConnectLinear(3, 1, keep_probability=0.3, dtype=torch.float64)
    x = torch.randn(2, 3, dtype=torch.float64)
    outputs, weights = [], []
    for bits in itertools.product((0.0, 1.0), repeat=4):
        gates = torch.tensor(bits)
        with torch.no_grad(), dcpp.forced_masks(layer, {"weight": gates[None, :3], "bias": gates[3:]}):
            outputs.append(layer(x))
        weights.append(math.prod(0.3 if bit else 0.7 for bit in bits))
    values, p = torch.stack(outputs), torch.tensor(weights, dtype=torch.float64).view(-1, 1, 1)
    mean = (p * values).sum(0)
    with torch.no_grad():
        found, deviation = layer.gaussian_moments(x)
    torch.testing.assert_close(found, mean)
    torch.testing.assert_close(deviation.square(), (p * (values - mean).square()).sum(0), rtol=1e-9, atol=1e-10)


def test_quadrature_agrees_with_closed_forms() -> None:
    mean = torch.linspace(-3, 3, 13, dtype=torch.float64)
    deviation = torch.linspace(0.1, 2.0, 13, dtype=torch.float64)
    closed = expected_activation(nn.ReLU(), mean, deviation)
    zero = torch.zeros((), dtype=torch.float64)
    assert float(expected_activation(nn.ReLU(), zero, zero + 2.0)) == pytest.approx(2.0 / math.sqrt(2 * math.pi))
    # A kink limits the quadrature to 1 / nodes; a polynomial is exact.
    rough = expected_activation(lambda u: u.clamp_min(0.0), mean, deviation)
    torch.testing.assert_close(rough, closed, rtol=0.0, atol=0.02)
    cubed = expected_activation(lambda u: u**3, mean, deviation)
    torch.testing.assert_close(cubed, mean**3 + 3 * mean * deviation**2)
