"""torch.compile over a whole step of the bound: one graph, the eager numbers, and no recompilation afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters

import dropconnectpp as dcpp
from dropconnectpp.errors import NonFiniteError
from elbo_cases import X, Y, make, samples_for

# dynamo's own look at tensors around a graph break, which it means to keep silent
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def no_recompiles() -> Any:
    return torch._dynamo.config.patch(error_on_recompile=True)


def whole(elbo: dcpp.ELBO, backend: str = "aot_eager") -> Any:
    return torch.compile(elbo, fullgraph=True, backend=backend)


def elbo_of(name: str, mask: str = "batch", num_samples: int = 1, **options: Any) -> dcpp.ELBO:
    """Seeds come from torch's own generator, which a graph can draw from; a check of the loss would end the graph."""
    model = make(name, mask, **options)
    return dcpp.ELBO(model, dcpp.categorical, 30, num_samples=num_samples, check_finite=False)


def train(elbo: dcpp.ELBO, call: Any, steps: int, start: int = 0, changing: bool = False) -> list[list[Tensor]]:
    """What each step came to: its terms, its gradients and what it left in the moments."""
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.05)
    found = []
    for step in range(start, start + steps):
        torch.manual_seed(step)
        if changing:
            elbo.kl_weight = 0.02 * step
        optimizer.zero_grad()
        terms = call(X, Y)
        terms.loss.backward()
        optimizer.step()
        gradients = [p.grad.clone() for p in elbo.parameters() if p.grad is not None]
        values = [terms.loss, terms.elbo, terms.kl, terms.log_likelihood, terms.output]
        found.append([*(v.detach() for v in values), *gradients, *(b.clone() for b in elbo.moments.buffers())])
    return found


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]], rtol: float = 1e-10) -> None:
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=1e-12, msg=lambda m, step=step: f"step {step}: {m}")


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("name", ["running", "straight-through", "disarm"])
def test_a_hundred_steps_are_one_graph_and_the_eager_steps(name: str, num_samples: int) -> None:
    options: dict[str, Any] = {"num_samples": num_samples, "hyper": "marginal", "beta": 3.0}
    eager = elbo_of(name, **options)
    expected = train(eager, eager, 12)
    elbo = elbo_of(name, **options)
    call = whole(elbo)
    found = train(elbo, call, 2)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    with no_recompiles():
        found += train(elbo, call, 10, start=2)
        rest = train(elbo, call, 88, start=12)
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(found, expected)
    assert len({float(step[0]) for step in rest}) == 88  # each with masks of its own


