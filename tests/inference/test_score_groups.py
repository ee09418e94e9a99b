"""Small layers that are scored together, against the same layers scored one by one."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.inference import elbo as elbo_module
from dropconnectpp.inference.score_groups import ScoredTogether, score_together


def network(dtype: torch.dtype, **options: Any) -> nn.Module:
    """Layers of several sizes and kinds; the third and fourth share their weight's posterior."""
    torch.manual_seed(3)
    model = nn.Sequential(
        dcpp.DropConnectPPLinear(6, 7, estimator="bbvi", **options),
        dcpp.DropConnectPPLinear(7, 5, estimator="bbvi", bias=False, **options),
        dcpp.DropConnectPPLinear(5, 5, estimator="bbvi", **options),
        dcpp.DropConnectPPLinear(5, 5, estimator="bbvi", **options),
        dcpp.DropConnectPPLinear(5, 4, estimator="bbvi", kl_weight=0.5, **options),
        dcpp.DropConnectPPLinear(4, 4, estimator=dcpp.estimators.BBVI(per_synapse=True), **options),
        dcpp.DropConnectPPLinear(4, 4, estimator="straight-through", **options),
        dcpp.DropConnectPPLinear(4, 3, estimator="bbvi", kl_weight=0.5, **options),
    )
    model[3].weight, model[3].weight_logit = model[2].weight, model[2].weight_logit  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=1.0 if name.endswith("logit") else 0.7)
    return model.to(dtype)


def steps(model: nn.Module, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """What two steps give: the second has a baseline to subtract."""
    elbo = dcpp.ELBO(model, dcpp.categorical, 40, generator=torch.Generator().manual_seed(5))
    x, y = torch.randn(9, 6, generator=torch.Generator().manual_seed(6)).to(dtype), torch.arange(9) % 3
    found = []
    for _ in range(2):
        model.zero_grad()
        terms = elbo(x, y)
        (2.0 * terms.loss).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        moments = {name: value.clone() for name, value in elbo.moments.named_buffers()}
        found.append({"loss": terms.loss.detach(), "kl": terms.kl, **gradients, **moments})
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"hyper": "optimal"}, {"alpha": 2.0, "beta": 5.0}, {"mask": "example"}, {"hyper": "learned"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_scored_together_learn_what_each_learns_by_itself(dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = network(dtype, **options)
    twin = copy.deepcopy(model)
    taken: list[set[str]] = []

    def watched(*arguments: Any) -> ScoredTogether:
        found = score_together(*arguments)
        taken.append(found.names)
        return found

    with mock.patch.object(elbo_module, "score_together", watched):
        together = steps(model, dtype)
    with mock.patch.object(elbo_module, "score_together", return_value=ScoredTogether()):
        alone = steps(twin, dtype)
    fits = not options.keys() & {"mask"} and options.get("hyper") != "learned"
    assert taken == [{"0", "1", "4", "7"} if fits else set()] * 2
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for mine, other in zip(together, alone, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            torch.testing.assert_close(
                mine[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_pruned_layer_and_one_by_itself_go_their_own_way() -> None:
    model = network(torch.float32)
    model[0].keep_only("weight", torch.rand_like(model[0].weight) > 0.5)
    taken: list[set[str]] = []

    def watched(*arguments: Any) -> ScoredTogether:
        found = score_together(*arguments)
        taken.append(found.names)
        return found

    with mock.patch.object(elbo_module, "score_together", watched):
        steps(model, torch.float32)
    assert taken == [{"4", "7"}] * 2  # layer 1 has nobody left to go with
