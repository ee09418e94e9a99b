"""The exceptions users can catch, and the checks that raise them with one voice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DropConnectError(Exception):
    """Every error this library raises on purpose."""


class ArgumentError(DropConnectError, ValueError):
    """An argument breaks a rule: the message names it, the rule, the value and the next step."""


class ShapeError(DropConnectError, ValueError):
    """A tensor does not have the shape that the layer or the ELBO needs."""


class NonFiniteError(DropConnectError, ArithmeticError):
    """NaN or infinity reached the loss; no parameter and no running moment was touched."""


class ConversionError(DropConnectError, TypeError):
    """A module cannot become a DropConnect++ layer, or would silently stop being one."""


class FileFormatError(DropConnectError, OSError):
    """A saved model is damaged, or is not one of ours, or does not fit the model given."""


class FileWriteError(DropConnectError, OSError):
    """A file could not be written, on a full disk for example; nothing half-written is left."""


class MissingPackageError(DropConnectError, ImportError):
    """An optional package is needed for this call; the message says how to install it."""


def check_positive(name: str, value: float) -> float:
    """Return ``value`` as a float if it is a finite number above zero, else raise."""
    number = float(value)
    if not 0.0 < number < float("inf"):
        raise ArgumentError(f"{name} must be a finite number above 0, got {value!r}.")
    return number


def check_not_negative(name: str, value: float) -> float:
    """Return ``value`` as a float if it is a finite number of at least zero, else raise."""
    number = float(value)
    if not 0.0 <= number < float("inf"):
        raise ArgumentError(f"{name} must be a finite number of at least 0, got {value!r}.")
    return number


def check_probability(name: str, value: float) -> float:
    """Return ``value`` as a float if it lies strictly between 0 and 1, else raise."""
    number = float(value)
    if not 0.0 < number < 1.0:
        raise ArgumentError(
            f"{name} must lie strictly between 0 and 1, got {value!r}. "
            "To keep every synapse use a plain nn layer; to drop one for good use dropconnectpp.prune."
        )
    return number


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``choices``, else raise with the list of them."""
    options = list(choices)
    if not isinstance(value, str) or value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ArgumentError(f"{name} must be one of {listed}; got {value!r}.")
    return value


def check_count(name: str, value: int, minimum: int = 1) -> int:
    """Return ``value`` if it is a whole number of at least ``minimum``, else raise."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < minimum:
        raise ArgumentError(f"{name} must be a whole number of at least {minimum}, got {value!r}.")
    return value.__index__()


def named_options(call: Callable[P, T]) -> Callable[P, T]:
    """A function, or an ``__init__``, whose unknown options are errors that name the nearest known one.

    >>> @named_options
    ... def drawn(model: object, *, num_samples: int = 1) -> int:
    ...     return num_samples
    >>> drawn(None, num_sample=3)
    Traceback (most recent call last):
    ...
    dropconnectpp.errors.ArgumentError: drawn has no option 'num_sample'. Did you mean 'num_samples'?
    """
    known = [name for name, one in signature(call).parameters.items() if one.kind is not Parameter.POSITIONAL_ONLY]
    owner = call.__qualname__.removesuffix(".__init__")
    options = [name for name in known if name != "self"]

    @wraps(call)
    def checked(*args: P.args, **given: P.kwargs) -> T:
        for name in given:
            if name not in known:
                near = get_close_matches(name, options, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(options)}."
                raise ArgumentError(f"{owner} has no option {name!r}. {hint}")
        return call(*args, **given)

    return checked
