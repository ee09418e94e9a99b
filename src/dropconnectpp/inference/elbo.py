"""The evidence lower bound of Eq. (15) as a module: a loss with the right gradient for every layer.

Shapes: L samples, A arms (2 for an antithetic pair), B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.errors import (
    ArgumentError,
    NonFiniteError,
    ShapeError,
    check_count,
    check_not_negative,
    named_options,
)
from dropconnectpp.estimators import Estimator
from dropconnectpp.inference import optimisers
from dropconnectpp.inference.batchnorm import frozen_statistics
from dropconnectpp.inference.buffers import Weight, WideBuffers
from dropconnectpp.inference.divergence import pathwise_kl, posteriors_of
from dropconnectpp.inference.ledger import Ledger, open_ledger
from dropconnectpp.inference.score_gradient import RewardedPasses, initial_moments, moment_names, prefix_of, score_layer
from dropconnectpp.inference.score_groups import score_together
from dropconnectpp.inference.sharding import gather
from dropconnectpp.inference.watching import Watch
from dropconnectpp.layers.base import MaskedLayer, masked_layers
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.passes import MEAN, Gates, begin, end, replay_in_backward, running
from dropconnectpp.layers.sampling import Sample, draw_samples
from dropconnectpp.likelihoods import LearnedNoise, LogLikelihood, remember
from dropconnectpp.ops.drawn import transformed
from dropconnectpp.ops.gpu_gates import Table
from dropconnectpp.ops.registered import held


@dataclass
class ELBOTerms:
    """What one minibatch says of Eq. (15)."""

    loss: Tensor
    """To minimise: -elbo / num_data in value, with the gradient of the layers' estimators."""
    elbo: Tensor
    """log_likelihood - the weighted KL, in nats for the whole data set; no gradient.

    Each layer's KL counts kl_weight of the ELBO times kl_weight of the layer; both are 1 by default.
    """
    log_likelihood: Tensor
    """num_data times the mean log-likelihood of an example, averaged over samples; no gradient."""
    kl: Tensor
    """Eq. (20) + Eq. (21) summed over all synapses, in nats, whatever the weights; no gradient."""
    output: Any = field(repr=False)
    """The network's output for the first sample."""


