"""What `save` and `load` refuse before they change anything: models that cannot be written, names that are too long."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, FileFormatError, FileWriteError
from dropconnectpp.io import container, disk
from saved_cases import plain_network, same_state, trained_network


def _inference() -> nn.Module:
    with torch.inference_mode():
        return plain_network()


def _with_weight(weight: torch.Tensor) -> nn.Module:
    model = plain_network()
    model[4].weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return model


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: plain_network().to("meta"), ArgumentError, r"the model's 0\.weight is on the meta device"),
        (_inference, ArgumentError, r"0\.weight was made in inference mode"),
        (lambda: _with_weight(torch.zeros(1).expand(3, 8)), ArgumentError, r"4\.weight has elements that share memory"),
        (
            lambda: _with_weight(torch.zeros(3, 8, dtype=torch.int8)),
            FileFormatError,
            "the model's weight is int8. Give the model floating-point weights first",
        ),
        (lambda: {"0.weight": torch.zeros(2)}, ArgumentError, r"must be an nn\.Module.*; got a dict"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), FileFormatError, "no module of that name"),
    ],
)
def test_a_model_that_cannot_take_values_is_refused_and_left(
    tmp_path: Path, make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    dcpp.save(trained_network(), tmp_path / "m")
    model = make()
    kinds = [type(one) for one in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises(kind, match=message):
        dcpp.load(tmp_path / "m", model)
    assert not kinds or kinds == [type(one) for one in model.modules()]


def test_half_precision_and_frozen_models_take_values(tmp_path: Path) -> None:
    saved = trained_network()
    dcpp.save(saved, tmp_path / "m")
    frozen = plain_network().requires_grad_(False)
    assert same_state(dcpp.load(tmp_path / "m", frozen), saved)
    half = dcpp.load(tmp_path / "m", plain_network().half())
    assert half.state_dict()["4.weight"].dtype == torch.float16
    assert torch.equal(half[4].weight, saved[4].weight.half())


@pytest.mark.parametrize("name", ["x" * 300, "f/" * 2500 + "m"])
def test_a_name_that_is_too_long_is_an_error_of_ours(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        dcpp.load(tmp_path / name, plain_network())
    with pytest.raises(ArgumentError, match="cannot write into the folder"):
        dcpp.save(trained_network(), tmp_path / name)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="is no plain file"):
        dcpp.load(tmp_path / "pipe", plain_network())


def test_very_many_layers_that_the_model_does_not_have_are_refused_at_once(tmp_path: Path) -> None:
    dcpp.save(trained_network(), tmp_path / "m")
    tensors, metadata = container.read(tmp_path / "m")
    metadata.pop(container.DIGEST)
    described = json.loads(metadata["description"])
    layer = described["layers"]["0"]
    options = [{**layer["options"], "alpha": 1.0 + n} for n in range(20_000)]
    described["layers"] = {str(n): {**layer, "options": one} for n, one in enumerate(options)}
    container.write(tmp_path / "many", tensors, {**metadata, "description": json.dumps(described)})
    begun = time.process_time()
    with pytest.raises(FileFormatError, match="the model has no module of that name"):
        dcpp.load(tmp_path / "many", plain_network())
    assert time.process_time() - begun < 4.0, "a layer each would take longer"


def test_a_long_value_is_shown_short(tmp_path: Path) -> None:
    dcpp.save(trained_network(), tmp_path / "m")
    tensors, metadata = container.read(tmp_path / "m")
    metadata.pop(container.DIGEST)
    metadata["description"] = metadata["description"].replace('"logit"', json.dumps("\x1b" * 9 + "a" * 10_000))
    container.write(tmp_path / "long", tensors, metadata)
    with pytest.raises(FileFormatError, match="parameterisation must be one of") as raised:
        dcpp.load(tmp_path / "long", plain_network())
    assert len(str(raised.value)) < len(str(tmp_path)) + 500
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
def test_a_full_disk_is_an_error_of_ours_and_the_old_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "m"
    dcpp.save(trained_network(), path)
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "write":
        monkeypatch.setattr("dropconnectpp.io.saving.write", full)
    else:
        monkeypatch.setattr(disk.os, call, full)
    with pytest.raises(FileWriteError, match=r"m: cannot be written \(No space left on device\)"):
        dcpp.save(trained_network(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_that_cannot_sync_folders_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def files_alone(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(disk.os, "fsync", files_alone)
    dcpp.save(trained_network(), tmp_path / "m")
    assert (tmp_path / "m").exists()


def test_what_a_killed_save_left_is_cleared_after_an_hour(tmp_path: Path) -> None:
    ours, fresh, others = (
        tmp_path / name for name in (".m.0123456789ab.part", ".m.ba9876543210.part", ".m.notes.part")
    )
    for one in (ours, fresh, others):
        one.write_bytes(b"half")
    folder = tmp_path / ".m.aaaaaaaaaaaa.part"
    (folder / "inside").mkdir(parents=True)
    for one in (ours, others, folder):
        os.utime(one, (0, 0))
    dcpp.save(trained_network(), tmp_path / "m")
    assert {one.name for one in tmp_path.iterdir()} == {"m", fresh.name, others.name}
