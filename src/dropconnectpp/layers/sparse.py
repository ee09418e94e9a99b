"""A linear layer that stores and multiplies only the weights that are not zero: compressed sparse rows, on the CPU.

Shapes: B batch, O out, I in, K weights kept.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, ShapeError

DTYPES = (torch.float32, torch.float64)
"""What torch's sparse products take on the CPU."""


class SparseLinear(nn.Module):
    """`nn.Linear` with its weights as compressed sparse rows; `to_sparse` makes it, `to_dense` goes back.

    >>> dense = nn.Linear(6, 3)
    >>> dense.weight.data[:, 1:] = 0.0
    >>> sparse = SparseLinear.of(dense)
    >>> sparse
    SparseLinear(in_features=6, out_features=3, bias=True, kept=3 of 18)
    >>> x = torch.randn(5, 6)
    >>> torch.allclose(sparse(x), dense(x), atol=1e-6)
    True
    """

    row_starts: Tensor
    columns: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        count: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.count = in_features, out_features, count
        # int32: what the products want; they would copy other indices at each call.
        self.register_buffer("row_starts", torch.zeros(out_features + 1, dtype=torch.int32, device=device))
        self.register_buffer("columns", torch.zeros(count, dtype=torch.int32, device=device))
        self.values = nn.Parameter(torch.zeros(count, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    @torch.no_grad()
    def of(cls, layer: nn.Linear, columns: Tensor | None = None, total: int | None = None) -> SparseLinear:
        """The weights of a dense layer that are not zero; ``columns`` are its inputs' places among ``total``."""
        weight, bias = layer.weight.detach(), layer.bias
        on = weight != 0
        if not bool(on.any()):
            on[0, 0] = True  # a stored zero: tensors without elements are trouble elsewhere
        made = cls(total or layer.in_features, layer.out_features, int(on.sum()), bias is not None, dtype=weight.dtype)
        places = on.nonzero()[:, 1]
        made.row_starts = F.pad(on.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        made.columns = (places if columns is None else columns[places]).to(torch.int32)
        made.values = nn.Parameter(weight[on].clone(), requires_grad=layer.weight.requires_grad)
        if bias is not None:
            made.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return made.train(layer.training)

    @torch.no_grad()
    def dense(self) -> nn.Linear:
        """The ordinary layer with the same weights, zeros and all."""
        made = nn.utils.skip_init(
            nn.Linear,
            self.in_features,
            self.out_features,
            self.bias is not None,
            device=self.values.device,
            dtype=self.values.dtype,
        )
        made.weight = nn.Parameter(self._dense_weight(), requires_grad=self.values.requires_grad)
        if self.bias is not None:
            made.bias = self.bias
        found: nn.Linear = made.train(self.training)
        return found

    def _dense_weight(self) -> Tensor:  # (O, I)
        rows = torch.repeat_interleave(self.row_starts.diff().long(), output_size=self.count)
        weight = self.values.new_zeros(self.out_features, self.in_features)
        weight[rows, self.columns.long()] = self.values.detach()
        return weight

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1] != self.in_features:
            raise ShapeError(f"SparseLinear has {self.in_features} inputs, got {tuple(input.shape)}.")
        if self.values.dtype not in DTYPES or input.dtype != self.values.dtype:
            raise ArgumentError(
                f"SparseLinear: torch multiplies sparse rows in float32 and float64; the weights are "
                f"{self.values.dtype}, the input is {input.dtype}. Use to_dense(model) for other dtypes and autocast."
            )
        parts = (self.row_starts, self.columns, self.values, self.bias)
        if torch.compiler.is_compiling():
            output: Tensor = _registered(input.reshape(-1, self.in_features), *parts)
        else:
            output = product(input.reshape(-1, self.in_features), *parts)
        return output.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        size = self.in_features * self.out_features
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"kept={self.count:,} of {size:,}"
        )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        fault = self._fault(state_dict.get(f"{prefix}row_starts"), state_dict.get(f"{prefix}columns"))
        if fault is not None:  # the products would read beyond the input
            error_msgs.append(f"{prefix}{fault}; the file is damaged, save the model again")
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _fault(self, starts: Tensor | None, columns: Tensor | None) -> str | None:
        if (
            starts is not None
            and starts.shape == self.row_starts.shape
            and (int(starts[0]) != 0 or int(starts[-1]) != self.count or bool((starts.diff() < 0).any()))
        ):
            return f"row_starts must rise from 0 to {self.count}"
        within = columns is None or not columns.numel() or int(columns.min()) >= 0
        if columns is not None and not (within and bool((columns < self.in_features).all())):
            return f"columns must lie in 0..{self.in_features - 1}"
        return None


def product(input: Tensor, row_starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for rows of x (B, I) and W as compressed sparse rows; (B, O)."""
    _hear_the_warning()
    # Made anew at each call, in 2 microseconds: one that is kept would not follow .to() and load_state_dict().
    size = (row_starts.shape[0] - 1, input.shape[1])
    weight = torch.sparse_csr_tensor(row_starts, columns, values, size, check_invariants=False)
    # W x^T, not x W^T: measured 5 times faster, since the rows of W are then the product's own.
    if len(input) == 1:
        single = torch.mv(weight, input[0])
        return (single if bias is None else single + bias).unsqueeze(0)
    if bias is None:
        return torch.mm(weight, input.t()).t().contiguous()
    return torch.addmm(bias.unsqueeze(1), weight, input.t()).t().contiguous()


@cache
def _hear_the_warning() -> None:
    """torch says once in a process that its sparse rows are in beta: make it say so where nobody listens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(
            [0, 0], torch.zeros(0, dtype=torch.int64), torch.zeros(0), (1, 1), check_invariants=False
        )


@torch.library.custom_op("dropconnectpp::sparse_linear", mutates_args=())
def _registered(input: Tensor, row_starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """`product` as an operation of torch, for `torch.compile`, which knows no sparse tensors."""
    return product(input, row_starts, columns, values, bias).clone()


@_registered.register_fake
def _(input: Tensor, row_starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(input.shape[0], row_starts.shape[0] - 1)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, row_starts, columns, values, bias = inputs
    ctx.save_for_backward(input, row_starts, columns, values)
    ctx.biased = bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input, row_starts, columns, values = ctx.saved_tensors
    rows = torch.repeat_interleave(row_starts.diff().long(), output_size=values.shape[0])
    weight = values.new_zeros(gradient.shape[1], input.shape[1])
    weight = weight.index_put((rows, columns.long()), values)
    of_values = (gradient.t() @ input)[rows, columns.long()]
    return gradient @ weight, None, None, of_values, gradient.sum(0) if ctx.biased else None


_registered.register_autograd(_backward, setup_context=_remember)
