"""Log-likelihoods of classes and of yes/no values, in nats.

Shapes: B batch, C classes, `*` further axes of an example (pixels, positions), summed over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dropconnectpp.errors import ArgumentError, ShapeError, check_positive
from dropconnectpp.likelihoods.outputs import check_same_shape, per_example, tensor_of, wide


def _binary_entropy(probability: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probability) + torch.special.entr(1.0 - probability)
    return entropy


@dataclass(frozen=True)
class Categorical:
    """Classes: output (B, C, *) holds logits, target (B, *) holds class numbers."""

    label_smoothing: float = 0.0
    """The share of a training target that is spread evenly over all classes; predictions do not use it."""
    temperature: float = 1.0
    """What logits are divided by: see `calibrate`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ArgumentError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing!r}.")
        check_positive("temperature", self.temperature)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self._log_likelihood(tensor_of(output), target, self.label_smoothing)

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """The log-probability (B,) of the target itself, without label smoothing."""
        return self._log_likelihood(output, target, 0.0)

    def _log_likelihood(self, output: Tensor, target: Tensor, smoothing: float) -> Tensor:
        if output.ndim < 2 or target.shape != (output.shape[0], *output.shape[2:]):
            raise ShapeError(
                "categorical needs logits of shape (B, C, ...) and class numbers of shape (B, ...), "
                f"got {tuple(output.shape)} and {tuple(target.shape)}."
            )
        _check_classes(output)
        if target.dtype.is_floating_point:
            raise ArgumentError(
                f"categorical needs whole-number classes as target, got {target.dtype}. "
                "Use target.long(), or bernoulli or gaussian for real-valued targets."
            )
        logits = self._scaled(wide(output))
        return per_example(-F.cross_entropy(logits, target.long(), reduction="none", label_smoothing=smoothing))

    def smoothed(self, label_smoothing: float) -> Categorical:
        """The same with label smoothing: ``ELBO(model, categorical.smoothed(0.1), ...)``."""
        return replace(self, label_smoothing=label_smoothing)

    def tempered(self, factor: float) -> Categorical:
        """The same at ``factor`` times the temperature."""
        return replace(self, temperature=self.temperature * factor)

    def mean(self, output: Tensor) -> Tensor:
        """Class probabilities (B, C, *)."""
        _check_classes(output)
        return torch.softmax(self._scaled(output), dim=1)

    def entropy(self, mean: Tensor) -> Tensor:
        """Entropy of class probabilities, (B, *)."""
        entropy: Tensor = torch.special.entr(mean).sum(1)
        return entropy

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1.0 else logits / self.temperature


@dataclass(frozen=True)
class Bernoulli:
    """Independent yes/no values: output holds logits, target values in [0, 1] of the same shape."""

    temperature: float = 1.0
    """What logits are divided by: see `calibrate`."""

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        output = tensor_of(output)
        check_same_shape("bernoulli", output, target)
        logits = self._scaled(wide(output))
        return per_example(-F.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none"))

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        """The log-probability (B,) of the target."""
        return self(output, target)

    def tempered(self, factor: float) -> Bernoulli:
        """The same at ``factor`` times the temperature."""
        return replace(self, temperature=self.temperature * factor)

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities of yes."""
        return torch.sigmoid(self._scaled(output))

    def entropy(self, mean: Tensor) -> Tensor:
        """Entropy summed over an example's values, (B,)."""
        return per_example(_binary_entropy(mean))

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.temperature == 1.0 else logits / self.temperature


def _check_classes(logits: Tensor) -> None:
    if logits.ndim > 1 and logits.shape[1] == 1:
        raise ArgumentError(
            f"categorical over one output gives it probability 1 whatever the input: got logits of shape "
            f"{tuple(logits.shape)}. Use likelihood=bernoulli for yes/no values, gaussian() for real ones, "
            "or give the model one output for each class."
        )


categorical = Categorical()
bernoulli = Bernoulli()
