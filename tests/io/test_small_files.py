"""How large a file is, and that nothing of what matters was left out to get there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dropconnectpp as dcpp
from dropconnectpp.errors import ArgumentError
from saved_cases import plain_network, same_state, same_where_kept, trained_network

HEADER = 3000
"""Bytes that names and options may take."""


def architecture() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def trained(**options: Any) -> nn.Module:
    model = dcpp.convert(architecture(), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    return model


def saved_bytes(model: nn.Module, path: Path, **options: Any) -> int:
    dcpp.save(model, path, **options)
    return path.stat().st_size


def plain_bytes(model: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters())


def test_a_converted_model_takes_its_weights_and_log_odds_and_no_more(tmp_path: Path) -> None:
    model = trained()
    size = saved_bytes(model, tmp_path / "m")
    assert plain_bytes(model) < size < plain_bytes(model) + HEADER
    fresh = saved_bytes(dcpp.convert(architecture()), tmp_path / "m")
    assert fresh < plain_bytes(architecture()) + HEADER, "log-odds that are all the same take nothing"


@pytest.mark.parametrize(("keep", "percent"), [(0.01, 3.5), (0.1, 22.5)])
def test_a_pruned_model_takes_what_was_kept(tmp_path: Path, keep: float, percent: float) -> None:
    pruned = dcpp.prune(trained(), keep=keep)
    dense = plain_bytes(architecture())
    assert saved_bytes(pruned, tmp_path / "m") < percent / 100 * dense
    assert same_where_kept(pruned, dcpp.load(tmp_path / "m", architecture()))
    half = saved_bytes(pruned, tmp_path / "half", dtype=torch.float16)
    assert half < 0.6 * (tmp_path / "m").stat().st_size + HEADER
    folded = dcpp.to_dense(pruned)
    assert saved_bytes(folded, tmp_path / "dense") < percent / 100 * dense
    assert same_state(folded, dcpp.load(tmp_path / "dense", architecture()))


def test_one_hundredth_of_a_larger_model_takes_less_than_3_percent(tmp_path: Path) -> None:
    layer = dcpp.convert(nn.Linear(2048, 1024))
    with torch.no_grad():
        layer.weight_logit.add_(torch.randn_like(layer.weight_logit))
    assert saved_bytes(dcpp.prune(layer, keep=0.01), tmp_path / "m") < 0.03 * 4 * 2048 * 1024


def test_a_fixed_support_takes_a_weight_each(tmp_path: Path) -> None:
    pruned = dcpp.prune(trained(), keep=0.1)
    with torch.no_grad():  # as a plan leaves them
        for name, parameter in pruned.named_parameters():
            if name.endswith("_logit"):
                parameter.fill_(30.0)
    assert saved_bytes(pruned, tmp_path / "m") < 0.13 * plain_bytes(architecture())
    loaded = dcpp.load(tmp_path / "m", architecture())
    assert same_where_kept(pruned, loaded)


@pytest.mark.parametrize("options", [{}, {"parameterisation": "probability"}, {"hyper": "learned"}])
def test_a_pruned_synapse_comes_back_as_a_new_layer_starts_it(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"keep_probability": 0.25, **options}
    pruned = dcpp.prune(trained(**options), keep=0.1)
    dcpp.save(pruned, tmp_path / "m")
    loaded, fresh = dcpp.load(tmp_path / "m", architecture()), dcpp.convert(architecture(), **options)
    for name in ("0", "2", "4"):
        layer, new = loaded.get_submodule(name), fresh.get_submodule(name)
        off = ~layer.weight_kept
        assert not layer.weight[off].any()
        for key in new.posterior_names_of("weight"):
            assert torch.equal(getattr(layer, key)[off], getattr(new, key)[off])


def test_all_of_a_pruned_model_is_stored_on_request(tmp_path: Path) -> None:
    pruned = dcpp.prune(trained(), keep=0.1)
    dcpp.save(pruned, tmp_path / "m", keep_pruned=True)
    assert same_state(pruned, dcpp.load(tmp_path / "m", architecture()))


def test_training_goes_on_from_a_file_as_it_would_have(tmp_path: Path) -> None:
    first = dcpp.prune(trained(hyper="optimal", sharing="unit"), keep=0.2)
    dcpp.save(first, tmp_path / "m")
    second = dcpp.load(tmp_path / "m", architecture())
    x, y = torch.randn(32, 64), torch.arange(32) % 10
    for model in (first, second):
        elbo = dcpp.ELBO(model, dcpp.categorical, num_data=32)
        optimizer = torch.optim.Adam(dcpp.parameter_groups(model, lr=0.01))
        torch.manual_seed(5)
        for _ in range(4):
            optimizer.zero_grad()
            elbo(x, target=y).loss.backward()
            optimizer.step()
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        owner, _, key = name.rpartition(".")
        kept = first.get_submodule(owner).kept(key.partition("_")[0])
        ours, theirs = (ours, theirs) if kept is None else (ours[kept], theirs[kept])
        assert torch.equal(ours, theirs), name


def test_a_weight_that_an_embedding_reads_too_is_stored_whole(tmp_path: Path) -> None:
    def network() -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(50, 30), "output": nn.Linear(30, 50, bias=False)})
        model["output"].weight = model["embedding"].weight
        return model

    pruned = dcpp.prune(dcpp.convert(network()), keep=0.05)
    dcpp.save(pruned, tmp_path / "m")
    loaded = dcpp.load(tmp_path / "m", network())
    assert torch.equal(pruned["embedding"].weight, loaded["embedding"].weight)
    assert loaded["output"].weight is loaded["embedding"].weight
    assert torch.equal(pruned["output"].weight_kept, loaded["output"].weight_kept)


def test_a_weight_of_two_layers_is_stored_where_either_keeps_it(tmp_path: Path) -> None:
    def network() -> nn.Module:
        first, second = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, second)

    model = dcpp.convert(network(), kind="dropconnect")
    model[0].keep_only("weight", torch.rand(40, 40) < 0.1)
    dcpp.save(model, tmp_path / "m")  # the second layer keeps all
    assert same_state(model, dcpp.load(tmp_path / "m", network()))
    model[1].keep_only("weight", torch.rand(40, 40) < 0.1)
    dcpp.save(model, tmp_path / "m")
    assert same_state(model, dcpp.load(tmp_path / "m", network()))
    model[1].keep_only("weight", model[0].weight_kept.clone())
    dcpp.save(model, tmp_path / "m")
    loaded = dcpp.load(tmp_path / "m", network())
    assert torch.equal(loaded[0].weight, model[0].weight * model[0].weight_kept)


def test_ties_of_weights_and_posteriors_come_back(tmp_path: Path) -> None:
    def network(tied: bool = True) -> nn.Module:
        first, second = nn.Linear(30, 30), nn.Linear(30, 30)
        if tied:
            second.weight = first.weight
        return nn.Sequential(first, second)

    tied = dcpp.prune(dcpp.convert(network()), keep=0.1)
    dcpp.save(tied, tmp_path / "tied")
    loaded = dcpp.load(tmp_path / "tied", network())
    assert loaded[0].weight is loaded[1].weight
    assert loaded[0].weight_logit is loaded[1].weight_logit
    assert loaded[0].bias_logit is not loaded[1].bias_logit
    assert same_where_kept(tied, loaded)
    apart = dcpp.load(tmp_path / "tied", network(tied=False))
    assert apart[0].weight_logit is not apart[1].weight_logit
    assert same_where_kept(tied, apart)
    separate = dcpp.convert(network(tied=False))
    with torch.no_grad():
        separate[1].weight_logit.fill_(1.0)
    dcpp.save(separate, tmp_path / "separate")
    model = network()
    with pytest.raises(dcpp.DropConnectError, match=r"0\.weight and 1\.weight are one tensor in the model and two"):
        dcpp.load(tmp_path / "separate", model)
    assert type(model[0]) is nn.Linear


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    model = dcpp.prune(trained(), keep=0.1)
    dcpp.save(model, tmp_path / "a")
    dcpp.save(dcpp.load(tmp_path / "a", architecture()), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_are_rounded_on_request(tmp_path: Path, dtype: torch.dtype) -> None:
    model = trained_network()
    dcpp.save(model, tmp_path / "m", dtype=dtype)
    loaded = dcpp.load(tmp_path / "m", plain_network())
    parameters = dict(model.named_parameters())
    for key, value in loaded.state_dict().items():
        saved = model.state_dict()[key]
        assert value.dtype == saved.dtype
        assert torch.equal(value, saved.to(dtype).to(saved.dtype) if key in parameters else saved)


def test_what_cannot_be_rounded_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = 1e6
    with pytest.raises(ArgumentError, match=r"weight has values up to 1e\+06, beyond float16's 6.55e\+04"):
        dcpp.save(model, tmp_path / "m", dtype=torch.float16)
    dcpp.save(model, tmp_path / "m", dtype=torch.bfloat16)
    for dtype in (torch.int8, torch.float64, "float16"):
        with pytest.raises(ArgumentError, match=r"dtype must be one of torch\.float32, torch\.float16"):
            dcpp.save(model, tmp_path / "n", dtype=dtype)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_compact_model_is_rebuilt(tmp_path: Path) -> None:
    model = dcpp.convert(architecture())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    small = dcpp.compact(dcpp.prune(model.eval(), keep=0.005))
    dcpp.save(small, tmp_path / "small")
    loaded = dcpp.load(tmp_path / "small", architecture()).eval()
    assert same_state(small, loaded)
    x = torch.randn(8, 64)
    assert torch.equal(small(x), loaded(x))
    dcpp.save(loaded, tmp_path / "again")
    assert (tmp_path / "small").read_bytes() == (tmp_path / "again").read_bytes()
    assert (tmp_path / "small").stat().st_size < 0.05 * plain_bytes(architecture())
    assert same_state(small, dcpp.load(tmp_path / "small", dcpp.convert(architecture())))
    other = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(dcpp.DropConnectError, match="rebuild: "):
        dcpp.load(tmp_path / "small", other)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())


def test_what_compile_and_parallel_add_is_left_out(tmp_path: Path) -> None:
    model = trained_network()
    dcpp.save(torch.compile(model), tmp_path / "compiled")
    dcpp.save(nn.DataParallel(model), tmp_path / "parallel")
    dcpp.save(model, tmp_path / "plain")
    assert (tmp_path / "compiled").read_bytes() == (tmp_path / "plain").read_bytes()
    assert (tmp_path / "parallel").read_bytes() == (tmp_path / "plain").read_bytes()
    inside = plain_network()
    inside[4] = torch.compile(inside[4])
    assert dcpp.load(tmp_path / "plain", inside) is inside
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(inside[:4].eval()(x), model[:4].eval()(x))
    assert torch.equal(inside[4]._orig_mod.weight_logit, model[4].weight_logit)
    dcpp.save(inside, tmp_path / "inside")
    assert (tmp_path / "inside").read_bytes() == (tmp_path / "plain").read_bytes()
    outside = torch.compile(plain_network())
    assert dcpp.load(tmp_path / "plain", outside) is outside
    assert same_state(outside._orig_mod, model)
    dcpp.save(dcpp.convert(nn.Linear(3, 2)), tmp_path / "bare")
    with pytest.raises(ArgumentError, match="cannot be converted in place"):
        dcpp.load(tmp_path / "bare", torch.compile(nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device and has no values"),
        (lambda: nn.LazyLinear(2), "weight has no shape yet"),
        (lambda: _with_buffer(torch.eye(3).to_sparse()), "buffer is sparse_coo float32"),
        (lambda: _with_buffer(torch.zeros(2, dtype=torch.complex128)), "buffer is strided complex128"),
        (lambda: _WithExtraState(), "_extra_state is a dict, and a file holds tensors"),
    ],
)
def test_what_no_file_can_hold_is_named(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        dcpp.save(make(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def _with_buffer(value: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("buffer", value)
    return model


class _WithExtraState(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass
