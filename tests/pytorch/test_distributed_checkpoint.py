"""torch.distributed.checkpoint reads what the model asks for: pruning that it does not ask for is missed, by name."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn

import dropconnectpp as dcpp


def network() -> nn.Module:
    return dcpp.convert(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))


def read_into(model: nn.Module, folder: Path) -> None:
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a single process is no distributed run
        checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state)


def written(model: nn.Module, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(model.state_dict(), checkpoint_id=folder)
    return folder


def test_a_pruned_state_is_not_read_into_a_model_without_pruning(tmp_path: Path) -> None:
    folder = written(dcpp.prune(network(), keep=0.25), tmp_path / "state")
    with pytest.raises(RuntimeError, match=r"0: 18 synapses are pruned in this state, and its masks are missing"):
        read_into(network(), folder)


def test_a_pruned_state_is_read_into_a_pruned_model(tmp_path: Path) -> None:
    model = dcpp.prune(network(), keep=0.25).eval()
    other = dcpp.prune(network(), keep=0.9).eval()
    x = torch.randn(3, 6)
    read_into(other, written(model, tmp_path / "state"))
    assert torch.equal(other(x), model(x))


def test_a_whole_state_is_read_into_a_whole_model(tmp_path: Path) -> None:
    model, other, x = network().eval(), network().eval(), torch.randn(3, 6)
    read_into(other, written(model, tmp_path / "state"))
    assert torch.equal(other(x), model(x))


def test_a_pruned_state_as_a_dictionary_brings_its_masks() -> None:
    model, other, x = dcpp.prune(network(), keep=0.25).eval(), network().eval(), torch.randn(3, 6)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_states_from_before_the_count_are_read() -> None:
    model, other = network(), network()
    old = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
    other.load_state_dict(old)
    assert torch.equal(other[0].weight, model[0].weight)
