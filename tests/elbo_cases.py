"""What the ELBO's tests share: every estimator by name, one small model, one minibatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.estimators import BBVI, Eq16, Estimator

ESTIMATORS: dict[str, Estimator | str] = {
    "running": "bbvi",
    "per-synapse": BBVI(per_synapse=True),
    "mean-network": BBVI(baseline="mean-network"),
    "leave-one-out": BBVI(baseline="leave-one-out"),
    "eq16": "eq16",
    "eq16-same-sample": Eq16(baseline="same-sample"),
    "straight-through": "straight-through",
    "local": "local",
    "concrete": "concrete",
    "disarm": "disarm",
}
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)
each_mask = pytest.mark.parametrize("mask", ["batch", "example"])

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0, 1, 0])


def make(name: str = "running", mask: str = "batch", **options: Any) -> nn.Sequential:
    """Two layers with scattered posteriors, the same at every call."""
    torch.manual_seed(1)
    options |= {"estimator": ESTIMATORS[name], "mask": mask, "dtype": torch.float64}
    options.setdefault("hyper", "learned" if name.startswith("eq16") else "optimal")
    layers = dcpp.DropConnectPPLinear(3, 4, **options), dcpp.DropConnectPPLinear(4, 2, **options)
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("_logit"):
                parameter.normal_()
    return model


def bound(model: nn.Module, num_data: int = 30, **options: Any) -> dcpp.ELBO:
    generator = torch.Generator().manual_seed(2)
    return dcpp.ELBO(model, options.pop("likelihood", dcpp.categorical), num_data, generator=generator, **options)


def samples_for(name: str) -> int:
    return 2 if name == "leave-one-out" else 1


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, dcpp.DropConnectPPLinear)}
    return {f"{n}.{s}": torch.rand(getattr(m, s).shape) < 0.5 for n, m in layers.items() for s in m.synapse_names}


def masked_output(model: nn.Sequential, masks: dict[str, Tensor], x: Tensor) -> Tensor:
    for index, layer in enumerate(model):
        if isinstance(layer, dcpp.DropConnectPPLinear):
            weight, bias = layer.weight * masks[f"{index}.weight"], layer.bias * masks[f"{index}.bias"]
            x = nn.functional.linear(x, weight, bias)
        else:
            x = layer(x)
    return x


def gradients(model: nn.Module) -> dict[str, Tensor]:
    assert all(p.grad is not None for p in model.parameters())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
