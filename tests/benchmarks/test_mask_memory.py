"""What the first masks leave behind: the masks that are drawn again are those that training drew."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from tiny_cases import tiny

from dropconnectpp.lab.replicas import dropconnectpp, evaluation, regularisers
from scripts import ROOT


@pytest.fixture
def mask_memory(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("mask_memory")


def test_masks_of_a_minibatch_are_those_that_training_drew(mask_memory, monkeypatch) -> None:
    small = tiny("small", train=384)
    drawn: list[torch.Tensor] = []
    real = dropconnectpp.draw_masks

    def noted(stream, keep, *where):
        mask = real(stream, keep, *where)
        if stream.purpose == "mask:weight":
            drawn.append(mask)
        return mask

    monkeypatch.setattr(dropconnectpp, "draw_masks", noted)
    monkeypatch.setattr(regularisers, "draw_masks", noted)
    settings = {"device": "cpu", "dataset": "small", "hidden": 4, "replicas": 2, "epochs": 2, "step_size": 0.005}
    stack = mask_memory.stacked(mask_memory.Settings(**settings), small)
    losses = mask_memory.train(stack)
    assert losses.shape == (3, 6), "the first epoch's minibatches"
    assert losses[0].tolist() == pytest.approx([math.log(3)] * 6, abs=0.3)
    assert len(drawn) == 3 * 6, "three segments, two epochs of three minibatches"
    for number in range(1, 7):
        for segment, mask in zip(stack.segments, drawn[3 * (number - 1) :], strict=False):
            again = mask_memory.masks(stack, segment, number)
            if segment.regulariser.parameters:
                assert (again == mask).double().mean() > 0.95, "but for those between pi~ and one half"
            else:
                assert torch.equal(again, mask)
    keep = 1.0 - 0.1 * again.double()
    assert torch.allclose(mask_memory.shares(keep, again), torch.ones(2, dtype=torch.float64))
    other = mask_memory.masks(stack, stack.segments[0], mask_memory.NEVER)
    assert mask_memory.shares(other.double(), again).max() < 0.05
    found = mask_memory.accuracies(stack, stack.segments[0], [torch.ones_like(again), torch.zeros_like(again)])
    expected = [point["accuracy"] for point in evaluation.along_the_way(stack, stack.protocol.evaluation)[:2]]
    assert found[0].tolist() == pytest.approx(expected)
    assert found[0].tolist() != found[1].tolist(), "without its dense weights a network is another"
