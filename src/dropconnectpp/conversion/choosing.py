"""What of a model is converted: patterns of names and types against its modules and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from dropconnectpp.conversion.hosting import DEFAULT, ON_REQUEST, Connections, Host, floating_names, is_huggings_conv1d
from dropconnectpp.conversion.kinds import plain_layers
from dropconnectpp.errors import ArgumentError, ConversionError
from dropconnectpp.layers.base import MaskedLayer

Pattern = str | type[nn.Module]


@dataclass(frozen=True)
class Chosen:
    """A module that is to be converted."""

    parameters: tuple[str, ...] | None
    """The parameters that were asked for; None: all that the module has."""
    by_name: bool
    """Whether it was asked for by its full name."""


@dataclass
class Choice:
    """What a call of `convert` asks for."""

    include: list[Pattern] | None
    exclude: list[Pattern]
    parameters: list[str]
    _whole: set[nn.Module] = field(default_factory=set)
    """Attention blocks that are converted, with the projection that they read."""

    def of(self, name: str, module: nn.Module, owner: nn.Module | None) -> Chosen | None:
        """How a module was chosen; None if it was not."""
        if is_converted(module) or matches(name, module, self.exclude):
            return None
        if self._asks_for(name, module) or owner in self._whole:
            if isinstance(module, nn.MultiheadAttention):
                self._whole.add(module)
            return Chosen(None, self.include is not None and name in self.include)
        named = tuple(own for own in floating_names(module) if self._names(name, own))
        return Chosen(named, True) if named else None

    def _asks_for(self, name: str, module: nn.Module) -> bool:
        if isinstance(module, ON_REQUEST):
            return self.include is not None and _is_asked_for(name, module, self.include)
        if not convertible(module):
            return False
        return self.include is None or matches(name, module, self.include)

    def _names(self, module: str, parameter: str) -> bool:
        full = f"{module}.{parameter}" if module else parameter
        return any(fnmatchcase(full, pattern) for pattern in self.parameters)

    def check(self, model: nn.Module) -> None:
        """Raise unless each pattern matches something that could be converted: a typing error would leave it plain."""
        layers = [(name, module) for name, module in model.named_modules() if convertible(module)]
        tables = [(name, module) for name, module in model.named_modules() if isinstance(module, ON_REQUEST)]
        missed = [
            one
            for one in self.include or []
            if not any(matches(name, module, [one]) for name, module in layers)
            and not any(_is_asked_for(name, module, [one]) for name, module in tables)
        ]
        if missed:
            shown = ", ".join(repr(one) if isinstance(one, str) else one.__name__ for one in missed)
            raise ConversionError(
                f"convert: nothing matches include={shown}. A pattern is a layer's full name, with wildcards, or a "
                f"type. Layers that could be converted: {names_of(model)}."
            )
        known = [name for name, value in model.named_parameters() if value.is_floating_point()]
        for pattern in self.parameters:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ConversionError(
                    f"convert: no parameter matches parameters={pattern!r}. There are: {', '.join(known[:20])}"
                    f"{', …' if len(known) > 20 else ''}."
                )


def convertible(module: nn.Module) -> bool:
    """Whether `convert` takes a module without being asked for it."""
    kinds = isinstance(module, (*plain_layers(), *DEFAULT)) or is_huggings_conv1d(module)
    return kinds and not is_converted(module)


def is_converted(module: nn.Module) -> bool:
    """Whether a module is ours already."""
    return isinstance(module, MaskedLayer | Host | Connections)


def _is_asked_for(name: str, module: nn.Module, wanted: Iterable[Pattern]) -> bool:
    """Whether a table is asked for by its full name or its type: a wildcard means layers."""
    return any(name == one if isinstance(one, str) else isinstance(module, one) for one in wanted)


def each_module(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Each module once, owners first, with its name and its owner."""
    owners = {id(child): owner for owner in model.modules() for child in owner.children()}
    for name, module in model.named_modules():
        yield name, module, owners.get(id(module))


def names_of(model: nn.Module) -> str:
    """The layers that could be converted, for a message."""
    names = [name or "(the model itself)" for name, one in model.named_modules() if convertible(one)]
    return ", ".join(names) or "none"


def matches(name: str, module: nn.Module, wanted: Iterable[Pattern]) -> bool:
    """Whether a module has one of the names or types."""
    return any(
        fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(module, pattern) for pattern in wanted
    )


def patterns(given: Pattern | Sequence[Pattern] | None) -> list[Pattern] | None:
    """Names and types of modules as a list; None stays None."""
    if given is None:
        return None
    found = [given] if isinstance(given, str | type) else list(given)
    for pattern in found:
        if not isinstance(pattern, str) and not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            raise ArgumentError(
                f"include and exclude take module names or module types, got {pattern!r}. "
                "For example include=['fc*', nn.Conv2d]."
            )
    return found


def parameter_patterns(given: str | Sequence[str]) -> list[str]:
    """Names of parameters as a list."""
    found = [given] if isinstance(given, str) else list(given)
    for pattern in found:
        if not isinstance(pattern, str):
            raise ArgumentError(
                f"parameters takes names of parameters, got {pattern!r}. "
                "For example parameters=['*.experts.down_proj']."
            )
    return found
