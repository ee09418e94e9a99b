"""Prediction with uncertainty: Monte Carlo over masks, by whole networks or by activations (Eq. 18).

Shapes: S networks, B batch, C classes or outputs, `*` further axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from inspect import Parameter, signature
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, NonFiniteError, ShapeError, check_choice, check_count
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.passes import AverageGates, BinaryGates, DrawnGates, Gates, running
from dropconnectpp.layers.sampling import Sample, draw_samples
from dropconnectpp.likelihoods import LearnedNoise, LogLikelihood, remembered, tensor_of
from dropconnectpp.prediction.batches import (
    Call,
    call_of,
    calls_of,
    check_rows,
    is_loader,
    number_of_batches,
    pieces,
)
from dropconnectpp.prediction.progress import Progress
from dropconnectpp.prediction.result import Prediction

Average = Literal["networks", "probabilities", "activations"]
"""What is averaged over masks; "probabilities" is the old name of "networks"."""
AVERAGES: tuple[Average, ...] = ("networks", "probabilities", "activations")
BATCH_SIZE = 1024


def predict(
    model: nn.Module,
    *inputs: Any,
    num_samples: int = 30,
    average: Average = "networks",
    likelihood: LogLikelihood | None = None,
    generator: torch.Generator | None = None,
    batch_size: int | None = BATCH_SIZE,
    keep_samples: bool | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Prediction:
    """Predict by drawing ``num_samples`` networks from the learned connectivity.

    The model runs in eval mode, so BatchNorm and Dropout are left alone. The same networks predict every batch, and
    one mask is in memory at a time.

    Args:
        model: Any model with masked layers. One without is a single network.
        *inputs: What the model takes: tensors, or one tuple, dictionary (as keywords) or loader of batches. A loader's
            batches go to the model's device, and the results to the CPU; of a batch with several items the last is
            the target and left out, unless the model needs it.
        num_samples: How many networks are drawn.
        average: "networks" averages what whole networks predict, and tells how much they disagree; "probabilities" is
            its old name. "activations" estimates Eq. (17) by Eq. (18) as written: each DropConnect++ layer passes on
            its activation averaged over masks.
        likelihood: How an output becomes a prediction; None: the one that the model was trained with. Outputs are
            averaged as they are where it is a callable of your own.
        generator: Where the masks' seeds come from; None: torch's own.
        batch_size: How many examples go through the model at once; None: all.
        keep_samples: Whether each network's output is kept, for `Prediction.samples`; None: for real values and
            counts, whose quantiles need them.
        progress: Whether a bar is shown on stderr; None: for what takes a few seconds, in a terminal.
        **options: Go to the model.

    Returns:
        A `Prediction`.

    Raises:
        ArgumentError: No likelihood is known, or an argument breaks its rule.
        NonFiniteError: The prediction holds NaN or infinity.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(4, 3))
    >>> p = predict(model, torch.randn(8, 4), likelihood=dropconnectpp.categorical)
    >>> p.probabilities.shape, p.mutual_information.shape
    (torch.Size([8, 3]), torch.Size([8]))
    """
    count = check_count("num_samples", num_samples)
    check_choice("average", average, AVERAGES)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    _check_options(model, options)
    if not inputs and not options:
        raise ArgumentError("predict needs inputs for the model: predict(model, x).")
    found = batchwise(
        model,
        inputs,
        options,
        num_samples=count,
        average=average,
        likelihood=likelihood,
        generator=generator,
        batch_size=batch_size,
        keep_samples=keep_samples,
        progress=progress,
    )
    parts = [part for part, _ in found]
    if not parts:
        raise ArgumentError("predict: the loader gave no batch.")
    return parts[0] if len(parts) == 1 else _together(parts)


def batchwise(
    model: nn.Module,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    *,
    num_samples: int,
    average: Average = "networks",
    likelihood: LogLikelihood | None,
    generator: torch.Generator | None,
    batch_size: int | None,
    keep_samples: bool | None,
    progress: bool | None,
    title: str = "predict",
) -> Iterator[tuple[Prediction, Call]]:
    """The predictions of `predict` one batch after the other, with the call each belongs to; all by the same networks.

    Of a loader they are on the CPU.
    """
    chosen = likelihood_for(model, likelihood)
    networks = _Networks.of(model, num_samples, average, generator)
    kept = hasattr(chosen, "cdf") if keep_samples is None else keep_samples
    calls, total = _calls(model, inputs, options, batch_size)
    with Progress(title, total and total * networks.count, progress) as bar:
        for call, split in calls:
            with torch.no_grad(), evaluating(model):  # not around the yield: it would reach into the caller
                part = networks.predict(call, chosen, kept, bar)
            if split:
                check_rows(call, len(part.mean))
            _require_finite(part, call)
            yield _to(part, torch.device("cpu")) if is_loader(inputs) else part, call


def likelihood_for(model: nn.Module, given: LogLikelihood | None) -> LogLikelihood:
    """The likelihood given, or else the one that the model was trained with; learned noise at its scale of now."""
    found = remembered(model) if given is None else given
    if found is None:
        raise ArgumentError(
            "predict does not know which likelihood the model was trained with: no ELBO was made for it. Give "
            "likelihood=dropconnectpp.categorical for class logits, bernoulli for yes/no logits, gaussian(scale) for "
            "real values."
        )
    if not callable(found):
        raise ArgumentError(f"likelihood must be callable, (output, target) -> (B,), got {found!r}.")
    return found.fixed() if isinstance(found, LearnedNoise) else found


def _calls(
    model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], batch_size: int | None
) -> tuple[Iterator[tuple[Call, bool]], int | None]:
    """Calls of bounded size, with whether they are parts of one; and how many there will be, where that is known."""
    if is_loader(inputs):
        loaded = calls_of(inputs[0], model)
        return ((replace(c, options={**c.options, **options}), False) for c in loaded), number_of_batches(inputs[0])
    whole = call_of(inputs, model)
    split = pieces(replace(whole, options={**whole.options, **options}), batch_size)
    return iter([(part, len(split) > 1) for part in split]), len(split)


@dataclass(frozen=True)
class _Networks:
    """Networks drawn once, for every batch."""

    model: nn.Module
    layers: list[MaskedLayer]
    average: Average
    count: int
    samples: list[Sample] = field(default_factory=list)
    averaged: dict[nn.Module, Gates] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, count: int, average: Average, generator: torch.Generator | None) -> _Networks:
        layers = masked_layers(model)
        found = list(layers.values())
        if average != "activations":
            count = count if found else 1
            return cls(model, found, average, count, draw_samples(found, count, generator, relaxed=False))
        bare = [name or "the model" for name, layer in layers.items() if layer.activation is None]
        if bare:
            raise ArgumentError(
                f"average='activations' averages what the activation gives, and {', '.join(bare)} has none. "
                "Give the layer its activation (activation=nn.ReLU(), or nn.Identity() if it has no other), "
                "or use average='networks'."
            )
        return cls(model, found, average, count, averaged=_averages(found, count, generator))

    def predict(self, call: Call, likelihood: LogLikelihood, kept: bool, bar: Progress) -> Prediction:
        """What the networks say of one call."""
        sums = _Sums(likelihood, kept)
        for assignment in self._assignments():
            with running(assignment):
                output = tensor_of(self.model(*call.inputs, **call.options))
            if not isinstance(output, Tensor):
                raise ShapeError(
                    f"predict needs a model that gives a tensor, or an object with a tensor `logits`, got "
                    f"{type(output).__name__}. Wrap the model in one that gives what the likelihood takes."
                )
            sums.add(output)
            bar.step()
        if self.average == "activations":
            return sums.of_one_network(self.count)
        return sums.result()

    def _assignments(self) -> Iterator[dict[nn.Module, Gates]]:
        if self.average == "activations":
            yield self.averaged
        for sample in self.samples:  # drawn anew in each pass, so that no mask outlives it
            yield {layer: _anew(gates) for layer, gates in sample.arms[0].items()}


def _anew(gates: Gates) -> Gates:
    return replace(gates, draw=gates.draw.anew()) if isinstance(gates, BinaryGates | DrawnGates) else gates


def _averages(layers: list[MaskedLayer], count: int, generator: torch.Generator | None) -> dict[nn.Module, Gates]:
    """Draws of its own for each layer: Eq. (18) averages one layer's masks at a time."""
    return {
        layer: AverageGates(
            tuple(sample.arms[0][layer] for sample in draw_samples([layer], count, generator, relaxed=False))
        )
        for layer in layers
    }


