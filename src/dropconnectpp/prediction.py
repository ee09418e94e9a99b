"""Prediction with uncertainty: Monte Carlo over masks, by activations (Eq. 18) or by whole networks.

Shapes: B batch, C classes or outputs, `*` further axes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, NonFiniteError, check_choice, check_count
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.passes import AverageGates, Gates, running
from dropconnectpp.layers.sampling import draw_samples
from dropconnectpp.likelihoods import categorical


@dataclass(frozen=True)
class Prediction:
    """What the model expects, and how sure it is."""

    mean: Tensor
    """Class probabilities (B, C, *) for `categorical`, probabilities for `bernoulli`, else the mean output."""
    entropy: Tensor | None
    """Entropy of `mean` in nats: all uncertainty; None for likelihoods without one."""
    mutual_information: Tensor | None
    """The part of `entropy` that comes from not knowing the connectivity, in nats (B, *); None with
    average="activations", which mixes the masks inside the network."""
    standard_deviation: Tensor | None
    """Spread of the sampled networks' means around `mean`, shaped like it; None likewise."""
    num_samples: int

    @property
    def probabilities(self) -> Tensor:
        """`mean`, by the name it has for a classifier."""
        return self.mean


def predict(
    model: nn.Module,
    *inputs: Any,
    num_samples: int = 30,
    average: str = "activations",
    likelihood: Callable[..., Any] = categorical,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Prediction:
    """Predict by drawing ``num_samples`` masks.

    ``average="activations"`` estimates Eq. (17) by Eq. (18) as written: each DropConnect++ layer passes on its
    activation averaged over masks. ``average="probabilities"`` draws whole networks and averages
    what they predict, which also tells how much they disagree. The model runs in eval mode, so
    BatchNorm and Dropout are left alone, and one mask is in memory at a time. ``likelihood`` says
    how an output becomes a mean: `categorical`, `bernoulli`, `gaussian(scale)`, or any other
    callable, whose outputs are averaged as they are. ``options`` go to the model.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(4, 3))
    >>> p = predict(model, torch.randn(8, 4), num_samples=20, average="probabilities")
    >>> p.probabilities.shape, p.mutual_information.shape
    (torch.Size([8, 3]), torch.Size([8]))
    """
    count = check_count("num_samples", num_samples)
    check_choice("average", average, ("activations", "probabilities"))
    layers = masked_layers(model)
    to_mean = getattr(likelihood, "mean", None) or (lambda output: output)
    to_entropy = getattr(likelihood, "entropy", None)
    with torch.no_grad(), _evaluating(model):
        if average == "probabilities":
            result = _over_networks(model, inputs, options, count, generator, to_mean, to_entropy)
        else:
            bare = [name or "the model" for name, layer in layers.items() if layer.activation is None]
            if bare:
                raise ArgumentError(
                    f"average='activations' averages what the activation gives, and {', '.join(bare)} has none. "
                    "Give the layer its activation (activation=nn.ReLU(), or nn.Identity() if it has no other), "
                    "or use average='probabilities'."
                )
            with running(_averages(list(layers.values()), count, generator)):
                mean = to_mean(model(*inputs, **options))
            entropy = None if to_entropy is None else to_entropy(mean)
            result = Prediction(mean, entropy, None, None, count)
    if not bool(torch.isfinite(result.mean).all()):
        bad = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and not bool(torch.isfinite(x).all())]
        where = f"input {bad[0]} holds values that are not finite" if bad else "the inputs are finite"
        raise NonFiniteError(f"The prediction holds NaN or infinity; {where}. Look at the data, then at the weights.")
    return result


def _averages(layers: list[MaskedLayer], count: int, generator: torch.Generator | None) -> dict[nn.Module, Gates]:
    """Draws of its own for each layer: Eq. (18) averages one layer's masks at a time."""
    return {
        layer: AverageGates(
            tuple(sample.arms[0][layer] for sample in draw_samples([layer], count, generator, relaxed=False))
        )
        for layer in layers
    }


def _over_networks(
    model: nn.Module,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    count: int,
    generator: torch.Generator | None,
    to_mean: Callable[[Any], Tensor],
    to_entropy: Callable[[Tensor], Tensor] | None,
) -> Prediction:
    """Running sums over sampled networks: memory does not grow with their number."""
    layers = list(masked_layers(model).values())
    mean: Tensor | None = None
    spread: Tensor | None = None
    entropies: Tensor | None = None
    samples = deque(draw_samples(layers, count, generator, relaxed=False))
    for index in range(count):
        with running(samples.popleft().arms[0]):  # and its masks go with it
            sample = to_mean(model(*inputs, **options))
        if to_entropy is not None:
            entropy = to_entropy(sample)
            entropies = entropy if entropies is None else entropies + entropy
        if mean is None or spread is None:
            mean, spread = sample.clone(), torch.zeros_like(sample)
        else:  # Welford: the squares of nearly equal probabilities would cancel
            step = sample - mean
            mean = mean + step / (index + 1)
            spread = spread + step * (sample - mean)
    assert mean is not None
    assert spread is not None
    deviation = torch.sqrt(spread / max(count - 1, 1))
    if to_entropy is None or entropies is None:
        return Prediction(mean, None, None, deviation, count)
    total = to_entropy(mean)
    return Prediction(mean, total, (total - entropies / count).clamp_min(0.0), deviation, count)


_lock = Lock()
_borrowed: WeakKeyDictionary[nn.Module, tuple[bool, int]] = WeakKeyDictionary()
"""The modes of modules that are in eval mode for predictions under way, and how many of those there are."""


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within the context; each module has its own mode again when the last of its predictions is over."""
    modules = list(model.modules())
    with _lock:
        for module in modules:
            mode, users = _borrowed.get(module, (module.training, 0))
            _borrowed[module] = (mode, users + 1)
        model.eval()
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                mode, users = _borrowed.pop(module)
                if users > 1:
                    _borrowed[module] = (mode, users - 1)
                else:
                    module.training = mode
