"""The estimators' stateless parts with leading axes, their options, and every rule they enforce."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp import estimators
from dropconnectpp.estimators import BBVI, ESTIMATORS, Concrete, Disarm, Eq16, Local, StraightThrough, resolve

EVERY = [
    BBVI(),
    BBVI(per_synapse=True, decay=0.5),
    BBVI(baseline="mean-network"),
    BBVI(baseline="leave-one-out"),
    Eq16(),
    Eq16(baseline="same-sample", decay=0.0),
    StraightThrough(),
    Local(),
    Concrete(temperature=0.1),
    Disarm(),
]


def raises(message):
    return pytest.raises(dcpp.errors.ArgumentError, match=f"^{re.escape(message)}$")


# ------------------------------------------------------------------------- stateless functions


def test_moments_are_exponential_averages_of_fh_and_hh():
    reward, squared = torch.rand(2, 30, 4, dtype=torch.float64)  # 30 minibatches of 4 replicas
    moments = torch.zeros(2, 4, dtype=torch.float64)
    for step in range(30):
        moments = estimators.update_moments(moments, reward[step], squared[step], 0.8)
    weights = 0.2 * 0.8 ** torch.arange(29, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(moments[0], weights @ (reward * squared))
    torch.testing.assert_close(moments[1], weights @ squared)


def test_update_moments_keeps_the_moments_precision():
    moments = torch.zeros(2, dtype=torch.float32)
    found = estimators.update_moments(moments, torch.tensor(0.5).double(), torch.tensor(2.0).double(), 0.0)
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0, 2.0]


def test_the_starting_bias_cancels_in_varpi():
    moments = estimators.update_moments(torch.zeros(2), torch.tensor(-1.5), torch.tensor(0.25), 0.99)
    assert float(estimators.running_coefficient(torch.tensor(-1.5), moments)) == pytest.approx(0.0, abs=1e-5)
    assert float(estimators.running_coefficient(torch.tensor(-1.0), moments)) == pytest.approx(0.5, abs=1e-5)


def test_running_coefficient_is_zero_before_any_baseline():
    reward = torch.tensor([[-2.0, -2.0], [-1.0, -1.0]])  # (L, replicas): the first replica has seen nothing
    moments = torch.tensor([[0.0, -0.3], [0.0, 0.2]])
    found = estimators.running_coefficient(reward, moments)
    torch.testing.assert_close(found, torch.tensor([[0.0, -0.5], [0.0, 0.5]]))


def test_leave_one_out_subtracts_the_other_samples_mean():
    reward = torch.randn(4, 3, 2, dtype=torch.float64)
    found = estimators.leave_one_out_coefficient(reward)
    for sample in range(4):
        others = torch.cat([reward[:sample], reward[sample + 1 :]])
        torch.testing.assert_close(found[sample], reward[sample] - others.mean(0))


def test_antithetic_coefficient_is_half_the_difference():
    reward, mirrored = torch.randn(2, 3, 5)
    torch.testing.assert_close(estimators.antithetic_coefficient(reward, mirrored), (reward - mirrored) / 2)


@pytest.mark.parametrize("estimator", [e for e in EVERY if e.scores], ids=repr)
def test_coefficients_of_a_stack_are_those_of_each_replica(estimator):
    reward = torch.randn(3, estimator.arms, 5, dtype=torch.float64)  # (L, A, replicas)
    baseline = None
    if estimator.needs_moments:
        baseline = torch.rand(2, 5, dtype=torch.float64)
    elif estimator.needs_mean_network:
        baseline = torch.randn(5, dtype=torch.float64)
    stacked = estimator.coefficients(reward, baseline)
    alone = [estimator.coefficients(reward[..., r], None if baseline is None else baseline[..., r]) for r in range(5)]
    assert stacked.shape == (3, 5)
    torch.testing.assert_close(stacked, torch.stack(alone, -1))


def test_coefficients_say_what_the_baseline_is():
    reward = torch.tensor([[-1.0], [-3.0]])
    moments = torch.tensor([-0.5, 0.25])  # varpi = -2
    assert BBVI().coefficients(reward, moments).tolist() == [1.0, -1.0]
    assert BBVI(baseline="mean-network").coefficients(reward, torch.tensor(-2.5)).tolist() == [1.5, -0.5]
    assert BBVI(baseline="leave-one-out").coefficients(reward, None).tolist() == [2.0, -2.0]
    assert Eq16().coefficients(reward, moments).tolist() == [2.0, 2.0]
    assert Eq16().coefficients(reward, torch.zeros(2)).tolist() == [0.0, 0.0]
    assert Eq16(baseline="same-sample").coefficients(reward, None).tolist() == [1.0, 3.0]
    assert Disarm().coefficients(reward.view(1, 2), None).tolist() == [1.0]


@pytest.mark.parametrize("estimator", [StraightThrough(), Local(), Concrete()], ids=repr)
def test_pathwise_estimators_take_no_rewards(estimator):
    with pytest.raises(TypeError, match=f"^{estimator.name} takes no rewards: its gradient comes by backpropagation.$"):
        estimator.coefficients(torch.zeros(1, 1), None)


# ------------------------------------------------------------------------------ names and options


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_resolve_turns_options_back(estimator):
    assert resolve(estimator.options()) == estimator
    assert resolve(estimator) is estimator


@pytest.mark.parametrize("name", ESTIMATORS)
def test_resolve_by_name_gives_the_defaults(name):
    assert resolve(name) == ESTIMATORS[name]()
    assert resolve(name).name == name


def test_resolve_leaves_the_options_alone():
    options = BBVI().options()
    resolve(options)
    assert options["name"] == "bbvi"


def test_estimators_are_values():
    assert BBVI() == BBVI(decay=0.9)
    assert len({BBVI(), BBVI(decay=0.9), BBVI(decay=0.8)}) == 2
    with pytest.raises(AttributeError):
        BBVI().decay = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_what_is_kept_between_minibatches(estimator):
    layer = dcpp.DropConnectPPLinear(3, 2, estimator=estimator, hyper="learned", dtype=torch.float64)
    elbo = dcpp.ELBO(nn.Sequential(layer), dcpp.categorical, num_data=5, num_samples=2)
    shapes = {name: tuple(buffer.shape) for name, buffer in elbo.moments.named_buffers()}
    if not estimator.needs_moments:
        assert shapes == {}
    elif getattr(estimator, "per_synapse", False):
        assert shapes == {"0/weight": (2, 2, 3), "0/bias": (2, 2)}
    else:
        assert shapes == {"0/layer": (2,)}


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("per_synapse", [False, True])
def test_a_step_folds_its_scores_into_the_moments(mask, per_synapse):
    layer = dcpp.DropConnectPPLinear(2, 1, mask=mask, estimator=BBVI(per_synapse=per_synapse, decay=0.6)).double()
    nn.init.normal_(layer.weight_logit)
    elbo = dcpp.ELBO(layer, lambda output, target: output[:, 0] * target, num_data=9, num_samples=2)
    for buffer in elbo.moments.buffers():
        buffer.uniform_(0.1, 1.0)
    before = {name: buffer.clone() for name, buffer in elbo.moments.named_buffers()}
    inputs, target = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    leading = (2, 3) if mask == "example" else (2, 1)
    z = {"weight": torch.randint(2, (*leading, 1, 2)), "bias": torch.randint(2, (*leading, 1))}
    passes = [{name: value[s] if mask == "example" else value[s, 0] for name, value in z.items()} for s in range(2)]
    with dcpp.forced_masks(layer, passes):
        elbo(inputs, target=target)
    gated = (layer.weight * z["weight"]).detach()  # (L, E, O, I)
    reward = ((gated * inputs.view(3, 1, 2)).sum(-1) + (layer.bias * z["bias"]).detach())[..., 0] * target
    reward = reward if mask == "example" else reward.mean(1, keepdim=True)  # (L, E)
    squares = {name: (z[name] - layer.keep_probability(name).detach()) ** 2 for name in z}
    moments = {}
    for name, square in squares.items():
        r = reward.view(*reward.shape, *[1] * (square.ndim - 2))
        moments[name] = torch.stack([(r * square).mean((0, 1)), square.mean((0, 1))])
    if not per_synapse:
        moments = {"layer": sum(value.flatten(1).sum(1) for value in moments.values())}
    for name, value in elbo.moments.named_buffers():
        fresh = moments[name.rpartition("/")[2]]
        torch.testing.assert_close(value, 0.6 * before[name] + 0.4 * fresh, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("per_synapse", [False, True])
def test_moments_move_in_training_steps_alone(mask, per_synapse):
    layer = dcpp.DropConnectPPLinear(2, 2, mask=mask, estimator=BBVI(per_synapse=per_synapse))
    elbo = dcpp.ELBO(layer, dcpp.categorical, num_data=9)
    batch = {"target": torch.tensor([0, 1, 1])}
    inputs = torch.randn(3, 2)

    def untouched():
        return all(bool((buffer == 0).all()) for buffer in elbo.moments.buffers())

    with torch.no_grad():
        elbo(inputs, **batch)
    assert untouched()
    elbo.eval()
    elbo(inputs, **batch)
    assert untouched()
    elbo.train()
    elbo(inputs, **batch)
    assert not untouched()


# ------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize("given", ["reinforce", None, 3, {"baseline": "running"}])
def test_unknown_estimator(given):
    name = None if isinstance(given, dict) else given
    listed = "'bbvi', 'eq16', 'straight-through', 'local', 'concrete', 'disarm'"
    with raises(f"estimator must be one of {listed}; got {name!r}."):
        resolve(given)


def test_unknown_baseline():
    with raises("baseline must be one of 'running', 'mean-network', 'leave-one-out'; got 'mean'."):
        BBVI(baseline="mean")
    with raises("baseline must be one of 'running', 'same-sample'; got 'mean-network'."):
        Eq16(baseline="mean-network")


@pytest.mark.parametrize("kind", [BBVI, Eq16])
@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_decay_out_of_range(kind, decay):
    with raises(f"decay must lie in [0, 1), got {decay!r}. The default is 0.9."):
        kind(decay=decay)


@pytest.mark.parametrize("baseline", ["mean-network", "leave-one-out"])
def test_per_synapse_needs_the_running_baseline(baseline):
    with raises(
        f"per_synapse=True needs baseline='running', got {baseline!r}: "
        "the other baselines are one number per sample or example."
    ):
        BBVI(per_synapse=True, baseline=baseline)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf")])
def test_temperature_must_be_positive(temperature):
    with raises(f"temperature must be a finite number above 0, got {temperature!r}."):
        Concrete(temperature=temperature)


def test_leave_one_out_needs_two_samples():
    layer = dcpp.DropConnectPPLinear(2, 2, estimator=BBVI(baseline="leave-one-out"))
    with raises(
        "baseline='leave-one-out' needs num_samples of at least 2, got 1. "
        "Use ELBO(..., num_samples=2), or baseline='mean-network' with one sample."
    ):
        dcpp.ELBO(layer, dcpp.categorical, num_data=10)
    dcpp.ELBO(layer, dcpp.categorical, num_data=10, num_samples=2)


@pytest.mark.parametrize(("hyper", "options"), [("marginal", {}), ("optimal", {"hyper": "optimal"})])
def test_eq16_needs_a_learned_hyper_posterior(hyper, options):
    with raises(
        f"estimator='eq16' needs hyper='learned', got '{hyper}': Eq. (16) scores a draw of "
        "pi from q(pi). Use estimator='bbvi' for hyper='optimal'."
    ):
        dcpp.DropConnectPPLinear(2, 2, estimator="eq16", **options)
    dcpp.DropConnectPPLinear(2, 2, estimator="eq16", hyper="learned")
