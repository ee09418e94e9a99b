"""Experiments of few connections: the files are the command, budgets are equal, mistakes are told."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dropconnectpp.lab.config.experiments import from_file, sparsity, sparsity_search
from dropconnectpp.lab.config.selection import SparsitySearch
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.config.sparsity import family

FILES = Path(__file__).parents[3] / "experiments" / "sparsity"
WRITTEN_OUT = (
    ("lenet_300_100", "lenet-300-100", "0.01,0.0067", False),
    ("lenet_5", "lenet-5-caffe", "0.01,0.0033", False),
    ("lenet_300_100_structured", "lenet-300-100", "0.33,0.2,0.14", True),
    ("lenet_5_structured", "lenet-5-caffe", "0.2,0.1", True),
)


@pytest.mark.skipif(not FILES.is_dir(), reason="needs the experiments, which a wheel does not carry")
@pytest.mark.parametrize(("file", "network", "keep", "structured"), WRITTEN_OUT, ids=[one[0] for one in WRITTEN_OUT])
def test_a_file_is_the_command_written_out(file: str, network: str, keep: str, structured: bool) -> None:
    written = from_file(FILES / f"{file}.toml")
    command = sparsity("mnist", network, search=sparsity_search(keep, structured=structured), structured=structured)
    assert {one.digest for one in written.protocols} == {one.digest for one in command.protocols}
    assert (written.sparsity, written.repeats) == (command.sparsity, command.repeats)


@pytest.mark.skipif(not FILES.is_dir(), reason="needs the experiments, which a wheel does not carry")
@pytest.mark.parametrize("file", ["lenet_300_100", "lenet_5"])
def test_controls_are_of_the_same_search(file: str) -> None:
    tried = {one.digest for one in from_file(FILES / f"{file}.toml").protocols}
    controls = from_file(FILES / f"{file}_controls.toml")
    assert {one.digest for one in controls.protocols} <= tried
    assert controls.sparsity is not None
    assert controls.sparsity.controls == ("random", "magnitude", "unlearned", "from-start")


@pytest.mark.skipif(not FILES.is_dir(), reason="needs the experiments, which a wheel does not carry")
@pytest.mark.parametrize("name", ["cifar10", "fashion", "svhn"])
def test_methods_in_two_files_are_tried_alike(name: str) -> None:
    """What is told the share and what is told a price: the same network, and eight settings at each share."""
    files = [from_file(FILES / f"dense_{name}{kind}.toml") for kind in ("", "_priced")]
    assert files[0].sparsity == files[1].sparsity
    assert files[0].repeats == files[1].repeats == 20
    tried = [one for file in files for one in file.protocols]
    assert all(tried[0].stackable(one) for one in tried)
    counts = Counter(family(one.pruning) for one in tried)
    assert counts == {
        "DropConnect++": 32,
        "Gradual magnitude pruning": 32,
        "Sparse VD": 32,
        "L0": 32,
        "Dense": 1,
    }


@pytest.mark.skipif(not FILES.is_dir(), reason="needs the experiments, which a wheel does not carry")
def test_the_whole_network_is_gated() -> None:
    file = from_file(FILES / "gated_cifar10.toml")
    assert {one.architecture.name for one in file.protocols} == {"paper-gated"}
    assert all(one.layer.gated for one in file.protocols[0].architecture.shape(3, 32, 10).weight_layers())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": ()}, "keep must be one or more shares"),
        ({"keep": (0.0,)}, "keep must be one or more shares"),
        ({"keep": (0.1, 0.1)}, "keep names a share twice"),
        ({"keep": (0.1,), "repeats": 0}, "repeats must be at least 1"),
        ({"keep": (0.1,), "holdout_share": 1.0}, "holdout_share must lie in"),
        ({"keep": (0.1,), "slack": -0.1}, "slack must be at least 0"),
        ({"keep": (0.1,), "controls": ("chance",)}, "controls must be of random, magnitude"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        SparsitySearch(**changes)  # type: ignore[arg-type]


def test_mistakes_of_the_command_are_told() -> None:
    with pytest.raises(ProtocolError, match=r"keep must be shares separated by commas, such as 0.05,0.02, got 'few'"):
        sparsity_search("few")
    with pytest.raises(ProtocolError, match="network must be one of lenet-300-100, lenet-5-caffe, got 'vgg'"):
        sparsity("mnist", "vgg")
    with pytest.raises(ProtocolError, match="methods must be of dropconnect"):
        sparsity("mnist", methods=["dropconnect"])
    with pytest.raises(ProtocolError, match="structured is for dropconnect"):
        sparsity("mnist", methods=["l0"], structured=True)
