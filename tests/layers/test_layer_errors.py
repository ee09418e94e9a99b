"""What a layer refuses, and the words it says so with."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, DropConnectError, ShapeError

LEARNED = (
    lambda **options: dcpp.DropConnectPPLinear(3, 2, **options),
    lambda **options: dcpp.DropConnectPPConv1d(3, 2, 3, **options),
    lambda **options: dcpp.DropConnectPPConv2d(3, 2, 3, **options),
    lambda **options: dcpp.DropConnectPPConv3d(3, 2, 3, **options),
)
FIXED = (
    lambda **options: dcpp.DropConnectLinear(3, 2, **options),
    lambda **options: dcpp.DropConnectConv1d(3, 2, 3, **options),
    lambda **options: dcpp.DropConnectConv2d(3, 2, 3, **options),
    lambda **options: dcpp.DropConnectConv3d(3, 2, 3, **options),
)
BOTH = [
    ({"keep_probability": 0.0}, "keep_probability must lie strictly between 0 and 1, got 0.0. To keep every"),
    ({"keep_probability": 1.0}, "keep_probability must lie strictly between 0 and 1, got 1.0."),
    ({"keep_probability": -0.1}, "keep_probability must lie strictly between 0 and 1, got -0.1."),
    ({"keep_probability": float("nan")}, "keep_probability must lie strictly between 0 and 1, got nan."),
    ({"mask": "layer"}, "mask must be one of 'batch', 'example'; got 'layer'."),
    ({"activation": "relu"}, "activation must be a module or function such as nn.ReLU(), got 'relu'."),
]
POSTERIOR = [
    ({"alpha": 0.0}, "alpha must be a finite number above 0, got 0.0."),
    ({"alpha": float("inf")}, "alpha must be a finite number above 0, got inf."),
    ({"beta": -2}, "beta must be a finite number above 0, got -2."),
    ({"beta": float("nan")}, "beta must be a finite number above 0, got nan."),
    ({"kl_weight": -0.1}, "kl_weight must be a finite number of at least 0, got -0.1."),
    ({"kl_weight": float("inf")}, "kl_weight must be a finite number of at least 0, got inf."),
    ({"kl_weight": float("nan")}, "kl_weight must be a finite number of at least 0, got nan."),
    ({"logit_step": 0.0}, "logit_step must be a finite number above 0, got 0.0."),
    ({"logit_step": float("inf")}, "logit_step must be a finite number above 0, got inf."),
    ({"hyper": "fixed"}, "hyper must be one of 'marginal', 'optimal', 'learned'; got 'fixed'."),
    ({"sharing": "row"}, "sharing must be one of 'synapse', 'layer', 'unit', 'input'; got 'row'."),
    ({"parameterisation": "odds"}, "parameterisation must be one of 'logit', 'probability'; got 'odds'."),
    ({"estimator": "reinforce"}, "estimator must be one of 'bbvi', 'eq16', 'straight-through', 'local',"),
    ({"estimator": None}, "estimator must be one of 'bbvi', 'eq16',"),
    ({"estimator": {"name": "bbvi", "decay": 1.0}}, "decay must lie in [0, 1), got 1.0. The default is 0.9."),
    ({"estimator": "eq16"}, "estimator='eq16' needs hyper='learned', got 'marginal'"),
    ({"estimator": "eq16", "hyper": "optimal"}, "estimator='eq16' needs hyper='learned', got 'optimal'"),
    *(
        ({"sharing": sharing, "hyper": hyper}, f"sharing='{sharing}' needs hyper='optimal', got hyper='{hyper}': {why}")
        for sharing in ("layer", "unit", "input")
        for hyper, why in (
            ("marginal", "summing pi out synapse by synapse leaves nothing to share. Use hyper='optimal', or"),
            ("learned", "a shared pi has its best q(pi) in closed form. Use hyper='optimal', or sharing='synapse'."),
        )
    ),
    ({"sharing": "layer"}, "sharing='layer' needs hyper='optimal', got hyper='marginal'"),
    ({"keep_probabilty": 0.5}, "has no option 'keep_probabilty'. Did you mean 'keep_probability'?"),
    ({"activations": None}, "has no option 'activations'. Did you mean 'activation'?"),
    ({"colour": "red"}, "has no option 'colour'. There are: alpha, beta, keep_probability, hyper, sharing, estimator,"),
]
RATE = [
    ({"evaluation": "median"}, "evaluation must be one of 'mean', 'gaussian'; got 'median'."),
    ({"evaluation": "gaussian"}, "evaluation='gaussian' averages the activation, and this layer has none."),
]


@pytest.mark.parametrize("make", LEARNED)
@pytest.mark.parametrize(("options", "words"), BOTH + POSTERIOR)
def test_learned_layers_refuse_bad_arguments(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        make(**options)


@pytest.mark.parametrize("make", FIXED)
@pytest.mark.parametrize(("options", "words"), BOTH + RATE)
def test_fixed_layers_refuse_bad_arguments(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        make(**options)


def test_gaussian_evaluation_error_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"Give activation=nn\.ReLU\(\) to the layer, or use evaluation='mean'\."):
        dcpp.DropConnectLinear(3, 2, evaluation="gaussian")
    dcpp.DropConnectLinear(3, 2, evaluation="gaussian", activation=nn.ReLU())


def test_errors_are_the_librarys_and_value_errors() -> None:
    for kind in (DropConnectError, ValueError):
        with pytest.raises(kind, match="alpha"):
            dcpp.DropConnectPPLinear(3, 2, alpha=0.0)
        with pytest.raises(kind, match="input of shape"):
            dcpp.DropConnectPPLinear(3, 2)(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 2}, "in_channels must be divisible by groups"),
        ({"padding": "same", "stride": 2}, "padding='same' is not supported for strided convolutions"),
        ({"padding_mode": "mirror"}, "padding_mode must be one of"),
    ],
)
def test_geometry_is_checked_by_torch(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dcpp.DropConnectPPConv2d(3, 2, 3, **options)


@pytest.mark.parametrize("kind", ["DropConnectPP", "DropConnect"])
@pytest.mark.parametrize(
    ("layer", "options", "shape", "words"),
    [
        ("Linear", {}, (4, 5), "Linear(3, 2) needs an input of shape (..., 3), got (4, 5)."),
        ("Linear", {}, (), "Linear(3, 2) needs an input of shape (..., 3), got ()."),
        ("Linear", {"mask": "example"}, (3,), "Linear(3, 2) needs an input of shape (B, ..., 3), got (3,)."),
        ("Conv1d", {}, (4, 2, 9), "Conv1d with in_channels=3 needs an input of shape (B, 3, length), got (4, 2, 9)."),
        ("Conv1d", {"mask": "example"}, (3, 9), "needs an input of shape (B, 3, length), got (3, 9)."),
        ("Conv2d", {}, (4, 9), "Conv2d with in_channels=3 needs an input of shape (B, 3, height, width), got (4, 9)."),
        ("Conv2d", {"mask": "example"}, (3, 9, 9), "shape (B, 3, height, width), got (3, 9, 9)."),
        ("Conv3d", {}, (1, 1, 3, 5, 5, 5), "(B, 3, depth, height, width), got (1, 1, 3, 5, 5, 5)."),
    ],
)
def test_wrong_inputs_are_refused(kind: str, layer: str, options: Any, shape: Any, words: str) -> None:
    module = getattr(dcpp, kind + layer)(3, 2, *([] if layer == "Linear" else [3]), **options)
    with pytest.raises(ShapeError, match=re.escape(words)) as caught:
        module(torch.zeros(shape))
    assert str(caught.value).startswith(kind + layer)
    if options:  # with one weight for all, an example alone will do
        module.eval()(torch.zeros(shape))
    else:
        with pytest.raises(ShapeError, match=re.escape(words)):
            module.eval()(torch.zeros(shape))
