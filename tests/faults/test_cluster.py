"""A part of what `make test-cluster` does: a worker, a node and the driver of a Ray cluster killed, once each."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from cluster_kills import KINDS, ground, run_round
from tally import Tally

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or sys.platform != "linux", reason="needs Ray, on Linux"
)


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_worker_a_node_and_the_driver_are_killed_and_the_rows_are_those_of_one_process(tmp_path: Path) -> None:
    tally = Tally(tmp_path / "cluster.json")
    with ground(tmp_path, repeats=2, epochs=12, at_once=1, head_cpus=0) as made:
        run_round(made, tmp_path / "out", ("driver", "worker", "node"), (0.5, 0.0, 0.0), random.Random(1), tally)
        assert len(made.whole) == 4
    assert tally.faults == []
    assert {kind: tally.get(kind, "kills") for kind in KINDS} == dict.fromkeys(KINDS, 1)
    said = (tmp_path / "out" / "said").read_text()
    assert "was lost: its network goes on from the last checkpoint." in said
