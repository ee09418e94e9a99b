"""What `predict` takes: tensors, a tuple, a dictionary or a loader, as calls of a model on bounded batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError

TARGET_KEYS = ("labels", "label", "targets", "target", "y")
"""Under which keys a batch that is a dictionary may hold its target."""


@dataclass(frozen=True)
class Call:
    """One call of a model, and the target that came with its inputs."""

    inputs: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs that are tensors with an axis."""
        return [x for x in (*self.inputs, *self.options.values()) if isinstance(x, Tensor) and x.ndim]


def is_loader(inputs: tuple[Any, ...]) -> bool:
    """Whether the inputs are one iterable of batches."""
    return (
        len(inputs) == 1 and not isinstance(inputs[0], Tensor | Mapping | tuple | list | str) and _iterates(inputs[0])
    )


def _iterates(value: Any) -> bool:
    return hasattr(value, "__iter__") or hasattr(value, "__next__")


def number_of_batches(loader: Any) -> int | None:
    """How many batches a loader has, where it knows."""
    try:
        return len(loader)
    except TypeError:
        return None


def calls_of(loader: Any, model: nn.Module) -> Iterator[Call]:
    """A loader's batches as calls, on the model's device.

    The last item of a batch is its target unless the model needs it as an input; in a dictionary it is one of
    `TARGET_KEYS`.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for batch in loader:
        yield call_of_batch(_moved(batch, device), model)


def call_of_batch(batch: Any, model: nn.Module) -> Call:
    """One batch of a loader as a call."""
    if isinstance(batch, Mapping):
        target = next((batch[key] for key in TARGET_KEYS if key in batch), None)
        return call_of(({key: value for key, value in batch.items() if key not in TARGET_KEYS},), model, target)
    if isinstance(batch, tuple | list):
        *inputs, last = batch
        if inputs and _binds(model, tuple(inputs), {}):
            return Call(tuple(inputs), target=last)
        return Call(tuple(batch))
    return Call((batch,))


def call_of(inputs: tuple[Any, ...], model: nn.Module, target: Any = None) -> Call:
    """What a user gave as a call: a tuple becomes several inputs, a dictionary keywords, where the model takes them."""
    if len(inputs) == 1:
        only = inputs[0]
        if isinstance(only, Mapping) and all(isinstance(key, str) for key in only) and _binds(model, (), only):
            return Call((), dict(only), target)
        if isinstance(only, tuple | list) and _binds(model, tuple(only), {}):
            return Call(tuple(only), target=target)
    return Call(inputs, target=target)


def _binds(model: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*inputs, **options)
    except TypeError:
        return False
    return True


def pieces(call: Call, batch_size: int | None) -> list[Call]:
    """A call in pieces of at most ``batch_size`` examples; whole where its tensors have no first axis in common."""
    lengths = {len(x) for x in call.tensors}
    if batch_size is None or len(lengths) != 1 or max(lengths) <= batch_size:
        return [call]
    count = max(lengths)

    def rows(value: Any, start: int) -> Any:
        return value[start : start + batch_size] if isinstance(value, Tensor) and value.ndim else value

    return [
        Call(tuple(rows(x, start) for x in call.inputs), {key: rows(x, start) for key, x in call.options.items()})
        for start in range(0, count, batch_size)
    ]


def check_rows(call: Call, rows: int) -> None:
    """Raise unless a piece of a call gave one row for each of its examples."""
    expected = len(call.tensors[0])
    if rows != expected:
        raise ArgumentError(
            f"predict split the inputs along their first axis, and {expected} examples gave an output of {rows} rows. "
            "Use batch_size=None to predict in one piece, or give the examples the first axis."
        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_moved(item, device) for item in value]
    return value
