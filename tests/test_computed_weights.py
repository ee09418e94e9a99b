"""Layers whose weights are computed, before or after convert: the same network, its pruning and its ties."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torch_prune

import dropconnectpp as dcpp
from dropconnectpp.errors import ConversionError
from dropconnectpp.layers.base import masked_layers

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        return nn.utils.weight_norm(layer)


def pruned(layer: nn.Module) -> nn.Module:
    torch_prune.random_unstructured(layer, "weight", 0.5)
    return torch_prune.random_unstructured(layer, "bias", 1)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "pruned": pruned,
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": old_weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
}


def network(way: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(WAYS[way](nn.Linear(4, 4)), nn.Tanh(), WAYS[way](nn.Linear(4, 3))).eval()


def undropped(model: nn.Module) -> Tensor:
    """The output with every gate on that pruning has left."""
    masks: dict[str, Tensor] = {}
    for name, layer in masked_layers(model).items():
        masks |= {f"{name}.{own}": torch.ones_like(getattr(layer, own)) for own in layer.synapse_names}
    with dcpp.forced_masks(model, masks):
        return model(X)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["dropconnect++", "dropconnect"])
def test_a_converted_layer_computes_its_weight_as_before(way: str, kind: str) -> None:
    model = network(way)
    expected = model(X)
    converted = dcpp.convert(model, kind=kind, example_input=X).eval()
    assert len(masked_layers(converted)) == 2
    torch.testing.assert_close(undropped(converted), expected)
    torch.testing.assert_close(dcpp.to_dense(converted)(X), converted(X))
    torch.testing.assert_close(model(X), expected)


@pytest.mark.parametrize("way", ["weight_norm", "old weight_norm"])
def test_what_a_weight_is_computed_from_is_trained(way: str) -> None:
    model = network(way)
    converted = dcpp.convert(model, inplace=True).train()
    elbo = dcpp.ELBO(converted, dcpp.categorical, 10)
    optimizer = torch.optim.SGD(dcpp.parameter_groups(converted, lr=0.1))
    before = {name: value.clone() for name, value in converted.named_parameters()}
    elbo(X, target=torch.tensor([0, 1, 2])).loss.backward()
    optimizer.step()
    changed = [name for name, value in converted.named_parameters() if not torch.equal(value, before[name])]
    assert {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1", "0.weight_logit"} <= {
        *changed
    }


def test_the_parameters_stay_the_same_objects() -> None:
    model = network("old weight_norm")
    sources = [model[0].weight_g, model[0].weight_v, model[0].bias]
    layer: Any = dcpp.convert(model, inplace=True)[0]
    chain = layer.parametrizations.weight
    found = [chain.original0, chain.original1, layer.bias]
    assert all(ours is theirs for ours, theirs in zip(found, sources, strict=True))


def test_pruning_becomes_ours() -> None:
    model = network("pruned")
    layer: Any = dcpp.convert(model, inplace=False)[0]
    assert torch.equal(layer.weight_kept, model[0].weight_mask.bool())
    assert torch.equal(layer.bias_kept, model[0].bias_mask.bool())
    assert torch.equal(layer.weight, model[0].weight_orig)
    assert not layer._forward_pre_hooks
    assert bool((layer.keep_probability()[~layer.weight_kept] == 0).all())


@pytest.mark.parametrize("kind", ["dropconnect++", "dropconnect"])
def test_layers_that_compute_their_weights_after_convert_have_masks_of_their_own(kind: str) -> None:
    model = dcpp.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), kind=kind)
    for layer in model:
        parametrizations.weight_norm(layer)
    first, second = masked_layers(model).values()
    assert first.tie("weight") != second.tie("weight")
    small = dcpp.prune(model, keep=0.25, score="magnitude").eval()
    assert [int(layer.weight_kept.sum()) for layer in small] == [4, 4]
    assert not torch.equal(small[0].weight_kept, small[1].weight_kept)
    torch.testing.assert_close(dcpp.to_dense(small)(X), small(X))


def test_layers_with_one_shape_do_not_share_gates_by_chance() -> None:
    converted: Any = dcpp.convert(network("weight_norm"))
    assert converted[0].weight_logit is not converted[2].weight_logit
    same: Any = dcpp.convert(nn.Sequential(*(parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(3))))
    assert len({id(layer.weight_logit) for layer in same}) == 3


def test_an_integer_weight_is_an_error_at_convert() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConversionError, match=r"0 cannot be converted: its weight is quantised.*quantise to_dense"):
        dcpp.convert(nn.Sequential(layer))
