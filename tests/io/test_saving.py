"""save, load and to_onnx: what comes back is what went in, and a bad file harms nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp import likelihoods
from dropconnectpp.errors import ArgumentError, FileFormatError, MissingPackageError
from dropconnectpp.io import container, disk
from saved_cases import plain_network, same_state, same_where_kept, trained_network


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hyper": "learned", "alpha": 2.0, "beta": 3.0, "estimator": "eq16"},
        {"parameterisation": "probability", "mask": "example"},
        {"estimator": dcpp.estimators.BBVI(baseline="mean-network"), "activation": nn.ReLU()},
        {"activation": torch.tanh, "keep_probability": 0.9},
        {"kl_weight": 0.25, "logit_step": 4.0},
    ],
)
def test_a_saved_model_loads_into_the_plain_architecture(tmp_path: Path, options: dict[str, Any]) -> None:
    model = trained_network(**options)
    dcpp.save(model, tmp_path / "model.safetensors")
    loaded = dcpp.load(tmp_path / "model.safetensors", plain_network())
    assert same_state(model, loaded)
    for name in ("0", "4"):
        ours, theirs = model.get_submodule(name).options(), loaded.get_submodule(name).options()
        assert {k: v for k, v in ours.items() if k != "activation"} == {
            k: v for k, v in theirs.items() if k != "activation"
        }
    x = torch.randn(4, 1, 4, 4)
    assert torch.equal(model.eval()(x), loaded.eval()(x))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_saved_model_loads_into_a_converted_one(tmp_path: Path) -> None:
    model = trained_network()
    dcpp.save(model, tmp_path / "m")
    target = dcpp.convert(plain_network())
    assert dcpp.load(tmp_path / "m", target) is target
    assert same_state(model, target)


def test_a_file_from_before_the_weights_and_steps_has_them_at_one(tmp_path: Path) -> None:
    model = trained_network()
    dcpp.save(model, tmp_path / "m")
    with safe_open(tmp_path / "m", framework="pt") as file:
        described = json.loads(file.metadata()["description"])
    for layer in described["layers"].values():
        assert layer["options"].pop("kl_weight") == layer["options"].pop("logit_step") == 1.0
    metadata = {"dropconnectpp_format": "1", "aliases": "{}", "layers": json.dumps(described["layers"])}
    save_file(load_file(tmp_path / "m"), tmp_path / "old", metadata=metadata)
    loaded = dcpp.load(tmp_path / "old", plain_network())
    assert same_state(model, loaded)
    assert [(loaded[i].kl_weight, loaded[i].logit_step) for i in (0, 4)] == [(1.0, 1.0)] * 2


def test_a_converted_model_keeps_its_own_weight_and_step(tmp_path: Path) -> None:
    dcpp.save(trained_network(kl_weight=0.25, logit_step=4.0), tmp_path / "m")
    target = dcpp.load(tmp_path / "m", dcpp.convert(plain_network(), kl_weight=0.5))
    assert [(target[i].kl_weight, target[i].logit_step) for i in (0, 4)] == [(0.5, 1.0)] * 2


def test_pruning_is_saved_and_an_unpruned_file_undoes_it(tmp_path: Path) -> None:
    model = trained_network()
    pruned = dcpp.prune(model, keep=0.5)
    dcpp.save(pruned, tmp_path / "pruned")
    assert same_where_kept(pruned, dcpp.load(tmp_path / "pruned", plain_network()))
    dcpp.save(model, tmp_path / "whole")
    assert same_state(dcpp.load(tmp_path / "whole", pruned), model)


def test_ties_and_a_bare_layer_survive(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    tied = dcpp.convert(nn.Sequential(first, second))
    dcpp.save(tied, tmp_path / "tied")
    assert "1.weight" not in load_file(tmp_path / "tied")
    assert same_state(dcpp.load(tmp_path / "tied", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), tied)
    layer = dcpp.DropConnectLinear(3, 2, keep_probability=0.3, evaluation="gaussian", activation=nn.ReLU())
    dcpp.save(layer, tmp_path / "bare")
    loaded = dcpp.load(tmp_path / "bare", nn.Linear(3, 2))
    assert isinstance(loaded, dcpp.DropConnectLinear)
    assert loaded.fixed_keep_probability == 0.3
    assert loaded.evaluation == "gaussian"


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    dcpp.save(trained_network(), path)
    before = path.read_bytes()

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(container, "_memory", full_disk)
    with pytest.raises(OSError, match="No space left"):
        dcpp.save(trained_network(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"does not exist\. Make it first"):
        dcpp.save(trained_network(), tmp_path / "no" / "m")


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage", "foreign", "newer", "bad metadata"])
def test_damaged_files_are_refused_and_harm_nothing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m"
    dcpp.save(trained_network(), path)
    data = path.read_bytes()
    expected = {
        "missing": "no such file",
        "truncated": "damaged, or not a safetensors file",
        "garbage": "damaged, or not a safetensors file",
        "foreign": r"not written by dropconnectpp.save \(format None",
        "newer": r"not written by dropconnectpp.save \(format '99'",
        "bad metadata": "description of the layers is damaged",
    }
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "garbage":
        path.write_bytes(b"\xff" * 100)
    else:
        form = {"foreign": {}, "newer": {"dropconnectpp_format": "99"}}.get(
            damage, {"dropconnectpp_format": "1", "layers": "{", "aliases": "{}"}
        )
        save_file({"x": torch.zeros(1)}, path, metadata=form)
    target = plain_network()
    state = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(FileFormatError, match=expected[damage]):
        dcpp.load(path, target)
    assert type(target[4]) is nn.Linear
    assert all(torch.equal(state[k], v) for k, v in target.state_dict().items())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: nn.Sequential(*plain_network()[:4], nn.Linear(8, 5)), r"shape \(3, 8\), the model's has \(5, 8\)"),
        (lambda: nn.Sequential(*plain_network()[:4]), "holds a layer '4', and the model has no module of that name"),
        (lambda: nn.Sequential(*plain_network(), nn.Linear(3, 3)), r"5\.bias is missing"),
        (lambda: dcpp.convert(plain_network(), hyper="learned"), "hyper='marginal', and the model's has 'learned'"),
        (lambda: dcpp.convert(plain_network(), hyper="optimal"), "hyper='marginal', and the model's has 'optimal'"),
        (lambda: dcpp.convert(plain_network(), kind="dropconnect"), "saved with kind="),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path, target: Any, message: str) -> None:
    dcpp.save(trained_network(), tmp_path / "m")
    model = target()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(FileFormatError, match=message):
        dcpp.load(tmp_path / "m", model)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_an_activation_without_a_name_needs_a_converted_model(tmp_path: Path) -> None:
    model = dcpp.convert(nn.Sequential(nn.Linear(3, 2)), activation=nn.LeakyReLU(0.3))
    dcpp.save(model, tmp_path / "m")
    with pytest.raises(FileFormatError, match=r"saved with the activation <LeakyReLU\(negative_slope=0.3\)>"):
        dcpp.load(tmp_path / "m", nn.Sequential(nn.Linear(3, 2)))
    target = dcpp.convert(nn.Sequential(nn.Linear(3, 2)), activation=nn.LeakyReLU(0.3))
    assert same_state(dcpp.load(tmp_path / "m", target), model)


@pytest.mark.parametrize(("call", "extra"), [("save", "io"), ("to_onnx", "onnx")])
def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, extra: str
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(disk, "import_module", refuse)
    arguments = [torch.randn(1, 1, 4, 4)] if call == "to_onnx" else []
    with pytest.raises(MissingPackageError, match=rf"pip install 'dropconnectpp\[{extra}\]'"):
        getattr(dcpp, call)(trained_network(), tmp_path / "m", *arguments)


def test_importing_the_library_needs_neither_safetensors_nor_onnx() -> None:
    import subprocess
    import sys

    code = (
        "import sys, dropconnectpp; "
        "bad = [m for m in ('safetensors', 'onnx', 'onnxscript', 'sklearn', 'scipy', 'triton') if m in sys.modules]; "
        "print(bad); sys.exit(bool(set(bad) - {'triton'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("mode", ["mean", "map"])
def test_onnx_runtime_agrees(tmp_path: Path, mode: str) -> None:
    import onnxruntime

    model = trained_network().eval()
    path = tmp_path / "model.onnx"
    dcpp.to_onnx(model, path, torch.randn(2, 1, 4, 4), mode=mode)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    dense = dcpp.to_dense(model, mode)
    for batch in (1, 7):
        x = torch.randn(batch, 1, 4, 4)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert np.abs(found - dense(x).detach().numpy()).max() < 1e-5
        if mode == "mean":
            assert np.abs(found - model(x).detach().numpy()).max() < 1e-5


def test_layers_that_share_pi_otherwise_are_refused(tmp_path: Path) -> None:
    saved = nn.Sequential(dcpp.DropConnectPPLinear(4, 2, hyper="optimal", sharing="unit"))
    dcpp.save(saved, tmp_path / "unit.safetensors")
    loaded = dcpp.load(tmp_path / "unit.safetensors", nn.Sequential(nn.Linear(4, 2)))
    assert loaded[0].sharing == "unit"
    torch.testing.assert_close(dcpp.kl_divergence(loaded), dcpp.kl_divergence(saved))
    with pytest.raises(FileFormatError, match="sharing='unit', and the model's has 'synapse'"):
        dcpp.load(tmp_path / "unit.safetensors", nn.Sequential(dcpp.DropConnectPPLinear(4, 2, hyper="optimal")))


@pytest.mark.parametrize("likelihood", [dcpp.categorical.tempered(1.7), dcpp.gaussian(), dcpp.student_t(0.5, df=5.0)])
def test_a_file_keeps_the_likelihood_of_the_training(tmp_path: Path, likelihood: Any) -> None:
    model = trained_network()
    dcpp.ELBO(model, likelihood, num_data=10)
    dcpp.save(model, tmp_path / "m")
    for target in (plain_network(), dcpp.convert(plain_network())):
        found = likelihoods.remembered(dcpp.load(tmp_path / "m", target))
        assert likelihoods.describe(found) == likelihoods.describe(likelihood)
        assert found is not likelihood


def test_a_file_without_a_likelihood_leaves_the_models_own(tmp_path: Path) -> None:
    model = trained_network()
    for likelihood in (None, lambda output, target: -(output - target).square().sum(1)):
        likelihoods.remember(model, likelihood)
        dcpp.save(model, tmp_path / "m")
        target = plain_network()
        likelihoods.remember(target, dcpp.bernoulli)
        assert likelihoods.remembered(dcpp.load(tmp_path / "m", target)) is dcpp.bernoulli


def test_a_damaged_likelihood_is_refused(tmp_path: Path) -> None:
    model = trained_network()
    dcpp.ELBO(model, dcpp.gaussian(0.5), num_data=10)
    dcpp.save(model, tmp_path / "m")
    with safe_open(tmp_path / "m", framework="pt") as file:
        described = json.loads(file.metadata()["description"])
    tensors = load_file(tmp_path / "m")
    for wrong, message in (
        ({"name": "cauchy"}, "name must be one of"),
        ({"name": "gaussian", "scale": [-1.0]}, "scale must be a finite number above 0"),
        ({"name": "gaussian", "scale": math.inf}, "Infinity is no number"),
        ([], "likelihood is"),
    ):
        text = json.dumps({**described, "likelihood": wrong})
        container.write(tmp_path / "damaged", tensors, {"dropconnectpp_format": "2", "description": text})
        target = plain_network()
        with pytest.raises(FileFormatError, match=message):
            dcpp.load(tmp_path / "damaged", target)
        assert likelihoods.remembered(target) is None
