"""posterior: the read-out says what the layers hold, and its table is right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError


@pytest.fixture
def model() -> nn.Sequential:
    model = nn.Sequential(
        dcpp.DropConnectPPLinear(5, 4, hyper="learned", alpha=2.0, beta=0.5), dcpp.DropConnectPPLinear(4, 1, bias=False)
    ).double()
    with torch.no_grad():
        model[0].weight_logit.copy_(torch.linspace(-4, 4, 20).view(4, 5))
    return model


def test_the_read_out_matches_the_layers(model: nn.Sequential) -> None:
    found = dcpp.posterior(model)
    assert list(found) == ["0", "1"]
    assert len(found) == 2
    assert found.num_synapses == 28
    pi = torch.sigmoid(model[0].weight_logit.detach())
    assert torch.allclose(found["0"].weight.keep_probability, pi)
    expected = -(pi * pi.log() + (1 - pi) * (1 - pi).log())
    assert torch.allclose(found["0"].weight.entropy, expected)
    assert torch.allclose(found["0"].weight.alpha, torch.full((4, 5), 2.5, dtype=torch.float64))
    assert found["1"].bias is None
    assert math.isclose(found["0"].kl + found["1"].kl, dcpp.kl_divergence(model).item(), rel_tol=1e-12)
    assert "28 synapses in 2 layers" in repr(found)


def test_the_read_out_is_a_copy(model: nn.Sequential) -> None:
    found = dcpp.posterior(model)
    before = found["0"].weight.keep_probability.clone()
    with torch.no_grad():
        model[0].weight_logit.zero_()
    assert torch.equal(found["0"].weight.keep_probability, before)


def test_pruned_synapses_show_as_zero(model: nn.Sequential) -> None:
    found = dcpp.posterior(dcpp.prune(model, keep=0.25))
    assert int(found["0"].weight.kept.sum()) == 5
    assert not found["0"].weight.keep_probability[~found["0"].weight.kept].any()
    assert not found["0"].weight.entropy[~found["0"].weight.kept].any()


def test_histogram_counts_every_synapse(model: nn.Sequential) -> None:
    counts, edges = dcpp.posterior(model).histogram(10)
    assert int(counts.sum()) == 28
    assert edges.tolist() == pytest.approx([i / 10 for i in range(11)])
    # eight synapses at exactly one half: four biases and the second layer
    assert int(counts[5]) >= 8


def test_summary_is_a_table_with_the_shares_of_the_figure(model: nn.Sequential) -> None:
    text = dcpp.posterior(model).summary()
    lines = text.splitlines()
    assert lines[0].split() == [
        "layer", "synapses", "kept", "mean", "std", "<0.35", "0.4-0.6", ">0.6", "entropy", "KL/nats",
    ]  # fmt: skip
    pi = torch.cat([torch.sigmoid(model[0].weight_logit.detach()).flatten(), torch.full((4,), 0.5)])
    row = lines[1].split()
    assert row[:3] == ["0", "24", "100.0%"]
    assert row[3] == f"{pi.mean():.3f}"
    assert row[5] == f"{(pi < 0.35).double().mean():.1%}"
    assert row[6] == f"{((pi >= 0.4) & (pi <= 0.6)).double().mean():.1%}"
    assert lines[3].split()[0] == "all"
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[-1].startswith("keep probability  0 ")


def test_a_layer_with_nothing_left_is_shown_as_such(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[1].weight_logit.fill_(-9.0)
    with pytest.warns(UserWarning, match="1 keeps no weight"):
        pruned = dcpp.prune(model, threshold=0.1)
    assert dcpp.posterior(pruned).summary().splitlines()[2].split()[:4] == ["1", "4", "0.0%", "-"]


def test_errors_name_the_next_step(model: nn.Sequential) -> None:
    with pytest.raises(ArgumentError, match=r"no DropConnect\+\+ layer.*convert"):
        dcpp.posterior(nn.Linear(2, 2))
    with pytest.raises(KeyError, match=r"no DropConnect.*layer 'head'; there are: 0, 1"):
        dcpp.posterior(model)["head"]
    with pytest.raises(ArgumentError, match="bins must be a whole number"):
        dcpp.posterior(model).histogram(0)
