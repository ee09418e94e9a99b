"""A training loop without an ELBO: said once where it teaches the keep probabilities nothing, and never elsewhere."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dropconnectpp as dcpp
from dropconnectpp.layers import untaught

MESSAGE = r"A loss without dropconnectpp.ELBO reaches DropConnectPPLinear: with estimator='{}'"


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaught, "said", set())


def network(estimator: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    return dcpp.convert(model, estimator=estimator, **options)


def step(model: nn.Module) -> None:
    loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.zeros(5).long())
    loss.backward()


def learns(model: nn.Module) -> bool:
    logits: list[Tensor | None] = [p.grad for name, p in model.named_parameters() if name.endswith("_logit")]
    return all(grad is not None and bool(grad.abs().sum() > 0) for grad in logits)


@pytest.mark.parametrize("estimator", ["bbvi", "eq16", "disarm"])
def test_it_is_said_once(estimator: str) -> None:
    model = network(estimator, hyper="learned")
    with pytest.warns(UserWarning, match=MESSAGE.format(estimator)) as caught:
        step(model)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
        step(network(estimator, hyper="learned"))
    assert not learns(model)


@pytest.mark.parametrize("estimator", ["straight-through", "local", "concrete"])
def test_a_loss_that_teaches_them_is_no_trap(estimator: str) -> None:
    model = network(estimator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model)
    assert learns(model)


def test_the_default_learns_in_an_ordinary_loop() -> None:
    model = dcpp.convert(nn.Sequential(nn.Linear(4, 3)))
    step(model)
    assert learns(model)


def test_an_elbo_is_no_trap() -> None:
    model = network("bbvi")
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # the running baseline begins with the first reward
            elbo(torch.randn(5, 4), target=torch.zeros(5).long()).loss.backward()
    assert learns(model)


def test_an_elbo_whose_passes_are_recomputed_is_no_trap() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network("bbvi")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    elbo = dcpp.ELBO(Recomputed(), dcpp.categorical, num_data=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elbo(torch.randn(5, 4), target=torch.zeros(5).long()).loss.backward()


def test_what_only_looks_is_no_trap() -> None:
    model = network("bbvi")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(5, 4))  # no backward pass
        with torch.no_grad():
            model(torch.randn(5, 4))
        step(model.eval())
