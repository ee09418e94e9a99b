"""Log-likelihoods log p(d | Z) of one example given the network's output, in nats.

Shapes: B batch, C classes, `*` further axes of an example (pixels, positions), summed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dropconnectpp.errors import ArgumentError, ShapeError, check_positive

LogLikelihood = Callable[..., Tensor]
"""Any callable (output, target) -> (B,) will do; the ones below also tell `predict` what to average."""


def _per_example(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _wide(output: Tensor) -> Tensor:
    """Half precisions are widened: a log-likelihood of 8 bits is no reward."""
    return output.float() if output.dtype.itemsize < 4 else output


def _binary_entropy(probability: Tensor) -> Tensor:
    entropy: Tensor = torch.special.entr(probability) + torch.special.entr(1.0 - probability)
    return entropy


@dataclass(frozen=True)
class Categorical:
    """Classes: output (B, C, *) holds logits, target (B, *) holds class numbers."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if output.ndim < 2 or target.shape != (output.shape[0], *output.shape[2:]):
            raise ShapeError(
                "categorical needs logits of shape (B, C, ...) and class numbers of shape (B, ...), "
                f"got {tuple(output.shape)} and {tuple(target.shape)}."
            )
        if target.dtype.is_floating_point:
            raise ArgumentError(
                f"categorical needs whole-number classes as target, got {target.dtype}. "
                "Use target.long(), or bernoulli or gaussian for real-valued targets."
            )
        return _per_example(-F.cross_entropy(_wide(output), target, reduction="none"))

    def mean(self, output: Tensor) -> Tensor:
        """Class probabilities (B, C, *)."""
        return torch.softmax(output, dim=1)

    def entropy(self, mean: Tensor) -> Tensor:
        """Entropy of class probabilities, (B, *)."""
        entropy: Tensor = torch.special.entr(mean).sum(1)
        return entropy


@dataclass(frozen=True)
class Bernoulli:
    """Independent yes/no values: output holds logits, target values in [0, 1] of the same shape."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        _check_same_shape("bernoulli", output, target)
        wide = _wide(output)
        return _per_example(-F.binary_cross_entropy_with_logits(wide, target.to(wide.dtype), reduction="none"))

    def mean(self, output: Tensor) -> Tensor:
        """Probabilities of yes."""
        return torch.sigmoid(output)

    def entropy(self, mean: Tensor) -> Tensor:
        """Entropy summed over an example's values, (B,)."""
        return _per_example(_binary_entropy(mean))


@dataclass(frozen=True)
class Gaussian:
    """Real values with a known noise scale: output holds means, target values of the same shape."""

    scale: float

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        _check_same_shape("gaussian", output, target)
        wide = _wide(output)
        squared = ((target.to(wide.dtype) - wide) / self.scale).square()
        return _per_example(-0.5 * squared - math.log(self.scale) - 0.5 * math.log(2 * math.pi))

    def mean(self, output: Tensor) -> Tensor:
        """The output itself."""
        return output


def _check_same_shape(name: str, output: Tensor, target: Tensor) -> None:
    if output.shape != target.shape:
        raise ShapeError(
            f"{name} needs output and target of one shape, got {tuple(output.shape)} and {tuple(target.shape)}."
        )


categorical = Categorical()
bernoulli = Bernoulli()


def gaussian(scale: float = 1.0) -> Gaussian:
    """The Gaussian log-likelihood with standard deviation ``scale``.

    >>> gaussian(1.0)(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([-0.9189])
    """
    return Gaussian(scale)
