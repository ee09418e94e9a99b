"""Misspelt options are told by name, with the nearest that there is, and nothing has changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, named_options

DATA = torch.randn(8, 4), torch.randint(3, (8,))


def model() -> nn.Module:
    return dcpp.convert(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))


def elbo(**options: Any) -> dcpp.ELBO:
    return dcpp.ELBO(model(), dcpp.categorical, num_data=8, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: elbo(kl_wieght=0.1), "ELBO has no option 'kl_wieght'. Did you mean 'kl_weight'?"),
        (lambda: elbo(num_sample=2), "ELBO has no option 'num_sample'. Did you mean 'num_samples'?"),
        (
            lambda: dcpp.evaluate(model(), DATA, batchsize=2),
            "evaluate has no option 'batchsize'. Did you mean",
        ),
        (
            lambda: dcpp.calibrate(model(), DATA, zzz=1),
            "calibrate has no option 'zzz'. There are: model, loader, ",
        ),
        (lambda: dcpp.SparsityPlan(elbo(), 9, keeps=0.1), "SparsityPlan has no option 'keeps'. Did you mean 'keep'?"),
    ],
)
def test_an_unknown_option_names_the_nearest(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value).startswith(message)


def test_known_ones_pass_and_the_signature_is_the_functions_own() -> None:
    assert elbo(kl_weight=0.5).num_samples == 1
    assert list(inspect.signature(dcpp.ELBO).parameters)[:3] == ["model", "log_likelihood", "num_data"]
    assert "num_samples" in inspect.signature(dcpp.evaluate).parameters
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'loader'"):
        dcpp.evaluate(model())  # type: ignore[call-arg]


def test_a_class_of_ones_own_may_add_options() -> None:
    class Own(dcpp.ELBO):
        def __init__(self, *args: Any, extra: int = 0, **options: Any) -> None:
            super().__init__(*args, **options)
            self.extra = extra

    assert Own(model(), dcpp.categorical, 8, extra=3, kl_weight=0.5).extra == 3


def test_it_takes_positional_arguments_as_before() -> None:
    @named_options
    def call(first: int, /, second: int = 2, *, third: int = 3) -> tuple[int, int, int]:
        return first, second, third

    assert call(1, 5, third=7) == (1, 5, 7)
    with pytest.raises(ArgumentError, match="There are: second, third"):
        call(1, first=2)  # type: ignore[call-arg]
