"""A layer's options stand once, with one set of types, defaults and errors; what is abstract cannot be made."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

import pytest
import torch

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from dropconnectpp.estimators import resolve
from dropconnectpp.layers.affine import Operation
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnect import DropConnectLayer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer, PosteriorArguments, PosteriorOptions
from dropconnectpp.ops.prior import Prior

LEARNED = (
    (dcpp.DropConnectPPLinear, (3, 2)),
    (dcpp.DropConnectPPConv1d, (3, 2, 3)),
    (dcpp.DropConnectPPConv2d, (3, 2, 3)),
    (dcpp.DropConnectPPConv3d, (3, 2, 3)),
)


def test_arguments_and_options_have_the_same_fields_in_order_and_types() -> None:
    fields = {field.name: field for field in dataclasses.fields(PosteriorOptions)}
    assert list(fields) == list(PosteriorArguments.__annotations__)
    assert get_type_hints(PosteriorArguments) == {
        name: hint for name, hint in get_type_hints(PosteriorOptions).items() if name in fields
    }
    assert PosteriorArguments.__total__ is False
    assert all(field.default is not dataclasses.MISSING for field in fields.values())


def test_the_defaults_are_what_is_recommended() -> None:
    options = PosteriorOptions()
    assert (options.alpha, options.beta, options.keep_probability) == (1.0, 1.0, 0.5)
    assert (options.hyper, options.sharing, options.parameterisation) == ("marginal", "synapse", "logit")
    assert (options.kl_weight, options.logit_step, options.estimator) == (1.0, 1.0, resolve("straight-through"))
    assert options.prior == Prior()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.alpha = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "shape"), LEARNED)
def test_every_layer_takes_every_option_and_tells_it_back(kind: Any, shape: tuple[int, ...]) -> None:
    given: dict[str, Any] = {
        "alpha": 2.0,
        "beta": 3.0,
        "keep_probability": 0.3,
        "hyper": "optimal",
        "sharing": "unit",
        "estimator": "disarm",
        "parameterisation": "probability",
        "kl_weight": 0.5,
        "logit_step": 7.0,
        "granularity": "kernel",
    }
    assert given.keys() == PosteriorArguments.__annotations__.keys()
    layer = kind(*shape, **given)
    told = layer.options()
    assert {name: told[name] for name in given} == given | {"estimator": resolve("disarm").options()}
    assert layer.posterior_of("weight").prior == PosteriorOptions(**given).prior == Prior(2.0, 3.0, "optimal", "unit")
    assert [p.kind for p in inspect.signature(kind).parameters.values()][-1] is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize(("kind", "shape"), LEARNED)
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("estimater", "Did you mean 'estimator'?"),
        ("kl_wieght", "Did you mean 'kl_weight'?"),
        ("keep_prob", "Did you mean 'keep_probability'?"),
        ("activations", "Did you mean 'activation'?"),
        ("masks", "Did you mean 'mask'?"),
        (
            "xyzzy",
            "There are: alpha, beta, keep_probability, hyper, sharing, estimator, parameterisation, "
            "kl_weight, logit_step, granularity.",
        ),
    ],
)
def test_an_unknown_option_names_the_nearest(kind: Any, shape: tuple[int, ...], wrong: str, hint: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"{kind.__name__} has no option {wrong!r}. {hint}") + "$"):
        kind(*shape, **{wrong: 1})


@pytest.mark.parametrize(
    "kind", [Operation, MaskedLayer, DropConnectPPLayer, DropConnectLayer], ids=lambda k: k.__name__
)
def test_what_is_abstract_cannot_be_made(kind: type) -> None:
    with pytest.raises(TypeError, match=f"abstract class {kind.__name__} "):
        kind()


def test_a_new_operation_must_say_how_it_computes() -> None:
    class Half(DropConnectPPLayer):
        def operate(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return input

    with pytest.raises(TypeError, match=r"abstract class Half .*check_input.*operate_each"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("hyper", ["marginal", "optimal", "learned"])
def test_the_hyper_posterior_of_each_way(hyper: Any) -> None:
    """Eq. (14): learned, or the best for pi~; where pi is summed out the same, which is the posterior of pi given z."""
    layer = dcpp.DropConnectPPLinear(3, 2, hyper=hyper, alpha=2.0, beta=5.0, keep_probability=0.25)
    alpha, beta = layer.hyper_posterior()
    torch.testing.assert_close(alpha, torch.full((2, 3), 2.25))
    torch.testing.assert_close(beta, torch.full((2, 3), 5.75))


@pytest.mark.parametrize(
    ("sharing", "shape", "size"), [("layer", (1, 1), 6), ("unit", (2, 1), 3), ("input", (1, 3), 2)]
)
def test_the_hyper_posterior_of_a_group(sharing: Any, shape: tuple[int, ...], size: int) -> None:
    layer = dcpp.DropConnectPPLinear(3, 2, hyper="optimal", sharing=sharing, alpha=2.0, beta=5.0, keep_probability=0.25)
    alpha, beta = layer.hyper_posterior()
    torch.testing.assert_close(alpha, torch.full(shape, 2.0 + 0.25 * size))
    torch.testing.assert_close(beta, torch.full(shape, 5.0 + 0.75 * size))
    alpha, beta = layer.hyper_posterior("bias")
    torch.testing.assert_close(torch.stack([alpha, beta]), torch.tensor([[2.5], [6.5]]))
    layer.keep_only("weight", torch.tensor([[True, False, False], [False, False, False]]))
    pruned = layer.hyper_posterior()
    assert (pruned[0] + pruned[1] - 7.0).sum().item() == pytest.approx(1.0)  # one synapse is left


def test_a_shared_pi_learns_how_many_synapses_a_group_needs() -> None:
    """Two of three inputs are of no use: with one pi for an input they fall together, below where they start."""
    torch.manual_seed(0)
    layer = dcpp.DropConnectPPLinear(3, 4, hyper="optimal", sharing="input", estimator="straight-through")
    elbo = dcpp.ELBO(layer, dcpp.gaussian(0.3), num_data=256)
    x = torch.randn(256, 3)
    y = x[:, :1] * torch.tensor([1.0, -2.0, 1.5, 0.7])
    optimizer = torch.optim.Adam(dcpp.parameter_groups(layer, lr=0.02, logit_lr=0.05))
    for _ in range(200):
        optimizer.zero_grad()
        elbo(x, y).loss.backward()
        optimizer.step()
    keep = layer.keep_probability().detach()
    assert float(keep[:, 0].min()) > 0.9
    assert float(keep[:, 1:].max()) < 0.5
