"""to_sparse: the same outputs by sparse rows, from where on they pay, files, and what is refused."""

from __future__ import annotations

import copy
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.compaction.sparse import crossover, to_sparse
from dropconnectpp.compaction.structure import describe, rebuild
from dropconnectpp.errors import ArgumentError, DropConnectError, FileFormatError, ShapeError
from dropconnectpp.layers.sparse import SparseLinear
from saved_cases import same_state

X = torch.randn(7, 40)


def plain_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20, bias=False), nn.Tanh(), nn.Linear(20, 5))


def pruned(**options: Any) -> nn.Module:
    return dcpp.prune(dcpp.convert(plain_model(), **options).eval(), keep=0.1)


@pytest.mark.parametrize("make", [pruned, lambda: dcpp.to_dense(pruned()), lambda: dcpp.compact(pruned())])
@pytest.mark.parametrize("shape", [(7, 40), (1, 40), (40,), (2, 3, 40), (0, 40)])
def test_the_outputs_are_the_same(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    sparse = to_sparse(model, 0.5)
    assert sum(isinstance(module, SparseLinear) for module in sparse.modules()) >= 2
    assert torch.allclose(sparse(x), model(x), atol=1e-6)
    assert torch.allclose(sparse.double()(x.double()), copy.deepcopy(model).double()(x.double()), atol=1e-12)


def test_only_layers_above_the_share_change() -> None:
    model = plain_model()
    with torch.no_grad():
        model[0].weight.view(-1)[: 1200 * 9 // 10] = 0.0
        model[2].weight.view(-1)[: 600 * 8 // 10] = 0.0
    kinds = [type(module) for module in to_sparse(model, 0.85)]
    assert kinds == [SparseLinear, nn.ReLU, nn.Linear, nn.Tanh, nn.Linear]
    both = to_sparse(model, 0.8)
    assert both[2].count == 120
    assert both[2].bias is None


def test_the_measured_crossover_decides() -> None:
    assert crossover(784 * 300, 1) == 0.98
    assert crossover(300 * 100, 1) is None
    assert [crossover(4096 * 4096, rows) for rows in (1, 16, 128)] == [0.8, 0.8, 0.8]
    model = nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 100)).eval()
    with torch.no_grad():
        for layer in model:
            layer.weight[torch.rand_like(layer.weight) < 0.97] = 0.0
    with pytest.raises(
        ArgumentError, match=r"0 has 97\.\d% zeros, and pays from 98% on; 1 has 30,000 weights, too few"
    ):
        to_sparse(model)
    assert [type(layer) for layer in to_sparse(model, rows=128)] == [SparseLinear, SparseLinear]
    with torch.no_grad():
        model[0].weight[:, 10:] = 0.0
    assert [type(layer) for layer in to_sparse(model)] == [SparseLinear, nn.Linear]


def test_the_way_back_is_exact() -> None:
    dense = dcpp.to_dense(pruned())
    back = dcpp.to_dense(to_sparse(dense, 0.5))
    assert [type(module) for module in back] == [type(module) for module in dense]
    assert same_state(back, dense)
    again = to_sparse(to_sparse(dense, 0.5), 0.5)
    assert same_state(again, to_sparse(dense, 0.5))


def test_the_model_stays_as_it_was_unless_asked_otherwise() -> None:
    model = dcpp.to_dense(pruned())
    before = copy.deepcopy(model)
    to_sparse(model, 0.5)
    assert same_state(model, before)
    assert to_sparse(model, 0.5, inplace=True) is model
    assert isinstance(model[0], SparseLinear)


@pytest.mark.parametrize("make", [pruned, lambda: dcpp.compact(pruned(activation=F.relu))])
@pytest.mark.parametrize("converted", [False, True])
def test_a_file_brings_it_back_bit_for_bit(tmp_path: Path, make: Callable[[], nn.Module], converted: bool) -> None:
    sparse = to_sparse(make(), 0.5)
    dcpp.save(sparse, tmp_path / "m")
    target: nn.Module = plain_model()
    if converted:
        target = dcpp.convert(target)
    again = dcpp.load(tmp_path / "m", target).eval()
    assert same_state(again, sparse)
    assert [type(module) for module in again.modules()] == [type(module) for module in sparse.modules()]
    assert torch.equal(again(X), sparse(X))


def test_values_may_be_rounded_in_the_file(tmp_path: Path) -> None:
    sparse = to_sparse(pruned(), 0.5)
    dcpp.save(sparse, tmp_path / "m", torch.float16)
    again = dcpp.load(tmp_path / "m", plain_model())
    assert torch.equal(again[0].values, sparse[0].values.half().float())


def test_a_file_cut_short_or_changed_harms_nothing(tmp_path: Path) -> None:
    dcpp.save(to_sparse(pruned(), 0.5), tmp_path / "m")
    whole = (tmp_path / "m").read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    target = plain_model()
    before = copy.deepcopy(target)
    for damaged in (whole[:40], whole[:-1], whole[: start + 3], whole[:start] + b"\xff" * (len(whole) - start)):
        (tmp_path / "m").write_bytes(damaged)
        with pytest.raises(FileFormatError, match="m"):
            dcpp.load(tmp_path / "m", target)
        assert same_state(target, before)
        assert [type(module) for module in target] == [type(module) for module in before]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("0.columns", 40, r"0\.columns must lie in 0\.\.39"),
        ("0.columns", -1, r"0\.columns must lie in 0\.\.39"),
        ("0.row_starts", 7, "must rise from 0"),
    ],
)
def test_places_outside_the_matrix_are_refused(key: str, value: int, message: str) -> None:
    sparse = to_sparse(pruned(), 0.5)
    state = sparse.state_dict()
    state[key] = state[key].clone()
    state[key][0] = value
    with pytest.raises(RuntimeError, match=message):
        sparse.load_state_dict(state)


