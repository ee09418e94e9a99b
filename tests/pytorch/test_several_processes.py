"""A training in two processes in which nothing averages the gradients is named; those that average are not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dropconnectpp as dcpp
from elbo_cases import X, Y, make

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")


def said(way: str) -> list[str]:
    """What two training steps warn of."""
    torch.manual_seed(0)
    model = make("straight-through", "batch")
    bound = dcpp.ELBO(DistributedDataParallel(model) if way == "ELBO(DDP)" else model, dcpp.categorical, 30)
    called = {"DDP(ELBO)": DistributedDataParallel, "FSDP(ELBO)": fully_shard}.get(way, lambda module: module)(bound)
    with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(way != "evaluation"):
        warnings.simplefilter("always")
        for _ in range(2):
            called(X, target=Y)
    return [str(warning.message) for warning in caught if "ELBO:" in str(warning.message)]


WAYS = ("ELBO(DDP)", "DDP(ELBO)", "FSDP(ELBO)", "evaluation", "ELBO(model)")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        torch.save({way: said(way) for way in WAYS}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    folder: Path = tmp_path_factory.mktemp("processes")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_a_model_that_bypasses_its_wrapper_is_named_once(ranks: list[dict[str, list[str]]]) -> None:
    for rank in ranks:
        assert len(rank["ELBO(model)"]) == 1
        assert "2 processes train, and the model is called outside DistributedDataParallel" in rank["ELBO(model)"][0]


@pytest.mark.parametrize("way", WAYS[:-1])
def test_what_averages_or_does_not_train_is_not(ranks: list[dict[str, list[str]]], way: str) -> None:
    assert all(rank[way] == [] for rank in ranks)
