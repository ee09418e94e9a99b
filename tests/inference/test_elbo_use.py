"""The ELBO's two ways of use, its modes and its state."""

from __future__ import annotations

import copy

import pytest
import torch

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from elbo_cases import (
    ESTIMATORS,
    X,
    Y,
    bound,
    each_estimator,
    each_mask,
    gradients,
    make,
    masks_of,
    samples_for,
)

# --------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("name", ["running", "mean-network", "straight-through", "disarm"])
def test_the_target_may_be_the_last_of_the_inputs(name: str) -> None:
    found = []
    for call in (lambda elbo: elbo(X, target=Y), lambda elbo: elbo(X, Y)):
        model = make(name)
        elbo = bound(model)
        for _ in range(2):
            terms = call(elbo)
            model.zero_grad()
            terms.loss.backward()
        found.append([terms.loss.detach(), terms.elbo, terms.kl, terms.output, *gradients(model).values()])
    for named, last in zip(*found, strict=True):
        assert torch.equal(named, last)


def test_a_target_may_be_none_and_inputs_and_options_may_be_many() -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make()[0]

        def forward(self, *inputs: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
            return gain * sum(self.layer(x) for x in inputs)  # type: ignore[return-value]

    seen = []

    def likelihood(output: torch.Tensor, target: object) -> torch.Tensor:
        seen.append(target)
        return output.sum(1)

    model = Sum()
    passes = {f"layer.{s}": torch.ones_like(getattr(model.layer, s)) for s in ("weight", "bias")}
    with dcpp.forced_masks(model, passes):
        one = bound(model, likelihood=likelihood)(X, 2 * X, Y, gain=3.0)
        other = bound(model, likelihood=likelihood)(X, 2 * X, gain=3.0, target=None)
        assert torch.equal(one.output, other.output)
    expected = 9 * X @ model.layer.weight.T + 6 * model.layer.bias
    torch.testing.assert_close(one.output, expected)
    assert seen[0] is Y
    assert seen[1] is None
    bound(model, likelihood=likelihood)(X, None)
    assert seen[2] is None


@pytest.mark.parametrize("inputs", [(), (X,)])
def test_a_missing_target_is_refused(inputs: tuple[torch.Tensor, ...]) -> None:
    words = rf"ELBO needs a target: elbo\(inputs, target=\.\.\.\) or elbo\(inputs, target\), got {len(inputs)} input"
    with pytest.raises(ArgumentError, match=words):
        bound(make())(*inputs)


def test_terms_are_not_frozen_and_pass_through_a_map_over_their_tensors() -> None:
    """As a framework does that moves every output, field by field."""
    terms = bound(make())(X, Y)
    for key, value in vars(terms).items():
        setattr(terms, key, value.clone())
    terms.loss.backward()


# ------------------------------------------------------------------- what the model has at each step


@pytest.mark.parametrize("name", ["running", "per-synapse", "straight-through", "disarm", "eq16"])
def test_a_layer_put_in_after_the_bound_was_made_counts(name: str) -> None:
    """In the KL, in the gradient and in the moments; the one that was taken out counts no more."""
    model = make(name)
    elbo = bound(model)
    elbo(X, Y).loss.backward()
    old = model[0]
    old.zero_grad()
    before = old.state_dict() | {}
    model[0] = dcpp.DropConnectPPLinear(
        3, 4, estimator=ESTIMATORS[name], hyper=old.hyper, beta=7.0, keep_probability=0.2, dtype=torch.float64
    )
    for _ in range(2):
        model.zero_grad()
        terms = elbo(X, Y)
        terms.loss.backward()
    torch.testing.assert_close(terms.kl, dcpp.kl_divergence(model).detach())
    assert all((gradient != 0).any() for key, gradient in gradients(model).items() if key.startswith("0."))
    assert all(p.grad is None for p in old.parameters())
    assert all(torch.equal(old.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_layer_of_another_kind_or_shape_put_in_counts(by_hand: bool) -> None:
    model = make("per-synapse")
    elbo = bound(model)
    elbo(X, Y)
    assert set(dict(elbo.moments.named_buffers())) == {f"{i}/{s}" for i in (0, 2) for s in ("weight", "bias")}
    model[0] = dcpp.DropConnectPPLinear(3, 5, estimator="bbvi", dtype=torch.float64)
    model[2] = dcpp.DropConnectPPLinear(5, 2, estimator=ESTIMATORS["per-synapse"], dtype=torch.float64)
    model.append(torch.nn.Identity())
    for _ in range(2):
        if by_hand:
            with elbo.sample():
                output = model(X)
            terms = elbo.terms(output, Y)
        else:
            terms = elbo(X, Y)
        terms.loss.backward()
    torch.testing.assert_close(terms.kl, dcpp.kl_divergence(model).detach())
    assert elbo.moments.get_buffer("0/layer").any()
    assert elbo.moments.get_buffer("2/weight").shape == (2, 2, 5)
    model[0] = torch.nn.Linear(3, 5, dtype=torch.float64)
    model[2].kl_weight = 2.0
    terms = elbo(X, Y)
    torch.testing.assert_close(terms.kl, dcpp.kl_divergence(model).detach())
    torch.testing.assert_close(terms.elbo, terms.log_likelihood - 2.0 * terms.kl)


def test_a_layer_that_does_not_fit_the_bound_is_refused_when_it_is_met() -> None:
    model = make()
    elbo = bound(model)
    elbo(X, Y)
    model[0] = make("leave-one-out")[0]
    with pytest.raises(ArgumentError, match=r"baseline='leave-one-out' needs num_samples of at least 2, got 1\."):
        elbo(X, Y)
    model[0] = make("straight-through")[0]
    elbo(X, Y)
    model[0].estimator = ESTIMATORS["leave-one-out"]
    with pytest.raises(ArgumentError, match=r"baseline='leave-one-out' needs num_samples of at least 2, got 1\."):
        elbo(X, Y)


# ------------------------------------------------------------------------- `sample` and `terms`


@pytest.mark.parametrize(
    ("name", "num_samples"),
    [(name, count) for name in ESTIMATORS for count in (1, 2) if (name, count) != ("leave-one-out", 1)],
)
@each_mask
def test_sample_and_terms_do_what_the_call_does(name: str, mask: str, num_samples: int) -> None:
    found = []
    for by_hand in (False, True):
        model = make(name, mask)
        elbo = bound(model, num_samples=num_samples)
        for _ in range(3):
            if by_hand:
                with elbo.sample():
                    output = model(X)
                terms = elbo.terms(output, Y)
            else:
                terms = elbo(X, target=Y)
            model.zero_grad()
            terms.loss.backward()
        found.append([terms.loss.detach(), terms.elbo, terms.kl, terms.output, *gradients(model).values()])
        found[-1] += list(elbo.moments.buffers())
    for called, used in zip(*found, strict=True):
        assert torch.equal(called, used)
    assert any((g != 0).any() for key, g in gradients(model).items() if key.endswith("_logit"))


def test_terms_without_a_sample_are_refused() -> None:
    elbo = bound(make())
    with pytest.raises(ArgumentError, match=r"terms needs a pass: use `with elbo.sample\(\): output = model"):
        elbo.terms(torch.zeros(6, 2), Y)
    with elbo.sample():
        output = elbo.model(X)
    elbo.terms(output, Y)
    with pytest.raises(ArgumentError, match="terms needs a pass"):
        elbo.terms(output, Y)  # a pass is used once


@pytest.mark.parametrize(
    ("name", "num_samples"), [("mean-network", 1), ("disarm", 1), ("straight-through", 2), ("running", 2)]
)
def test_terms_refuse_what_they_could_not_repeat(name: str, num_samples: int) -> None:
    model = make(name)
    elbo = bound(model, num_samples=num_samples)
    with elbo.sample():
        output = model(X) + model(X)
    with pytest.raises(ArgumentError, match=r"exactly one call of it and `terms` its very output; saw 2 calls\."):
        elbo.terms(output, Y)
    with elbo.sample():
        output = model[2](model[1](model[0](X)))
    with pytest.raises(ArgumentError, match=r"saw 0 calls\. Use elbo\(\*inputs, target=\.\.\.\)"):
        elbo.terms(output, Y)
    with elbo.sample():
        output = model(X)
    with pytest.raises(ArgumentError, match="its very output; saw 1 calls"):
        elbo.terms(output * 2, Y)


@pytest.mark.parametrize("name", ["running", "straight-through", "local", "concrete"])
def test_one_pass_estimators_take_any_use_of_the_model_inside_sample(name: str) -> None:
    model = make(name)
    elbo = bound(model)
    with elbo.sample():
        first, second = model(X), model(X)
    assert torch.equal(first, second)  # one draw of the masks, however often the model is called
    terms = elbo.terms(torch.cat([first, second]), torch.cat([Y, Y]))
    torch.testing.assert_close(terms.log_likelihood, 30 * dcpp.categorical(first, Y).mean().detach())
    terms.loss.backward()
    gradients(model)


def test_an_error_inside_sample_leaves_nothing_behind() -> None:
    model = make()
    elbo = bound(model)
    with pytest.raises(RuntimeError, match="mine"), elbo.sample():
        raise RuntimeError("mine")
    with pytest.raises(ArgumentError, match="terms needs a pass"):
        elbo.terms(torch.zeros(6, 2), Y)
    assert not torch.equal(model(X), model(X))
    assert torch.equal(model.eval()(X), model(X))


# ------------------------------------------------------------------------------ modes and state


@each_estimator
@each_mask
def test_eval_mode_samples_binary_masks_and_leaves_moments_alone(name: str, mask: str) -> None:
    model = make(name, mask)
    elbo = bound(model, num_samples=samples_for(name))
    for _ in range(2):
        elbo(X, target=Y)
    before = {key: value.clone() for key, value in elbo.state_dict().items()}
    elbo.eval()
    with torch.no_grad():
        values = {float(elbo(X, target=Y).elbo) for _ in range(8)}
    assert len(values) > 1
    elbo(X, target=Y).loss.backward()  # with a gradient, too
    elbo.train()
    with torch.no_grad():
        elbo(X, target=Y)  # and in train mode without one
    assert all(torch.equal(before[key], value) for key, value in elbo.state_dict().items())


def test_eval_mode_estimates_the_same_bound_for_every_estimator() -> None:
    terms = []
    for name in ("running", "straight-through", "local", "concrete"):
        elbo = bound(make(name)).eval()
        terms.append(elbo(X, target=Y).elbo)
    assert all(torch.equal(terms[0], other) for other in terms[1:])


@pytest.mark.parametrize("name", ["running", "per-synapse", "eq16"])
def test_moments_are_state_and_training_resumes_from_it(name: str) -> None:
    elbo = bound(make(name))
    for _ in range(2):
        elbo(X, target=Y)
    state = copy.deepcopy(elbo.state_dict())
    keys = [key for key in state if key.startswith("moments.")]
    expected = ["moments.0/layer", "moments.2/layer"]
    if name == "per-synapse":
        expected = [f"moments.{layer}/{part}" for layer in (0, 2) for part in ("weight", "bias")]
    assert keys == expected
    assert all(state[key].dtype == torch.float64 and (state[key] != 0).all() for key in keys)
    resumed = bound(make(name))
    resumed.load_state_dict(state)
    for other in (elbo, resumed):
        other.generator.manual_seed(5)
        other.model.zero_grad()
        other(X, target=Y).loss.backward()
    for (key, mine), theirs in zip(gradients(elbo.model).items(), gradients(resumed.model).values(), strict=True):
        assert torch.equal(mine, theirs), key


def test_running_moments_are_those_of_eq_10() -> None:
    """E[f h] and E[h^2] with f = reward h, summed over a layer, at decay 0.9 from zero."""
    model = make()
    elbo = bound(model)
    moments = torch.zeros(2, dtype=torch.float64)
    for _ in range(3):
        masks = masks_of(model)
        with dcpp.forced_masks(model, masks):
            reward = elbo(X, target=Y).log_likelihood / 30
        squared = sum(
            (masks[f"0.{s}"].double() - torch.sigmoid(model[0].logit(s))).square().sum() for s in ("weight", "bias")
        )
        moments = 0.9 * moments + 0.1 * torch.stack([reward * squared.detach(), squared.detach()])
    torch.testing.assert_close(elbo.moments.get_buffer("0/layer"), moments)
