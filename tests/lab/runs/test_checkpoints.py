"""Checkpoints: a flipped bit never resumes silently, the state before it does."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dropconnectpp.lab.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    DamagedCheckpointError,
    require_alike,
)

KEYS = (("0123456789abcdef", 0), ("0123456789abcdef", 1))


def made(epoch: int, keys: tuple[tuple[str, int], ...] = KEYS) -> Checkpoint:
    state = {"epoch": epoch, "tensors": {"weight": torch.full((2, 30), float(epoch))}}
    return Checkpoint(keys, state, [[1.0] * epoch] * 2, [[], []], 2.0 * epoch)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, said: list[str]) -> Checkpoints:
    """With two states of one stack."""
    folder = Checkpoints(tmp_path, said.append)
    folder.write(made(1))
    folder.write(made(2))
    return folder


def epoch_of(found: Checkpoint | None) -> int:
    assert found is not None
    assert torch.equal(found.state["tensors"]["weight"], torch.full((2, 30), float(found.state["epoch"])))
    assert found.losses == [[1.0] * found.state["epoch"]] * 2
    return int(found.state["epoch"])


def damage(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[2] for path in folder.iterdir())


def test_every_flipped_bit_is_noticed(checkpoints: Checkpoints) -> None:
    path = checkpoints.path(KEYS)
    whole = path.read_bytes()
    choose = random.Random(0)
    places = {choose.randrange(8 * len(whole)) for _ in range(300)} | {8 * len(whole) - n for n in range(1, 200)}
    for place in places:
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError):
            checkpoints.read(path)


def test_a_damaged_state_is_set_aside_and_the_one_before_it_is_used(
    checkpoints: Checkpoints, said: list[str], tmp_path: Path
) -> None:
    assert epoch_of(checkpoints.restore(KEYS)) == 2
    assert said == []
    damage(path := checkpoints.path(KEYS))
    assert epoch_of(checkpoints.restore(KEYS)) == 1
    assert said == [
        f"{path}: not used, as its content does not have the digest that was written with it. "
        f"Training goes on from the checkpoint before it. It is kept as {path.name}.damaged; nothing needs it."
    ]
    assert names(tmp_path) == ["json", "pt.before", "pt.damaged"]
    assert [keys for _, keys in checkpoints.all()] == [KEYS]
    damage(path.with_name(f"{path.name}.before"))
    assert checkpoints.restore(KEYS) is None
    assert "goes on from the start" in said[-1]
    checkpoints.write(made(1))
    assert epoch_of(checkpoints.restore(KEYS)) == 1
    checkpoints.forget(KEYS)
    assert names(tmp_path) == ["pt.before.damaged", "pt.damaged"]


def test_killed_between_its_two_renames_the_state_before_it_is_found(checkpoints: Checkpoints) -> None:
    checkpoints.path(KEYS).unlink()
    assert [keys for _, keys in checkpoints.all()] == [KEYS]
    assert epoch_of(checkpoints.restore(KEYS)) == 1


@pytest.mark.parametrize("text", ["", "{", "[[1]]", json.dumps([["0123456789abcdef", 7]]), "[" * 5000])
def test_a_list_that_names_other_replicas_is_not_believed(checkpoints: Checkpoints, said: list[str], text: str) -> None:
    listed = checkpoints.path(KEYS).with_suffix(".json")
    listed.write_text(text)
    assert [keys for _, keys in checkpoints.all()] == [KEYS]
    assert said == [f"{listed}: damaged. What it should list was read from the checkpoint."]
    assert tuple(map(tuple, json.loads(listed.read_text()))) == KEYS


def test_a_list_and_a_state_that_are_both_damaged_are_told_of(checkpoints: Checkpoints, said: list[str]) -> None:
    path = checkpoints.path(KEYS)
    path.with_suffix(".json").write_text("{")
    damage(path)
    assert [keys for _, keys in checkpoints.all()] == [KEYS]
    damage(path.with_name(f"{path.name}.before"))
    path.with_suffix(".json").write_text("{")
    assert list(checkpoints.all()) == []
    assert sum("and so is the list of what it holds" in one for one in said) == 2


def test_another_stacks_state_is_not_taken(checkpoints: Checkpoints, tmp_path: Path) -> None:
    others = (("fedcba9876543210", 0),)
    checkpoints.write(made(5, others))
    checkpoints.path(others).replace(checkpoints.path(KEYS))
    with pytest.raises(DamagedCheckpointError, match="holds other replicas than its name stands for"):
        checkpoints.read(checkpoints.path(KEYS))
    assert epoch_of(checkpoints.restore(KEYS)) == 1


def test_a_state_of_version_0_1_0_is_checked_by_the_sums_in_it(checkpoints: Checkpoints) -> None:
    path = checkpoints.path(KEYS)
    torch.save(vars(made(3)), path)
    assert epoch_of(checkpoints.restore(KEYS)) == 3
    with zipfile.ZipFile(path) as parts:
        weight = next(part for part in parts.infolist() if part.filename.endswith("data/0"))
        start = weight.header_offset + 30 + len(weight.filename.encode())
    for place in (start + 100, start + 200):
        whole = path.read_bytes()
        damage(path, place)
        with pytest.raises(DamagedCheckpointError, match="it has no digest"):
            checkpoints.read(path)
        path.write_bytes(whole)


def test_a_state_that_lost_its_digest_is_not_taken_for_an_old_one(checkpoints: Checkpoints) -> None:
    path = checkpoints.path(KEYS)
    path.write_bytes(path.read_bytes()[:-87])
    with pytest.raises(DamagedCheckpointError, match="its digest is missing"):
        checkpoints.read(path)


def test_a_file_that_must_not_be_read_is_left_where_it_is(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)\. Check its permissions"):
        checkpoints.restore(KEYS)
    assert names(tmp_path) == ["json", "pt", "pt.before"]


def test_a_list_without_its_checkpoint_is_removed_after_an_hour(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (orphan := tmp_path / f"{'0' * 24}.json").write_text("[]")
    list(checkpoints.all())
    assert orphan.exists()  # a process may be about to write its checkpoint
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    assert [keys for _, keys in checkpoints.all()] == [KEYS]
    assert names(tmp_path) == ["json", "pt", "pt.before"]


def seal(path: Path, content: dict[str, Any]) -> None:
    torch.save(content, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes() + b"\ndropconnectpp sha256 %s\n" % digest.encode())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("losses", [[1.0]], "its content is not what a run writes"),
        ("losses", {"0": 1.0}, "its content is not what a run writes"),
        ("curves", [[], [{"epoch": "two"}]], "its content is not what a run writes"),
        ("curves", [[], [{"epoch": 1, 2: 3.0}]], "its content is not what a run writes"),
        ("seconds", -1.0, "its content is not what a run writes"),
        ("content", None, "its content is not what a run writes"),
        ("state", [], "its content is not what a run writes"),
        ("format", torch.zeros(2), "its format is no number"),
        ("format", 3, "its format is 3"),
        ("more", 1, "it cannot be read (TypeError)"),
    ],
)
def test_content_that_no_run_writes_is_refused_with_the_right_digest_too(
    checkpoints: Checkpoints, name: str, value: object, why: str
) -> None:
    path = checkpoints.path(KEYS)
    content = {"format": 2, **vars(made(2))}
    seal(path, content)
    assert epoch_of(checkpoints.read(path)) == 2
    seal(path, content | {name: value})
    with pytest.raises(DamagedCheckpointError) as raised:
        checkpoints.read(path)
    assert str(raised.value) == why


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"epoch": 1.0, "parts": [torch.zeros(2)]}, "state.epoch is of type float, not int"),
        ({"epoch": 1, "parts": [torch.zeros(3)]}, "state.parts[0] is torch.float32 of (3,)"),
        ({"epoch": 1, "parts": [torch.zeros(2).double()]}, "state.parts[0] is torch.float64 of (2,)"),
        ({"epoch": 1, "parts": []}, "state.parts has 0 parts, not 1"),
        ({"epoch": 1}, "state differs in parts"),
        ({"epoch": 1, "parts": [torch.zeros(2)], "x": 0}, "state differs in x"),
    ],
)
def test_a_state_of_another_stack_is_named(found: dict[str, Any], said: str) -> None:
    expected = {"epoch": 0, "parts": [torch.ones(2)], "batch": 1, "loss_sum": 0}
    require_alike({"epoch": 7, "parts": [torch.zeros(2)]}, expected)  # as version 0.1 wrote it
    with pytest.raises(ValueError, match="^" + re.escape(said) + "$"):
        require_alike(found, expected)
