"""compact takes heads out of nn.MultiheadAttention: the same outputs under every mask, and files that hold them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dropconnectpp as dcpp
from dropconnectpp.compaction.attention import SelectedAttention, select_heads
from dropconnectpp.errors import ArgumentError, DropConnectError, FileFormatError

pytest.importorskip("torch_pruning")

E, HEADS, D = 12, 4, 3


@torch.no_grad()
def attention(off: tuple[int, ...] = (0, 2), **options: Any) -> nn.MultiheadAttention:
    """Heads that nobody reads."""
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(E, HEADS, **({"batch_first": True} | options)).double().eval()
    for parameter in layer.parameters():
        parameter.normal_()
    for head in off:
        layer.out_proj.weight[:, head * D : (head + 1) * D] = 0.0
    return layer


class Attending(nn.Module):
    """A linear layer that can be made compact, and attention."""

    def __init__(self, layer: nn.Module, *, weights: bool = False) -> None:
        super().__init__()
        self.attention, self.out, self.weights = layer, nn.Linear(E, 2).double(), weights

    def forward(self, x: Tensor, y: Tensor | None = None, **masks: Any) -> Any:
        y = x if y is None else y
        found, weights = self.attention(x, y, y, **masks)
        return (self.out(found), weights) if self.weights else self.out(found)


X, Y = torch.randn(3, 5, E, dtype=torch.float64), torch.randn(3, 7, E, dtype=torch.float64)
PADDING = torch.arange(5) >= torch.tensor([[5], [3], [2]])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
EACH = (torch.rand(3 * HEADS, 5, 5) < 0.4) & ~torch.eye(5, dtype=torch.bool)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "no weights": {"need_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "numbers": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
    "each head": {"attn_mask": EACH},
    "each head and padding": {"attn_mask": torch.randn(3 * HEADS, 5, 5).double(), "key_padding_mask": PADDING.double()},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@torch.no_grad()
def test_the_heads_that_are_left_give_the_same(masks: dict[str, Any], bias: bool) -> None:
    model = Attending(attention(bias=bias))
    small = dcpp.compact(model, X)
    assert isinstance(small.attention, SelectedAttention)
    assert (small.attention.num_heads, small.attention.columns.tolist()) == (2, [1, 3])
    torch.testing.assert_close(small(X, **masks), model(X, **masks), rtol=0.0, atol=1e-12)


@torch.no_grad()
def test_sequences_first_other_keys_and_no_batch() -> None:
    model = Attending(attention(batch_first=False))
    small = dcpp.compact(model, (X, X))
    torch.testing.assert_close(small(X.transpose(0, 1), Y.transpose(0, 1)), model(X.transpose(0, 1), Y.transpose(0, 1)))
    torch.testing.assert_close(small(X[0]), model(X[0]))
    assert small(X[0]).shape == (5, 2)


@torch.no_grad()
def test_a_head_whose_values_are_its_bias_is_folded() -> None:
    layer = attention(off=())
    layer.in_proj_weight[2 * E : 2 * E + D] = 0.0
    model = Attending(layer)
    small = dcpp.compact(model, X)
    assert small.attention.columns.tolist() == [1, 2, 3]
    assert not torch.allclose(small.attention.out_proj.bias, layer.out_proj.bias)
    torch.testing.assert_close(small(X), model(X), rtol=0.0, atol=1e-12)


@torch.no_grad()
def test_one_head_stays() -> None:
    model = Attending(attention(off=(0, 1, 2, 3)))
    small = dcpp.compact(model, X)
    assert small.attention.num_heads == 1
    torch.testing.assert_close(small(X), model(X), rtol=0.0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_an_encoder_keeps_its_outputs_also_with_lengths() -> None:
    """With lengths nn.TransformerEncoder makes nested tensors, which its layers get."""
    block = nn.TransformerEncoderLayer(E, HEADS, 16, batch_first=True)
    model = nn.TransformerEncoder(block, 2).double().eval()
    model.layers[0].self_attn.out_proj.weight[:, :D] = 0.0
    model.layers[1].linear1.weight[:5] = 0.0
    small = dcpp.compact(model, X)
    kinds = [type(one.self_attn) for one in small.layers]
    assert kinds == [SelectedAttention, nn.MultiheadAttention]
    assert small.layers[1].linear1.out_features == 11
    torch.testing.assert_close(small(X), model(X), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(small(X, src_key_padding_mask=PADDING), model(X, src_key_padding_mask=PADDING))
    rows = {row.name: row for row in small.compaction.layers}
    assert rows["layers.0.self_attn"].units == (4, 3)
    scores = 4 * 5 * 5 * D
    assert rows["layers.0.self_attn"].flops == (5 * 8 * E * E + 4 * scores, 5 * 8 * E * 3 * D + 3 * scores)


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"vdim": 7}, "its keys or values have a width of their own"),
    "a key of its own": ({"add_bias_kv": True}, "it attends to keys of its own"),
    "zeros": ({"add_zero_attn": True}, "it attends to keys of its own"),
}


@pytest.mark.parametrize(("options", "reason"), LEFT.values(), ids=LEFT.keys())
def test_what_cannot_lose_heads_is_whole_and_named(options: dict[str, Any], reason: str) -> None:
    left: dict[str, str] = {}
    assert select_heads(Attending(attention(**options)), left) == {}
    assert left["attention"].startswith(f"2 of its heads are off, and {reason}")


def test_weights_that_are_used_twice_keep_their_heads() -> None:
    first, second = attention(), attention(off=())
    second.in_proj_weight = first.in_proj_weight
    left: dict[str, str] = {}
    assert select_heads(nn.ModuleList([first, second]), left) == {}
    assert left == {"0": "2 of its heads are off, and its weights are used in two places: they stay"}


@torch.no_grad()
def test_a_model_that_gives_attention_weights_keeps_all_heads() -> None:
    """The mean over heads would be another one."""
    model = Attending(attention(), weights=True)
    small = dcpp.compact(model, X)
    assert type(small.attention) is nn.MultiheadAttention
    torch.testing.assert_close(small(X), model(X))


def test_weights_train_on_and_are_saved(tmp_path: Path) -> None:
    model = Attending(attention())
    small = dcpp.compact(model, X).train()
    before = small.attention.in_proj_weight.clone()
    small(X).square().sum().backward()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter -= 0.1 * parameter.grad
    assert not torch.equal(before, small.attention.in_proj_weight)
    dcpp.save(small, tmp_path / "m.safetensors")
    fresh = Attending(attention(off=()))
    state = copy.deepcopy(fresh.state_dict())
    again = dcpp.load(tmp_path / "m.safetensors", fresh).eval()
    assert torch.equal(again(X), small.eval()(X))
    narrow = Attending(nn.MultiheadAttention(6, 1, batch_first=True).double())
    with pytest.raises(FileFormatError, match=r"attention was saved with num_heads=2, the model has 1"):
        dcpp.load(tmp_path / "m.safetensors", narrow)
    assert state.keys() == {"attention.in_proj_weight", "attention.in_proj_bias"} | {
        f"{name}.{kind}" for name in ("attention.out_proj", "out") for kind in ("weight", "bias")
    }


def test_a_hint_without_a_mask_is_an_error() -> None:
    small = dcpp.compact(Attending(attention()), X)
    with pytest.raises(ArgumentError, match="is_causal says what attn_mask is like"):
        small(X, is_causal=True)
    ragged = torch.nested.as_nested_tensor([torch.zeros(2, E), torch.zeros(3, E)])
    with pytest.raises(DropConnectError, match="nested tensors can attend to themselves alone"):
        small.attention(ragged, ragged, X)
