"""Small problems with known answers, learned from end to end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The layers are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_irrelevant_inputs_are_kept_less_than_relevant_ones() -> None:
    """Three inputs decide, twelve are noise. Over 8 seeds: relevant >= 0.956, irrelevant <= 0.673."""
    count, relevant, irrelevant = 256, 3, 12
    x = torch.randn(count, relevant + irrelevant)
    y = (x[:, :relevant].sum(1) > 0).long()
    layer = dcpp.DropConnectPPLinear(relevant + irrelevant, 2, estimator="straight-through")
    elbo = dcpp.ELBO(layer, dcpp.categorical, num_data=count)
    optimizer = torch.optim.Adam(dcpp.parameter_groups(layer, lr=0.02, logit_lr=0.1))
    for _ in range(200):
        optimizer.zero_grad()
        elbo(x, target=y).loss.backward()
        optimizer.step()
    keep = layer.keep_probability().detach()
    assert keep[:, :relevant].min() > 0.9
    assert keep[:, relevant:].max() < 0.75
    assert keep[:, relevant:].mean() < 0.6
    assert (layer.eval()(x).argmax(1) == y).float().mean() > 0.95


@pytest.mark.parametrize("mask", ["batch", "example"])
def test_a_denoising_autoencoder_learns(mask: str) -> None:
    """Twelve binary pixels from three patterns, a tenth of them flipped. From 7.1 nats an image to 0.9-2.0."""
    patterns = (torch.rand(3, 12) < 0.4).float()
    clean = ((torch.rand(256, 3) < 0.5).float() @ patterns > 0).float()
    model = nn.Sequential(
        dcpp.DropConnectPPLinear(
            12, 8, estimator="straight-through", mask=mask, keep_probability=0.8, activation=nn.ReLU()
        ),
        dcpp.DropConnectPPLinear(8, 12, estimator="straight-through", mask=mask, keep_probability=0.8),
    )
    elbo = dcpp.ELBO(model, dcpp.bernoulli, num_data=256)
    optimizer = torch.optim.Adam(dcpp.parameter_groups(model, lr=0.01))
    nats = []
    for _ in range(250):
        noisy = torch.where(torch.rand_like(clean) < 0.1, 1 - clean, clean)
        optimizer.zero_grad()
        terms = elbo(noisy, target=clean)
        terms.loss.backward()
        optimizer.step()
        nats.append(-float(terms.log_likelihood) / 256)
    assert sum(nats[-20:]) < 0.5 * sum(nats[:20])
    assert dcpp.bernoulli(model.eval()(clean), clean).mean() > -2.0


@pytest.mark.parametrize("estimator", ["bbvi", "disarm"])
def test_score_estimators_find_the_one_synapse_that_hurts(estimator: str) -> None:
    """Frozen weights, one of no use. Over 12 seeds the useful one is kept >= 0.953, the other <= 0.033."""
    layer = dcpp.DropConnectPPLinear(2, 1, bias=False, estimator=estimator)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, -2.0]]))
    layer.weight.requires_grad_(False)
    x = torch.randn(128, 2)
    y = torch.sigmoid(2 * x[:, :1]).bernoulli()
    elbo = dcpp.ELBO(layer, dcpp.bernoulli, num_data=128)
    optimizer = torch.optim.Adam(dcpp.parameter_groups(layer, lr=0.05))
    for _ in range(300):
        optimizer.zero_grad()
        elbo(x, target=y).loss.backward()
        optimizer.step()
    right, wrong = layer.keep_probability().detach()[0]
    assert right > 0.9
    assert wrong < 0.1
