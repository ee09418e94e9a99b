"""Gradient checkpointing runs layers anew inside backward: the masks must be those of the forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dropconnectpp as dcpp
from elbo_cases import ESTIMATORS, X, Y, bound, each_mask, make

NAMES = ["running", "mean-network", "straight-through", "local", "concrete", "disarm"]
each_name = pytest.mark.parametrize("name", NAMES)
each_way = pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])


class Checkpointed(nn.Module):
    """A plain layer, then two masked blocks that are recomputed in backward; ``None`` keeps them."""

    def __init__(self, name: str, mask: str, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.plain = nn.Linear(3, 3, dtype=torch.float64)
        first, activation, second = make(name, mask)
        self.first, self.second = nn.Sequential(first, activation), second
        self.reentrant = reentrant
        self.runs = 0

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        self.runs += 1
        output: Tensor = block(x)
        return output

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(x)
        for block in (self.first, self.second):
            if self.reentrant is None:
                x = self.run(block, x)
            else:
                x = checkpoint(self.run, block, x, use_reentrant=self.reentrant)
        return x


def assert_same_gradients(name: str, mask: str, reentrant: bool, use: Any) -> None:
    """``use(model)`` trains; with and without recomputation it must come to the same gradients."""
    found = []
    for way in (None, reentrant):
        model = Checkpointed(name, mask, way)
        torch.manual_seed(5)
        use(model)
        found.append((model.runs, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
    (runs, plain), (more_runs, again) = found
    assert more_runs > runs  # it did recompute
    assert plain.keys() == again.keys()
    assert (plain["first.0.weight"] != 0).any()
    for key, gradient in plain.items():
        # Reentrant checkpoints add up in another order; another mask would be wrong in the first digit.
        torch.testing.assert_close(again[key], gradient, rtol=1e-11, atol=1e-14)


# torch's word on a reentrant checkpoint in a pass without gradient, such as a mean-network baseline's
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@each_name
@each_mask
@each_way
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("by_hand", [False, True], ids=["call", "sample"])
def test_under_an_elbo(name: str, mask: str, reentrant: bool, num_samples: int, by_hand: bool) -> None:
    def use(model: nn.Module) -> None:
        elbo = bound(model, num_samples=num_samples)
        for _ in range(2):
            if by_hand:
                with elbo.sample():
                    output = model(X)
                loss = elbo.terms(output, Y).loss
            else:
                loss = elbo(X, target=Y).loss
            loss.backward()

    assert_same_gradients(name, mask, reentrant, use)


@each_name
@each_mask
@each_way
def test_under_plain_training_calls(name: str, mask: str, reentrant: bool) -> None:
    def use(model: nn.Module) -> None:
        (model(X).square().sum() + model(X).sum()).backward()

    assert_same_gradients(name, mask, reentrant, use)


@each_name
@each_mask
@each_way
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_under_sampling(name: str, mask: str, reentrant: bool, training: bool, inside: bool) -> None:
    def use(model: nn.Module) -> None:
        model.train(training)
        with dcpp.sampling(model, torch.Generator().manual_seed(7)):
            loss = (model(X) * model(2 * X)).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    assert_same_gradients(name, mask, reentrant, use)


@each_way
def test_two_losses_outstanding_at_once(reentrant: bool) -> None:
    """Backward in the order of the passes, and against it: each finds its own masks."""

    def use(model: nn.Module) -> None:
        elbo = bound(model)
        first, second, third = (elbo(X, target=Y).loss for _ in range(3))
        first.backward()
        third.backward()
        second.backward()

    assert_same_gradients("straight-through", "batch", reentrant, use)


def test_backward_twice_through_a_kept_graph() -> None:
    def use(model: nn.Module) -> None:
        loss = bound(model, num_samples=2)(X, target=Y).loss
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same_gradients("straight-through", "batch", False, use)  # the reentrant kind frees its graph


@each_way
def test_two_bounds_in_one_backward(reentrant: bool) -> None:
    def use(model: nn.Module) -> None:
        first, second = bound(model), bound(model, num_samples=2)
        (first(X, target=Y).loss + second(X, target=Y).loss).backward()

    assert_same_gradients("straight-through", "example", reentrant, use)


@pytest.mark.parametrize("context", ["elbo", "elbo-reentrant", "sampling"])
@each_mask
def test_a_checkpoint_around_the_whole_model(context: str, mask: str) -> None:
    found = []
    for recompute in (False, True):
        model = make("straight-through", mask)
        x = X.clone().requires_grad_()

        def run(model: nn.Module = model, x: Tensor = x, recompute: bool = recompute) -> Tensor:
            reentrant = context == "elbo-reentrant"
            output: Tensor = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            return output

        if context == "sampling":
            with dcpp.sampling(model.eval(), torch.Generator().manual_seed(7)):
                loss = run().square().sum() + run().sum()
        else:
            elbo = bound(model)
            with elbo.sample():
                output = run()
            loss = elbo.terms(output, Y).loss
        loss.backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-11, atol=1e-14)


# ---------------------------------------------------------------------- what must not be left over


@pytest.mark.parametrize("name", ESTIMATORS)
def test_after_backward_layers_draw_and_average_as_usual(name: str) -> None:
    model = make(name)
    elbo = bound(model, num_samples=2)
    elbo(X, target=Y).loss.backward()
    assert not torch.equal(model(X), model(X))
    model.eval()
    mean = nn.functional.linear(X, *[model[0].keep_probability(s) * getattr(model[0], s) for s in ("weight", "bias")])
    torch.testing.assert_close(model[0](X), mean)


def test_backward_inside_sampling_leaves_its_masks_in_place() -> None:
    model = make().eval()
    with dcpp.sampling(model):
        output = model(X)
        output.sum().backward()
        assert torch.equal(model[2](model[1](model[0](X))), output)  # the layers by themselves: the same draw


def test_a_backward_that_failed_leaves_no_masks_behind() -> None:
    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of luck")

    model = Checkpointed("straight-through", "batch", False)
    loss = bound(model)(X, target=Y).loss
    handle = model.plain.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        loss.backward()
    handle.remove()
    assert not torch.equal(model(X), model(X))
    mean = model.eval()(X)
    assert torch.equal(mean, model(X))
    fresh = Checkpointed("straight-through", "batch", None).eval()
    torch.testing.assert_close(mean, fresh(X))
