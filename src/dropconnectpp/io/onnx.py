"""`to_onnx`: a folded model as ONNX."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.conversion import to_dense
from dropconnectpp.errors import ConversionError, check_count
from dropconnectpp.io.disk import replacing_with_data, require
from dropconnectpp.io.naming import shown, unwrapped

OLDEST_OPSET = 18
"""The exporter writes this one, and turns it into later ones."""


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Tensor | Sequence[Any],
    *,
    mode: str = "mean",
    dynamic_batch: bool = True,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    external_data: bool | None = None,
) -> None:
    """Fold the model with `to_dense` and write it as ONNX; the file appears whole or not at all.

    Args:
        model: Any model, converted or plain. It is not changed.
        path: The file, ``m.onnx`` for example.
        example_inputs: One tensor, or a tuple of the model's inputs.
        mode: What becomes of the gates: see `to_dense`.
        dynamic_batch: The first axis of each input may be of any length.
        dynamic_shapes: Which axes may be of any length, as `torch.export.export` takes it: for a model with one
            input ``({0: Dim("batch"), 1: Dim("tokens")},)``. It goes before ``dynamic_batch``.
        opset: The version of ONNX's operators; by default the exporter's.
        external_data: Put the weights into a second file, ``m.onnx.data``, which must stay beside the first. By
            default only where a model is too large for one file, at 2 GB.

    Raises:
        ArgumentError: The path cannot be written to, or an option is not what it must be.
        ConversionError: The model cannot be folded, or the exporter cannot follow what it does.
        MissingPackageError: onnx or onnxscript is not installed.
    """
    require("onnx", "onnx")
    require("onnxscript", "onnx")
    if opset is not None:
        check_count("opset", opset, OLDEST_OPSET)
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if dynamic_shapes is None and dynamic_batch:
        batch = torch.export.Dim("batch")
        dynamic_shapes = tuple({0: batch} if isinstance(x, Tensor) and x.ndim else None for x in inputs)
    dense = to_dense(unwrapped(model), mode).eval()
    with replacing_with_data(path) as temporary:
        _export(dense, inputs, dynamic_shapes, opset).save(str(temporary), external_data=external_data)


def _export(dense: nn.Module, inputs: tuple[Any, ...], shapes: Any, opset: int | None) -> torch.onnx.ONNXProgram:
    for module in dense.modules():
        module.training = False  # some call .train() on parts of themselves
    with _quiet():
        try:
            program = torch.onnx.export(
                dense, inputs, dynamo=True, dynamic_shapes=shapes, opset_version=opset, verbose=False
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise ConversionError(
                f"to_onnx: the model cannot be exported: {_reason(error)}. Write what it does without branches on a "
                "tensor's values, or export a part of it."
            ) from error
    assert program is not None
    return program


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause that says anything."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    lines = [line.strip() for cause in reversed(causes) for line in str(cause).splitlines() if line.strip()]
    return shown(lines[0], 300).rstrip(".") if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own deprecated names, and of torchvision, which nobody needs here."""

    def wanted(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.removeFilter(wanted)
