"""convert and to_dense: weights, ties and flags survive, and nothing silently ignores its masks."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, ConversionError
from dropconnectpp.layers.base import masked_layers
from dropconnectpp.ops.noise import generator_of


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, stride=2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.Linear(5, 2)
    ).double()


def pictures() -> torch.Tensor:
    return torch.randn(4, 1, 8, 8, dtype=torch.float64)


def spread_posterior(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_logit"):
                parameter.normal_(0.0, 2.0)


def test_every_layer_is_converted_by_default_and_keeps_its_parameters() -> None:
    model = small_network()
    converted = dcpp.convert(model, inplace=True)
    assert [type(m).__name__ for m in converted] == [
        "DropConnectPPConv2d", "ReLU", "Flatten", "DropConnectPPLinear", "DropConnectPPLinear",
    ]  # fmt: skip
    assert converted is model
    assert converted[0].weight_logit.dtype == torch.float64


def test_a_copy_is_converted_unless_asked_otherwise() -> None:
    model = small_network()
    converted = dcpp.convert(model)
    assert type(model[3]) is nn.Linear
    assert torch.equal(converted[3].weight, model[3].weight)
    assert converted[3].weight is not model[3].weight


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["3"], (), [3]),
        ("[34]", (), [3, 4]),
        (nn.Conv2d, (), [0]),
        (None, ["4", nn.Conv2d], [3]),
        (["*"], "0", [3, 4]),
    ],
)
def test_patterns_choose_by_name_and_type(include: object, exclude: object, expected: list[int]) -> None:
    converted = dcpp.convert(small_network(), include, exclude)
    found = [i for i, m in enumerate(converted) if type(m).__name__.startswith("DropConnectPP")]
    assert found == expected


def test_layer_options_reach_the_layers_and_conversion_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    torch.manual_seed(3)
    layer = dcpp.convert(model, hyper="learned", estimator="straight-through", alpha=2.0, keep_probability=0.8)
    assert torch.equal(torch.rand(1), expected)
    assert isinstance(layer, dcpp.DropConnectPPLinear)
    assert layer.hyper == "learned"
    assert layer.alpha == 2.0
    assert torch.allclose(layer.keep_probability(), torch.full((2, 4), 0.8))
    assert torch.allclose(layer.hyper_posterior()[0], torch.full((2, 4), 2.8))


def test_flags_and_hooks_survive() -> None:
    model = small_network()
    model[3].weight.requires_grad_(False)
    model[4].eval()
    calls: list[str] = []
    model[3].register_forward_hook(lambda *_: calls.append("seen"))
    converted = dcpp.convert(model, inplace=True)
    assert not converted[3].weight.requires_grad
    assert converted[3].weight_logit.requires_grad
    assert converted[3].training
    assert not converted[4].training
    converted(pictures())
    assert calls == ["seen"]


def test_a_module_used_twice_stays_one_module() -> None:
    shared = nn.Linear(3, 3)
    model = dcpp.convert(nn.Sequential(shared, nn.ReLU(), shared))
    assert model[0] is model[2]
    assert len(dcpp.named_kl(model)) == 1


@pytest.mark.parametrize(
    ("hyper", "kl"),
    [("optimal", dcpp.functional.beta_bernoulli_kl), ("marginal", dcpp.functional.marginal_kl)],
)
def test_layers_that_share_a_weight_share_its_logits_and_count_once(hyper: str, kl: Any) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = dcpp.convert(nn.Sequential(first, second), hyper=hyper, beta=9.0)
    assert model[0].weight is model[1].weight
    assert model[0].weight_logit is model[1].weight_logit
    assert model[0].bias_logit is not model[1].bias_logit
    one_synapse = kl(torch.zeros(()), 1.0, 9.0)
    assert torch.isclose(dcpp.kl_divergence(model), (9 + 3 + 3) * one_synapse)


def test_a_weight_tied_to_an_embedding_stays_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "out": nn.Linear(4, 7, bias=False)})
    model["out"].weight = model["embed"].weight
    converted = dcpp.convert(model, ["out"])
    assert converted["out"].weight is converted["embed"].weight


@pytest.mark.parametrize(
    ("include", "shown"),
    [("head*", r"'head\*'"), (["0", "head*"], r"'head\*'"), ([nn.Conv3d, "4", "fc"], "Conv3d, 'fc'")],
)
def test_every_pattern_must_match_a_layer(include: Any, shown: str) -> None:
    model = small_network()
    with pytest.raises(ConversionError, match=f"nothing matches include={shown}\\. .* converted: 0, 3, 4\\."):
        dcpp.convert(model, include, inplace=True)
    assert type(model[0]) is nn.Conv2d, "nothing was changed"


def test_a_pattern_may_match_what_is_excluded() -> None:
    assert type(dcpp.convert(small_network(), ["*"], exclude=["0"])[0]) is nn.Conv2d


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"estimater": "bbvi"},
            "neither have layers of kind 'dropconnect++'. Did you mean 'estimator'?",
        ),
        ({"incldue": ["0"]}, "Did you mean 'include'?"),
        ({"kind": "dropconnect", "keep_probabilty": 0.5}, "kind 'dropconnect'. Did you mean 'keep_probability'?"),
        ({"kind": "dropconnect", "beta": 2.0}, "There are: include, exclude, parameters, kind, preset,"),
        ({"qqq": 1}, "There are: include, exclude, parameters, kind, preset, example_input, inplace, alpha,"),
    ],
)
def test_unknown_options_name_the_nearest(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        dcpp.convert(small_network(), **options)


def test_bad_patterns_and_kinds_are_errors() -> None:
    with pytest.raises(ArgumentError, match="module names or module types, got 3"):
        dcpp.convert(small_network(), [3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="kind must be one of"):
        dcpp.convert(small_network(), kind="dropout")


def test_converting_twice_changes_nothing_more() -> None:
    model = dcpp.convert(small_network())
    with pytest.warns(UserWarning, match="nothing was converted"):
        again = dcpp.convert(model)
    assert torch.equal(again[3].weight_logit, model[3].weight_logit)


def test_fixed_rate_conversion() -> None:
    model = dcpp.convert(small_network(), nn.Linear, kind="dropconnect", keep_probability=0.3)
    assert type(model[3]) is dcpp.DropConnectLinear
    assert model[3].fixed_keep_probability == 0.3


# ----------------------------------------------------------- modules that read a child's weight


def test_attention_is_converted_whole_or_by_its_name() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    inner = {f"self_attn.connections.in_proj_{name}" for name in ("weight", "bias")}
    outer = {f"self_attn.out_proj.connections.{name}" for name in ("weight", "bias")}
    assert masked_layers(dcpp.convert(layer)).keys() == inner | outer | {"linear1", "linear2"}
    assert masked_layers(dcpp.convert(layer, "self_attn")).keys() == inner | outer
    assert masked_layers(dcpp.convert(layer, nn.MultiheadAttention, exclude="*.out_proj")).keys() == inner
    assert masked_layers(dcpp.convert(layer, ["self_attn.out_proj"])).keys() == outer


def test_attention_that_needs_another_option_is_left_plain_with_a_warning_or_refused_when_named() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.warns(UserWarning, match=r"left plain: self_attn \(mask='example' needs .*self_attn.out_proj \("):
        converted = dcpp.convert(layer, mask="example")
    assert list(masked_layers(converted)) == ["linear1", "linear2"]
    with pytest.raises(ConversionError, match=r"self_attn\.out_proj cannot be converted"):
        dcpp.convert(layer, ["self_attn.out_proj"], mask="example")


@pytest.mark.parametrize("padding", [False, True])
def test_transformer_evaluates_alike_with_and_without_grad(padding: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2)
    converted = dcpp.convert(encoder, ["*linear?"]).eval()
    spread_posterior(converted)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]]) if padding else None
    expected = converted(x, src_key_padding_mask=mask)
    keep = slice(None) if mask is None else ~mask
    with torch.no_grad():
        found = converted(x, src_key_padding_mask=mask)
        assert torch.allclose(found[keep], expected[keep], atol=1e-12)
    # The masks matter: the plain encoder, which uses W alone, answers otherwise.
    plain = encoder.eval()(x, src_key_padding_mask=mask)
    assert not torch.allclose(plain[keep], expected[keep], atol=1e-3)


def test_the_fast_path_comes_back_with_to_dense() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    before = (encoder.layers[0].activation_relu_or_gelu, encoder.use_nested_tensor)
    converted = dcpp.convert(encoder, ["*linear?"])
    assert not converted.layers[0].activation_relu_or_gelu
    assert not converted.use_nested_tensor
    dense = dcpp.to_dense(converted)
    assert (dense.layers[0].activation_relu_or_gelu, dense.use_nested_tensor) == before


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.LazyLinear(2), "run the model once"),
    ],
)
def test_layers_that_would_break_are_refused(make: object, reason: str) -> None:
    model = nn.Sequential(make())  # type: ignore[operator]
    with pytest.raises(ConversionError, match=reason):
        dcpp.convert(model, ["0"], inplace=True)


def test_a_weight_made_by_a_hook_is_refused() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight.detach()
    del layer._parameters["weight"]
    layer.weight = weight  # what the old weight_norm leaves behind
    with pytest.raises(ConversionError, match="computed by a hook"):
        dcpp.convert(nn.Sequential(layer), ["0"], inplace=True)


def test_a_residual_network_converts_and_trains() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
            self.head = nn.Linear(32, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((x + self.body(x)).flatten(1))

    model = dcpp.convert(Residual())
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=20)
    elbo(torch.randn(5, 2, 4, 4), target=torch.tensor([0, 1, 2, 0, 1])).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# --------------------------------------------------------------------------------------- and back


@pytest.mark.parametrize("mode", ["mean", "map", "sample"])
def test_to_dense_gives_plain_layers_that_compute_the_same(mode: str) -> None:
    model = dcpp.convert(small_network()).eval()
    spread_posterior(model)
    dense = dcpp.to_dense(model, mode, generator=torch.Generator().manual_seed(5))
    assert [type(m).__name__ for m in dense] == ["Conv2d", "ReLU", "Flatten", "Linear", "Linear"]
    x = pictures()
    if mode == "mean":
        expected = model(x)
    else:
        seed = torch.randint(2**62, (), generator=torch.Generator().manual_seed(5))
        masks = {}
        for stream, name in enumerate(("0.weight", "3.weight", "3.bias", "4.weight", "4.bias")):
            logit = model.get_parameter(f"{name}_logit")
            generator = generator_of(seed, stream, logit.device)
            noise = torch.rand(logit.shape, dtype=torch.float64, generator=generator)
            masks[name] = logit >= 0 if mode == "map" else noise < torch.sigmoid(logit)
        with dcpp.forced_masks(model, masks):
            expected = model(x)
    assert torch.allclose(dense(x), expected, atol=1e-12)


def test_to_dense_keeps_pruned_synapses_at_zero_and_ties_together() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = dcpp.prune(dcpp.convert(nn.Sequential(first, second)), keep=0.25)
    dense = dcpp.to_dense(model)
    assert dense[0].weight is dense[1].weight
    assert int((dense[0].weight != 0).sum()) == 4


def test_an_activation_becomes_a_module_behind_the_layer() -> None:
    model = nn.Sequential(
        dcpp.DropConnectPPLinear(3, 2, activation=torch.relu), dcpp.DropConnectLinear(2, 2, activation=nn.Tanh())
    ).eval()
    dense = dcpp.to_dense(model)
    assert [type(m).__name__ for m in dense.modules()][1:] == [
        "Sequential", "Linear", "ReLU", "Sequential", "Linear", "Tanh",
    ]  # fmt: skip
    x = torch.randn(5, 3)
    assert torch.allclose(dense(x), model(x), atol=1e-6)
    with pytest.raises(ConversionError, match="no nn module is known for the activation"):
        dcpp.to_dense(dcpp.DropConnectPPLinear(2, 2, activation=torch.sin))


def test_gaussian_evaluation_cannot_be_folded() -> None:
    layer = dcpp.DropConnectLinear(2, 2, activation=nn.ReLU(), evaluation="gaussian")
    with pytest.raises(ConversionError, match="Gaussian moment matching"):
        dcpp.to_dense(nn.Sequential(layer))


def test_plain_state_loads_into_the_converted_model_and_back() -> None:
    plain, other = small_network(), small_network()
    converted = dcpp.convert(other)
    spread_posterior(converted)
    logits = converted[3].weight_logit.clone()
    converted.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(converted[3].weight, plain[3].weight)
    assert torch.equal(converted[3].weight_logit, logits)
    other.load_state_dict(dcpp.plain_state_dict(converted), strict=True)
    assert torch.equal(other[3].weight, plain[3].weight)
    pruned = dcpp.prune(converted, keep=0.5)
    copy.deepcopy(other).load_state_dict(dcpp.plain_state_dict(pruned), strict=True)
