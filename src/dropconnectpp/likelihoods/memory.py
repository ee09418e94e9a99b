"""Which likelihood a model was trained with: left on the model by the ELBO, and kept in files by its description."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dropconnectpp.errors import ArgumentError, check_choice
from dropconnectpp.likelihoods.classes import Bernoulli, Categorical
from dropconnectpp.likelihoods.outputs import LogLikelihood
from dropconnectpp.likelihoods.regression import Gaussian, HeteroscedasticGaussian, LearnedNoise, Poisson, StudentT

_PLACE = "_dropconnectpp_likelihood"


class _Remembered:
    """Holds a likelihood outside the model's submodules; a pickle takes along what a description can say."""

    def __init__(self, likelihood: LogLikelihood | None) -> None:
        self.likelihood = likelihood

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (None if self.likelihood is None else describe(self.likelihood),)


def _restored(description: dict[str, Any] | None) -> _Remembered:
    return _Remembered(None if description is None else from_description(description))


def remember(model: nn.Module, likelihood: LogLikelihood | None) -> None:
    """Leave a likelihood on a model, for `predict` and `save`; None forgets it."""
    for module in _unwrapped(model):
        held = module.__dict__.get(_PLACE)
        if held is None or held.likelihood is not likelihood:
            object.__setattr__(module, _PLACE, _Remembered(likelihood))


def remembered(model: nn.Module) -> LogLikelihood | None:
    """The likelihood that was left on a model; None if there is none."""
    for module in _unwrapped(model):
        held = module.__dict__.get(_PLACE)
        if held is not None and held.likelihood is not None:
            found: LogLikelihood = held.likelihood
            return found
    return None


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and what DistributedDataParallel or torch.compile wrapped."""
    yield model
    for name in ("module", "_orig_mod"):
        inner = model._modules.get(name)
        if inner is not None and len(model._modules) == 1:
            yield from _unwrapped(inner)


_WRITERS: dict[type[Any], Callable[[Any], dict[str, Any]]] = {
    Categorical: lambda x: {
        "name": "categorical",
        "label_smoothing": x.label_smoothing,
        "temperature": x.temperature,
    },
    Bernoulli: lambda x: {"name": "bernoulli", "temperature": x.temperature},
    Gaussian: lambda x: {"name": "gaussian", "scale": list(x.scales)},
    StudentT: lambda x: {"name": "student_t", "scale": list(x.scales), "df": x.df},
    HeteroscedasticGaussian: lambda x: {"name": "heteroscedastic_gaussian", "factor": x.factor},
    Poisson: lambda x: {"name": "poisson"},
    LearnedNoise: lambda x: {**(describe(x.fixed()) or {}), "learned": True},
}


def describe(likelihood: object) -> dict[str, Any] | None:
    """A likelihood of this package as plain data for JSON; None for any other callable.

    >>> from dropconnectpp.likelihoods import gaussian
    >>> describe(gaussian(0.5))
    {'name': 'gaussian', 'scale': [0.5]}
    """
    writer = _WRITERS.get(type(likelihood))
    return None if writer is None else writer(likelihood)


_READERS: dict[str, Callable[[dict[str, Any]], LogLikelihood]] = {
    "categorical": lambda d: Categorical(**d),
    "bernoulli": lambda d: Bernoulli(**d),
    "gaussian": lambda d: Gaussian(**_with_scale(d)),
    "student_t": lambda d: StudentT(**_with_scale(d)),
    "heteroscedastic_gaussian": lambda d: HeteroscedasticGaussian(**d),
    "poisson": lambda d: Poisson(**d),
}


def from_description(description: dict[str, Any]) -> LogLikelihood:
    """The likelihood that `describe` described; a learned one starts at the scale it had.

    >>> from_description({"name": "poisson"})
    Poisson()
    """
    fields = dict(description)
    name = check_choice("the likelihood's name", fields.pop("name", None), _READERS)
    learned = fields.pop("learned", False)
    try:
        numbers = [value for key, value in fields.items() if key != "scale"]
        if not all(map(_is_number, numbers)) or not isinstance(learned, bool):
            raise TypeError("a field is no number")
        found = _READERS[name](fields)
        if learned and not isinstance(found, Gaussian | StudentT):
            raise TypeError("its noise is not learned")
    except (TypeError, LookupError) as error:
        raise ArgumentError(f"the description of the likelihood {name!r} is damaged: {description!r}.") from error
    if learned:
        assert isinstance(found, Gaussian | StudentT)
        learnt = LearnedNoise(found, len(found.scales))
        with torch.no_grad():
            learnt.log_scale.copy_(torch.tensor(found.scales, dtype=torch.float64).log())
        return learnt
    return found


def _with_scale(description: dict[str, Any]) -> dict[str, Any]:
    scales = tuple(description["scale"])
    if not all(_is_number(scale) for scale in scales):
        raise TypeError("a scale is no number")
    return {**description, "scale": scales if len(scales) > 1 else scales[0]}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
