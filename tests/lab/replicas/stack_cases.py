"""Stacks to compare: methods of every kind, images to learn from, and what is trained of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_cases import TWO_LAYERS
from torch import Tensor

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.config.protocol import Protocol, Training
from dropconnectpp.lab.data.dataset import Dataset, Provenance, Split
from dropconnectpp.lab.replicas.network import Unit
from dropconnectpp.lab.replicas.stack import Stack

CPU = torch.device("cpu")
METHODS = {
    "none": Method(kind="none"),
    "dropout": Method(kind="dropout", rate=0.4),
    "dropconnect": Method(kind="dropconnect", rate=0.3),
    "bbvi": Method(logit_step=30.0),
    "straight-through": Method(estimator="straight-through", hyper="optimal", logit_step=10.0, kl_weight=2.0),
}
ESTIMATORS = {
    "mean-network": Method(baseline="mean-network", parameterisation="probability"),
    "leave-one-out": Method(baseline="leave-one-out", num_samples=2, hyper="optimal"),
    "eq16": Method(estimator="eq16"),
    "local": Method(estimator="local"),
    "concrete": Method(estimator="concrete", num_samples=2),
    "disarm": Method(estimator="disarm", parameterisation="probability", logit_step=20.0),
}
LATE = {
    "prior, warm-up": Method(
        estimator="straight-through", hyper="optimal", alpha=2.0, beta=0.7, kl_weight=30.0, kl_warmup=2, logit_step=10.0
    ),
    "frozen, slab": Method(hyper="optimal", alpha=0.6, beta=0.6, freeze_after=1, slab=0.1, logit_step=30.0),
    "dropconnect, slab": Method(kind="dropconnect", rate=0.3, slab=0.1),
    "learned, all": Method(estimator="straight-through", kl_warmup=1, freeze_after=2, slab=0.1, logit_step=10.0),
}
"""Settings that change from epoch to epoch, other priors and slabs; kernels gate them all."""
each_method = pytest.mark.parametrize("name", METHODS)


def varied(method: Method) -> list[Method]:
    """In what replicas of one segment may differ."""
    changes: list[dict[str, Any]] = [
        {},
        {"kl_weight": 30.0, "logit_step": 3.0},
        {"kl_weight": 20.0, "kl_warmup": 3},
        {"freeze_after": 1, "logit_step": 10.0},
        {"kl_weight": 0.0, "freeze_after": 2},
        {"learn_after": 1, "logit_step": 4.0},
        {"learn_after": 2, "freeze_after": 4},
        {"kl_weight": 50.0, "kl_warmup": 2, "freeze_after": 3, "logit_step": 5.0},
    ]
    return [replace(method, **one) for one in changes]


VARIED = [
    *varied(Method(hyper="optimal")),
    *varied(Method(estimator="straight-through", alpha=1.5, slab=0.1)),
    *varied(Method(estimator="straight-through", hyper="optimal", alpha=2.0, beta=0.7)),
]
"""Three segments; kernels gate them all."""


def bright(
    train: int = 40, test: int = 23, channels: int = 2, side: int = 8, classes: int = 3, seed: int = 0
) -> Dataset:
    """Random images whose class shows in their brightness."""
    random = np.random.default_rng(seed)

    def split(count: int) -> Split:
        labels = np.arange(count) % classes
        images = random.integers(0, 150, (count, channels, side, side))
        images[:, 0, : side // 2] += (labels * 100 // classes)[:, None, None]
        return Split(images.astype(np.uint8), labels.astype(np.int64))

    names = tuple(map(str, range(classes)))
    return Dataset(f"tiny{seed}", split(train), split(test), names, "", "", Provenance("random", True))


def settings(method: Method = METHODS["none"], **training: Any) -> Protocol:
    chosen = {"step_size": 0.05, "batch_size": 4, **training}
    return Protocol(
        data="tiny",
        method=method,
        architecture=TWO_LAYERS,
        training=Training(**chosen),
        precision="float64",
        root_seed=5,
    )


def stack_of(*units: Unit, dataset: Dataset | None = None, **options: Any) -> Stack:
    return Stack(units, dataset or bright(), CPU, **options)


def trained(units: Sequence[Unit], epochs: int = 2, dataset: Dataset | None = None) -> Stack:
    stack = stack_of(*units, dataset=dataset)
    for _ in range(epochs):
        stack.train_epoch()
    return stack


def tensors_of(stack: Stack, row: int) -> dict[str, Tensor]:
    """Everything trained of one replica, by names that do not depend on its neighbours."""
    found = {name: value[row].detach() for name, value in stack.parameters.items()}
    segment = next(s for s in stack.segments if s.rows.start <= row < s.rows.stop)
    for name, value in segment.regulariser.parameters.items():
        found[f"dense.{name}"] = value[row - segment.rows.start].detach()
    if segment.regulariser.moments is not None:
        found["moments"] = segment.regulariser.moments[:, row - segment.rows.start]
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].cpu(), value.cpu(), rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_fused_is_plain(units, batch_size):
    plain, fused = (stack_of(*units, dataset=bright(train=10 * batch_size)) for _ in range(2))
    assert not fused.fused  # there is nothing to gain on a CPU
    fused.fused = True
    for stack in (plain, fused):
        stack.train_epoch()
        stack.train_epoch()
    torch.testing.assert_close(fused.loss_sum, plain.loss_sum, rtol=1e-9, atol=0)
    for row in range(len(units)):
        assert_close(tensors_of(fused, row), tensors_of(plain, row), 1e-9)
