"""How kernels are launched: the defaults, what a file may change, and what is done with one that cannot be used."""

from __future__ import annotations

import ast
import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import card_cases as cards
import pytest
import torch
from launch_cases import HERE, OTHER, SMALL

from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab.kernels import launch_config
from dropconnectpp.lab.kernels.launch_config import DEFAULTS, Forward, Walk
from dropconnectpp.lab.runs.evidence import how
from dropconnectpp.lab.tuning import candidates

GPU = torch.device("cuda", 0)


# ------------------------------------------------------------------------------------------ the defaults


def test_the_defaults_are_those_of_the_h200() -> None:
    product = {"block_b": 128, "block_o": 64, "num_warps": 8, "maxnreg": 128}
    assert asdict(DEFAULTS) == {
        "forward": {**product, "block_i": 64, "num_stages": 2, "split": 512},
        "forward_many": {**product, "block_i": 32, "num_warps": 4, "num_stages": 3, "maxnreg": None, "split": 512},
        "backward": {**product, "block_i": 64, "num_stages": 1},
        "backward_crowded": {**product, "block_i": 32, "num_stages": 1},
        "gates": {"block": 1024, "num_warps": 4},
        "gates_learned": {"block": 512, "num_warps": 4},
        "local_forward": {**product, "block_i": 32, "num_stages": 3, "split": 512},
        "local_backward": {**product, "block_i": 32, "num_stages": 1},
        "local_crowded": {**product, "block_i": 16, "num_stages": 1},
    }


TILE = {"TILE.batch": 128, "TILE.units": 64, "TILE.inputs": 64}
FORWARD = {"LENGTH": 512, **TILE, "num_warps": 8, "num_stages": 2, "maxnreg": 128}
MANY = {"LENGTH": 512, **TILE, "TILE.inputs": 32, "num_warps": 4, "num_stages": 3}
BACKWARD = {**TILE, "num_warps": 8, "num_stages": 1, "maxnreg": 128}
CROWDED, LOCAL_CROWDED = {**BACKWARD, "TILE.inputs": 32}, {**BACKWARD, "TILE.inputs": 16}
GATES, GATES_LEARNED = {"BLOCK": 1024, "num_warps": 4}, {"BLOCK": 512, "num_warps": 4}
LOCAL_FORWARD = {**FORWARD, "TILE.inputs": 32, "num_stages": 3}


@pytest.mark.triton
@pytest.mark.parametrize(
    ("name", "few", "many"),
    [
        ("none", [FORWARD, BACKWARD], [MANY, BACKWARD]),
        ("DropConnect", [FORWARD, BACKWARD], [MANY, BACKWARD]),
        ("score", [FORWARD, BACKWARD, GATES], [MANY, CROWDED, GATES]),
        ("score, learned q(pi)", [FORWARD, BACKWARD, GATES_LEARNED], [MANY, CROWDED, GATES_LEARNED]),
        ("straight-through", [FORWARD, CROWDED], [MANY, CROWDED]),
        ("straight-through, five masks", [FORWARD, CROWDED], [MANY, CROWDED]),
        ("local", [LOCAL_FORWARD, CROWDED], [LOCAL_FORWARD, LOCAL_CROWDED]),
        ("local, learned q(pi)", [LOCAL_FORWARD, LOCAL_CROWDED], [LOCAL_FORWARD, LOCAL_CROWDED]),
    ],
)
def test_kernels_are_launched_as_on_the_h200(name: str, few: list[Any], many: list[Any]) -> None:
    for units, wanted in ((64, few), (65, many)):
        for launch, one in zip(cards.launches_of_a_step(name, units), wanted, strict=True):
            found = cards.settings(launch)
            assert {key: value for key, value in found.items() if key in FORWARD or key == "BLOCK"} == one


BLOCKS = {"block": "BLOCK", "block_b": "TILE.batch", "block_o": "TILE.units", "block_i": "TILE.inputs"}


@pytest.mark.triton
def test_every_kernel_is_launched_as_the_launches_in_force_say() -> None:
    for group in candidates.GROUPS:
        for launch in group.candidates:
            with launch_config.using(replace(DEFAULTS, **{group.name: launch})):
                for one in (found for work in group.work for found in cards.launches_of_work(work)):
                    options = cards.settings(one)
                    told = {name: options.get(name) for name in launch_config.OPTIONS if hasattr(launch, name)}
                    blocks = {name: options[place] for name, place in BLOCKS.items() if hasattr(launch, name)}
                    split = {"split": options["LENGTH"]} if isinstance(launch, Forward) else {}
                    assert {**told, **blocks, **split} == vars(launch)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("block_b", 96),
        ("block_o", 8),
        ("block_i", 512),
        ("block_i", 64.0),
        ("num_warps", 3),
        ("num_warps", True),
        ("num_warps", None),
        ("num_stages", 0),
        ("maxnreg", 256),
        ("maxnreg", "128"),
        ("split", 32),  # less than a tile of inputs: programs would add up their neighbours' too
    ],
)
def test_what_no_kernel_can_take_is_refused(name: str, wrong: object) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be"):
        replace(DEFAULTS.forward, **{name: wrong})


