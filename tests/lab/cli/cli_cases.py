"""What tests of the command share: tiny data sets, an experiment of one's own, and stores of made-up results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_cases import ONE_LAYER_TOML, tiny

from dropconnectpp.lab.config import experiments
from dropconnectpp.lab.data.dataset import Dataset
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Row, Store

SIZES = {"tiny": 8, "other": 8, "large": 12}
MINE = f"""
repeats = 2

[protocol]
data = "tiny"
{ONE_LAYER_TOML}
[protocol.training]
step_size = 0.05
batch_size = 32
epochs = 2

[protocol.evaluation]
every = 1
curve_samples = 2
samples = [1, 2]
shares = [1.0, 0.5]
predictive_samples = 2

[[methods]]
kind = "none"

[[methods]]
kind = "dropconnect"
rate = 0.5

[[methods]]
kind = "dropconnect++"
"""
PAPER = ("--dataset", "tiny", "--epochs", "1", "--repeats", "1", "--rate", "0.5", "--step-size", "0.01")


def made(name: str) -> Dataset:
    return tiny(name, train=160, test=40, side=SIZES[name], seed=len(name))


def rows(out: str = "dcpp-results") -> list[Row]:
    with Store.open(Path(out) / "results.sqlite", read_only=True) as store:
        return store.rows()


def notes(name: str, out: str = "dcpp-results") -> list[Any]:
    with Store.open(Path(out) / "results.sqlite", read_only=True) as store:
        return [value for (_, one), value in store.notes().items() if one == name]


def fill(out: str, accuracy: float = 50.0, replicas: tuple[int, ...] = (0, 1)) -> None:
    """A store of made-up results."""
    Path(out).mkdir(exist_ok=True)
    me = Owner.here()
    with Store.open(Path(out) / "results.sqlite") as store:
        for protocol in experiments.demo().protocols[:2]:
            digest = store.add(protocol)
            for key in store.claim([(digest, replica) for replica in replicas], me):
                results = {"accuracy": accuracy + key.replica, "nll": 1.0, "losses": [1.0]}
                store.finish(key, me, "done", results=results, seconds=1.0, device="none")
