"""`calibrate`: temperature scaling on held-out data, kept with the model's likelihood, and undone as easily."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, check_count, named_options
from dropconnectpp.likelihoods import Categorical, LogLikelihood, remember, remembered
from dropconnectpp.metrics.evaluation import batches, target_of
from dropconnectpp.prediction.mixture import over_networks
from dropconnectpp.prediction.monte_carlo import BATCH_SIZE, batchwise, likelihood_for

RANGE = (0.05, 20.0)
POINTS = 25
"""Factors tried in each of the passes over the data; the second looks closer at the best of the first."""


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` did to a model."""

    factor: float
    """What the temperature, or the noise's scale, was multiplied by: above 1 the model had been too sure."""
    nll_before: float
    """Mean negative log-likelihood of the held-out examples, in nats."""
    nll_after: float
    count: int
    """How many held-out examples."""
    likelihood: LogLikelihood
    """What predictions use now."""
    model: nn.Module = field(repr=False, compare=False)
    previous: LogLikelihood | None = field(repr=False, compare=False)

    def undo(self) -> None:
        """Leave on the model the likelihood that it had before; a later calibration is not undone by an earlier one.

        Raises:
            ArgumentError: the model's likelihood is no longer the one that this left there.
        """
        if remembered(self.model) is not self.likelihood:
            raise ArgumentError("undo: the model's likelihood has changed since. Undo the later calibration first.")
        remember(self.model, self.previous)


@named_options
def calibrate(
    model: nn.Module,
    loader: Iterable[Any] | tuple[Any, ...],
    *,
    num_samples: int = 30,
    likelihood: LogLikelihood | None = None,
    batch_size: int = BATCH_SIZE,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
) -> Calibration:
    """Scale a model's confidence to what held-out data say: temperature scaling, Guo et al. (2017).

    One number: what logits are divided by, or what the noise of real values is multiplied by. It minimises the NLL of
    the prediction averaged over networks. Parameters stay as they are. The scaled likelihood is left on the model,
    where `predict` and `evaluate` find it and `save` keeps it.

    Args:
        model: Any model, with masked layers or without.
        loader: Held-out batches of inputs and targets, gone through three times; or a tuple of tensors, the last of
            them the target. Not training data, on which a model is surer and more often right; nor test data.
        num_samples: How many networks are drawn.
        likelihood: As in `predict`; None: the one that the model was trained with.
        batch_size: Of tensors; a loader has its own.
        generator: Where the masks' seeds come from.
        progress: Whether a bar is shown on stderr; None: for what takes a few seconds, in a terminal.

    Raises:
        ArgumentError: The likelihood has nothing to scale, or an argument breaks its rule. Nothing is changed.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    >>> data = 10 * torch.randn(90, 4), torch.randint(3, (90,))
    >>> done = calibrate(model, data, likelihood=dropconnectpp.categorical)
    >>> done.factor > 1, done.nll_after < done.nll_before
    (True, True)
    >>> done.undo()
    """
    check_count("num_samples", num_samples)
    check_count("batch_size", batch_size)
    chosen: Any = likelihood_for(model, likelihood)
    if not hasattr(chosen, "tempered"):
        raise ArgumentError(f"calibrate scales logits or noise, and {chosen!r} has neither.")
    data = batches(loader, batch_size)
    if iter(data) is data:
        raise ArgumentError("calibrate goes through the data three times: give a loader, not an iterator of one.")
    seed = int(torch.randint(2**62, (), generator=generator))

    def nlls(factors: Sequence[float]) -> tuple[list[float], int]:
        """Mean NLL at each factor."""
        scaled = [chosen.tempered(factor) for factor in factors]
        totals, count = torch.zeros(len(factors), dtype=torch.float64), 0
        for found, call in batchwise(
            model,
            (data,),
            {},
            num_samples=num_samples,
            likelihood=chosen,
            generator=torch.Generator().manual_seed(seed),
            batch_size=None,
            keep_samples=True,
            progress=progress,
            title="calibrate",
        ):
            assert found.outputs is not None
            target = target_of(call)
            totals += torch.stack([_nll(one, found.outputs.double(), target) for one in scaled])
            count += len(found.mean)
        if not count:
            raise ArgumentError("calibrate: the loader gave no batch.")
        return (totals / count).tolist(), count

    wide = _spread(*RANGE, POINTS)
    first, count = nlls([1.0, *wide])
    best = min(range(POINTS), key=lambda place: first[1 + place])
    narrow = _spread(wide[max(0, best - 1)], wide[min(POINTS - 1, best + 1)], POINTS)
    factor = _lowest(narrow, nlls(narrow)[0])
    after = nlls([factor])[0][0]
    if not after < first[0]:  # it was right to the last digit
        factor, after = 1.0, first[0]
    previous = remembered(model)
    scaled = chosen.tempered(factor)
    remember(model, scaled)
    return Calibration(factor, first[0], after, count, scaled, model, previous)


def _nll(likelihood: Any, outputs: Tensor, target: Tensor) -> Tensor:
    """Of a batch in all: of the mixture over networks; of classes at each position by itself, as `predict` has them."""
    if isinstance(likelihood, Categorical) and outputs.ndim > 3:
        mean = over_networks(likelihood.mean, outputs).mean(0)
        right = mean.gather(1, target.long().unsqueeze(1))
        return -right.clamp_min(torch.finfo(mean.dtype).tiny).log().sum()
    logs = over_networks(likelihood.log_prob, outputs, target)
    return -(torch.logsumexp(logs, 0) - math.log(len(logs))).sum()


def _spread(low: float, high: float, count: int) -> list[float]:
    """Factors at equal ratios."""
    return [low * (high / low) ** (place / (count - 1)) for place in range(count)]


def _lowest(factors: Sequence[float], values: Sequence[float]) -> float:
    """Where a parabola through the lowest three, over the logarithm of the factor, is lowest."""
    best = min(range(len(values)), key=values.__getitem__)
    if not 0 < best < len(values) - 1:
        return factors[best]
    left, middle, right = values[best - 1 : best + 2]
    curvature = left - 2.0 * middle + right
    shift = 0.5 * (left - right) / curvature if curvature > 0.0 else 0.0
    ratio: float = (factors[best + 1] / factors[best]) ** shift
    return factors[best] * ratio