# ---------------------------------------------------------------------------------------------- the file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the launches of a made-up card are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv(launch_config.VARIABLE, raising=False)
    monkeypatch.setattr(launch_config, "card", lambda device: HERE)
    monkeypatch.setattr(launch_config, "has_triton", lambda: True)
    launch_config._of_card.cache_clear()
    yield tmp_path / "dropconnectpp" / "launches" / "Card-of-the-tests-triton-9.9.json"
    launch_config._of_card.cache_clear()


def test_without_a_file_the_defaults_are_in_force_without_a_word(file: Path) -> None:
    assert launch_config.file_of(GPU) == file
    assert launch_config.of(GPU) is DEFAULTS
    assert launch_config.of(torch.device("cpu")) is DEFAULTS


def test_what_was_written_is_in_force(file: Path) -> None:
    launch_config.write(file, OTHER, HERE)
    assert launch_config.read(file, HERE) == OTHER
    assert launch_config.of(GPU) == OTHER
    assert launch_config.of(torch.device("cpu")) is DEFAULTS
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_is_read_once_a_process(file: Path) -> None:
    launch_config.write(file, OTHER, HERE)
    first = launch_config.of(GPU)
    launch_config.write(file, DEFAULTS, HERE)
    assert launch_config.of(GPU) is first


def test_a_machine_without_triton_asks_for_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_config.write(file, OTHER, HERE)
    monkeypatch.setattr(launch_config, "has_triton", lambda: False)
    assert launch_config.of(GPU) is DEFAULTS


def test_the_variable_names_a_file_or_turns_them_off(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_config.write(file, OTHER, HERE)
    monkeypatch.setenv(launch_config.VARIABLE, "off")
    assert launch_config.file_of(GPU) is None
    assert launch_config.of(GPU) is DEFAULTS
    launch_config._of_card.cache_clear()
    another = replace(OTHER, gates=Walk(block=512, num_warps=2))
    launch_config.write(tmp_path / "mine.json", another, HERE)
    monkeypatch.setenv(launch_config.VARIABLE, str(tmp_path / "mine.json"))
    assert launch_config.of(GPU) == another


def test_a_file_that_was_named_and_is_not_there_is_told(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch_config.VARIABLE, str(tmp_path / "mine.json"))
    with pytest.warns(UserWarning, match=r"mine\.json: cannot be used.*No such file"):
        assert launch_config.of(GPU) is DEFAULTS


def test_a_variable_that_names_no_path_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_config.VARIABLE, "~nosuchuser/launches.json")
    with pytest.warns(
        UserWarning,
        match=r"^DCPP_LAUNCHES=~nosuchuser/launches\.json: cannot be used.*home directory\. Name another file with",
    ):
        assert launch_config.of(GPU) is DEFAULTS


