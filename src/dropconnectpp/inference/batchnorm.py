"""Keeps batch statistics out of extra passes: normalisation layers count a minibatch once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def frozen_statistics(model: nn.Module | None) -> Iterator[None]:
    """Within the context, running means and variances may move; afterwards they are as before.

    The buffers are swapped for copies rather than written back, so that a graph that holds the
    originals is not disturbed.
    """
    swapped: list[tuple[nn.Module, str, Tensor]] = []
    for module in () if model is None else model.modules():
        if isinstance(module, _NormBase) and module.training:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    swapped.append((module, name, buffer))
                    module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in swapped:
            module._buffers[name] = buffer