@pytest.mark.parametrize("count", [1201, 0, True, "6"])
def test_a_description_of_more_values_than_places_is_refused(count: Any) -> None:
    described = describe(to_sparse(pruned(), 0.5))
    described["modules"]["0"]["arguments"]["count"] = count
    target = plain_model()
    with pytest.raises(ArgumentError, match=f"0 was saved with count={count!r}, the model has 1200"):
        rebuild(target, described)
    assert isinstance(target[0], nn.Linear)


def test_gradients_are_those_of_the_dense_layer() -> None:
    dense = dcpp.to_dense(pruned())
    sparse, x = to_sparse(dense, 0.5), X.clone().requires_grad_()
    sparse(x).square().sum().backward()
    found = x.grad
    x.grad = None
    dense(x).square().sum().backward()
    assert torch.allclose(found, x.grad, atol=1e-5)
    kept = dense[0].weight != 0
    assert torch.allclose(sparse[0].values.grad, dense[0].weight.grad[kept], atol=1e-5)
    assert torch.allclose(sparse[0].bias.grad, dense[0].bias.grad, atol=1e-5)


def test_compiled_it_gives_the_same_forward_and_backward() -> None:
    sparse = to_sparse(pruned(), 0.5)
    compiled = torch.compile(copy.deepcopy(sparse), backend="aot_eager", fullgraph=True)
    for rows in (7, 1):
        x = X[:rows].clone().requires_grad_()
        y = x.detach().clone().requires_grad_()
        compiled(x).sum().backward()
        sparse(y).sum().backward()
        assert torch.allclose(x.grad, y.grad, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(compiled(X), sparse(X), atol=1e-6)


def test_the_transformers_fast_path_does_not_read_the_rows() -> None:
    block = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        block.linear1.weight[torch.rand_like(block.linear1.weight) < 0.9] = 0.0
    sparse, x = to_sparse(block, 0.8), torch.randn(2, 5, 16)
    assert isinstance(sparse.linear1, SparseLinear)
    with torch.no_grad():
        assert torch.allclose(sparse(x), block(x), atol=1e-5)
    assert dcpp.to_dense(sparse).activation_relu_or_gelu == 1


def test_onnx_takes_its_dense_form(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    sparse = to_sparse(pruned(), 0.5)
    dcpp.to_onnx(sparse, tmp_path / "m.onnx", X)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    assert torch.allclose(torch.from_numpy(found), sparse(X), atol=1e-5)


def hooked() -> nn.Module:
    model = dcpp.to_dense(pruned())
    model[0].register_forward_hook(lambda module, given, output: None)
    return model


def hooked_and_masked() -> nn.Module:
    model = pruned()
    model[0].register_forward_pre_hook(lambda module, given: None)
    return model


def parametrised() -> nn.Module:
    model = dcpp.to_dense(pruned())
    nn.utils.parametrizations.weight_norm(model[2])
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    nn.init.zeros_(model[0].weight)
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (hooked, {}, "0 has a forward hook, .* Remove it first"),
        (hooked_and_masked, {}, "0 has a forward hook"),
        (parametrised, {}, "a parameter of 2 is parametrised.*remove_parametrizations"),
        (lambda: pruned().to("meta"), {}, r"0 is on meta, and sparse rows pay on the CPU alone. Use model\.cpu\(\)"),
        (
            plain_model,
            {},
            r"no layer has enough zeros: 0 has 0\.0% zeros, and pays from 50% on.*Use dropconnectpp\.prune",
        ),
        (tied, {}, "0 shares its weight with another module"),
        (lambda: dcpp.to_dense(pruned()).half(), {}, "0 is float16, and sparse rows are float32 or 64"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 3)), {}, "it has no linear layer"),
        (pruned, {"min_sparsity": 1.0}, r"min_sparsity must lie between 0 and 1, got 1\.0"),
        (pruned, {"min_sparsity": float("nan")}, "min_sparsity must lie between 0 and 1, got nan"),
        (pruned, {"rows": 0}, "rows"),
        (pruned, {"rows": 2.5}, "rows"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_in_the_way_is_an_error_and_nothing_changes(
    make: Callable[[], nn.Module], options: dict[str, Any], message: str, inplace: bool
) -> None:
    model = make()
    kinds = [type(module) for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=message):
        to_sparse(model, **({"min_sparsity": 0.5} | options), inplace=inplace)
    assert kinds == [type(module) for module in model.modules()]
    after = model.state_dict()
    assert all(value.is_meta or torch.equal(value, after[key]) for key, value in state.items())


def test_an_input_that_does_not_fit_is_an_error() -> None:
    layer = SparseLinear.of(nn.Linear(4, 2))
    with pytest.raises(ShapeError, match=r"SparseLinear has 4 inputs, got \(3, 5\)"):
        layer(torch.zeros(3, 5))
    with pytest.raises(ArgumentError, match=r"the input is torch\.float16. Use to_dense"):
        layer(torch.zeros(3, 4, dtype=torch.float16))
    with pytest.raises(DropConnectError, match=r"the weights are torch\.bfloat16"):
        layer.to(torch.bfloat16)(torch.zeros(3, 4, dtype=torch.bfloat16))


def test_torchs_warning_of_its_beta_is_not_the_users(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_sparse(pruned(), 0.5)(X)
    assert "beta" not in capfd.readouterr().err


@torch.no_grad()
def test_what_a_compact_layer_does_not_read_does_not_count() -> None:
    """50 of 4,096 inputs are read: too few weights to gain, whatever the share of all 262,144."""
    layer = nn.Linear(4096, 64)
    layer.weight[:, 50:] = 0.0
    layer.weight[1:, 0] = 0.0
    small = dcpp.compact(nn.Sequential(layer, nn.Linear(64, 2)))
    with pytest.raises(ArgumentError, match="0 has 3,200 weights, too few to gain at 1 row"):
        to_sparse(small)
    assert to_sparse(small, 0.01)[0].in_features == 4096
