"""What a layer saves and loads: plain states, pruning, settings."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp


def plain_model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))


def masked_model(**options: Any) -> nn.Sequential:
    return nn.Sequential(
        dcpp.DropConnectPPConv2d(2, 3, 3, **options),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        dcpp.DropConnectPPLinear(12, 4, **options),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hyper": "learned", "keep_probability": 0.2},
        {"hyper": "optimal", "sharing": "unit"},
        {"parameterisation": "probability"},
    ],
    ids=["logit", "learned", "shared", "probability"],
)
@pytest.mark.parametrize("assign", [False, True])
def test_plain_state_loads_strictly_and_the_posterior_keeps_its_start(options: dict[str, Any], assign: bool) -> None:
    plain, model = plain_model(), masked_model(**options)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = plain.state_dict()
    before = set(state)
    outcome = model.load_state_dict(state, strict=True, assign=assign)
    assert outcome.missing_keys == outcome.unexpected_keys == []
    assert set(state) == before  # the caller's dictionary is left alone
    posterior = set(start) - before
    assert len(posterior) == 4 * (3 if options.get("hyper") == "learned" else 1)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert torch.equal(parameter, start[name] if name in posterior else state[name])
    masks = {n: torch.ones_like(model.get_parameter(n)) for n in ("0.weight", "0.bias", "3.weight", "3.bias")}
    x = torch.randn(5, 2, 4, 4)
    with dcpp.forced_masks(model, masks):
        torch.testing.assert_close(model(x), plain(x))


def test_a_learned_posterior_survives_the_plain_state_of_another_layer() -> None:
    model = masked_model()
    nn.init.normal_(model[3].weight_logit)
    learned = model[3].weight_logit.detach().clone()
    state = plain_model()[3].state_dict()
    model[3].load_state_dict(state, strict=True)
    assert torch.equal(model[3].weight_logit, learned)


def test_half_a_posterior_is_refused_by_torch() -> None:
    model = masked_model()
    state = model.state_dict()
    del state["3.bias_logit"]
    with pytest.raises(RuntimeError, match=re.escape('Missing key(s) in state_dict: "3.bias_logit"')):
        model.load_state_dict(state)
    learned = masked_model(hyper="learned")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*0\.weight_alpha"):
        learned.load_state_dict(model.state_dict())


def test_a_posterior_does_not_load_into_a_plain_model_unasked() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*0\.weight_logit"):
        plain_model().load_state_dict(masked_model().state_dict())


def test_state_goes_round_with_fixed_rate_layers() -> None:
    plain, fixed = nn.Linear(3, 2), dcpp.DropConnectLinear(3, 2)
    fixed.load_state_dict(plain.state_dict())
    nn.Linear(3, 2).load_state_dict(fixed.state_dict())
    assert torch.equal(fixed.weight, plain.weight)


def pruned_layer(**options: Any) -> Any:
    layer = dcpp.DropConnectPPLinear(3, 2, dtype=torch.float64, estimator="straight-through", **options)
    layer.keep_only("weight", torch.tensor([[True, False, True], [False, True, True]]))
    layer.keep_only("bias", torch.tensor([True, False]))
    return layer


@pytest.mark.parametrize(
    ("options", "per_synapse"),
    [
        ({"hyper": "marginal"}, lambda logit: dcpp.functional.marginal_kl(logit, 1.0, 9.0)),
        ({"hyper": "optimal"}, lambda logit: dcpp.functional.beta_bernoulli_kl(logit, 1.0, 9.0)),
        ({"hyper": "learned"}, lambda logit: dcpp.functional.beta_bernoulli_kl(logit, 1.0, 9.0)),  # where it starts
    ],
    ids=["marginal", "optimal", "learned"],
)
def test_pruned_synapses_are_off_in_every_pass_and_out_of_the_bound(options: dict[str, Any], per_synapse: Any) -> None:
    layer = pruned_layer(beta=9.0, **options)
    off = ~layer.weight_kept
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    with torch.no_grad():
        mean = nn.functional.linear(x, 0.5 * layer.weight * layer.weight_kept, 0.5 * layer.bias * layer.bias_kept)
    assert (layer.keep_probability()[off] == 0).all()
    assert (layer.kl()[off] == 0).all()
    elbo = dcpp.ELBO(layer, dcpp.categorical, num_data=5)
    terms = elbo(x, target=y)
    terms.loss.backward()
    torch.testing.assert_close(terms.kl, 5 * per_synapse(torch.zeros((), dtype=torch.float64)))
    for gradient in (layer.weight.grad, layer.weight_logit.grad):
        assert (gradient[off] == 0).all()
        assert (gradient[~off] != 0).any()
    torch.testing.assert_close(layer.eval()(x), mean)


def test_pruning_travels_in_the_state() -> None:
    layer = pruned_layer()
    state = layer.state_dict()
    assert {"weight_kept", "bias_kept"} <= set(state)
    assert not {"weight_kept", "bias_kept"} & set(dcpp.DropConnectPPLinear(3, 2).state_dict())
    fresh = dcpp.DropConnectPPLinear(3, 2, dtype=torch.float64)
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh.weight_kept, layer.weight_kept)
    x = torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(fresh.eval()(x), layer.eval()(x))
    assert layer.to(torch.float32).weight_kept.dtype == torch.bool


@pytest.mark.parametrize(
    "layer",
    [
        dcpp.DropConnectPPLinear(3, 2, False, alpha=2.0, keep_probability=0.7, mask="example", estimator="disarm"),
        dcpp.DropConnectPPConv2d(4, 2, (3, 2), padding="same", groups=2, hyper="learned", estimator="eq16"),
        dcpp.DropConnectPPConv2d(4, 2, 3, kl_weight=0.25, logit_step=4.0),
        dcpp.DropConnectPPConv1d(4, 2, 3, hyper="optimal", sharing="input", beta=9.0),
        dcpp.DropConnectPPConv1d(
            3, 2, 3, parameterisation="probability", estimator=dcpp.estimators.Concrete(temperature=0.3)
        ),
        dcpp.DropConnectConv3d(2, 2, 2, stride=2, keep_probability=0.2, activation=torch.relu, evaluation="gaussian"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_layer_is_made_again_from_its_arguments_and_options(layer: Any) -> None:
    again = type(layer)(**layer.arguments(), **layer.options())
    again.load_state_dict(layer.state_dict(), strict=True)
    assert again.options() == layer.options()
    assert again.arguments() == layer.arguments()
    assert repr(again) == repr(layer)
    for key, value in layer.arguments().items():
        assert f"{key}={value!r}" in repr(layer)
