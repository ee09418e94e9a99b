"""to_onnx: the same outputs in ONNX Runtime, small where the model is, options that hold, and files that are whole."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError, ConversionError, FileWriteError
from dropconnectpp.io import disk


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).eval()


def opset_of(path: Path) -> int:
    return int(onnx.load(path, load_external_data=False).opset_import[0].version)


def input_shape(path: Path) -> list[Any]:
    (value,) = onnx.load(path, load_external_data=False).graph.input
    return [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]


def run(path: Path, x: Tensor) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert isinstance(found, np.ndarray)
    return found


def test_a_compact_model_is_smaller_in_proportion(tmp_path: Path) -> None:
    pruned = dcpp.prune(
        dcpp.convert(nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 10))).eval(), keep=0.005
    )
    small, x = dcpp.compact(pruned), torch.randn(5, 400)
    dcpp.to_onnx(pruned, tmp_path / "whole.onnx", x)
    dcpp.to_onnx(small, tmp_path / "small.onnx", x)
    whole, compact = ((tmp_path / f"{name}.onnx").stat().st_size for name in ("whole", "small"))
    before, after = small.compaction.bytes
    assert after < before / 2
    assert compact - after < 2_500  # the graph itself
    assert abs((whole - compact) - (before - after)) < 500
    assert np.abs(run(tmp_path / "small.onnx", x) - run(tmp_path / "whole.onnx", x)).max() < 1e-6
    assert np.abs(run(tmp_path / "small.onnx", x[:1]) - pruned(x[:1]).detach().numpy()).max() < 1e-5


def test_the_file_says_nothing_of_the_machine(tmp_path: Path) -> None:
    dcpp.to_onnx(network(), tmp_path / "m.onnx", torch.randn(3, 64))
    content = (tmp_path / "m.onnx").read_bytes()
    for word in (b"site-packages", b".py", b"stack_trace", b"fx_node"):
        assert word not in content


def test_a_compact_convolution_runs_at_any_batch_size(tmp_path: Path) -> None:
    plain = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)
    )
    small = dcpp.compact(dcpp.prune(dcpp.convert(plain).eval(), keep=0.03))
    dcpp.to_onnx(small, tmp_path / "m.onnx", torch.randn(2, 3, 4, 4))
    for batch in (1, 6):
        x = torch.randn(batch, 3, 4, 4)
        assert np.abs(run(tmp_path / "m.onnx", x) - small(x).detach().numpy()).max() < 1e-5


@pytest.mark.parametrize("asked", [True, None])
def test_external_data_has_the_files_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool | None
) -> None:
    model, x = network(), torch.randn(3, 64)
    if asked is None:  # as for a model of 2 GB
        monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1_000)
    dcpp.to_onnx(model, tmp_path / "m.onnx", x, external_data=asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    locations = {
        entry.value
        for tensor in onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert locations == {"m.onnx.data"}
    assert np.abs(run(tmp_path / "m.onnx", x) - model(x).detach().numpy()).max() < 1e-5
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("m.onnx", "m.onnx.data"):
        (tmp_path / name).rename(moved / name)
    run(moved / "m.onnx", x)
    monkeypatch.undo()
    dcpp.to_onnx(model, moved / "m.onnx", x, external_data=False)
    assert [path.name for path in moved.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("opset", [18, 23])
def test_the_opset_can_be_chosen(tmp_path: Path, opset: int) -> None:
    model, x = network(), torch.randn(3, 64)
    dcpp.to_onnx(model, tmp_path / "m.onnx", x, opset=opset)
    assert opset_of(tmp_path / "m.onnx") == opset
    assert np.abs(run(tmp_path / "m.onnx", x) - model(x).detach().numpy()).max() < 1e-5


def test_axes_can_be_of_any_length(tmp_path: Path) -> None:
    path, x = tmp_path / "m.onnx", torch.randn(2, 3, 64)
    model = network()
    dcpp.to_onnx(model, path, x)
    assert input_shape(path) == ["batch", 3, 64]
    dcpp.to_onnx(model, path, x, dynamic_shapes=({0: Dim("images"), 1: Dim("tokens")},))
    assert input_shape(path) == ["images", "tokens", 64]
    other = torch.randn(5, 7, 64)
    assert np.abs(run(path, other) - model(other).detach().numpy()).max() < 1e-5
    dcpp.to_onnx(model, path, x, dynamic_shapes={"input": {1: Dim.AUTO}})
    assert [isinstance(axis, str) for axis in input_shape(path)] == [False, True, False]
    dcpp.to_onnx(model, path, x, dynamic_batch=False)
    assert input_shape(path) == [2, 3, 64]


def test_nothing_is_said_and_the_loggers_are_as_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcpp.to_onnx(network(), tmp_path / "m.onnx", torch.randn(3, 64), opset=21)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ""


class Reshaping(nn.Module):
    """Fixes its batch size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, 64) + 1.0


class Branching(nn.Module):
    """Asks for a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


X = torch.ones(3, 64)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "kind", "message"),
    [
        (network(), X, {"opset": 17}, ArgumentError, "opset must be a whole number of at least 18, got 17"),
        (network(), X, {"opset": 99}, ConversionError, "the installed onnx cannot write opset 99.*Leave out opset"),
        (network(), X, {"external_data": "m.data"}, ArgumentError, "external_data must be True, False or None"),
        (network(), torch.ones(3, 65), {}, ArgumentError, r"does not run on example_inputs \(shapes \[\(3, 65\)\]\)"),
        (
            network(),
            "x",
            {},
            ArgumentError,
            "example_inputs must be a tensor, or a tuple of the model's inputs, got 'x'",
        ),
        (network(), (), {}, ArgumentError, r"example_inputs must be .*, got \(\)"),
        (
            network(),
            X,
            {"dynamic_shapes": ({2: Dim("n")},)},
            ArgumentError,
            r"names axis 2 of an input of shape \(3, 64\)",
        ),
        (network(), X, {"dynamic_shapes": ({1: Dim("n")},)}, ConversionError, "axis 1 .* the model fixes it at 64"),
        (network(), X, {"dynamic_shapes": ({0: Dim("n")}, None)}, ConversionError, "`inputs` has 1 elements"),
        (network(), X, {"mode": "median"}, ArgumentError, "mode must be one of"),
        (Reshaping(), X, {}, ConversionError, "axis 0 .* the model fixes it at 3. Use dynamic_batch=False"),
        (Branching(), X, {}, ConversionError, "the model cannot be exported: .*Write what it does without branches"),
    ],
)
def test_what_cannot_be_written_is_an_error_and_the_old_file_stays(
    tmp_path: Path, model: nn.Module, inputs: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    with pytest.raises(kind, match=message):
        dcpp.to_onnx(model, path, inputs, **options)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_model_that_fixes_its_batch_is_written_when_asked(tmp_path: Path) -> None:
    dcpp.to_onnx(Reshaping(), tmp_path / "m.onnx", X, dynamic_batch=False)
    assert input_shape(tmp_path / "m.onnx") == [3, 64]


@pytest.mark.parametrize("external", [False, True])
def test_a_write_that_fails_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    path, x = tmp_path / "m.onnx", torch.randn(3, 64)
    first, second = network(), network()
    dcpp.to_onnx(first, path, x)
    monkeypatch.setattr(disk, "flush", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileWriteError, match=r"m\.onnx: cannot be written \(No space left on device\)"):
        dcpp.to_onnx(second, path, x, external_data=external)
    assert [found.name for found in tmp_path.iterdir()] == ["m.onnx"]
    assert np.abs(run(path, x) - first(x).detach().numpy()).max() < 1e-5
