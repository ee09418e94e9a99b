"""What a model's parts are called in a file: as in the model underneath `torch.compile` and `DataParallel`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dropconnectpp._compat import COMPILED, compiled_from
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.dropconnectpp import PRUNED


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what was put around it."""
    while True:
        inner = compiled_from(model)
        if inner is None and isinstance(model, nn.DataParallel | DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def plain_name(name: str) -> str:
    """A module's or tensor's name without what `torch.compile` adds to it.

    >>> plain_name("encoder._orig_mod.weight")
    'encoder.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED) if COMPILED in name else name


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its plain name; the inner one where a compiled module stands around it."""
    return {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}


def masked_by_name(model: nn.Module) -> dict[str, MaskedLayer]:
    """Every masked layer once, by its plain name."""
    return {plain_name(name): module for name, module in model.named_modules() if isinstance(module, MaskedLayer)}


def stored_state(model: nn.Module) -> dict[str, Tensor]:
    """The state that a file holds: without what masked layers can tell from the rest."""
    told = {f"{name}.{PRUNED}" if name else PRUNED for name, m in model.named_modules() if isinstance(m, MaskedLayer)}
    return {key: value for key, value in model.state_dict().items() if key not in told}


def join(name: str, key: str) -> str:
    """A tensor's name from its module's and its own."""
    return f"{name}.{key}" if name else key


def shown(text: object, limit: int = 80) -> str:
    """A file's text as an error message may show it: short, and without control characters.

    >>> shown("weight"), shown("a" + chr(27) + "[2J")
    ('weight', "'a\\\\x1b[2J'")
    """
    plain = text if isinstance(text, str) else repr(text)
    plain = plain if plain.isprintable() else repr(plain)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def first_few(faults: Mapping[str, str] | list[str], limit: int = 5) -> str:
    """Several faults in one line."""
    listed = sorted(faults)
    more = f"; and {len(listed) - limit} more" if len(listed) > limit else ""
    return "; ".join(listed[:limit]) + more
