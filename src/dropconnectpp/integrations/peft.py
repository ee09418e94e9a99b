"""PEFT: low-rank adapters on converted layers."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from dropconnectpp.conversion.kinds import CONVERTED
from dropconnectpp.errors import ArgumentError, ConversionError, MissingPackageError
from dropconnectpp.layers.base import MaskedLayer

try:
    from peft import LoraConfig
    from peft.tuners import lora
except ImportError as error:
    raise MissingPackageError(
        "dropconnectpp.integrations.peft needs PEFT: pip install 'dropconnectpp[peft]'."
    ) from error

ConfigT = TypeVar("ConfigT", bound=LoraConfig)


def _gated(plain: type[Any]) -> type[Any]:
    """PEFT's adapter of a plain layer for one with gates, which does not merge before these are folded in."""

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # PEFT reads its sizes all the same
            plain.__init__(self, *arguments, **options)

    def merge(self: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(self.base_layer, MaskedLayer):
            raise ConversionError(
                f"the adapters of a {type(self.base_layer).__name__} cannot be merged: its weight has gates, and a sum "
                "of weights has one gate where its parts have one each. Fold the gates first: to_dense(model), and "
                "merge that."
            )
        plain.merge(self, *arguments, **options)

    return type(f"Gated{plain.__name__}", (plain,), {"__init__": __init__, "merge": merge, "__module__": __name__})


_ADAPTERS = {
    ours: _gated(getattr(lora, theirs.__name__))
    for table in CONVERTED.values()
    for theirs, ours in table.items()
    if hasattr(lora, theirs.__name__)
}
"""For each of our layers the adapter of the plain one."""


def with_gated_layers(config: ConfigT) -> ConfigT:
    """Let a LoRA configuration adapt converted layers too; returns it.

    The adapter is added to what the layer gives under the gates of the pass. The layer keeps its gates, and PEFT
    freezes its weight and its posterior; set `requires_grad` of what is to be trained on.

    Args:
        config: A `peft.LoraConfig`.

    Returns:
        The configuration that was given.

    Raises:
        ArgumentError: The configuration asks for what needs the layer's own weight: DoRA.
    """
    if not isinstance(config, LoraConfig):
        raise ArgumentError(f"with_gated_layers takes a peft.LoraConfig, got a {type(config).__name__}.")
    if config.use_dora:
        raise ArgumentError("with_gated_layers: DoRA reads the layer's weight without its gates. Use use_dora=False.")
    config._register_custom_module(_ADAPTERS)
    return config
