"""`Prediction`: what a model expects and how sure it is, as a mixture over sampled networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, ShapeError, check_probability
from dropconnectpp.likelihoods import Bernoulli, Categorical, LogLikelihood, describe
from dropconnectpp.prediction import mixture


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """What the model expects, and how sure it is: a mixture over the sampled networks.

    `mean` and `standard_deviation` sum it up. For real values and counts `interval`, `quantile`, `crps` and `log_prob`
    are those of the mixture itself, not of a normal distribution with its moments.
    """

    mean: Tensor
    """Class probabilities (B, C, *) for `categorical`, probabilities for `bernoulli`, else the mean output."""
    entropy: Tensor | None
    """Entropy of `mean` in nats: all uncertainty; None for likelihoods of real values."""
    mutual_information: Tensor | None
    """The part of `entropy` that comes from not knowing the connectivity, in nats (B, *); None with
    average="activations", which mixes the masks inside the network."""
    standard_deviation: Tensor | None
    """Of a new value, shaped like `mean`: from the model and the noise together. For classes and yes/no values, of
    the sampled networks' probabilities. None with average="activations" where there is no noise."""
    num_samples: int
    """How many networks were sampled."""
    model_deviation: Tensor | None = None
    """The part of `standard_deviation` that comes from not knowing the connectivity."""
    noise_deviation: Tensor | None = None
    """The part that no model could know: the likelihood's noise, averaged over networks; None for classes."""
    likelihood: LogLikelihood | None = None
    """What turns outputs into predictions."""
    outputs: Tensor | None = None
    """The sampled networks' outputs (S, B, *), where they were kept."""

    @property
    def probabilities(self) -> Tensor:
        """`mean`, by the name it has for a classifier."""
        return self.mean

    @property
    def samples(self) -> Tensor:
        """What each sampled network expects, (S, B, *)."""
        to_mean = getattr(self.likelihood, "mean", None)
        outputs = self._kept_outputs("samples")
        return outputs if to_mean is None else mixture.over_networks(to_mean, outputs)

    def log_prob(self, target: Tensor) -> Tensor:
        """The log of the density averaged over networks, of each example's target: (B,), in nats."""
        if self.outputs is None:
            return self._log_prob_of_mean(target)
        function: Any = getattr(self.likelihood, "log_prob", self.likelihood)
        target = target.to(self.outputs.device)
        logs = mixture.over_networks(lambda output, y: function(output, y), self.outputs, target)
        return torch.logsumexp(logs, 0) - math.log(len(logs))

    def _log_prob_of_mean(self, target: Tensor) -> Tensor:
        """Where an example is one value, its probability is the mean's own."""
        mean = self.mean
        target = target.to(mean.device)
        tiny = torch.finfo(mean.dtype).tiny
        if isinstance(self.likelihood, Categorical) and mean.ndim == 2:
            if target.shape != mean.shape[:1]:
                raise ShapeError(f"log_prob needs one class an example, ({len(mean)},), got {tuple(target.shape)}.")
            return mean.gather(1, target.long().unsqueeze(1)).squeeze(1).clamp_min(tiny).log()
        if isinstance(self.likelihood, Bernoulli) and mean[:1].numel() == 1:
            if target.shape != mean.shape:
                raise ShapeError(f"log_prob needs targets of shape {tuple(mean.shape)}, got {tuple(target.shape)}.")
            share = torch.where(target.bool(), mean, 1.0 - mean)
            return share.clamp_min(tiny).log().flatten()
        self._kept_outputs("log_prob")
        raise AssertionError

    def quantile(self, probability: float) -> Tensor:
        """The value below which a new one lies with this probability, shaped like `mean`."""
        check_probability("probability", probability)
        outputs = self._real_values("quantile")
        return mixture.quantile(self.likelihood, outputs, probability).to(self.mean.dtype)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Ends, shaped like `mean`, of what holds a new value with probability ``level``, with as much on each side.

        They are quantiles of the mixture over sampled networks, noise included.
        """
        check_probability("level", level)
        return self.quantile(0.5 * (1.0 - level)), self.quantile(0.5 * (1.0 + level))

    def crps(self, target: Tensor) -> Tensor:
        """The continuous ranked probability score of each value, shaped like `mean`, in its unit: lower is better."""
        outputs = self._real_values("crps")
        if target.shape != self.mean.shape:
            raise ShapeError(f"crps needs targets of shape {tuple(self.mean.shape)}, got {tuple(target.shape)}.")
        return mixture.crps(self.likelihood, outputs, target.to(outputs.device)).to(self.mean.dtype)

    def _real_values(self, what: str) -> Tensor:
        if not hasattr(self.likelihood, "cdf"):
            raise ArgumentError(
                f"{what} is for real values and counts, and the likelihood is {self.likelihood!r}. "
                "For classes see `probabilities`, `entropy` and `mutual_information`."
            )
        return self._kept_outputs(what)

    def _kept_outputs(self, what: str) -> Tensor:
        if self.outputs is None:
            raise ArgumentError(f"{what} needs each network's output: predict(..., keep_samples=True) keeps them.")
        return self.outputs

    def __repr__(self) -> str:
        kind = (describe(self.likelihood) or {}).get("name", "a likelihood of your own")
        told = [f"mean of shape {tuple(self.mean.shape)}", f"{self.num_samples} networks", str(kind)]
        for name, value in (("entropy", self.entropy), ("mutual information", self.mutual_information)):
            if value is not None:
                told.append(f"{name} {float(value.mean()):.3g} nats")
        if self.entropy is None:
            parts = [("model", self.model_deviation), ("noise", self.noise_deviation)]
            for name, value in [("standard deviation", self.standard_deviation), *parts]:
                if value is not None:
                    told.append(f"{name} {float(value.mean()):.3g}")
        return f"Prediction({', '.join(told)})"
