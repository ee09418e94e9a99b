"""torchao's quantised layers hold no ordinary numbers: convert says so, and to_dense may be quantised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ConversionError

quantization = pytest.importorskip("torchao.quantization")


def quantised(model: nn.Module) -> nn.Module:
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def test_a_quantised_layer_is_an_error_that_names_it() -> None:
    model = quantised(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)))
    with pytest.raises(ConversionError, match=r"0 cannot be converted: its weight is quantised.*quantise to_dense"):
        dcpp.convert(model)


def test_the_dense_model_may_be_quantised() -> None:
    model = dcpp.convert(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))).eval()
    x = torch.randn(3, 32)
    torch.testing.assert_close(quantised(dcpp.to_dense(model))(x), model(x), atol=0.05, rtol=0.05)
