"""accelerate moves a layer's weights by a forward of its own: convert comes first, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ConversionError

accelerate = pytest.importorskip("accelerate")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_an_offloaded_layer_stays_plain_and_is_named() -> None:
    model, x = network(), torch.randn(2, 4)
    expected = model(x)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.warns(UserWarning, match="left plain|nothing was converted") as caught:
        converted = dcpp.convert(model, inplace=True)
    assert "left plain: 0 (its forward was replaced" in str(caught[0].message)
    assert torch.equal(converted(x), expected)
    with pytest.raises(ConversionError, match="2 cannot be converted: its forward was replaced"):
        dcpp.convert(model, include=["2"], inplace=True)


def test_a_converted_model_may_be_offloaded() -> None:
    model, x = dcpp.convert(network()).eval(), torch.randn(2, 4)
    expected = model(x)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).is_meta
    assert torch.equal(model(x), expected)
    with dcpp.sampling(model, torch.Generator().manual_seed(0)):
        assert not torch.equal(model(x), expected)
