"""The ELBO on models of many kinds: batch statistics, mixed and shared layers, parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.estimators import BBVI
from elbo_cases import ESTIMATORS, X, Y, bound, each_estimator, each_mask, gradients, make, samples_for

HALF = dcpp.functional.beta_bernoulli_kl(torch.zeros((), dtype=torch.float64))  # KL of a synapse at pi~ = 1/2


# ------------------------------------------------------------------------------- batch statistics


def normalised(name: str, mask: str) -> nn.Sequential:
    model = make(name, mask)
    return nn.Sequential(model[0], nn.BatchNorm1d(4, dtype=torch.float64), *model[1:])


@each_estimator
@each_mask
@pytest.mark.parametrize("by_hand", [False, True])
def test_batch_statistics_move_once_per_sample(name: str, mask: str, by_hand: bool) -> None:
    """The passes of a mean-network baseline or of an antithetic pair's second arm do not count."""
    for num_samples in (samples_for(name), 3):
        model = normalised(name, mask)
        norm = model[1]
        assert isinstance(norm, nn.BatchNorm1d)
        seen: list[Tensor] = []
        model[0].register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output.detach()))
        elbo = bound(model, num_samples=num_samples)
        for _ in range(2):
            if by_hand:
                with elbo.sample():
                    output = model(X)
                elbo.terms(output, Y).loss.backward()
            else:
                elbo(X, target=Y).loss.backward()
        assert norm.num_batches_tracked == 2 * num_samples
        passes_per_step = len(seen) // 2
        counted: list[Tensor] = []
        for step in range(2):
            passes = seen[step * passes_per_step : (step + 1) * passes_per_step]
            if name == "mean-network":
                del passes[1 if by_hand else 0]
            counted += passes[:: 2 if name == "disarm" else 1]
        mean = torch.zeros(4, dtype=torch.float64)
        for output in counted:
            mean = 0.9 * mean + 0.1 * output.mean(0)
        torch.testing.assert_close(norm.running_mean, mean)


def test_frozen_norms_and_norms_without_statistics_are_left_alone() -> None:
    model = normalised("mean-network", "batch")
    model.insert(2, nn.BatchNorm1d(4, track_running_stats=False, dtype=torch.float64))
    model[1].eval()
    elbo = bound(model)
    elbo(X, target=Y).loss.backward()
    assert model[1].num_batches_tracked == 0
    assert (model[1].running_mean == 0).all()


# ---------------------------------------------------------------------------------- mixed models


class Mixed(nn.Module):
    """Plain, fixed-rate and learned layers with every estimator, one after another."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        double: dict[str, Any] = {"dtype": torch.float64}
        self.plain = nn.Linear(3, 5, **double)
        self.fixed = dcpp.DropConnectLinear(5, 5, mask=mask, **double)
        self.learned = nn.ModuleDict(
            {
                name: dcpp.DropConnectPPLinear(
                    5,
                    5,
                    estimator=estimator,
                    mask=mask,
                    hyper="learned" if name.startswith("eq16") else "optimal",
                    **double,
                )
                for name, estimator in ESTIMATORS.items()
            }
        )
        self.head = nn.Linear(5, 2, **double)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fixed(torch.tanh(self.plain(x)))
        for layer in self.learned.values():
            x = x + torch.tanh(layer(x))
        output: Tensor = self.head(x)
        return output


@each_mask
def test_a_model_may_mix_plain_fixed_and_learned_layers_of_every_estimator(mask: str) -> None:
    model = Mixed(mask)
    elbo = bound(model, num_samples=2)
    for _ in range(2):
        model.zero_grad()
        terms = elbo(X, target=Y)
        terms.loss.backward()
    found = gradients(model)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert all((gradient != 0).any() for gradient in found.values())
    layers = dcpp.named_kl(model)
    assert list(layers) == [f"learned.{name}" for name in ESTIMATORS]
    torch.testing.assert_close(terms.kl, torch.stack(list(layers.values())).sum().detach())
    optimal = {key: value for key, value in layers.items() if "eq16" not in key}
    for value in optimal.values():
        torch.testing.assert_close(value, 30 * HALF)
    assert {key.split("/")[1] for key, _ in elbo.moments.named_buffers()} == {"running", "per-synapse", "eq16"}


def test_each_layer_has_the_gradient_of_its_own_estimator() -> None:
    """A layer's gradient given its masks does not depend on the estimators of the others."""

    def first_layer(estimators: tuple[Any, Any]) -> dict[str, Tensor]:
        torch.manual_seed(4)
        layers = [
            dcpp.DropConnectPPLinear(n, m, estimator=e, dtype=torch.float64)
            for n, m, e in zip((3, 4), (4, 2), estimators, strict=True)
        ]
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        masks = {f"{i}.{s}": torch.rand(getattr(model[i], s).shape) < 0.5 for i in (0, 2) for s in ("weight", "bias")}
        elbo = bound(model)
        with dcpp.forced_masks(model, masks):
            elbo(X, target=Y)
            elbo(X, target=Y).loss.backward()
        return gradients(layers[0])

    mean_network = BBVI(baseline="mean-network")
    for first in ("bbvi", "straight-through", mean_network):
        alone = first_layer((first, first))
        for other in ("bbvi", "straight-through", mean_network):
            mixed = first_layer((first, other))
            for key, gradient in alone.items():
                torch.testing.assert_close(mixed[key], gradient, msg=f"{first} beside {other}: {key}")


