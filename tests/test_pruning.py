"""prune: the right synapses go, they stay gone, and training goes on around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, ShapeError


def model_with_known_scores(**options: Any) -> nn.Sequential:
    layers = dcpp.DropConnectPPLinear(3, 2, **options), dcpp.DropConnectPPLinear(2, 2, **options)
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[6.0, -5.0, 4.0], [3.0, -2.0, 1.0]]))
        model[0].weight_logit.copy_(torch.tensor([[-3.0, -2.0, -1.0], [1.0, 2.0, 3.0]]))
        model[1].weight.copy_(torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
        model[1].weight_logit.copy_(torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    return model


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("keep_probability", [[0, 0, 0], [1, 1, 1]]),
        ("magnitude", [[1, 1, 1], [0, 0, 0]]),
        ("product", [[0, 0, 1], [1, 1, 0]]),  # pi |W|: .28 .60 1.08 / 2.19 1.76 .95
    ],
)
def test_the_best_share_is_kept_by_each_score(score: str, expected: list[list[int]]) -> None:
    pruned = dcpp.prune(model_with_known_scores(), keep=0.5, score=score)
    assert pruned[0].weight_kept.int().tolist() == expected
    assert pruned[0].bias_kept is None


def test_a_share_is_kept_by_the_product_unless_said_otherwise() -> None:
    pruned = dcpp.prune(model_with_known_scores(), keep=0.5)
    assert pruned[0].weight_kept.int().tolist() == [[0, 0, 1], [1, 1, 0]]


def test_global_scope_ranks_over_all_layers() -> None:
    pruned = dcpp.prune(model_with_known_scores(), keep=0.5, score="keep_probability", scope="global")
    assert pruned[1].weight_kept.all()
    assert pruned[0].weight_kept.int().tolist() == [[0, 0, 0], [0, 0, 1]]


def test_a_threshold_keeps_what_reaches_it() -> None:
    pruned = dcpp.prune(model_with_known_scores(), threshold=0.5)
    assert pruned[0].weight_kept.int().tolist() == [[0, 0, 0], [1, 1, 1]]


def test_biases_are_pruned_when_asked() -> None:
    pruned = dcpp.prune(model_with_known_scores(), keep=0.5, biases=True)
    assert int(pruned[0].weight_kept.sum() + pruned[0].bias_kept.sum()) == 4


def test_a_copy_is_pruned_unless_asked_otherwise() -> None:
    model = model_with_known_scores()
    dcpp.prune(model, keep=0.5)
    assert model[0].weight_kept is None
    assert dcpp.prune(model, keep=0.5, inplace=True) is model
    assert model[0].weight_kept is not None


def test_pruning_again_never_brings_a_synapse_back() -> None:
    once = dcpp.prune(model_with_known_scores(), keep=0.5)
    twice = dcpp.prune(once, keep=0.8, score="magnitude")
    assert torch.equal(twice[0].weight_kept, once[0].weight_kept)


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "local", "concrete", "disarm"])
@pytest.mark.parametrize("mask", ["batch", "example"])
def test_pruned_synapses_are_off_in_every_pass_and_have_no_gradient(estimator: str, mask: str) -> None:
    layer = dcpp.DropConnectPPLinear(4, 3, estimator=estimator, mask=mask, dtype=torch.float64)
    model = dcpp.prune(nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 2, dtype=torch.float64)), keep=0.5)
    off = ~model[0].weight_kept
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=50)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 0, 1])
    for _ in range(2):
        model.zero_grad()
        elbo(x, target=y).loss.backward()
    assert not model[0].weight.grad[off].any()
    assert not model[0].weight_logit.grad[off].any()
    assert model[0].weight_logit.grad[~off].all()
    with torch.no_grad():
        before = [model.eval()(x), dcpp.predict(model, x, likelihood=dcpp.categorical, generator=seeded()).mean]
        model[0].weight[off] = 1e6
        after = [model(x), dcpp.predict(model, x, likelihood=dcpp.categorical, generator=seeded()).mean]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("hyper", "kl"),
    [("optimal", dcpp.functional.beta_bernoulli_kl), ("marginal", dcpp.functional.marginal_kl)],
)
def test_the_kl_counts_only_what_is_kept(hyper: str, kl: Any) -> None:
    model = model_with_known_scores(hyper=hyper)
    kept = dcpp.prune(model, keep=0.5, score="keep_probability")
    expected = kl(model[0].weight_logit[1]).sum() + kl(model[0].bias_logit).sum()
    assert torch.isclose(dcpp.named_kl(kept)["0"], expected)
    terms = dcpp.ELBO(kept, dcpp.categorical, num_data=9)(
        torch.randn(3, 3, dtype=torch.float64), target=torch.tensor([0, 1, 0])
    )
    assert torch.isclose(terms.kl, dcpp.kl_divergence(kept))


def test_pruning_travels_with_the_state_dict() -> None:
    pruned = dcpp.prune(model_with_known_scores(), keep=0.5)
    fresh = model_with_known_scores()
    fresh.load_state_dict(pruned.state_dict(), strict=True)
    assert torch.equal(fresh[0].weight_kept, pruned[0].weight_kept)


def test_fixed_rate_layers_are_pruned_by_magnitude_alone() -> None:
    model = nn.Sequential(dcpp.DropConnectLinear(4, 3))
    by_size = dcpp.prune(model, keep=0.5, score="magnitude")[0].weight_kept
    assert int(by_size.sum()) == 6
    assert torch.equal(dcpp.prune(model, keep=0.5)[0].weight_kept, by_size)
    for options in ({"keep": 0.5, "score": "keep_probability"}, {"threshold": 0.5}):
        with pytest.raises(ArgumentError, match="cannot rank 0: DropConnect keeps every synapse at one rate"):
            dcpp.prune(model, **options)


def test_an_emptied_layer_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="0 keeps no weight"):
        dcpp.prune(model_with_known_scores(), keep=0.4, score="keep_probability", scope="global")


def test_a_pattern_keeps_the_best_two_of_four_inputs() -> None:
    model = dcpp.convert(nn.Linear(8, 2))
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2, 3, 4, 8, -7, 6, 5], [0, 0, 0, 0, 1, 1, 1, -9]]))
        model.weight_logit.zero_()
        model.weight_logit[0, 3] = -9.0
    pruned = dcpp.prune(model, pattern="2:4")
    assert pruned.weight_kept[0].int().tolist() == [0, 1, 1, 0, 1, 1, 0, 0]
    assert pruned.weight_kept.unflatten(1, (2, 4)).sum(-1).tolist() == [[2, 2], [2, 2]]
    assert bool(pruned.weight_kept[1, 7])
    assert pruned.bias_kept is None
    by_size = dcpp.prune(model, pattern="2:4", score="magnitude")
    assert by_size.weight_kept[0].int().tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_pattern_goes_along_the_channels_of_a_convolution(groups: int) -> None:
    model = dcpp.convert(nn.Conv2d(8, 4, 3, groups=groups))
    kept = dcpp.prune(model, pattern="2:4").weight_kept
    assert (kept.unflatten(1, (-1, 4)).sum(2) == 2).all()
    weight = model.weight.detach().abs().masked_fill(kept, 0.0)  # the logits are all alike
    assert (
        weight.unflatten(1, (-1, 4)).amax(2) <= model.weight.abs().unflatten(1, (-1, 4)).topk(2, 2).values[:, :, 1]
    ).all()


def test_a_pattern_never_brings_a_synapse_back() -> None:
    model = dcpp.prune(dcpp.convert(nn.Linear(16, 8)), keep=0.1)
    both = dcpp.prune(model, pattern="2:4")
    assert not bool((both.weight_kept & ~model.weight_kept).any())
    assert int(both.weight_kept.unflatten(1, (4, 4)).sum(-1).max()) <= 2


def test_torch_takes_the_pattern_as_its_own() -> None:
    dense = dcpp.to_dense(dcpp.prune(dcpp.convert(nn.Linear(64, 32)), pattern="2:4"))
    assert int((dense.weight != 0).sum()) == 64 * 32 // 2
    assert int((dense.weight.unflatten(1, (16, 4)) != 0).sum(-1).max()) == 2


@pytest.mark.parametrize("inplace", [False, True])
def test_inputs_that_four_does_not_divide_are_an_error_and_nothing_changes(inplace: bool) -> None:
    model = dcpp.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(6, 2)))
    with pytest.raises(ShapeError, match=r"multiple of 4 inputs.*and 0 has 3, 3 has 6\. Leave those layers plain"):
        dcpp.prune(model, pattern="2:4", inplace=inplace)
    assert model[1].weight_kept is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "1:4"}, "pattern must be one of '2:4'"),
        ({"pattern": "2:4", "keep": 0.5}, r"says by itself which weights are kept, got keep=0\.5 too. Leave out keep"),
        ({"pattern": "2:4", "threshold": 0.5}, "got threshold"),
        ({"pattern": "2:4", "scope": "global"}, "got scope='global'"),
        ({"pattern": "2:4", "biases": True}, "got biases=True"),
        ({}, "either keep or threshold"),
        ({"keep": 0.5, "threshold": 0.5}, "either keep or threshold"),
        ({"keep": 1.5}, r"keep must lie in \(0, 1\], got 1.5. To keep every synapse use keep=1.0"),
        ({"keep": 0.5, "score": "luck"}, "score must be one of"),
        ({"keep": 0.5, "scope": "galaxy"}, "scope must be one of"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        dcpp.prune(model_with_known_scores(), **options)  # type: ignore[arg-type]


def test_a_model_without_masked_layers_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="no masked layer"):
        dcpp.prune(nn.Linear(2, 2), keep=0.5)
