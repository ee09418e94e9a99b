"""Models that are saved and loaded, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dropconnectpp as dcpp


def plain_network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def trained_network(**options: Any) -> nn.Module:
    model = dcpp.convert(plain_network(), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model(torch.randn(16, 1, 4, 4))  # BatchNorm has something to remember
    return model


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def same_where_kept(saved: nn.Module, loaded: nn.Module) -> bool:
    """Whether all that matters is the same bit for bit: not what stands behind a pruned synapse."""
    left, right = saved.state_dict(), loaded.state_dict()
    if left.keys() != right.keys():
        return False
    for key in left:
        owner, _, name = key.rpartition(".")
        mask = left.get(f"{owner}.{name.partition('_')[0]}_kept".lstrip("."))
        a, b = left[key], right[key]
        if mask is not None and mask.shape == a.shape and not name.endswith("_kept"):
            a, b = a[mask], b[mask]
        if a.dtype != b.dtype or not torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)):
            return False
    return True


def filled(model: nn.Module) -> nn.Module:
    """Numbers that anybody can make again: those of the golden files."""
    with torch.no_grad():
        state = {key: value for key, value in model.state_dict().items() if not key.endswith("_extra_state")}
        for k, value in enumerate(state.values()):
            if value.dtype.is_floating_point:
                value.copy_(((torch.arange(value.numel()) * 7 + k) % 23 + 1).reshape(value.shape) / 32)
            elif value.dtype == torch.int64:
                value.fill_(5)
    return model


def tied_network() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


def _learned() -> nn.Module:
    return dcpp.convert(plain_network(), hyper="learned", alpha=2.0, beta=3.0, estimator="eq16")


def _probability() -> nn.Module:
    options: dict[str, Any] = {
        "hyper": "optimal",
        "parameterisation": "probability",
        "mask": "example",
        "estimator": "bbvi",
    }
    return dcpp.convert(plain_network(), **options, activation=nn.ReLU())


def _rate() -> nn.Module:
    return dcpp.convert(plain_network(), ["4"], kind="dropconnect", keep_probability=0.25)


def _pruned() -> nn.Module:
    estimator = dcpp.estimators.BBVI(baseline="mean-network")
    model = filled(dcpp.convert(plain_network(), hyper="optimal", estimator=estimator))
    return dcpp.prune(model, keep=0.25, biases=True, score="magnitude")


GOLDEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "learned": (lambda: filled(_learned()), plain_network),
    "probability": (lambda: filled(_probability()), plain_network),
    "rate": (lambda: filled(_rate()), plain_network),
    "pruned": (_pruned, plain_network),
    "tied": (lambda: filled(dcpp.convert(tied_network(), hyper="optimal", estimator="bbvi")), tied_network),
}
"""For each golden file's name, the model that was saved, and the architecture that it loads into."""
