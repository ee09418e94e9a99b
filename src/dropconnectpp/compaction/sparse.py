"""`to_sparse`: linear layers with few weights left as sparse rows, where that was measured to be faster."""

from __future__ import annotations

from torch import nn

from dropconnectpp.compaction.chains import tied_layers
from dropconnectpp.compaction.selected import SelectedLinear
from dropconnectpp.conversion import swap, to_dense
from dropconnectpp.errors import ArgumentError, check_count
from dropconnectpp.layers.affine import LinearOperation
from dropconnectpp.layers.sparse import DTYPES, SparseLinear

CROSSOVERS: tuple[tuple[int, int, float], ...] = (
    (1, 200_000, 0.98),
    (1, 400_000, 0.95),
    (1, 1_000_000, 0.9),
    (1, 4_000_000, 0.8),
    (16, 200_000, 0.9),
    (16, 400_000, 0.8),
    (128, 20_000, 0.9),
)
"""(rows at least, weights at least, sparsity): from where on sparse rows are faster; the least that fits counts.

Measured by `benchmarks/sparse_products.py` with torch 2.13 on an x86 CPU; its table is in records/deployment. At one
row a layer of fewer weights costs less than the call of the sparse product, whatever its zeros are.
"""


def crossover(weights: int, rows: int) -> float | None:
    """The sparsity from which on a layer with so many weights, zeros counted, is faster sparse; None for never.

    >>> crossover(800 * 500, rows=16), crossover(300 * 100, rows=1)
    (0.8, None)
    """
    return min((s for least_rows, least, s in CROSSOVERS if rows >= least_rows and weights >= least), default=None)


def to_sparse(
    model: nn.Module, min_sparsity: float | None = None, *, rows: int = 1, inplace: bool = False
) -> nn.Module:
    """Linear layers with many zeros as sparse rows (CSR), which multiply only what is not zero. For the CPU.

    Gates are folded first, as by `to_dense`, which also goes back. Without ``min_sparsity`` a layer changes where
    sparse rows were measured to be faster, see `CROSSOVERS`: for single examples from 98% zeros in layers of 200,000
    weights, 90% in those of a million; for batches from 80%. Layers below that stay dense, and convolutions always do.

    Where whole units are off, use `compact` first: it pays on every machine and in every runtime, this one does not.
    On a GPU sparse rows at the sparsities of pruned networks are slower than dense products, and 2:4 sparsity
    (``prune(pattern="2:4")``) mostly is too: public measurements of small networks are 0.1 to 0.95 times as fast.

    The result can be trained on, saved and loaded (`save`, `load`), and compiled by `torch.compile`, but no faster than
    eagerly. `to_onnx` writes its dense form: ONNX Runtime has no such product.

    Args:
        model: A pruned model, masked, plain or compact, on the CPU. It is not changed, unless ``inplace``.
        min_sparsity: The least share of zeros, between 0 and 1, in place of the measured crossover.
        rows: How many rows the layers will get at once: examples of a batch, times tokens.
        inplace: Change ``model`` itself.

    Raises:
        ArgumentError: No layer has so many zeros; a layer is not on the CPU; or a hook or a parametrisation is in the
            way. The model is as it was.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(784, 1000), torch.nn.Linear(1000, 10))
    >>> pruned = dropconnectpp.prune(model.eval(), keep=0.01)
    >>> to_sparse(pruned)
    Sequential(
      (0): SparseLinear(in_features=784, out_features=1000, bias=True, kept=7,840 of 784,000)
      (1): Linear(in_features=1000, out_features=10, bias=True)
    )
    """
    if min_sparsity is not None and not 0.0 < float(min_sparsity) < 1.0:
        raise ArgumentError(f"to_sparse: min_sparsity must lie between 0 and 1, got {min_sparsity!r}.")
    check_count("rows", rows)
    _check_model(model)
    dense = to_dense(model)
    chosen, reasons = _choose(dense, min_sparsity, rows)
    if not chosen:
        listed = "; ".join(f"{name} {reason}" for name, reason in reasons.items()) or "it has no linear layer"
        raise ArgumentError(
            f"to_sparse: no layer has enough zeros: {listed}. Use dropconnectpp.prune first, a larger `rows` if the "
            "model will run on batches, or min_sparsity to decide yourself."
        )
    if inplace:  # everything is checked: the same again, in the model itself
        dense = to_dense(model, inplace=True)
        chosen, _ = _choose(dense, min_sparsity, rows)
    return swap(dense, {layer: _sparse(layer) for layer in chosen})


def _choose(model: nn.Module, min_sparsity: float | None, rows: int) -> tuple[list[nn.Linear], dict[str, str]]:
    """The layers that become sparse, and why the others do not."""
    tied = tied_layers(list(model.modules()))
    chosen: list[nn.Linear] = []
    reasons: dict[str, str] = {}
    for name, layer in model.named_modules():
        if type(layer) not in (nn.Linear, SelectedLinear):
            continue
        assert isinstance(layer, nn.Linear)
        shown = name or "the model"
        size = layer.weight.numel()  # of the inputs that it reads: the others cost it nothing
        share = 1.0 - int((layer.weight != 0).sum()) / size
        least = crossover(size, rows) if min_sparsity is None else min_sparsity
        if id(layer) in tied:
            reasons[shown] = "shares its weight with another module"
        elif layer.weight.dtype not in DTYPES:
            reasons[shown] = f"is {str(layer.weight.dtype).removeprefix('torch.')}, and sparse rows are float32 or 64"
        elif least is None:
            reasons[shown] = f"has {size:,} weights, too few to gain at {rows} row{'s' if rows > 1 else ''}"
        elif share < least:
            reasons[shown] = f"has {share:.1%} zeros, and pays from {least:.0%} on"
        else:
            chosen.append(layer)
    return chosen, reasons


def _sparse(layer: nn.Linear) -> SparseLinear:
    if isinstance(layer, SelectedLinear):
        return SparseLinear.of(layer, layer.columns, layer.total)
    return SparseLinear.of(layer)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | LinearOperation | SparseLinear):
            continue
        shown = name or "the model"
        weight = module.values if isinstance(module, SparseLinear) else module.weight
        if nn.utils.parametrize.is_parametrized(module):
            raise ArgumentError(
                f"to_sparse: a parameter of {shown} is parametrised, so that its values are computed. "
                "Use torch.nn.utils.parametrize.remove_parametrizations first."
            )
        if module._forward_hooks or module._forward_pre_hooks:
            raise ArgumentError(
                f"to_sparse: {shown} has a forward hook, which a new layer would not have. Remove it first."
            )
        if weight.device.type != "cpu":
            raise ArgumentError(
                f"to_sparse: {shown} is on {weight.device}, and sparse rows pay on the CPU alone. Use model.cpu() "
                "to deploy there; on a GPU use dropconnectpp.compact, which makes the dense layers smaller."
            )
