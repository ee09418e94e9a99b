"""FSDP2 in two processes: a sharded model trains as DistributedDataParallel's does, and predicts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dropconnectpp as dcpp
from elbo_cases import X, Y, make

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
NAMES = ("straight-through", "running", "concrete", "local", "disarm")
WAYS = ("DDP", "fully_shard(model)", "fully_shard(elbo)")


def recurrent() -> nn.Module:
    torch.manual_seed(2)
    return dcpp.convert(nn.Sequential(nn.LSTMCell(3, 2), Second()).double())


class Second(nn.Module):
    """The cell state of an LSTM."""

    def forward(self, states: tuple[Tensor, Tensor]) -> Tensor:
        return states[1]


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }


def train(way: str, name: str) -> dict[str, Any]:
    model = recurrent() if name == "recurrent" else make(name)
    elbo = dcpp.ELBO(model, dcpp.categorical, 30, generator=torch.Generator().manual_seed(dist.get_rank()))
    # FSDP leaves the baselines, which are buffers, to each rank.
    called: nn.Module = DistributedDataParallel(elbo, broadcast_buffers=False) if way == "DDP" else elbo
    if way != "DDP":
        fully_shard(model if way == "fully_shard(model)" else elbo)
    optimizer = torch.optim.SGD(dcpp.parameter_groups(elbo, lr=0.2))
    part = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    for _ in range(3):
        optimizer.zero_grad()
        called(X[part], target=Y[part]).loss.backward()
        optimizer.step()
    if way == "fully_shard(elbo)":
        elbo.unshard()
    found = dcpp.predict(model.eval(), X, num_samples=3, generator=torch.Generator().manual_seed(4))
    if way == "fully_shard(elbo)":
        elbo.reshard()
    return {"parameters": whole(model), "prediction": found.mean}


def refused() -> str:
    model = make("straight-through")
    fully_shard(model[0])
    fully_shard(model)
    try:
        dcpp.ELBO(model, dcpp.categorical, 30)(X, target=Y)
    except dcpp.DropConnectError as error:
        return str(error)
    return ""


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        found: dict[str, Any] = {f"{way} {name}": train(way, name) for name in (*NAMES, "recurrent") for way in WAYS}
        found["refused"] = refused()
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("sharded")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", [*NAMES, "recurrent"])
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_sharded_model_trains_and_predicts_as_one_that_is_copied(
    ranks: list[dict[str, Any]], way: str, name: str
) -> None:
    for rank in ranks:
        expected, found = rank[f"DDP {name}"], rank[f"{way} {name}"]
        assert found["parameters"].keys() == expected["parameters"].keys()
        for key, value in expected["parameters"].items():
            torch.testing.assert_close(found["parameters"][key], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found["prediction"], expected["prediction"], rtol=1e-9, atol=1e-12)


def test_layers_that_are_sharded_apart_are_named(ranks: list[dict[str, Any]]) -> None:
    assert "the posterior of 0 is sharded apart from the rest" in ranks[0]["refused"]
    assert "fully_shard(model) alone" in ranks[0]["refused"]
