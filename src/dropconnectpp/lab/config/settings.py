"""What all settings share: fields that are checked when a dataclass is made, and how plain data becomes settings."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar

from dropconnectpp.errors import DropConnectError

T = TypeVar("T")

LATE = {"late": True}
"""Marks a setting that was added after results had been stored: at its default, a digest leaves it out."""


class ProtocolError(DropConnectError, ValueError):
    """A setting of an experiment breaks a rule: the message names the setting, the rule and the value."""


def require(condition: bool, message: str) -> None:
    """Raise with the message unless the condition holds."""
    if not condition:
        raise ProtocolError(message)


def check_fields(settings: object) -> None:
    """Every field that is a Literal must hold one of its values, and every number must be finite."""
    hints = typing.get_type_hints(type(settings))
    for item in fields(settings):  # type: ignore[arg-type]
        hint, value = hints[item.name], getattr(settings, item.name)
        if typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
            require(value in choices, f"{item.name} must be one of {', '.join(map(str, choices))}, got {value!r}.")
        if hint in (float, float | None) and value is not None:
            require(math.isfinite(value), f"{item.name} must be finite, got {value}.")
            object.__setattr__(settings, item.name, float(value))  # 1 and 1.0 are one experiment with one digest


def late_settings(settings: Any) -> dict[str, Any]:
    """Plain data of settings within settings, without those marked `LATE` that have their defaults."""
    values: dict[str, Any] = {}
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.metadata == LATE and value == item.default:
            continue
        values[item.name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return late_settings(value)
    return tuple(_plain(one) for one in value) if isinstance(value, tuple) else value


def from_dict(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Settings from plain data, such as a TOML file; unknown names and wrong types are errors.

    >>> from dropconnectpp.lab.config.protocol import Protocol
    >>> from_dict(Protocol, {"data": "svhn", "method": {"kind": "dropout", "rate": 0.5}}).method.rate
    0.5
    """
    hints = typing.get_type_hints(kind)
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        require(name in known, f"{where}{name} is no setting. Known: {', '.join(sorted(known))}.")
    for item in fields(kind):  # type: ignore[arg-type]
        needed = item.default is MISSING and item.default_factory is MISSING
        require(item.name in values or not needed, f"{where}{item.name} must be given.")
    return kind(**{name: _convert(hints[name], value, f"{where}{name}") for name, value in values.items()})


def _chosen(options: tuple[Any, ...], value: Any, where: str) -> Any:
    """Which type of a union a value is for: of several dataclasses, the one of its kind."""
    known = [option for option in options if option is not types.NoneType]
    if len(known) == 1:
        return known[0]
    kinds = {option.kind: option for option in known}
    require(isinstance(value, Mapping), f"{where} must be a table of settings, got {value!r}.")
    kind = value.get("kind")
    require(kind in kinds, f"{where}.kind must be one of {', '.join(kinds)}, got {kind!r}.")
    return kinds[kind]


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _convert(_chosen(options, value, where), value, where)
    if is_dataclass(hint):
        require(isinstance(value, Mapping), f"{where} must be a table of settings, got {value!r}.")
        return from_dict(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{where} must be a list, got {value!r}.")
        return tuple(_convert(options[0], item, where) for item in value)
    if origin is Literal:
        return value
    if hint is float and type(value) is int:
        require(abs(value) < 10**300, f"{where} must be smaller than 1e300, got {value!r}.")
        return float(value)
    require(type(value) is hint, f"{where} must be of type {hint.__name__}, got {value!r}.")
    return value