@dataclass
class _Step:
    """One minibatch on its way from the draw to the terms."""

    layers: dict[str, MaskedLayer]
    """As they were found when the step began."""
    samples: list[Sample]
    posteriors: dict[str, DropConnectPPLayer]
    pathwise_kl: list[tuple[float, Tensor]]
    """KL weights of layers, and the KL that each counts."""
    ledger: Ledger | None
    """The layers whose kernels work out KL and score."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)

    @property
    def first(self) -> dict[nn.Module, Gates]:
        return self.samples[0].arms[0]

    @property
    def arms(self) -> int:
        return len(self.samples[0].arms)


_LAST = object()
"""Stands for a target that is the last of the inputs."""


class ELBO(nn.Module):
    """The bound of Eq. (15) for a model with DropConnect++ layers, estimated on minibatches.

    ``log_likelihood(output, target) -> (B,)`` in nats; ``num_data`` is N, the size of the training
    set: the minibatch's likelihood counts N/B times, the KL once. ``num_samples`` is L.
    ``kl_weight`` multiplies the KL, on top of each layer's own ``kl_weight``, and may be changed
    between steps; `ELBOTerms.kl` has neither. The likelihood is left on the model, where `predict`
    finds it; a noise that it learns is a parameter of the ELBO. Masks come from ``generator``, or from torch's own.
    With ``check_finite`` a loss that is not finite raises before anything is changed; on a GPU that
    waits for the device at each step, so turn it off where that matters.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(4, 3))
    >>> elbo = ELBO(model, dropconnectpp.categorical, num_data=100)
    >>> terms = elbo(torch.randn(8, 4), target=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
    >>> terms.loss.backward()
    >>> bool(torch.isclose(terms.loss, -terms.elbo / 100))
    True
    """

    @named_options
    def __init__(
        self,
        model: nn.Module,
        log_likelihood: LogLikelihood,
        num_data: int,
        num_samples: int = 1,
        kl_weight: float = 1.0,
        *,
        generator: torch.Generator | None = None,
        check_finite: bool = True,
    ) -> None:
        super().__init__()
        if not callable(log_likelihood):
            raise ArgumentError(
                f"log_likelihood must be callable, (output, target) -> (B,), got {log_likelihood!r}. "
                "Ready made: dropconnectpp.categorical, bernoulli, gaussian()."
            )
        self.model = model
        device = next((parameter.device for parameter in model.parameters()), None)
        self.log_likelihood = log_likelihood.to(device) if isinstance(log_likelihood, LearnedNoise) else log_likelihood
        remember(model, log_likelihood)
        self.num_data = check_count("num_data", num_data)
        self.num_samples = check_count("num_samples", num_samples)
        double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        self._kl_weight = Weight(check_not_negative("kl_weight", kl_weight), torch.float64 if double else torch.float32)
        self.generator = generator
        self.check_finite = check_finite
        self._step: _Step | None = None
        self._watch = Watch()
        self._tables: dict[Any, Table] = {}
        self._seen: list[tuple[DropConnectPPLayer, Estimator]] = []  # to notice what has changed since the last step
        self.moments = WideBuffers()
        self._prepare(masked_layers(model))
        optimisers.check(self, model)

    def _moments_of(self, name: str, layer: DropConnectPPLayer) -> dict[str, Tensor]:
        """What a layer's estimator remembers."""
        known = {key: self.moments.get_buffer(prefix_of(name) + key) for key in moment_names(layer)}
        return {key: held(value) for key, value in known.items()} if torch.compiler.is_compiling() else known

    def _prepare(self, layers: dict[str, MaskedLayer]) -> None:
        """Check the layers that the model has now and make room for what their estimators remember."""
        seen = [(layer, layer.estimator) for layer in posteriors_of(layers).values()]
        if len(seen) == len(self._seen) and all(
            layer is other and estimator is known
            for (layer, estimator), (other, known) in zip(seen, self._seen, strict=True)
        ):
            return
        self._seen = seen
        _require_one_estimator(layers)
        known = dict(self.moments.named_buffers())
        for name, layer in posteriors_of(layers).items():
            layer.estimator.check(hyper=layer.hyper, num_samples=self.num_samples)
            for key, start in initial_moments(layer).items():
                buffer = known.get(f"{prefix_of(name)}{key}")
                if buffer is None or buffer.shape != start.shape:
                    self.moments.register_buffer(f"{prefix_of(name)}{key}", start)

    @property
    def kl_weight(self) -> float:
        return self._kl_weight.value

    @kl_weight.setter
    def kl_weight(self, value: float) -> None:
        self._kl_weight.set(check_not_negative("kl_weight", value))

    # ------------------------------------------------------------------------------ the public way

    def forward(self, *inputs: Any, target: Any = _LAST, **options: Any) -> ELBOTerms:
        """Run the model on ``inputs`` as often as the estimators need and return the terms.

        Without ``target`` the last of the inputs is the target: ``elbo(x, y)``.
        """
        if target is _LAST:
            if len(inputs) < 2:
                raise ArgumentError(
                    f"ELBO needs a target: elbo(inputs, target=...) or elbo(inputs, target), got {len(inputs)} input."
                )
            *inputs, target = inputs  # type: ignore[assignment]
        step = self._begin()
        mean = self._mean_network(step, inputs, options, target)
        rewards, output = self._run_passes(step, inputs, options, target, done=None)
        return self._finish(step, rewards, mean, output, inputs)

    @contextmanager
    def sample(self) -> Iterator[None]:
        """For loops that call the model themselves: draw masks, and use them inside the context.

        Call the model once inside, then `terms` with its output. Estimators that need further
        passes (a mean-network baseline, an antithetic pair, several samples) repeat that call.
        """
        step = self._begin()

        def remember(module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
            step.calls.append((arguments, keywords, output))

        handle = self.model.register_forward_hook(remember, with_kwargs=True)
        try:
            with running(self._watch.of(step.first, self), users=True):
                yield
        finally:
            handle.remove()
        self._step = step

    def terms(self, output: Any, target: Any) -> ELBOTerms:
        """The terms of the pass made inside `sample`; ``output`` is what the model gave there."""
        step, self._step = self._step, None
        if step is None:
            raise ArgumentError("terms needs a pass: use `with elbo.sample(): output = model(...)` first.")
        inputs, options = self._repeatable_call(step, output)
        mean = self._mean_network(step, inputs, options, target)
        rewards, first = self._run_passes(step, inputs, options, target, done=output)
        return self._finish(step, rewards, mean, first, inputs)

    # --------------------------------------------------------------------------------- the passes

    def _begin(self) -> _Step:
        layers = masked_layers(self.model)
        posteriors = posteriors_of(layers)
        if not torch.compiler.is_compiling():
            self._prepare(layers)
        arms = 1
        for layer in posteriors.values():
            arms = max(arms, layer.estimator.arms)
            if self.training:
                layer.project()
        gather(self.model)
        relaxed = self.model.training
        samples = draw_samples(list(layers.values()), self.num_samples, self.generator, relaxed=relaxed, arms=arms)
        ledger = None
        if not torch.compiler.is_compiling():  # which would be compiled anew for each weight of the KL
            ledger = open_ledger(posteriors, samples, self.moments._buffers, self.kl_weight / self.num_data)
        # The KL of pathwise layers enters the graph before the passes: autograd then works it out
        # last, when the masked weights are gone, and the peak of memory is lower by one tensor.
        kl = pathwise_kl(posteriors, () if ledger is None else ledger.tallies)
        return _Step(layers, samples, posteriors, kl, ledger)

    def _mean_network(self, step: _Step, inputs: Any, options: Any, target: Any) -> Tensor | None:
        """The log-likelihoods (B,) of Eq. (19) on the same minibatch, where a baseline needs them."""
        if not _needs_mean_network(step):
            return None
        assignment: dict[nn.Module, Gates] = dict.fromkeys(step.first, MEAN)
        with torch.no_grad(), running(assignment), frozen_statistics(self.model):
            return self._log_likelihoods(self.model(*inputs, **options), target)

    def _run_passes(self, step: _Step, inputs: Any, options: Any, target: Any, done: Any) -> tuple[Tensor, Any]:
        """Every sample and arm: log-likelihoods (L, A, B), and the first output."""
        rows: list[Tensor] = []
        first: Any = done
        model = self.model
        for sample in step.samples:
            for arm, assignment in enumerate(sample.arms):
                output = done
                if done is None or rows:
                    use = begin(self._watch.of(assignment, self))
                    try:
                        with frozen_statistics(model) if arm else nullcontext():
                            output = model(*inputs, **options)
                    finally:
                        end(use)
                replay_in_backward(output, assignment)
                first = output if first is None else first
                rows.append(self._log_likelihoods(output, target))
        rewards = (rows[0] if len(rows) == 1 else torch.stack(rows)).view(self.num_samples, step.arms, -1)
        return rewards, first

    def _repeatable_call(self, step: _Step, output: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        needed = _needs_mean_network(step) or self.num_samples * step.arms > 1
        if not needed:
            return (), {}
        if len(step.calls) != 1 or step.calls[0][2] is not output:
            raise ArgumentError(
                "These estimators need further passes through the model, so `sample` must see exactly one "
                f"call of it and `terms` its very output; saw {len(step.calls)} calls. Use "
                "elbo(*inputs, target=...), or an estimator with one pass: bbvi with the running baseline, "
                "straight-through, local, concrete."
            )
        return step.calls[0][0], step.calls[0][1]

    def _log_likelihoods(self, output: Any, target: Any) -> Tensor:
        values = self.log_likelihood(output, target)
        if not isinstance(values, Tensor) or values.ndim != 1 or values.numel() == 0:
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ShapeError(
                f"log_likelihood must return one value per example, shape (B,), got {shape}. "
                "Sum over what belongs to an example, and do not average over the batch."
            )
        if values.shape[0] > self.num_data:
            raise ArgumentError(
                f"num_data must be at least the batch size, got num_data={self.num_data} and a batch of "
                f"{values.shape[0]}. Give the number of examples in the training set."
            )
        return values

    # ---------------------------------------------------------------------------------- the terms

    def _finish(self, step: _Step, rewards: Tensor, mean: Tensor | None, output: Any, inputs: Any) -> ELBOTerms:
        weight = self._kl_weight.tensor.to(rewards.device) if torch.compiler.is_compiling() else self.kl_weight
        scale = weight / self.num_data
        moving = self.training and self.model.training and torch.is_grad_enabled()
        kl = [(scale * own * value, value.detach()) for own, value in step.pathwise_kl]
        settled, rest = None, step.posteriors
        if step.ledger is not None:
            counted, in_place = set(step.ledger.counted()), moving and not self.check_finite
            if counted:
                settled = step.ledger.settle(rewards, self.moments._buffers, self.num_data, in_place, self._tables)
            rest = {name: layer for name, layer in rest.items() if name not in counted}
            uncounted = {name: layer for name, layer in rest.items() if name in step.ledger.tallies}
            if uncounted:
                kl += [(scale * own * value, value.detach()) for own, value in pathwise_kl(uncounted)]
        passes = RewardedPasses(step.samples, rewards.detach(), mean)
        fresh = {} if settled is None or step.ledger is None else step.ledger.fresh
        done: set[Any] = set()
        scoring = {name: layer for name, layer in rest.items() if not layer.pathwise}
        if len(scoring) > 1 and isinstance(scale, float) and not transformed():
            together = score_together(scoring, passes, self.moments._buffers, scale)
            kl += together.kl
            fresh.update(together.moments)
            scoring = {name: layer for name, layer in scoring.items() if name not in together.names}
        for name, layer in scoring.items():
            scored = score_layer(
                layer, passes, self._moments_of(name, layer), scale * layer.kl_weight, self.generator, done
            )
            kl.append((scored.loss, scored.kl))
            fresh.update({prefix_of(name) + key: value for key, value in scored.moments.items()})
        loss = -rewards.mean() if settled is None else settled.loss
        log_likelihood = -self.num_data * loss.detach() if settled is None else settled.log_likelihood
        total = None if settled is None else settled.kl
        for part, value in kl:
            loss = loss + part.to(loss.device)
            total = value.to(loss.device) if total is None else total + value.to(loss.device)
        if self.check_finite:
            self._require_finite(loss, inputs, output)
        self._watch.step(step.layers)
        if moving:
            for key, value in fresh.items():
                self.moments.get_buffer(key).copy_(value)
        elbo = settled.elbo if settled is not None and not kl else -self.num_data * loss.detach()
        return ELBOTerms(loss, elbo, log_likelihood, torch.zeros_like(loss) if total is None else total, output)

    def _require_finite(self, loss: Tensor, inputs: Any, output: Any) -> None:
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if bool(torch.isfinite(loss)):
            return
        found = [f"the loss is {loss.item()}"]
        tensors = [("input", i, x) for i, x in enumerate(inputs)] + [("output", 0, output)]
        for what, index, value in tensors:
            if isinstance(value, Tensor) and value.is_floating_point():
                bad = int((~torch.isfinite(value)).sum())
                if bad:
                    found.append(f"{what} {index} holds {bad} values that are not finite")
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                found.append(f"parameter {name} is not finite")
        raise NonFiniteError(
            "; ".join(found) + ". No parameter and no moment of the baseline was changed. Look at the data first, "
            "then at the step size; check_finite=False turns this check off."
        )


def _require_one_estimator(layers: dict[str, MaskedLayer]) -> None:
    """A posterior that two layers share learns in one way."""
    known: dict[Any, tuple[str, DropConnectPPLayer]] = {}
    for name, layer in posteriors_of(layers).items():
        for synapse in layer.gate_names:
            first, other = known.setdefault(layer.tie(synapse), (name, layer))
            if other.estimator != layer.estimator:
                raise ArgumentError(
                    f"{first!r} and {name!r} share a posterior and need one estimator, "
                    f"got {other.estimator.name!r} and {layer.estimator.name!r}."
                )


def _needs_mean_network(step: _Step) -> bool:
    return any(layer.estimator.needs_mean_network for layer in step.posteriors.values())
