"""The example for several processes, started as its page says, in two of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

from scripts import ROOT

EXAMPLE = ROOT / "examples" / "several_processes.py"
START = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2")
HERE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")


@pytest.mark.skipif(not dist.is_available() or not EXAMPLE.is_file(), reason="needs the example and torch.distributed")
@pytest.mark.parametrize("way", ["DistributedDataParallel", "FSDP2"])
def test_two_processes_share_one_network_and_one_kl(way: str) -> None:
    pytest.importorskip("sklearn")
    options = ["--epochs", "2", *(["--fsdp"] if way == "FSDP2" else [])]
    found = subprocess.run(
        [sys.executable, *START, *HERE, str(EXAMPLE), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    lines = found.stdout.splitlines()
    assert lines[0] == f"2 processes, {way}, cpu"
    assert lines[2].endswith("all differ"), "each process draws its own masks"
    kls = re.findall(r"\d+\.\d", lines[3])
    assert len(kls) == 2
    assert kls[0] == kls[1]


@pytest.mark.skipif(not EXAMPLE.is_file(), reason="needs the example")
def test_without_torchrun_it_says_how_to_start_it() -> None:
    pytest.importorskip("sklearn")
    environment = {key: value for key, value in os.environ.items() if key != "RANK"} | {"PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 2
    assert "start it with torchrun" in found.stderr