class _Sums:
    """Running sums over sampled networks: but for the outputs kept, memory does not grow with their number."""

    def __init__(self, likelihood: LogLikelihood, kept: bool) -> None:
        self.likelihood = likelihood
        self.to_mean: Callable[[Tensor], Tensor] = getattr(likelihood, "mean", None) or (lambda output: output)
        self.to_entropy: Callable[[Tensor], Tensor] | None = getattr(likelihood, "entropy", None)
        self.to_deviation: Callable[[Tensor], Tensor] | None = getattr(likelihood, "deviation", None)
        self.outputs: list[Tensor] | None = [] if kept else None
        self.count = 0
        self.mean: Tensor
        self.squares: Tensor
        self.entropies: Tensor | None = None
        self.noise: Tensor | None = None

    def add(self, output: Tensor) -> None:
        """One network's output."""
        self.count += 1
        if self.outputs is not None:
            self.outputs.append(output)
        sample = self.to_mean(output)
        if self.to_entropy is not None:
            entropy = self.to_entropy(sample)
            self.entropies = entropy if self.entropies is None else self.entropies + entropy
        if self.to_deviation is not None:
            variance = self.to_deviation(output).square()
            self.noise = variance if self.noise is None else self.noise + variance
        if self.count == 1:
            self.mean, self.squares = sample.clone(), torch.zeros_like(sample)
        else:  # Welford: the squares of nearly equal probabilities would cancel
            step = sample - self.mean
            self.mean = self.mean + step / self.count
            self.squares = self.squares + step * (sample - self.mean)

    def result(self) -> Prediction:
        """What whole networks say."""
        model = torch.sqrt(self.squares / max(self.count - 1, 1))
        found = self.of_one_network(self.count)
        total = model if found.noise_deviation is None else torch.sqrt(model.square() + found.noise_deviation.square())
        information = None
        if found.entropy is not None and self.entropies is not None:
            information = (found.entropy - self.entropies / self.count).clamp_min(0.0)
        return replace(found, mutual_information=information, standard_deviation=total, model_deviation=model)

    def of_one_network(self, count: int) -> Prediction:
        """What can be said without networks that disagree."""
        entropy = None if self.to_entropy is None else self.to_entropy(self.mean)
        noise = None if self.noise is None else torch.sqrt(self.noise / self.count)
        outputs = None if self.outputs is None else torch.stack(self.outputs)
        return Prediction(self.mean, entropy, None, noise, count, None, noise, self.likelihood, outputs)


