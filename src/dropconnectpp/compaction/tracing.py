"""A model's graph: which operation follows which, from one pass over an example, by Torch-Pruning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp._compat import tree_leaves
from dropconnectpp.errors import ArgumentError, MissingPackageError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Call:
    """One call of a module in the pass."""

    source: Any
    """The operation that made its input; None for what no parameter went into."""
    made_by: Any
    """The operation that made its output."""
    input_axes: int
    output_axes: int
    positions: int
    """Numbers of its output for one example and one unit."""


@dataclass
class Trace:
    """The graph of one pass."""

    nodes: dict[Any, Any]
    """Torch-Pruning's node of each operation: its type and what it reads."""
    calls: dict[nn.Module, list[Call]]
    results: list[Any]
    """The operations that made the model's outputs."""


def as_inputs(example_input: Any) -> Inputs:
    """What the model is called with: a tensor, a tuple or list of positional inputs, or keywords."""
    if isinstance(example_input, dict):
        return (), dict(example_input)
    return (tuple(example_input), {}) if isinstance(example_input, tuple | list) else ((example_input,), {})


def check_example(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The model's outputs for the example; an error if it does not run or gives no numbers."""
    try:
        with torch.no_grad():
            outputs = floats(model(*inputs[0], **inputs[1]))
    except Exception as error:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in tree_leaves(inputs)]
        raise ArgumentError(
            f"compact: the model does not run on example_input (shapes {shapes}): {error}. Give inputs as the model "
            "takes them: a tensor, a tuple of positional inputs or a dict of keywords."
        ) from error
    if not outputs:
        raise ArgumentError("compact: the model gives no floating-point tensor for example_input.")
    return outputs


def floats(outputs: Any) -> list[Tensor]:
    """The floating-point tensors in a model's outputs."""
    leaves = tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def trace(model: nn.Module, inputs: Inputs, known: tuple[type[nn.Module], ...]) -> Trace:
    """Run the model once and note every operation; ``known`` are the modules that count as a whole."""
    graphs = _require()
    calls: dict[nn.Module, list[Call]] = {}
    results: list[Any] = []
    hooks = [m.register_forward_hook(_recorder(calls)) for m in model.modules() if isinstance(m, known)]

    def leaves(outputs: Any) -> list[Tensor]:
        found = [tensor for tensor in floats(outputs) if tensor.grad_fn is not None]
        results.extend(tensor.grad_fn for tensor in found)
        return found

    try:
        with _differentiable(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = graphs.DependencyGraph()
            graph.build_dependency(
                model,
                example_inputs=inputs,
                forward_fn=lambda called, given: called(*given[0], **given[1]),
                output_transform=leaves,
                verbose=False,
            )
    except Exception as error:  # the model runs on the example: what fails is the graph of it
        raise ArgumentError(
            f"compact: Torch-Pruning cannot follow the model ({type(error).__name__}: {error}). Make its parts compact "
            "one by one; nothing was changed."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return Trace({node.grad_fn: node for node in graph.module2node.values()}, calls, results)


def _require() -> Any:
    try:
        return import_module("torch_pruning.dependency")
    except ImportError as error:
        raise MissingPackageError(
            "torch_pruning is needed to follow layers that are not in a nn.Sequential: "
            "pip install 'dropconnectpp[compact]'."
        ) from error


def _recorder(calls: dict[nn.Module, list[Call]]) -> Callable[[nn.Module, Any, Any], None]:
    def record(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):
            output, given = output[0], given[:1] if len(given) > 1 and given[0].shape == given[1].shape else ()
        if not isinstance(output, Tensor) or not given or not isinstance(given[0], Tensor):
            return
        source = given[0].grad_fn
        units = int(getattr(module, "out_features", getattr(module, "out_channels", output.shape[-1])))
        positions = output.numel() // max(units * _examples(module, output), 1)
        calls.setdefault(module, []).append(Call(source, output.grad_fn, given[0].ndim, output.ndim, positions))

    return record


def _examples(module: nn.Module, output: Tensor) -> int:
    """How many examples an output holds."""
    if isinstance(module, nn.MultiheadAttention):
        return output.shape[0 if module.batch_first else 1] if output.ndim == 3 else 1
    return output.shape[0] if output.ndim > 1 else 1


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """The graph is autograd's: parameters that are frozen would be missing in it."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def probes(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The example, and other numbers of its shapes: what is constant must be so for both."""
    generator = torch.Generator().manual_seed(0)

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return torch.randn(value.shape, generator=generator).to(value)

    return inputs, (
        tuple(other(value) for value in inputs[0]),
        {name: other(value) for name, value in inputs[1].items()},
    )


def count_positions(model: nn.Module, inputs: Inputs, known: tuple[type[nn.Module], ...]) -> dict[str, int]:
    """For each layer, how many positions its output has for one example."""
    calls: dict[nn.Module, list[Call]] = {}
    hooks = [m.register_forward_hook(_recorder(calls)) for m in model.modules() if isinstance(m, known)]
    try:
        model(*inputs[0], **inputs[1])
    finally:
        for hook in hooks:
            hook.remove()
    return {name: calls[module][0].positions for name, module in model.named_modules() if module in calls}
