"""Attention with fewer heads: what `compact` makes of nn.MultiheadAttention.

Shapes: N batch, L queries, S keys, E embedding, H heads, D numbers in a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dropconnectpp.compaction.chains import tied_layers
from dropconnectpp.compaction.selected import Selection
from dropconnectpp.errors import ArgumentError


class SelectedAttention(Selection):
    """`nn.MultiheadAttention` with some of its heads. The others gave nothing, or a constant that is in the bias now.

    It is called as that one is. Attention weights, where they are asked for, are those of the heads that are left.

    >>> layer = SelectedAttention(embed_dim=32, head_dim=8, num_heads=1, total=4, batch_first=True)
    >>> x = torch.zeros(2, 5, 32)
    >>> layer(x, x, x)[0].shape
    torch.Size([2, 5, 32])
    """

    in_proj_bias: nn.Parameter | None
    out_proj: NonDynamicallyQuantizableLinear
    _qkv_same_embed_dim = False  # read by nn.TransformerEncoderLayer: its fast path takes E / H for D

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        total: int,
        dropout: float = 0.0,
        with_bias: bool = True,
        batch_first: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.head_dim, self.num_heads = embed_dim, head_dim, num_heads
        self.dropout, self.with_bias, self.batch_first = dropout, with_bias, batch_first
        width = num_heads * head_dim
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, embed_dim, device=device, dtype=dtype))
        bias = nn.Parameter(torch.zeros(3 * width, device=device, dtype=dtype)) if with_bias else None
        self.register_parameter("in_proj_bias", bias)
        self.out_proj = NonDynamicallyQuantizableLinear(width, embed_dim, with_bias, device=device, dtype=dtype)
        self._set_up_selection(num_heads, total, device)  # masks for each head are given for all heads of old

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ArgumentError("SelectedAttention: is_causal says what attn_mask is like; give attn_mask too.")
        if query.is_nested:
            return self._attend_nested(query, key, value)
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
        q, k, v = (self._by_head(x) for x in self._project(query, key, value))
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            attended = F.dropout(weights, self.dropout, self.training) @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        joined = attended.transpose(1, 2).flatten(2)  # (N, L, H D)
        output: Tensor = self.out_proj(joined if self.batch_first else joined.transpose(0, 1))
        return (output if batched else output.squeeze(0 if self.batch_first else 1)), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = zip((query, key, value), self.in_proj_weight.chunk(3), biases, strict=True)
        return tuple(F.linear(x, weight, bias) for x, weight, bias in parts)

    def _by_head(self, x: Tensor) -> Tensor:
        """(N, H, L, D)."""
        x = x if self.batch_first else x.transpose(0, 1)
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """What is added to the scores."""
        found: Tensor | None = None
        if mask is not None:
            found = _added(mask, q.dtype)
            if mask.ndim == 3:
                whole = found.view(q.shape[0], self.total, q.shape[2], k.shape[2])
                found = whole.index_select(1, self.columns)
        if padding is not None:
            columns = _added(padding, q.dtype).view(-1, 1, 1, k.shape[2])
            found = columns if found is None else found + columns
        return found

    def _attend_nested(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        """Sequences of several lengths, as nn.TransformerEncoder makes them of a padding mask."""
        if not (query is key and key is value and self.batch_first):
            raise ArgumentError("SelectedAttention: nested tensors can attend to themselves alone, with batch_first.")
        lengths = [len(one) for one in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        beyond = (
            torch.arange(padded.shape[1], device=padded.device) >= torch.tensor(lengths, device=padded.device)[:, None]
        )
        output, _ = self(padded, padded, padded, key_padding_mask=beyond, need_weights=False)
        return torch.nested.as_nested_tensor([one[:n] for one, n in zip(output, lengths, strict=True)]), None

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, head_dim={self.head_dim}, heads={self.num_heads} of {self.total}"


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers that are added to scores: of a boolean one, True is what is not attended to."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


@torch.no_grad()
def select_heads(model: nn.Module, left: dict[str, str]) -> dict[str, nn.Module]:
    """For each attention with heads that give nothing, or always the same: attention with the others."""
    found: dict[str, nn.Module] = {}
    for name, layer in attentions(model).items():
        on = heads_on(layer)
        if bool(on.all()):
            continue
        reason = _reason(model, layer)
        if reason is not None:
            left.setdefault(name, f"{int((~on).sum())} of its heads are off, and {reason}: they stay")
            continue
        if not bool(on.any()):
            on[0] = True
        found[name] = _selected(layer, on)
    return found


def attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The attention layers by name."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.MultiheadAttention}


def heads_on(layer: nn.MultiheadAttention) -> Tensor:
    """For each head whether its output varies and is read."""
    heads = layer.num_heads
    if layer.in_proj_weight is None:
        values: Tensor | None = layer.v_proj_weight
    else:
        values = layer.in_proj_weight.chunk(3)[2]
    assert values is not None
    varies = (values != 0).view(heads, -1).any(1)
    read = (layer.out_proj.weight != 0).view(layer.embed_dim, heads, -1).any(2).any(0)
    return varies & read


def _reason(model: nn.Module, layer: nn.MultiheadAttention) -> str | None:
    """Why heads cannot be taken out of an attention layer."""
    if layer.in_proj_weight is None:
        return "its keys or values have a width of their own"
    if layer.bias_k is not None or layer.bias_v is not None or layer.add_zero_attn:
        return "it attends to keys of its own (add_bias_kv, add_zero_attn)"
    if {id(layer), id(layer.out_proj)} & tied_layers(list(model.modules())):
        return "its weights are used in two places"
    return None


def _selected(layer: nn.MultiheadAttention, on: Tensor) -> SelectedAttention:
    weight, biased = layer.in_proj_weight, layer.in_proj_bias is not None
    assert weight is not None
    selected: Any = nn.utils.skip_init(
        SelectedAttention,
        *(layer.embed_dim, layer.head_dim, int(on.sum()), layer.num_heads),
        *(layer.dropout, biased, layer.batch_first),
        device=weight.device,
        dtype=weight.dtype,
    )
    rows = on.repeat_interleave(layer.head_dim)
    out = layer.out_proj
    selected.in_proj_weight = _like(weight, weight[rows.repeat(3)])
    selected.out_proj.weight = _like(out.weight, out.weight[:, rows])
    if biased:
        assert out.bias is not None
        selected.in_proj_bias = _like(layer.in_proj_bias, layer.in_proj_bias[rows.repeat(3)])
        # The weights of attention add up to one: a head whose values are all its bias gives this.
        constant = layer.in_proj_bias.chunk(3)[2].double().masked_fill(rows, 0.0)
        moved = out.bias.double() + out.weight.double() @ constant
        selected.out_proj.bias = _like(out.bias, moved.to(out.bias.dtype))
    selected.columns = on.nonzero().flatten().to(torch.int32)
    selected.train(layer.training)
    found: SelectedAttention = selected
    return found


def _like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(), requires_grad=old.requires_grad)