def test_a_model_without_learned_layers_has_a_bound_without_kl() -> None:
    model = nn.Sequential(nn.Linear(3, 4), dcpp.DropConnectLinear(4, 2)).double()
    terms = bound(model)(X, target=Y)
    terms.loss.backward()
    assert terms.kl == 0
    assert terms.elbo == terms.log_likelihood
    assert dcpp.named_kl(model) == {}
    assert dcpp.kl_divergence(model) == 0
    assert model[0].weight.grad is not None


def test_frozen_posteriors_get_no_gradient_and_still_count() -> None:
    for name in ("running", "straight-through", "disarm"):
        model = make(name)
        model[0].weight_logit.requires_grad_(False)
        elbo = bound(model)
        elbo(X, target=Y)
        terms = elbo(X, target=Y)
        terms.loss.backward()
        torch.testing.assert_close(terms.kl, dcpp.kl_divergence(model).detach())
        assert model[0].weight_logit.grad is None
        assert model[0].bias_logit.grad is not None
        assert model[2].weight_logit.grad is not None


# --------------------------------------------------------------------------------- shared layers


def tied(name: str) -> nn.Sequential:
    torch.manual_seed(1)
    hyper = "learned" if name.startswith("eq16") else "optimal"
    first, second, head = (
        dcpp.DropConnectPPLinear(3, n, estimator=ESTIMATORS[name], hyper=hyper, dtype=torch.float64) for n in (3, 3, 2)
    )
    for key, parameter in list(first.named_parameters()):
        setattr(second, key, parameter)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), head)


@each_estimator
def test_shared_parameters_have_one_mask_and_count_once(name: str) -> None:
    model = tied(name)
    elbo = bound(model, num_samples=samples_for(name))
    elbo(X, target=Y)
    terms = elbo(X, target=Y)
    terms.loss.backward()
    gradients(model)
    kl = dcpp.named_kl(model)
    assert kl["2"] == 0
    assert kl["0"] > 0
    torch.testing.assert_close(terms.kl, (kl["0"] + kl["4"]).detach())
    torch.testing.assert_close(dcpp.kl_divergence(model), kl["0"] + kl["4"])
    reused = nn.Sequential(model[0], nn.Tanh(), model[0], nn.Tanh(), model[4])  # one module in two places
    torch.testing.assert_close(dcpp.kl_divergence(reused), kl["0"] + kl["4"])
    if name not in ("local", "concrete"):
        eye = torch.eye(3, dtype=torch.float64)
        with elbo.sample():
            first, second = model[0](eye), model[2](eye)
        assert torch.equal(first, second)


def test_layers_that_share_a_posterior_need_one_estimator() -> None:
    model = tied("straight-through")
    model[2].estimator = BBVI()
    with pytest.raises(ArgumentError, match="'0' and '2' share a posterior and need one estimator"):
        bound(model)


# ------------------------------------------------------------------------------ parameter groups


