"""How the gradient of the expected log-likelihood reaches the keep probabilities.

An estimator is a frozen, stateless description. What it must remember between minibatches, its
moments, goes in and comes out as a tensor, so that one layer and a stack of replicas use the same
lines. Shapes: L samples, `...` any leading axes (replicas), E examples for layers that draw one
mask per example, else 1. A reward is the mean log-likelihood per example, in nats.

| name             | cost of a step                  | biased | when to use it                        |
| ---------------- | ------------------------------- | ------ | ------------------------------------- |
| bbvi             | L passes, +1 for mean-network   | no     | the paper's; any likelihood           |
| eq16             | L passes                        | yes    | ablation: the printed Eq. (16)        |
| straight-through | L passes                        | yes    | an informative posterior, pruning     |
| local            | 2 products per layer, 1 pass    | yes    | little noise; wide layers             |
| concrete         | L passes                        | yes    | smooth gates, one temperature         |
| disarm           | 2L passes                       | no     | unbiased with no baseline to keep     |
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dropconnectpp.errors import ArgumentError, check_choice, check_positive
from dropconnectpp.functional import control_weight

# ------------------------------------------------------------------------ stateless building blocks


def update_moments(moments: Tensor, reward: Tensor, squared_score: Tensor, decay: float) -> Tensor:
    """Fold one minibatch into the running E[f h] and E[h^2] of Eq. (10), with f = reward * h.

    ``moments`` is (2, ...) and starts at zero; the start's bias cancels in their ratio.
    """
    fresh = torch.stack([reward * squared_score, squared_score]).to(moments.dtype)
    return torch.lerp(fresh, moments, decay)


def running_coefficient(reward: Tensor, moments: Tensor) -> Tensor:
    """reward - varpi with varpi from earlier minibatches; 0 where there were none.

    Without that zero the first gradient would carry the whole reward, some 25 times what follows,
    and Adagrad never forgets it.
    """
    varpi = (moments[0] / moments[1]).to(reward.dtype)
    return torch.where(moments[1] > 0, reward - varpi, 0.0)


def leave_one_out_coefficient(reward: Tensor) -> Tensor:  # (L, ...) -> (L, ...)
    """reward minus the mean reward of the other samples."""
    count = reward.shape[0]
    return (reward - reward.mean(0, keepdim=True)) * (count / (count - 1))


def antithetic_coefficient(reward: Tensor, mirrored: Tensor) -> Tensor:
    """Half the difference of an antithetic pair's rewards."""
    return 0.5 * (reward - mirrored)


# ----------------------------------------------------------------------------------- the estimators


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """What every estimator says of itself."""

    name: ClassVar[str]
    unbiased: ClassVar[bool]
    gate: ClassVar[Literal["binary", "concrete", "gaussian"]] = "binary"
    """The gate of a training pass: "binary", "concrete" or "gaussian"."""
    arms: ClassVar[int] = 1
    """Passes per sample: 2 for an antithetic pair."""
    scores: ClassVar[bool] = False
    """Whether the logits' likelihood gradient comes from rewards rather than by backpropagation."""

    @property
    def needs_moments(self) -> bool:
        return False

    @property
    def needs_mean_network(self) -> bool:
        return False

    def check(self, *, hyper: str, num_samples: int | None = None) -> None:
        """Raise if this estimator cannot work with a layer's or an ELBO's settings."""

    def coefficients(self, reward: Tensor, baseline: Tensor | None) -> Tensor:
        """What multiplies each sample's score: (L, arms, ...) rewards -> (L, ...).

        ``baseline`` is the moments (2, ...) or the mean network's reward (...), as the estimator
        needs. The mean over the samples is taken by the caller.
        """
        raise TypeError(f"{self.name} takes no rewards: its gradient comes by backpropagation.")

    def options(self) -> dict[str, Any]:
        """The estimator as plain data; `resolve` turns it back."""
        return {"name": self.name, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class BBVI(Estimator):
    """Black-box variational inference, Eq. (6)-(10): score times (reward - baseline), unbiased.

    ``baseline``: "running" is varpi of Eq. (10) from earlier minibatches, one number per layer or,
    with ``per_synapse``, one per synapse (two more tensors of the weight's size); "mean-network" is
    the reward of Eq. (19) on the same minibatch, per example where masks are (one more forward
    pass; takes out the minibatch's part of the reward's variance); "leave-one-out" is the other samples' mean and needs
    num_samples >= 2.
    """

    name: ClassVar[str] = "bbvi"
    unbiased: ClassVar[bool] = True
    scores: ClassVar[bool] = True
    baseline: Literal["running", "mean-network", "leave-one-out"] = "running"
    per_synapse: bool = False
    decay: float = 0.9

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, ("running", "mean-network", "leave-one-out"))
        _check_decay(self.decay)
        if self.per_synapse and self.baseline != "running":
            raise ArgumentError(
                f"per_synapse=True needs baseline='running', got {self.baseline!r}: "
                "the other baselines are one number per sample or example."
            )

    @property
    def needs_moments(self) -> bool:
        return self.baseline == "running"

    @property
    def needs_mean_network(self) -> bool:
        return self.baseline == "mean-network"

    def check(self, *, hyper: str, num_samples: int | None = None) -> None:
        if self.baseline == "leave-one-out" and num_samples == 1:
            raise ArgumentError(
                "baseline='leave-one-out' needs num_samples of at least 2, got 1. "
                "Use ELBO(..., num_samples=2), or baseline='mean-network' with one sample."
            )

    def coefficients(self, reward: Tensor, baseline: Tensor | None) -> Tensor:
        """reward - baseline: with the score h it makes Eq. (7), (8)'s f - varpi h."""
        mean_reward = reward.mean(1)
        if self.baseline == "leave-one-out":
            return leave_one_out_coefficient(mean_reward)
        assert baseline is not None
        if self.baseline == "running":
            return running_coefficient(mean_reward, baseline)
        return mean_reward - baseline


