"""torch.compile: the same numbers, fresh masks at every step, and no recompilation for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn

import dropconnectpp as dcpp
from elbo_cases import X, Y, bound, each_mask, gradients, make

# dynamo's own look at tensors around a graph break, which it means to keep silent
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

each_name = pytest.mark.parametrize("name", ["running", "mean-network", "straight-through", "concrete", "disarm"])
each_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def no_recompiles() -> Any:
    return torch._dynamo.config.patch(error_on_recompile=True)


def compiled(model: nn.Module, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def steps(elbo: dcpp.ELBO, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        loss = elbo(X, target=Y).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients(elbo.model)


@each_backend
@each_name
@each_mask
def test_training_under_an_elbo_is_the_same_compiled(name: str, mask: str, backend: str) -> None:
    losses, expected = steps(bound(make(name, mask)), 6)
    elbo = bound(compiled(make(name, mask), backend))
    warm, _ = steps(elbo, 2)
    with no_recompiles():
        rest, found = steps(elbo, 4)
    assert warm + rest == pytest.approx(losses, rel=1e-10)
    assert len(set(rest)) == 4
    for (key, gradient), mine in zip(expected.items(), found.values(), strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-9, atol=1e-12, msg=key)


@each_mask
def test_local_noise_is_the_same_compiled(mask: str) -> None:
    losses, _ = steps(bound(make("local", mask)), 6)
    elbo = bound(compiled(make("local", mask), "aot_eager"))
    warm, _ = steps(elbo, 2)
    with no_recompiles():
        rest, _ = steps(elbo, 4)
    assert warm + rest == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("name", ["running", "straight-through", "concrete", "local"])
@each_mask
def test_plain_training_calls_draw_anew_without_recompiling(name: str, mask: str) -> None:
    model = compiled(make(name, mask), "aot_eager")
    model(X).sum().backward()
    with no_recompiles():
        outputs = [model(X) for _ in range(5)]
        outputs[-1].sum().backward()
    assert len({float(output.detach().sum()) for output in outputs}) > 1
    weights = {key.removeprefix("_orig_mod."): g for key, p in model.named_parameters() if (g := p.grad) is not None}
    assert (weights["0.weight"] != 0).any()
    assert ("0.weight_logit" in weights) == (name != "running")


def test_plain_training_calls_compile_into_one_graph() -> None:
    for name in ("running", "straight-through", "concrete", "local"):
        model = torch.compile(make(name), backend="aot_eager", fullgraph=True)
        model(X).sum().backward()


@each_backend
@each_mask
def test_eval_is_one_graph_and_the_same_compiled(mask: str, backend: str) -> None:
    plain = make("running", mask).eval()
    model = torch.compile(plain, backend=backend, fullgraph=True)
    torch.testing.assert_close(model(X), plain(X), rtol=1e-12, atol=1e-12)
    with no_recompiles():
        assert torch.equal(model(X), model(X))


def test_modes_and_contexts_are_told_apart_after_compiling() -> None:
    plain = make("straight-through")
    model = compiled(plain, "aot_eager")
    ones = {f"{i}.{s}": torch.ones_like(getattr(plain[i], s)) for i in (0, 2) for s in ("weight", "bias")}
    for _ in range(2):
        assert not torch.equal(model.train()(X), model(X))
        torch.testing.assert_close(model.eval()(X), plain(X))
        with dcpp.sampling(model):
            assert not torch.equal(model(X), model(X))
        with dcpp.forced_masks(plain, ones):
            torch.testing.assert_close(model(X), plain(X))
        torch.testing.assert_close(model(X), plain(X))


def test_a_compiled_fixed_rate_model_trains() -> None:
    plain = nn.Sequential(dcpp.DropConnectLinear(3, 8, activation=nn.ReLU()), dcpp.DropConnectLinear(8, 2)).double()
    model = torch.compile(plain, backend="aot_eager", fullgraph=True)
    model(X).sum().backward()
    with no_recompiles():
        outputs = {float(model(X).detach().sum()) for _ in range(5)}
    assert len(outputs) > 1
    assert (plain[0].weight.grad != 0).any()


# No vector code, no precompiled headers, no pool of processes: they take longer than this network is worth.
@torch._inductor.config.patch({"cpp.simdlen": 0, "cpp_cache_precompile_headers": False, "compile_threads": 1})
@pytest.mark.compiler
def test_inductor() -> None:
    losses, expected = steps(bound(make("straight-through")[0]), 3)
    elbo = bound(compiled(make("straight-through")[0], "inductor"))
    warm, _ = steps(elbo, 1)
    with no_recompiles():
        rest, found = steps(elbo, 2)
    assert warm + rest == pytest.approx(losses, rel=1e-9)
    for (key, gradient), mine in zip(expected.items(), found.values(), strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-8, atol=1e-11, msg=key)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("prior", [(1.0, 1.0), (10.0, 90.0)], ids=str)
@pytest.mark.parametrize("estimator", ["bbvi", "straight-through", "local"])
def test_inductor_on_the_gpu(estimator: str, prior: tuple[float, float]) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"estimator": estimator, "hyper": "optimal", "alpha": prior[0], "beta": prior[1]}
    plain = dcpp.convert(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), **options).cuda()
    x, y = torch.randn(4, 8, device="cuda"), torch.randint(3, (4,), device="cuda")
    expected = dcpp.ELBO(plain, dcpp.categorical, num_data=100)(x, target=y)
    terms = dcpp.ELBO(torch.compile(plain), dcpp.categorical, num_data=100)(x, target=y)
    terms.loss.backward()
    assert float(terms.kl) == pytest.approx(float(expected.kl), rel=1e-5)
    assert all(bool(torch.isfinite(one).all()) for one in gradients(plain).values())
