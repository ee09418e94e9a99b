"""Plain JSON values for the store: what may be kept, and how numbers that are not finite are written.

JSON has no word for such numbers. They are written as the strings "NaN", "Infinity" and "-Infinity" and come back
as floats; a text that reads like one of them is refused, so that nothing is ambiguous.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from dropconnectpp.errors import ArgumentError

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def check_text(name: str, value: object) -> str:
    """One line of text, or an error that names the argument."""
    if not isinstance(value, str) or not value.isprintable():
        raise ArgumentError(f"{name} must be one line of text, got {value!r}.")
    return value


def check_mapping(name: str, value: object) -> object:
    """A mapping, or an error that names the argument."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be a mapping from names to values, got {type(value).__name__}.")
    return value


def canonical(value: object) -> str:
    """JSON text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def to_json(value: object, where: str) -> str:
    """JSON text of plain data; ``where`` names it in errors."""
    return canonical(_encode(value, where))


def _encode(value: object, where: str) -> object:
    """Plain JSON data, or an error that names the place."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return word(value)
    if isinstance(value, str) and value not in WORDS:
        return value
    if isinstance(value, list | tuple):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _encode(item, f"{where}.{name}") for name, item in value.items()}
    raise ArgumentError(
        f"{where} must be a plain number, text, list or mapping with text keys, "
        f"got {type(value).__name__} {value!r:.60}. "
        "Arrays and tensors have tolist(); a number that is not finite must be a float, not a text."
    )


def decode(value: Any) -> Any:
    """Data as `to_json` was given it."""
    if isinstance(value, str):
        return WORDS.get(value, value)
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        return {name: decode(item) for name, item in value.items()}
    return value


def word(value: object) -> object:
    """The value, or the word for a float that is not finite."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