@dataclass(frozen=True, kw_only=True)
class Eq16(Estimator):
    """Eq. (16) to the letter, as an ablation: no data term reaches the keep probabilities.

    The printed last line, -varpi * grad log q, has expectation zero when varpi comes from earlier
    minibatches (``baseline="running"``): pi~ then follows the KL and noise. With varpi from the
    same sample (``baseline="same-sample"``), pooled over a layer, varpi is the reward itself and
    the line becomes the score gradient with the wrong sign. Needs hyper="learned": the line also
    scores a draw of pi from q(pi).
    """

    name: ClassVar[str] = "eq16"
    unbiased: ClassVar[bool] = False
    scores: ClassVar[bool] = True
    baseline: Literal["running", "same-sample"] = "running"
    decay: float = 0.9

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, ("running", "same-sample"))
        _check_decay(self.decay)

    @property
    def needs_moments(self) -> bool:
        return self.baseline == "running"

    def check(self, *, hyper: str, num_samples: int | None = None) -> None:
        if hyper != "learned":
            raise ArgumentError(
                f"estimator='eq16' needs hyper='learned', got {hyper!r}: Eq. (16) scores a draw of "
                "pi from q(pi). Use estimator='bbvi' for hyper='optimal'."
            )

    def coefficients(self, reward: Tensor, baseline: Tensor | None) -> Tensor:
        mean_reward = reward.mean(1)
        if self.baseline == "same-sample":
            return -mean_reward
        assert baseline is not None
        varpi = control_weight(baseline[0], baseline[1]).to(reward.dtype)
        return -varpi.expand_as(mean_reward)


@dataclass(frozen=True, kw_only=True)
class StraightThrough(Estimator):
    """The sampled mask's own gradient passed on to pi~, as though z were continuous: biased.

    Exact where the log-likelihood is linear in each gate; its bias is the curvature's.
    """

    name: ClassVar[str] = "straight-through"
    unbiased: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Local(Estimator):
    """Gaussian local reparameterisation: mean (pi~ W) v, variance (pi~ (1 - pi~) W^2) v^2.

    Noise per example and output, whatever the layer's ``mask``. Biased as far as the sum of gated
    inputs is not Gaussian and, in a convolution, as far as outputs share synapses.
    """

    name: ClassVar[str] = "local"
    unbiased: ClassVar[bool] = False
    gate: ClassVar[Literal["binary", "concrete", "gaussian"]] = "gaussian"


@dataclass(frozen=True, kw_only=True)
class Concrete(Estimator):
    """Relaxed gates, sigmoid((logit - logit(u)) / temperature), in training passes: biased."""

    name: ClassVar[str] = "concrete"
    unbiased: ClassVar[bool] = False
    gate: ClassVar[Literal["binary", "concrete", "gaussian"]] = "concrete"
    temperature: float = 2.0 / 3.0

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)


@dataclass(frozen=True, kw_only=True)
class Disarm(Estimator):
    """An antithetic pair of masks per sample (Dong, Mnih & Tucker, 2020): unbiased, 2L passes."""

    name: ClassVar[str] = "disarm"
    unbiased: ClassVar[bool] = True
    arms: ClassVar[int] = 2
    scores: ClassVar[bool] = True

    def coefficients(self, reward: Tensor, baseline: Tensor | None) -> Tensor:
        return antithetic_coefficient(reward[:, 0], reward[:, 1])


EstimatorName = Literal["bbvi", "eq16", "straight-through", "local", "concrete", "disarm"]

ESTIMATORS: dict[str, type[Estimator]] = {
    kind.name: kind for kind in (BBVI, Eq16, StraightThrough, Local, Concrete, Disarm)
}


def resolve(estimator: str | Estimator | dict[str, Any]) -> Estimator:
    """The estimator meant by a name, an instance or what `Estimator.options` gave.

    >>> resolve("bbvi")
    BBVI(baseline='running', per_synapse=False, decay=0.9)
    """
    if isinstance(estimator, Estimator):
        return estimator
    settings = dict(estimator) if isinstance(estimator, dict) else {"name": estimator}
    name = check_choice("estimator", settings.pop("name", None), ESTIMATORS)
    return ESTIMATORS[name](**settings)


def _check_decay(decay: float) -> None:
    if not 0.0 <= decay < 1.0:
        raise ArgumentError(f"decay must lie in [0, 1), got {decay!r}. The default is 0.9.")