def test_parameter_groups_keep_the_posterior_from_decaying() -> None:
    model = Mixed("batch")
    model.plain.weight.requires_grad_(False)
    model.learned["local"].weight_logit.requires_grad_(False)
    groups = dcpp.parameter_groups(model, lr=0.1, logit_lr=0.5, weight_decay=0.3)
    by_name = {group["name"]: group for group in groups}
    assert {key: (g["lr"], g["weight_decay"]) for key, g in by_name.items()} == {
        "weights": (0.1, 0.3),
        "posterior": (0.5, 0.0),
    }
    names = {id(p): key for key, p in model.named_parameters()}
    posterior = {names[id(p)] for p in by_name["posterior"]["params"]}
    weights = {names[id(p)] for p in by_name["weights"]["params"]}
    assert posterior == {
        key
        for key in names.values()
        if key.rpartition("_")[2] in ("logit", "alpha", "beta") and key != "learned.local.weight_logit"
    }
    assert weights | posterior == set(names.values()) - {"plain.weight", "learned.local.weight_logit"}
    assert not weights & posterior


def test_parameter_groups_leave_out_empty_ones_and_default_to_one_step_size() -> None:
    assert [group["name"] for group in dcpp.parameter_groups(nn.Linear(2, 2), lr=0.1)] == ["weights"]
    layer = dcpp.DropConnectPPLinear(2, 2, parameterisation="probability")
    assert [group["lr"] for group in dcpp.parameter_groups(layer, lr=0.1)] == [0.1, 0.1]
    layer.requires_grad_(False)
    assert dcpp.parameter_groups(layer, lr=0.1) == []
    layer.weight_probability.requires_grad_(True)
    assert [group["name"] for group in dcpp.parameter_groups(layer, lr=0.1)] == ["posterior"]


def test_each_logit_step_has_a_group_in_order_of_appearance() -> None:
    model = nn.Sequential(
        *(dcpp.DropConnectPPLinear(3, 3, logit_step=step) for step in (2.0, 1.0, 2.0)), nn.Linear(3, 1)
    )
    model[1].bias_logit.requires_grad_(False)
    names = {id(p): key for key, p in model.named_parameters()}
    groups = dcpp.parameter_groups(model, lr=0.1, weight_decay=0.3)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("weights", 0.1, 0.3),
        ("posterior", 0.2, 0.0),
        ("posterior", 0.1, 0.0),
    ]
    assert [[names[id(p)] for p in group["params"]] for group in groups[1:]] == [
        ["0.weight_logit", "0.bias_logit", "2.weight_logit", "2.bias_logit"],
        ["1.weight_logit"],
    ]
    torch.optim.Adam(groups)  # no parameter in two of them
    overridden = dcpp.parameter_groups(model, lr=0.1, logit_lr=0.7)
    assert [(g["name"], g["lr"], len(g["params"])) for g in overridden] == [("weights", 0.1, 8), ("posterior", 0.7, 5)]


def test_a_logit_step_covers_beta_parameters_and_the_first_layers_counts_where_they_are_shared() -> None:
    layer = dcpp.DropConnectPPLinear(3, 2, hyper="learned", logit_step=0.5)
    assert [(g["lr"], len(g["params"])) for g in dcpp.parameter_groups(layer, lr=0.1)] == [(0.1, 2), (0.05, 6)]
    model = nn.Sequential(*(dcpp.DropConnectPPLinear(3, 3, bias=False, logit_step=step) for step in (3.0, 5.0)))
    model[1].weight, model[1].weight_logit = model[0].weight, model[0].weight_logit
    assert [(g["lr"], len(g["params"])) for g in dcpp.parameter_groups(model, lr=1.0)] == [(1.0, 1), (3.0, 1)]


def test_parameter_groups_take_a_step_size_that_is_a_tensor() -> None:
    lr = torch.tensor(0.1)
    assert [g["lr"] is lr for g in dcpp.parameter_groups(dcpp.DropConnectPPLinear(2, 2), lr=lr)] == [True, True]


def test_adamw_decays_weights_alone() -> None:
    model = make()
    optimizer = torch.optim.AdamW(dcpp.parameter_groups(model, lr=0.1, logit_lr=0.2, weight_decay=0.5))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, parameter in model.named_parameters():
        factor = 1.0 if key.endswith("_logit") else 1 - 0.1 * 0.5
        torch.testing.assert_close(parameter.detach(), factor * before[key])