@pytest.mark.parametrize(
    ("name", "mask", "options"),
    [
        ("running", "example", {"hyper": "marginal"}),
        ("disarm", "example", {"hyper": "marginal", "num_samples": 2}),
        ("straight-through", "example", {"hyper": "optimal"}),
        ("concrete", "example", {"hyper": "marginal"}),
        ("concrete", "batch", {"hyper": "learned"}),
        ("local", "batch", {"hyper": "marginal", "num_samples": 2}),
        ("mean-network", "batch", {"hyper": "marginal"}),
        ("per-synapse", "batch", {"hyper": "marginal"}),
        ("leave-one-out", "batch", {"hyper": "optimal"}),
        ("eq16", "batch", {"hyper": "learned"}),
        ("straight-through", "batch", {"hyper": "optimal", "alpha": 2.0, "beta": 5.0}),  # without polynomials
        ("running", "batch", {"hyper": "optimal"}),
        ("running", "batch", {"hyper": "learned"}),  # its gradient is worked out in the open, from the moments
        ("running", "batch", {"hyper": "optimal", "sharing": "unit"}),
        ("straight-through", "batch", {"hyper": "marginal", "parameterisation": "probability"}),
    ],
    ids=str,
)
def test_every_estimators_step_is_one_graph_and_the_eager_step(name: str, mask: str, options: dict[str, Any]) -> None:
    options = {"num_samples": samples_for(name), **options}
    eager = elbo_of(name, mask, **options)
    expected = train(eager, eager, 4)
    elbo = elbo_of(name, mask, **options)
    call = whole(elbo)
    found = train(elbo, call, 2)
    with no_recompiles():
        found += train(elbo, call, 2, start=2)
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [("running", "marginal"), ("running", "learned"), ("straight-through", "marginal"), ("disarm", "optimal")],
)
def test_a_weight_of_the_kl_that_changes_at_every_step_compiles_nothing_anew(name: str, hyper: str) -> None:
    """As an annealed KL does."""
    eager = elbo_of(name, hyper=hyper)
    expected = train(eager, eager, 30, changing=True)
    elbo = elbo_of(name, hyper=hyper)
    call = whole(elbo)
    found = train(elbo, call, 2, changing=True)
    with no_recompiles():
        found += train(elbo, call, 28, start=2, changing=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_weight_of_the_kl_keeps_its_digits_in_every_precision(dtype: torch.dtype) -> None:
    elbo = elbo_of("straight-through").to(dtype)
    elbo.kl_weight = 0.1
    assert elbo.kl_weight == 0.1
    assert elbo._kl_weight.tensor.dtype == (dtype if dtype.itemsize > 2 else torch.float64)
    assert float(elbo._kl_weight.tensor) == pytest.approx(0.1, rel=1e-7)
    assert float(elbo.double()._kl_weight.tensor) == 0.1
    assert not [key for key in elbo.state_dict() if "kl_weight" in key]
    float32 = dcpp.ELBO(make("running").float(), dcpp.categorical, 30, kl_weight=0.1)
    assert float(float32._kl_weight.tensor) == pytest.approx(0.1, rel=1e-7)
    assert float(float32.double()._kl_weight.tensor) == 0.1  # all digits again


def test_a_layer_pruned_or_replaced_after_compiling_counts() -> None:
    elbo, eager = elbo_of("straight-through"), elbo_of("straight-through")
    call = whole(elbo)
    train(elbo, call, 2)
    train(eager, eager, 2)
    for bound in (elbo, eager):
        bound.model[0].keep_only("weight", torch.arange(12).view(4, 3) % 2 > 0)
        torch.manual_seed(7)
        bound.model[2] = dcpp.DropConnectPPLinear(4, 2, estimator="straight-through", beta=9.0, dtype=torch.float64)
    assert_same(train(elbo, call, 2, start=2), train(eager, eager, 2, start=2))


def test_a_loss_that_is_checked_ends_the_graph_and_is_still_checked() -> None:
    eager, elbo = elbo_of("running"), elbo_of("running")
    eager.check_finite = elbo.check_finite = True
    call = torch.compile(elbo, backend="aot_eager")
    assert_same(train(elbo, call, 4), train(eager, eager, 4))
    spoiled = X.clone()
    spoiled[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="input 0 holds 1 values that are not finite"):
        call(spoiled, Y)


@pytest.mark.parametrize("mask", ["batch", "example"])
@pytest.mark.parametrize("name", ["running", "disarm"])
def test_masks_scored_are_those_that_ran_in_a_compiled_model(name: str, mask: str) -> None:
    """In single precision, where small and large tensors draw by different generators."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(1)
        layers = (
            dcpp.DropConnectPPLinear(n, m, estimator={"running": "bbvi"}.get(name, name), mask=mask)
            for n, m in ((3, 5), (5, 2))
        )
        first, second = layers
        model = nn.Sequential(first, nn.Tanh(), second)
        used = torch.compile(model, backend="aot_eager") if compiled else model
        elbo = dcpp.ELBO(used, dcpp.categorical, 30, generator=torch.Generator().manual_seed(3))
        for _ in range(3):
            model.zero_grad()
            elbo(X.float(), Y).loss.backward()
        found.append([p.grad for p in model.parameters()])
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain, rtol=1e-4, atol=1e-6)


# No vector code, no precompiled headers, no pool of processes: they take longer than this network is worth.
@torch._inductor.config.patch(
    {"cpp.simdlen": 0, "cpp_cache_precompile_headers": False, "compile_threads": 1, "fallback_random": True}
)
@pytest.mark.compiler
@pytest.mark.parametrize(("name", "hyper"), [("running", "learned"), ("straight-through", "marginal")])
def test_a_whole_step_in_inductor(name: str, hyper: str) -> None:
    def tiny() -> dcpp.ELBO:
        return dcpp.ELBO(make(name, hyper=hyper)[:1], dcpp.categorical, 30, check_finite=False)

    eager = tiny()
    expected = train(eager, eager, 4)
    elbo = tiny()
    call = whole(elbo, "inductor")
    found = train(elbo, call, 2)
    with no_recompiles():
        found += train(elbo, call, 2, start=2)
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(found, expected, rtol=1e-8)