@pytest.mark.parametrize("text", ["my notes", '{"name": "value"}'])
def test_a_file_that_is_not_ours_is_told_without_advice_to_replace_it(
    file: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text(text)
    monkeypatch.setenv(launch_config.VARIABLE, str(notes))
    with pytest.warns(UserWarning, match=r"Name another file with DCPP_LAUNCHES\.$") as told:
        assert launch_config.of(GPU) is DEFAULTS
    assert "dcpp tune" not in str(told[0].message)


@pytest.mark.triton
def test_a_file_is_for_a_card_a_triton_and_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card of the tests")
    found = launch_config.card(GPU)
    assert found == {"card": "Card of the tests", "triton": triton.__version__, "kernels": launch_config.kernels()}
    assert found.keys() == HERE.keys()


@pytest.mark.triton
def test_the_name_of_a_file_does_not_depend_on_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card of the tests")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(launch_config.VARIABLE, raising=False)
    before = launch_config.file_of(GPU)
    monkeypatch.setattr(launch_config, "kernels", lambda: "89abcdef")
    assert launch_config.card(GPU)["kernels"] == "89abcdef"
    assert launch_config.file_of(GPU) == before


@pytest.mark.triton
@pytest.mark.parametrize("place", range(4))
def test_the_kernels_have_a_digest_that_moves_with_each_of_their_sources(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, source = launch_config.kernels(), inspect.getsource
    assert len(now) == 8
    assert len(launch_config.sources()) == 4
    edited = launch_config.sources()[place]
    monkeypatch.setattr(inspect, "getsource", lambda of: source(of) + ("\n" if of is edited else ""))
    assert launch_config.kernels.__wrapped__() != now
    monkeypatch.undo()
    assert launch_config.kernels.__wrapped__() == now


@pytest.mark.triton
def test_all_that_the_tuned_kernels_import_from_this_package_is_in_the_digest() -> None:
    covered = {module.__name__ for module in launch_config.sources()}
    for module in launch_config.sources():
        lines = ast.walk(ast.parse(inspect.getsource(module)))
        imported = {line.module or "" for line in lines if isinstance(line, ast.ImportFrom)}
        assert {one for one in imported if one.startswith("dropconnectpp")} <= covered


def changed(**values: object) -> str:
    return json.dumps({**HERE, "launches": asdict(OTHER), **values})


def launches_with(change: Callable[[dict[str, Any]], object]) -> str:
    values = asdict(OTHER)
    change(values)
    return changed(launches=values)


DAMAGED = {
    "empty": ("", "not JSON"),
    "cut short": (changed()[:100], "not JSON"),
    "bytes": ("\udcff", "not JSON"),
    "nested": ("[" * 100_000, "not JSON"),
    "a list": ("[]", "no file of launches"),
    "another file": ('{"name": "value"}', "no file of launches"),
    "one key more": (changed(more=1), "no file of launches"),
    "another card": (changed(card="NVIDIA H200"), "made for card 'NVIDIA H200', and here is 'Card of the tests'"),
    "another Triton": (changed(triton="3.0"), "made for triton '3.0', and here is '9.9'"),
    "other kernels": (changed(kernels="89abcdef"), "it was made for other kernels than these."),
    "no launches": (changed(launches=None), "launches must have forward, forward_many"),
    "a launch too few": (launches_with(lambda all: all.pop("gates")), "launches must have"),
    "a launch too many": (launches_with(lambda all: all.update(more={})), "launches must have"),
    "a launch that is none": (launches_with(lambda all: all.update(gates=[])), "gates must have num_warps, block"),
    "a value too few": (launches_with(lambda all: all["gates"].pop("block")), "gates must have num_warps, block"),
    "a value too many": (launches_with(lambda all: all["gates"].update(more=1)), "gates must have num_warps, block"),
    "a wrong type": (launches_with(lambda all: all["gates"].update(block="512")), "block must be a power of two"),
    "no power of two": (
        launches_with(lambda all: all["forward"].update(block_b=100)),
        "block_b must be a power of two",
    ),
    "a short split": (launches_with(lambda all: all["forward"].update(split=16)), "split must be at least block_i"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_cannot_be_used_is_told_once_and_the_defaults_are_in_force(file: Path, kind: str) -> None:
    text, problem = DAMAGED[kind]
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match="cannot be used") as told:
        assert launch_config.of(GPU) is DEFAULTS
    (message,) = (str(one.message) for one in told)
    assert message.startswith(f"{file}: cannot be used")
    assert problem in message
    assert "`dcpp tune` writes it anew, and `dcpp tune --forget` removes it." in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch_config.of(GPU) is DEFAULTS


def test_a_user_without_a_home_has_the_defaults(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert launch_config.of(GPU) is DEFAULTS


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(file: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    launch_config.write(file, OTHER, HERE)

    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        launch_config.write(file, DEFAULTS, HERE)
    assert launch_config.read(file, HERE) == OTHER
    assert [path.name for path in file.parent.iterdir()] == [file.name]


# ------------------------------------------------------------------------------------------------- in use


def test_launches_are_imposed_on_one_thread_and_for_a_while() -> None:
    cpu, elsewhere = torch.device("cpu"), []
    with launch_config.using(OTHER):
        thread = threading.Thread(target=lambda: elsewhere.append(launch_config.of(cpu)))
        thread.start()
        thread.join()
        assert (launch_config.of(cpu), elsewhere) == (OTHER, [DEFAULTS])
        with launch_config.using(SMALL):
            assert launch_config.of(GPU) is SMALL
        assert launch_config.of(GPU) is OTHER
    assert launch_config.of(cpu) is DEFAULTS


def test_a_result_says_so_where_its_launches_are_not_the_defaults() -> None:
    cpu = torch.device("cpu")
    assert launch_config.evidence(cpu) == {}
    found = []
    for one in (OTHER, SMALL, OTHER):
        with launch_config.using(one):
            found.append(launch_config.evidence(cpu)["launches"])
    assert found[0] == found[2] != found[1]
    assert found[0].startswith("tuned, ")


def test_a_row_of_the_store_says_so_only_where_the_kernels_were_used() -> None:
    convolutions = {"convolutions": "bfloat16"}
    fused, plain = (
        SimpleNamespace(device=torch.device("cpu"), input_dtype=torch.bfloat16, fused=fused) for fused in (True, False)
    )
    assert how(fused) == how(plain) == convolutions
    with launch_config.using(OTHER):
        assert how(fused) == {**convolutions, **launch_config.evidence(fused.device)} != convolutions
        assert how(plain) == convolutions


@pytest.mark.triton
@pytest.mark.parametrize("name", ["score", "local, learned q(pi)"])
def test_no_launch_depends_on_the_number_of_replicas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for replicas in (1, 2, 5):
        monkeypatch.setattr(cards, "REPLICAS", replicas)
        with launch_config.using(SMALL):
            found.append([cards.settings(launch) for launch in cards.launches_of_a_step(name, 100)])
    assert found[0] == found[1] == found[2]
