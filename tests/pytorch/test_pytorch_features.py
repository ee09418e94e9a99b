"""What users of PyTorch do with a model goes on working: precision, gradients, copies, functional calls."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import dropconnectpp as dcpp
from elbo_cases import X, Y, bound, each_mask, gradients, make

each_kind = pytest.mark.parametrize(
    ("name", "mask"), [(n, m) for n in ("running", "straight-through", "disarm") for m in ("batch", "example")]
)
each_pathwise = pytest.mark.parametrize("name", ["straight-through", "local", "concrete"])


def trained(elbo: dcpp.ELBO, steps: int = 2) -> dcpp.ELBO:
    """A few steps, so that moments, weights and posterior have left their start."""
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        elbo(X.to(next(elbo.parameters()).dtype), target=Y).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return elbo


def gradient_of(elbo: dcpp.ELBO, seed: int, use: Callable[[Tensor], Any] = lambda loss: loss.backward()) -> Any:
    assert elbo.generator is not None
    elbo.generator.manual_seed(seed)
    elbo.zero_grad()
    use(elbo(X, target=Y).loss)
    return gradients(elbo.model)


# -------------------------------------------------------------------------------------- gradients


@each_kind
@pytest.mark.parametrize("factor", [65536.0, 1 / 3])
def test_every_gradient_scales_with_the_loss(name: str, mask: str, factor: float) -> None:
    elbo = trained(bound(make(name, mask)))
    state = copy.deepcopy(elbo.state_dict())
    plain = gradient_of(elbo, 3)
    elbo.load_state_dict(state)  # the moments of a running baseline moved
    scaled = gradient_of(elbo, 3, lambda loss: (loss * factor).backward())
    for key, gradient in plain.items():
        torch.testing.assert_close(scaled[key], factor * gradient, rtol=1e-12, atol=1e-15 * factor)


@each_kind
def test_grad_scaler_steps_as_without_it(name: str, mask: str) -> None:
    found = []
    for enabled in (False, True):
        elbo = bound(make(name, mask))
        optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(elbo(X, target=Y).loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(elbo.model.state_dict())
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value)


@each_kind
def test_gradients_of_two_halves_accumulate(name: str, mask: str) -> None:
    def halves(elbo: dcpp.ELBO, accumulate: bool) -> list[dict[str, Tensor]]:
        found = []
        elbo.zero_grad()
        for part in (slice(0, 3), slice(3, 6)):
            if not accumulate:
                elbo.zero_grad()
            elbo(X[part], target=Y[part]).loss.backward()
            found.append(gradients(elbo.model))
        return found

    first, second = halves(trained(bound(make(name, mask))), accumulate=False)
    _, total = halves(trained(bound(make(name, mask))), accumulate=True)
    for key, gradient in total.items():
        torch.testing.assert_close(gradient, first[key] + second[key], rtol=1e-13, atol=1e-15)


@each_kind
def test_backward_twice_through_a_kept_graph_doubles_the_gradient(name: str, mask: str) -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    once = gradient_of(trained(bound(make(name, mask))), 3)
    doubled = gradient_of(trained(bound(make(name, mask))), 3, twice)
    for key, gradient in once.items():
        torch.testing.assert_close(doubled[key], 2 * gradient, rtol=1e-14, atol=0.0)


@each_kind
def test_autograd_grad_gives_what_backward_gives(name: str, mask: str) -> None:
    backward = gradient_of(trained(bound(make(name, mask))), 3)
    elbo = trained(bound(make(name, mask)))
    elbo.generator.manual_seed(3)
    found = torch.autograd.grad(elbo(X, target=Y).loss, list(elbo.parameters()))
    for gradient, expected in zip(found, backward.values(), strict=True):
        assert torch.equal(gradient, expected)


@each_mask
def test_a_posterior_changed_between_forward_and_backward_is_noticed(mask: str) -> None:
    model = make("running", mask)
    model.requires_grad_(False)
    x = X.clone().requires_grad_()
    loss = model(x).sum()
    with torch.no_grad():
        model[0].weight_logit.add_(1.0)
    if mask == "example":  # backward redraws these masks
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()


# ------------------------------------------------------------------------------------- precision


@each_kind
def test_autocast_trains_in_bfloat16_with_float32_parameters(name: str, mask: str) -> None:
    model = make(name, mask).float()
    elbo = bound(model)
    x = X.float()
    found = []
    for enabled in (False, True):
        elbo.generator.manual_seed(3)
        elbo.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            terms = elbo(x, target=Y)
        assert terms.output.dtype == (torch.bfloat16 if enabled else torch.float32)
        assert terms.loss.dtype == terms.kl.dtype == torch.float32
        terms.loss.backward()
        found.append((terms, gradients(model)))
    (exact, exact_gradients), (rough, rough_gradients) = found
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.02, atol=0.02)
    torch.testing.assert_close(rough.kl, exact.kl)
    for key in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert rough_gradients[key].dtype == torch.float32
        torch.testing.assert_close(rough_gradients[key], exact_gradients[key], rtol=0.05, atol=0.01)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_models_move_between_precisions_and_train_there(name: str, mask: str, dtype: torch.dtype) -> None:
    elbo = trained(bound(make(name, mask).float()))
    elbo.to(dtype)
    before = [p.detach().clone() for p in elbo.parameters()]
    trained(elbo, 3)
    assert all(p.dtype == dtype and p.isfinite().all() for p in elbo.parameters())
    assert all(not torch.equal(p, old) for p, old in zip(elbo.parameters(), before, strict=True))
    terms = elbo(X.to(dtype), target=Y)
    assert terms.loss.dtype == terms.kl.dtype == (dtype if dtype.itemsize > 2 else torch.float32)
    assert elbo.eval()(X.to(dtype), target=Y).output.dtype == dtype


def test_running_moments_stay_wide_in_a_half_precision_model() -> None:
    """Sums over the synapses of a layer: 600 x 600 of them are beyond float16."""
    model = nn.Sequential(dcpp.DropConnectPPLinear(600, 600), dcpp.DropConnectPPLinear(600, 2))
    elbo = dcpp.ELBO(model, dcpp.categorical, num_data=6).half()
    x = torch.randn(6, 600).half()
    for _ in range(3):
        elbo.zero_grad()
        elbo(x, target=Y).loss.backward()
    assert all(g.isfinite().all() for g in gradients(model).values())
    assert all(b.dtype == torch.float32 and b.isfinite().all() for b in elbo.moments.buffers())
    assert all(b.dtype == torch.float64 for b in elbo.double().moments.buffers())


# --------------------------------------------------------------------------------- copies and files


@each_kind
def test_a_deep_copy_trains_on_by_itself_and_alike(name: str, mask: str) -> None:
    elbo = trained(bound(make(name, mask)))
    twin = copy.deepcopy(elbo)
    state = copy.deepcopy(elbo.state_dict())
    assert twin.generator is not elbo.generator
    trained(twin, 3)
    assert all(torch.equal(state[key], value) for key, value in elbo.state_dict().items())
    trained(elbo, 3)
    assert all(torch.equal(twin.state_dict()[key], value) for key, value in elbo.state_dict().items())
    assert not torch.equal(state["model.0.weight_logit"], elbo.state_dict()["model.0.weight_logit"])


def by_pickle(value: Any, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_file(value: Any, folder: Path) -> Any:
    torch.save(value, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


@each_kind
@pytest.mark.parametrize("trip", [copy.deepcopy, by_pickle, by_file])
def test_layers_and_bounds_survive_round_trips(name: str, mask: str, trip: Any, tmp_path: Path) -> None:
    arguments = () if trip is copy.deepcopy else (tmp_path,)
    elbo = trained(bound(make(name, mask)))
    layer = trip(elbo.model[0], *arguments)
    assert layer.estimator == elbo.model[0].estimator
    torch.testing.assert_close(layer.eval()(X), elbo.model[0].eval()(X))
    elbo.train()
    again = trip(elbo, *arguments)
    assert all(torch.equal(again.state_dict()[key], value) for key, value in elbo.state_dict().items())
    expected = gradient_of(elbo, 7)
    for key, gradient in gradient_of(again, 7).items():
        assert torch.equal(gradient, expected[key])


def test_a_state_dict_goes_through_a_weights_only_file() -> None:
    elbo = trained(bound(make()))
    file = io.BytesIO()
    torch.save(elbo.state_dict(), file)
    file.seek(0)
    fresh = bound(make())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    expected = gradient_of(elbo, 7)
    for key, gradient in gradient_of(fresh, 7).items():
        assert torch.equal(gradient, expected[key])


# ----------------------------------------------------------------------------------- composition


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.branch(x)
        return output


@pytest.mark.parametrize("estimator", ["bbvi", "straight-through"])
@pytest.mark.parametrize("shape", [(3,), (1, 3), (5, 3), (2, 5, 3)])
def test_a_residual_branch_leaves_the_gradient_of_the_trunk_alone(estimator: str, shape: tuple[int, ...]) -> None:
    block = Residual(dcpp.DropConnectPPLinear(3, 3, estimator=estimator, dtype=torch.float64))
    masks = {"branch.0.weight": torch.rand(3, 3) < 0.5, "branch.0.bias": torch.tensor([1, 0, 1])}
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    kept = upstream.clone()
    with dcpp.forced_masks(block, masks):
        block(x).backward(upstream)
    layer = block.branch[0]
    assert torch.equal(upstream, kept)
    torch.testing.assert_close(x.grad, upstream + upstream @ (layer.weight.detach() * masks["branch.0.weight"]))
    rows, grads = x.detach().reshape(-1, 3), upstream.reshape(-1, 3)
    torch.testing.assert_close(layer.weight.grad, (grads.T @ rows) * masks["branch.0.weight"])
    torch.testing.assert_close(layer.bias.grad, grads.sum(0) * masks["branch.0.bias"])


@each_kind
def test_deep_residual_models_train(name: str, mask: str) -> None:
    first, activation, head = make(name, mask)
    torch.manual_seed(2)
    inner = dcpp.DropConnectPPLinear(4, 4, estimator=first.estimator, mask=mask, dtype=torch.float64)
    model = nn.Sequential(first, activation, Residual(inner, nn.GELU()), head)
    elbo = trained(bound(model, num_samples=6), 1)  # with one mask both biases of the head may be off
    assert all((g != 0).any() for g in gradient_of(elbo, 3).values())


# --------------------------------------------------------------------------------------- torch.func


@pytest.mark.parametrize("hyper", ["marginal", "optimal", "learned"])
@pytest.mark.parametrize("name", ["running", "mean-network", "straight-through", "local", "concrete", "disarm"])
@each_mask
def test_functional_call_of_a_bound_uses_the_parameters_given(name: str, mask: str, hyper: str) -> None:
    other = {key: p.detach() + 0.5 for key, p in make(name, mask, hyper=hyper).named_parameters()}
    elbo = bound(make(name, mask, hyper=hyper))
    given = {f"model.{key}": value.clone().requires_grad_() for key, value in other.items()}
    called = functional_call(elbo, given, (X,), {"target": Y})
    called.loss.backward()
    model = make(name, mask, hyper=hyper)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(other[key])
    terms = bound(model)(X, target=Y)
    terms.loss.backward()
    torch.testing.assert_close(called.loss, terms.loss)
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(given[f"model.{key}"].grad, gradient)
    assert all(p.grad is None for p in elbo.parameters())


@each_mask
@pytest.mark.parametrize("name", ["running", "straight-through"])
def test_func_grad_gives_what_backward_gives(name: str, mask: str) -> None:
    model = make(name, mask)
    lead = (6,) if mask == "example" else ()
    masks = {
        f"{i}.{s}": torch.rand(*lead, *getattr(model[i], s).shape) < 0.5 for i in (0, 2) for s in ("weight", "bias")
    }

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (X,)).square().sum()

    with dcpp.forced_masks(model, masks):
        found = grad(loss)({key: p.detach() for key, p in model.named_parameters()})
        loss(dict(model.named_parameters())).backward()
    for key, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[key], expected)


@each_mask
@each_pathwise
def test_func_grad_under_sampling_uses_the_masks_drawn(name: str, mask: str) -> None:
    model = make(name, mask).eval()
    parameters = {key: p.detach() for key, p in model.named_parameters()}

    def output(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (X,))

    def values(transform: Callable[..., Any]) -> Tensor:
        with dcpp.sampling(model, torch.Generator().manual_seed(4)):
            return transform()

    plain = values(lambda: output(parameters))
    inside = values(lambda: grad(lambda p: ((out := output(p)).sum(), out), has_aux=True)(parameters)[1])
    torch.testing.assert_close(inside, plain)


@each_mask
@pytest.mark.parametrize("name", ["running", "straight-through", "local", "concrete"])
def test_vmap_over_an_ensemble_draws_a_mask_for_each_member(name: str, mask: str) -> None:
    members = [make(name, mask) for _ in range(3)]  # the same weights, so that only masks differ
    base = copy.deepcopy(members[0])
    parameters, buffers = stack_module_state(members)

    def call(p: Any, b: Any) -> Tensor:
        return functional_call(base, (p, b), (X,))

    outputs = vmap(call, randomness="different")(parameters, buffers)
    assert outputs.shape == (3, 6, 2)
    assert not torch.equal(outputs[0], outputs[1])
    shared = vmap(call, randomness="same")(parameters, buffers)
    torch.testing.assert_close(shared[0], shared[1])
    found = vmap(grad(lambda p, b: call(p, b).square().sum()), randomness="different")(parameters, buffers)
    assert all(value.isfinite().all() for value in found.values())
    assert ((found["0.weight_logit"] != 0).any()) == (name != "running")
    base.eval()
    torch.testing.assert_close(vmap(call)(parameters, buffers)[1], members[0].eval()(X))
