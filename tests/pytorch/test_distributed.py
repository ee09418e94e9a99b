"""Data-parallel training in two processes: masks differ between ranks, gradients and weights do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dropconnectpp as dcpp
from elbo_cases import X, Y, make

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")

CASES = [
    (name, mask)
    for name in ("running", "mean-network", "straight-through", "concrete", "local", "disarm")
    for mask in ("batch", "example")
]
PLAIN_CASES = [("running", "batch"), ("straight-through", "example"), ("local", "batch")]
WAYS = ("DDP(ELBO)", "ELBO(DDP)")


def start(name: str, mask: str) -> nn.Sequential:
    """Two layers whose KL counts differently."""
    model = make(name, mask)
    model[0].kl_weight = 0.3
    return model


def wrap(way: str, name: str, mask: str, generator: torch.Generator | None = None) -> tuple[nn.Module, Any]:
    """The module to call and the model with the parameters."""
    model = start(name, mask)
    if way == "DDP(ELBO)":
        return DistributedDataParallel(dcpp.ELBO(model, dcpp.categorical, 30, generator=generator)), model
    return dcpp.ELBO(DistributedDataParallel(model), dcpp.categorical, 30, generator=generator), model


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def train(way: str, name: str, mask: str) -> dict[str, Any]:
    """Three steps on the same data everywhere: what differs between ranks comes from masks."""
    torch.manual_seed(11)
    bound, model = wrap(way, name, mask)
    optimizer = torch.optim.SGD(bound.parameters(), lr=0.2)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    outputs, steps = [], []
    for _ in range(3):
        optimizer.zero_grad()
        terms = bound(X, target=Y)
        terms.loss.backward()
        outputs.append(terms.output.detach())
        steps.append(grads(model))
        optimizer.step()
    end = {key: p.detach().clone() for key, p in model.named_parameters()}
    return {"outputs": outputs, "gradients": steps, "start": start, "end": end}


def against_single_process(rank: int, name: str, mask: str) -> dict[str, Any]:
    """The gradient DDP gives, and what this rank alone would have had with the same masks and data."""
    found = {}
    part = slice(3 * rank, 3 * rank + 3)
    for way in WAYS:
        bound, model = wrap(way, name, mask, torch.Generator().manual_seed(rank))
        bound(X[part], target=Y[part]).loss.backward()
        found[way] = grads(model)
    model = start(name, mask)
    alone = dcpp.ELBO(model, dcpp.categorical, 30, generator=torch.Generator().manual_seed(rank))
    alone(X[part], target=Y[part]).loss.backward()
    found["alone"] = grads(model)
    return found


def checkpointed(recompute: bool, mask: str) -> dict[str, Tensor]:
    """A plain training call, without any ELBO: the recomputed masks must be this rank's own."""
    torch.manual_seed(13)
    layer = dcpp.DropConnectLinear(3, 8, mask=mask, dtype=torch.float64)
    output = checkpoint(layer, X, use_reentrant=False) if recompute else layer(X)
    output.square().sum().backward()
    return grads(layer)


def plain_calls(name: str, mask: str) -> dict[str, Tensor]:
    """Training calls outside every context, and the ways torch transforms them."""
    model = make(name, mask)
    parameters, buffers = torch.func.stack_module_state([model, model])
    compiled = torch.compile(model, backend="eager")

    def member(p: Any, b: Any) -> Tensor:
        return torch.func.functional_call(model, (p, b), (X,))

    torch.manual_seed(19)
    return {
        "call": model(X).detach(),
        "compiled": compiled(X).detach(),
        "vmap": torch.vmap(member, randomness="different")(parameters, buffers).detach(),
    }


def seeded_twice() -> list[Tensor]:
    layer = make()[0]
    outputs = []
    for _ in range(2):
        torch.manual_seed(17)
        outputs.append(layer(X).detach())
    return outputs


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        found: dict[str, Any] = {f"{way} {name} {mask}": train(way, name, mask) for way in WAYS for name, mask in CASES}
        found |= {f"single {name} {mask}": against_single_process(rank, name, mask) for name, mask in CASES}
        found |= {
            f"checkpoint {mask}": [checkpointed(way, mask) for way in (False, True)] for mask in ("batch", "example")
        }
        found |= {f"plain {name} {mask}": plain_calls(name, mask) for name, mask in PLAIN_CASES}
        found["seeded twice"] = seeded_twice()
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


each_case = pytest.mark.parametrize(("name", "mask"), CASES)


@each_case
@pytest.mark.parametrize("way", WAYS)
def test_ranks_draw_different_masks_and_share_every_gradient(
    ranks: list[dict[str, Any]], way: str, name: str, mask: str
) -> None:
    first, second = (rank[f"{way} {name} {mask}"] for rank in ranks)
    assert any(not torch.equal(a, b) for a, b in zip(first["outputs"], second["outputs"], strict=True))
    for mine, theirs in zip(first["gradients"], second["gradients"], strict=True):
        assert len(mine) == 8
        assert all(torch.equal(gradient, theirs[key]) for key, gradient in mine.items())
    assert all(torch.equal(value, second["end"][key]) for key, value in first["end"].items())
    assert all(not torch.equal(value, first["start"][key]) for key, value in first["end"].items())


@each_case
@pytest.mark.parametrize("way", WAYS)
def test_the_shared_gradient_is_the_mean_of_the_ranks(
    ranks: list[dict[str, Any]], way: str, name: str, mask: str
) -> None:
    alone = [rank[f"single {name} {mask}"]["alone"] for rank in ranks]
    for key, gradient in ranks[0][f"single {name} {mask}"][way].items():
        torch.testing.assert_close(gradient, (alone[0][key] + alone[1][key]) / 2)
    assert not torch.equal(alone[0]["0.weight"], alone[1]["0.weight"])


@pytest.mark.parametrize(("name", "mask"), PLAIN_CASES)
def test_plain_calls_draw_different_masks(ranks: list[dict[str, Any]], name: str, mask: str) -> None:
    first, second = (rank[f"plain {name} {mask}"] for rank in ranks)
    for way in ("call", "compiled"):
        assert not torch.equal(first[way], second[way]), way
    assert not torch.equal(*first["vmap"])


@pytest.mark.parametrize("mask", ["batch", "example"])
def test_checkpointing_recomputes_each_ranks_own_masks(ranks: list[dict[str, Any]], mask: str) -> None:
    for plain, again in (rank[f"checkpoint {mask}"] for rank in ranks):
        assert all(torch.equal(gradient, again[key]) for key, gradient in plain.items())
    assert not torch.equal(ranks[0][f"checkpoint {mask}"][0]["weight"], ranks[1][f"checkpoint {mask}"][0]["weight"])


def test_a_seed_repeats_each_ranks_masks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(*rank["seeded twice"])
    assert not torch.equal(ranks[0]["seeded twice"][0], ranks[1]["seeded twice"][0])
