"""ELBO names gates that no forward pass of its first steps has asked for, once, and then costs nothing."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.inference.watching import STEPS
from dropconnectpp.layers.passes import Watched


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x), self.read.weight)


def train(elbo: dcpp.ELBO, steps: int) -> None:
    for _ in range(steps):
        elbo(torch.randn(4, 3), target=torch.tensor([0, 1, 2, 0])).loss.backward()


@pytest.mark.parametrize("estimator", ["bbvi", "disarm", "straight-through", "local", "concrete"])
def test_gates_that_nobody_asks_for_are_named_once(estimator: str) -> None:
    elbo = dcpp.ELBO(dcpp.convert(Reader(), estimator=estimator), dcpp.categorical, num_data=8)
    train(elbo, STEPS - 1)
    with pytest.warns(UserWarning, match=f"first {STEPS} steps has asked for the gates of read:") as seen:
        train(elbo, 1)
    assert len(seen) == 1
    train(elbo, 2 * STEPS)  # a warning is an error here


def test_passes_inside_sample_count_too() -> None:
    elbo = dcpp.ELBO(dcpp.convert(Reader(), estimator="straight-through"), dcpp.categorical, num_data=8)

    def step() -> None:
        with elbo.sample():
            output = elbo.model(torch.randn(4, 3))
        elbo.terms(output, torch.tensor([0, 1, 2, 0]))

    for _ in range(STEPS - 1):
        step()
    with pytest.warns(UserWarning, match=re.escape("gates of read:")):
        step()


def test_a_layer_that_is_called_now_and_then_is_not_named() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.calls = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.experts[self.calls // 2 % 4](x)

    elbo = dcpp.ELBO(dcpp.convert(Experts()), dcpp.categorical, num_data=8)
    train(elbo, STEPS + 1)


def test_nothing_is_watched_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    elbo = dcpp.ELBO(dcpp.convert(nn.Linear(3, 3)), dcpp.categorical, num_data=8)
    made: list[Any] = []
    before = Watched.__init__
    monkeypatch.setattr(Watched, "__init__", lambda self, gates: (made.append(self), before(self, gates))[1])
    train(elbo, STEPS)
    assert made
    made.clear()
    train(copy.deepcopy(elbo), 3)
    assert not made


@pytest.mark.parametrize("how", ["module", "part", "in place", "forward"])
def test_a_model_with_compiled_parts_is_not_watched(how: str) -> None:
    model: nn.Module = dcpp.convert(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    if how == "module":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    elif how == "part":
        model[0] = torch.compile(model[0], backend="eager")
    elif how == "in place":
        model[0].compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, while it compiles
        train(elbo, STEPS + 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_bound_is_not_watched() -> None:
    elbo = dcpp.ELBO(dcpp.convert(Reader(), estimator="straight-through"), dcpp.categorical, num_data=8)
    train(torch.compile(elbo, backend="eager"), STEPS + 1)  # type: ignore[arg-type]