_TENSORS = ("mean", "entropy", "mutual_information", "standard_deviation", "model_deviation", "noise_deviation")


def _together(parts: list[Prediction]) -> Prediction:
    """Predictions of one batch after the other as one."""
    merged: dict[str, Any] = {}
    for name in _TENSORS:
        values = [getattr(part, name) for part in parts]
        merged[name] = None if values[0] is None else torch.cat(values)
    if parts[0].outputs is not None:
        merged["outputs"] = torch.cat([part.outputs for part in parts if part.outputs is not None], 1)
    return replace(parts[0], **merged)


def _to(part: Prediction, device: torch.device) -> Prediction:
    held: dict[str, Any] = {name: getattr(part, name) for name in (*_TENSORS, "outputs")}
    moved: dict[str, Any] = {name: None if value is None else value.to(device) for name, value in held.items()}
    return replace(part, **moved)


def _require_finite(part: Prediction, call: Call) -> None:
    if bool(torch.isfinite(part.mean).all()):
        return
    bad = [i for i, x in enumerate(call.inputs) if isinstance(x, Tensor) and not bool(torch.isfinite(x).all())]
    where = f"input {bad[0]} holds values that are not finite" if bad else "the inputs are finite"
    raise NonFiniteError(f"The prediction holds NaN or infinity; {where}. Look at the data, then at the weights.")


def _check_options(model: nn.Module, options: dict[str, Any]) -> None:
    """A misspelt option of predict would go to the model, whose complaint names neither."""
    taken = signature(model.forward).parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    own = [name for name, p in signature(predict).parameters.items() if p.kind is Parameter.KEYWORD_ONLY]
    for name in options:
        if name not in taken:
            near = get_close_matches(name, [*own, *taken], 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"predict has {', '.join(own)}."
            raise ArgumentError(f"predict has no option {name!r}, and neither has the model's forward. {hint}")


# ------------------------------------------------------------------------------------------- eval mode

_lock = Lock()
_borrowed: WeakKeyDictionary[nn.Module, tuple[bool, int]] = WeakKeyDictionary()
"""The modes of modules that are in eval mode for predictions under way, and how many of those there are."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
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
