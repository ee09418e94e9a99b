"""The rule that picks a control for the test set: which settings it takes, and the file that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropconnectpp.lab.config.by_epoch import ByEpoch
from dropconnectpp.lab.config.experiments import from_file
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store
from scripts import call

SEARCH = """
repeats = 2

[protocol]
data = "cifar10"

[protocol.training]
holdout = 5000

[[methods]]
kind = "dropconnect"
step_size = 0.01
by_epoch = [
    {at = [0, 10], rate = [0.5, 0.9], between = "linear"},
    {at = [0, 30], rate = [0.5, 0.9], between = "linear"},
]

[[methods]]
kind = "dropconnect"
rate = 0.7
step_size = 0.01

[[methods]]
kind = "dropconnect"
scaling = "training"
rate = 0.7
step_size = 0.01
"""
USUAL = {"rising 10": (70.0, 1.0), "rising 30": (75.0, 1.0), "fixed": (80.0, 1.0), "scaled": (74.0, 0.5)}


def searched(folder: Path, networks: int = 2, **changes: tuple[float, float] | None) -> list[str]:
    """A store with rows of every setting, as options; None stands for networks that diverged."""
    (folder / "search.toml").write_text(SEARCH)
    given = {**USUAL, **{name.replace("_", " "): value for name, value in changes.items()}}
    me = Owner.here()
    with Store.open(folder / "results.sqlite") as store:
        for protocol, value in zip(from_file(folder / "search.toml").protocols, given.values(), strict=True):
            for key in store.claim([(store.add(protocol), replica) for replica in range(networks)], me):
                results = {"diverged_at": 1} if value is None else {"accuracy": value[0] + key.replica, "nll": value[1]}
                status = "diverged" if value is None else "done"
                store.finish(key, me, status, results=results, seconds=1.0, device="none")
    return [str(folder / "results.sqlite"), "--searches", str(folder / "search.toml")]


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "chosen: DropConnect, rate 0.5 to 0.9 in 30 epochs, step size 0.01: accuracy 75.50%"),
        ({"scaled": (75.0, 0.9)}, "chosen: DropConnect (scaling=training), rate 0.7, step size 0.01: accuracy 75.50%"),
        ({"rising_30": None}, "chosen: DropConnect (scaling=training), rate 0.7"),
    ],
)
def test_the_most_accurate_control_is_chosen_and_of_equals_the_likelier(tmp_path, changes, chosen):
    found = call("tools/choose_control.py", *searched(tmp_path, **changes))
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0].startswith("DropConnect, rate 0.7, step size 0.01: accuracy 80.50%")
    assert found.stdout.splitlines()[-1].startswith(chosen)


def test_the_choice_is_written_as_an_experiment_on_the_test_set(tmp_path):
    options = searched(tmp_path)
    assert call("tools/choose_control.py", *options, "--write", str(tmp_path / "rising.toml")).returncode == 0
    found = from_file(tmp_path / "rising.toml")
    (protocol,) = found.protocols
    assert found.repeats == 50
    assert protocol.by_epoch == ByEpoch(at=(0, 30), rate=(0.5, 0.9), between="linear")
    assert (protocol.training.holdout, protocol.training.step_size, protocol.method.rate) == (0, 0.01, 0.9)


def test_a_scaled_control_keeps_its_rate(tmp_path):
    options = searched(tmp_path, scaled=(90.0, 1.0))
    assert call("tools/choose_control.py", *options, "--write", str(tmp_path / "scaled.toml")).returncode == 0
    (protocol,) = from_file(tmp_path / "scaled.toml").protocols
    assert (protocol.method.scaling, protocol.method.rate, protocol.by_epoch) == ("training", 0.7, None)


def test_too_few_networks_are_an_error(tmp_path):
    found = call("tools/choose_control.py", *searched(tmp_path, networks=1))
    assert found.returncode == 1
    assert "DropConnect, rate 0.5 to 0.9 in 10 epochs: 1 of 2 networks." in found.stderr


def test_nothing_is_chosen_where_every_control_diverged(tmp_path):
    found = call("tools/choose_control.py", *searched(tmp_path, rising_10=None, rising_30=None, scaled=None))
    assert found.returncode == 1
    assert "Every control diverged." in found.stderr
