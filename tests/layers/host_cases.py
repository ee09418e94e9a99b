"""Modules that keep their forward and have gates on parameters: how each is made, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Fused weights of several layers, as plain parameters that are read one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(2, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x @ self.down_proj[expert].mT for expert in range(2)]).sum(0)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


BATCH = 2
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "LSTM": (lambda: nn.LSTM(1, 1, bias=False), (numbers(2, BATCH, 1),), {}),
    "GRU": (lambda: nn.GRU(1, 1, bias=False), (numbers(2, BATCH, 1),), {}),
    "RNN": (lambda: nn.RNN(2, 1, batch_first=True), (numbers(BATCH, 2, 2),), {}),
    "LSTMCell": (
        lambda: nn.LSTMCell(1, 1, bias=False),
        (numbers(BATCH, 1), (numbers(BATCH, 1), numbers(BATCH, 1))),
        {},
    ),
    "GRUCell": (lambda: nn.GRUCell(1, 1, bias=False), (numbers(BATCH, 1), numbers(BATCH, 1)), {}),
    "RNNCell": (lambda: nn.RNNCell(2, 1), (numbers(BATCH, 2), numbers(BATCH, 1)), {}),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(1, 2, 2), (numbers(BATCH, 1, 2),), {}),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(1, 1, 2), (numbers(BATCH, 1, 2, 2),), {}),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(1, 1, (1, 2, 2)), (numbers(BATCH, 1, 1, 2, 2),), {}),
    "Bilinear": (lambda: nn.Bilinear(2, 2, 1), (numbers(BATCH, 2), numbers(BATCH, 2)), {}),
    "Embedding": (lambda: nn.Embedding(3, 2), (torch.tensor([[0, 2], [1, 1]]),), {"include": nn.Embedding}),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(3, 2), (torch.tensor([[0, 2], [1, 1]]),), {"include": nn.EmbeddingBag}),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(1, 1, bias=False, batch_first=True),
        (numbers(BATCH, 2, 1),) * 3,
        {"exclude": "out_proj"},
    ),
    "out_proj": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        (numbers(BATCH, 2, 2),) * 3,
        {"include": "out_proj"},
    ),
    "own forward": (lambda: Scaled(2, 2), (numbers(BATCH, 2),), {}),
    "experts": (Experts, (numbers(BATCH, 2),), {"parameters": "down_proj"}),
}


class Net(nn.Module):
    """One module, and its output as (B, 2) numbers that depend on all of it."""

    def __init__(self, inner: nn.Module, batch_axis: int) -> None:
        super().__init__()
        self.inner = inner
        self.batch_axis = batch_axis

    def forward(self, *inputs: Any) -> Tensor:
        found = self.inner(*inputs)
        found = found[0] if isinstance(found, tuple) else found
        flat = torch.tanh(found.movedim(self.batch_axis, 0).flatten(1))
        places = torch.arange(flat.shape[1], dtype=flat.dtype)
        return torch.stack([(flat * torch.cos(places)).sum(1), (flat.square() * torch.sin(places + 1)).sum(1)], 1)


def plain(name: str) -> Net:
    torch.manual_seed(0)
    sequences_first = name in ("LSTM", "GRU")
    return Net(CASES[name][0](), 1 if sequences_first else 0).double()


def choice(name: str) -> dict[str, Any]:
    """What `convert` is asked for, with the names as they are in the `Net`."""
    asked = dict(CASES[name][2])
    for key in ("include", "exclude", "parameters"):
        if isinstance(asked.get(key), str):
            asked[key] = f"inner.{asked[key]}"
    return asked if "parameters" not in asked else {"include": (), **asked}
