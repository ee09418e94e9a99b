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

from dropconnectpp._compat import tree_leaves
from dropconnectpp.conversion import to_dense
from dropconnectpp.errors import ArgumentError, ConversionError, check_count
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
        ArgumentError: The path cannot be written to, an option is not what it must be, or the model does not run on
            the example.
        ConversionError: The model cannot be folded, the exporter cannot follow what it does, or the result would have
            another opset or fewer dynamic axes than asked for.
        MissingPackageError: onnx or onnxscript is not installed.
    """
    require("onnx", "onnx")
    require("onnxscript", "onnx")
    if opset is not None:
        check_count("opset", opset, OLDEST_OPSET)
    if external_data is not None and not isinstance(external_data, bool):
        raise ArgumentError(f"to_onnx: external_data must be True, False or None, got {external_data!r}.")
    inputs = _inputs(example_inputs)
    if dynamic_shapes is None and dynamic_batch:
        batch = torch.export.Dim("batch")
        dynamic_shapes = tuple({0: batch} if isinstance(x, Tensor) and x.ndim else None for x in inputs)
    dynamic = _dynamic_axes(inputs, dynamic_shapes)
    dense = to_dense(unwrapped(model), mode).eval()
    with replacing_with_data(path) as temporary:
        program = _export(dense, inputs, dynamic_shapes, opset)
        _check_program(program, opset, dynamic)
        _strip(program)
        program.save(str(temporary), external_data=external_data)


def _inputs(example_inputs: Any) -> tuple[Any, ...]:
    if isinstance(example_inputs, Tensor):
        return (example_inputs,)
    if not isinstance(example_inputs, tuple | list) or not example_inputs:
        raise ArgumentError(
            f"to_onnx: example_inputs must be a tensor, or a tuple of the model's inputs, got {example_inputs!r:.60}."
        )
    return tuple(example_inputs)


def _dynamic_axes(inputs: tuple[Any, ...], shapes: Any) -> dict[int, list[int]]:
    """Which axes may be of any length, by the place of the tensor among all tensors of the inputs."""
    found: dict[int, list[int]] = {}
    if not isinstance(shapes, tuple | list | dict) or len(shapes) != len(inputs):
        return found  # for the exporter to refuse
    place = 0
    for value, spec in zip(inputs, shapes.values() if isinstance(shapes, dict) else shapes, strict=True):
        if isinstance(value, Tensor) and isinstance(spec, dict | tuple | list):
            axes = spec if isinstance(spec, dict) else dict(enumerate(spec))
            beyond = [axis for axis in axes if axis not in range(value.ndim)]
            if beyond:
                raise ArgumentError(
                    f"to_onnx: dynamic_shapes names axis {beyond[0]!r} of an input of shape {tuple(value.shape)}."
                )
            named = [axis for axis, length in axes.items() if not _fixed(length)]
            found[place] = named
        place += sum(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    return found


def _fixed(length: Any) -> bool:
    return length is None or isinstance(length, int) or length is torch.export.Dim.STATIC


def _export(dense: nn.Module, inputs: tuple[Any, ...], shapes: Any, opset: int | None) -> torch.onnx.ONNXProgram:
    for module in dense.modules():
        module.training = False  # some call .train() on parts of themselves
    try:
        with torch.no_grad():
            dense(*inputs)
    except Exception as error:
        found = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in tree_leaves(inputs)]
        raise ArgumentError(
            f"to_onnx: the model does not run on example_inputs (shapes {found}): {shown(str(error), 300)}. "
            "Give inputs as the model takes them."
        ) from error
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


def _check_program(program: torch.onnx.ONNXProgram, opset: int | None, dynamic: dict[int, list[int]]) -> None:
    """The exporter gives another opset, or a fixed axis, without a word where it cannot do what it was asked for."""
    made = program.model.opset_imports[""]
    if opset is not None and made != opset:
        raise ConversionError(
            f"to_onnx: the installed onnx cannot write opset {opset}; the model would have opset {made}. "
            "Leave out opset, or give one that it knows."
        )
    for place, axes in dynamic.items():
        value = program.model.graph.inputs[place]
        shape: Any = value.shape
        fixed = [axis for axis in axes if isinstance(shape[axis], int)]
        if fixed:
            raise ConversionError(
                f"to_onnx: axis {fixed[0]} of the input {value.name!r} was to be of any length, and the model fixes it "
                f"at {shape[fixed[0]]}. Use dynamic_batch=False, or leave the axis out of dynamic_shapes."
            )


def _strip(program: torch.onnx.ONNXProgram) -> None:
    """Without the exporter's notes: in a small model they outweigh the weights, and they hold paths of this machine."""
    graph = program.model.graph
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    for node in graph.all_nodes():
        node.metadata_props.clear()
        values += node.outputs
    for value in values:
        value.metadata_props.clear()


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause that says anything."""
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    lines = [line.strip() for cause in reversed(causes) for line in str(cause).splitlines() if line.strip()]
    return shown(lines[0], 300).rstrip(".") if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own deprecated names, of torchvision, which nobody needs here, and of other opsets."""

    def wanted(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    converter = logging.getLogger("onnxscript.version_converter")
    level = converter.level
    registration.addFilter(wanted)
    converter.setLevel(logging.CRITICAL)  # what it could not do is an error of ours
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        registration.removeFilter(wanted)
        converter.setLevel(level)
