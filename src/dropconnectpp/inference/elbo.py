"""The evidence lower bound of Eq. (15) as a module: a loss with the right gradient for every layer.

Shapes: L samples, A arms (2 for an antithetic pair), B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp.errors import ArgumentError, NonFiniteError, ShapeError, check_count, check_not_negative
from dropconnectpp.inference.batchnorm import frozen_statistics
from dropconnectpp.inference.score_gradient import RewardedPasses, initial_moments, score_layer
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.sampling import (
    MEAN,
    Assignment,
    NoiseSource,
    Sample,
    masked_layers,
    replay_in_backward,
    running,
)
from dropconnectpp.likelihoods import LogLikelihood
from dropconnectpp.ops import posterior as posterior_ops


@dataclass(frozen=True)
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

    samples: list[Sample]
    pathwise_kl: list[tuple[DropConnectPPLayer, Tensor]]
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=list)

    @property
    def first(self) -> Assignment:
        return self.samples[0].arms[0]


class _Moments(nn.Module):
    """Running moments; they stay at least float32, since sums over a layer do not fit float16."""

    def _apply(self, fn: Any, recurse: bool = True) -> _Moments:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            known = before[name]
            if buffer is not None and known is not None and buffer.dtype.itemsize < 4:
                self._buffers[name] = known.to(buffer.device)
        return self


class ELBO(nn.Module):
    """The bound of Eq. (15) for a model with DropConnect++ layers, estimated on minibatches.

    ``log_likelihood(output, target) -> (B,)`` in nats; ``num_data`` is N, the size of the training
    set: the minibatch's likelihood counts N/B times, the KL once. ``num_samples`` is L.
    ``kl_weight`` multiplies the KL, on top of each layer's own ``kl_weight``, and may be changed
    between steps; `ELBOTerms.kl` has neither. Masks come from ``generator``, or from torch's own.
    With ``check_finite`` a loss that is not finite raises before anything is changed; on a GPU that
    waits for the device at each step, so turn it off where that matters.

    >>> model = torch.nn.Sequential(dropconnectpp.DropConnectPPLinear(4, 3))
    >>> elbo = ELBO(model, dropconnectpp.categorical, num_data=100)
    >>> terms = elbo(torch.randn(8, 4), target=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
    >>> terms.loss.backward()
    >>> bool(torch.isclose(terms.loss, -terms.elbo / 100))
    True
    """

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
                "Ready made: dropconnectpp.categorical, bernoulli, gaussian(scale)."
            )
        self.model = model
        self.log_likelihood = log_likelihood
        self.num_data = check_count("num_data", num_data)
        self.num_samples = check_count("num_samples", num_samples)
        self.kl_weight = kl_weight
        self.generator = generator
        self.check_finite = check_finite
        self._layers = masked_layers(model)
        self._require_one_estimator()
        self._step: _Step | None = None
        self.moments = _Moments()
        for name, layer in self._posterior_layers():
            layer.estimator.check(hyper=layer.hyper, num_samples=self.num_samples)
            for key, start in initial_moments(layer).items():
                self.moments.register_buffer(f"{name.replace('.', '/') or 'model'}/{key}", start)
        self._arms = max((layer.estimator.arms for _, layer in self._posterior_layers()), default=1)

    @property
    def kl_weight(self) -> float:
        return self._kl_weight

    @kl_weight.setter
    def kl_weight(self, value: float) -> None:
        self._kl_weight = check_not_negative("kl_weight", value)

    def _require_one_estimator(self) -> None:
        """A posterior that two layers share learns in one way."""
        known: dict[Any, tuple[str, DropConnectPPLayer]] = {}
        for name, layer in self._posterior_layers():
            for synapse in layer.synapse_names:
                first, other = known.setdefault(layer.tie(synapse), (name, layer))
                if other.estimator != layer.estimator:
                    raise ArgumentError(
                        f"{first!r} and {name!r} share a posterior and need one estimator, "
                        f"got {other.estimator.name!r} and {layer.estimator.name!r}."
                    )

    def _posterior_layers(self) -> Iterator[tuple[str, DropConnectPPLayer]]:
        for name, layer in self._layers.items():
            if isinstance(layer, DropConnectPPLayer):
                yield name, layer

    # ------------------------------------------------------------------------------ the public way

    def forward(self, *inputs: Any, target: Any, **options: Any) -> ELBOTerms:
        """Run the model on ``inputs`` as often as the estimators need and return the terms."""
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
            with running(step.first):
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
        layers = list(self._layers.values())
        if self.training:
            for _, layer in self._posterior_layers():
                layer.project()
        source = NoiseSource(self.generator)
        samples = [
            Sample(layers, source, relaxed=self.model.training, arms=self._arms) for _ in range(self.num_samples)
        ]
        # The KL of pathwise layers enters the graph before the passes: autograd then works it out
        # last, when the masked weights are gone, and the peak of memory is lower by one tensor.
        kl = [(layer, posterior_ops.kl_sum(layer, name)) for layer, name in self._synapses() if layer.pathwise]
        return _Step(samples, kl)

    def _synapses(self) -> Iterator[tuple[DropConnectPPLayer, str]]:
        """Each learned parameter once, however many layers share it."""
        seen: set[Any] = set()
        for _, layer in self._posterior_layers():
            for name in layer.synapse_names:
                if layer.tie(name) not in seen:
                    seen.add(layer.tie(name))
                    yield layer, name

    @property
    def _needs_mean_network(self) -> bool:
        return any(layer.estimator.needs_mean_network for _, layer in self._posterior_layers())

    def _mean_network(self, step: _Step, inputs: Any, options: Any, target: Any) -> Tensor | None:
        """The log-likelihoods (B,) of Eq. (19) on the same minibatch, where a baseline needs them."""
        if not self._needs_mean_network:
            return None
        assignment: Assignment = dict.fromkeys(step.first, MEAN)
        with torch.no_grad(), running(assignment), frozen_statistics(self.model):
            return self._log_likelihoods(self.model(*inputs, **options), target)

    def _run_passes(self, step: _Step, inputs: Any, options: Any, target: Any, done: Any) -> tuple[Tensor, Any]:
        """Every sample and arm: log-likelihoods (L, A, B), and the first output."""
        rows: list[Tensor] = []
        first: Any = done
        for sample in step.samples:
            for arm, assignment in enumerate(sample.arms):
                output = done
                if done is None or rows:
                    with running(assignment), frozen_statistics(self.model if arm else None):
                        output = self.model(*inputs, **options)
                replay_in_backward(output, assignment)
                first = output if first is None else first
                rows.append(self._log_likelihoods(output, target))
        rewards = torch.stack(rows).view(self.num_samples, self._arms, -1)
        return rewards, first

    def _repeatable_call(self, step: _Step, output: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        needed = self._needs_mean_network or self.num_samples * self._arms > 1
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
        loss = -rewards.mean()
        log_likelihood = -self.num_data * loss.detach()
        scale = self.kl_weight / self.num_data
        kl = [value.detach().to(loss.device) for _, value in step.pathwise_kl]
        parts = [scale * layer.kl_weight * value.to(loss.device) for layer, value in step.pathwise_kl]
        passes = RewardedPasses(step.samples, rewards.detach(), mean)
        fresh: dict[str, Tensor] = {}
        done: set[Any] = set()
        for name, layer in self._posterior_layers():
            if layer.pathwise:
                continue
            prefix = f"{name.replace('.', '/') or 'model'}/"
            known = {k[len(prefix) :]: v for k, v in self.moments.named_buffers() if k.startswith(prefix)}
            scored = score_layer(layer, passes, known, scale * layer.kl_weight, self.generator, done)
            kl.append(scored.kl.to(loss.device))
            parts.append(scored.loss.to(loss.device))
            fresh.update({prefix + key: value for key, value in scored.moments.items()})
        loss = sum(parts, loss)
        total = sum(kl[1:], kl[0]) if kl else torch.zeros_like(log_likelihood)
        if self.check_finite:
            self._require_finite(loss, inputs, output)
        if self.training and self.model.training and torch.is_grad_enabled():
            for key, value in fresh.items():
                self.moments.get_buffer(key).copy_(value)
        return ELBOTerms(loss, -self.num_data * loss.detach(), log_likelihood, total, output)

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


# ---------------------------------------------------------------------------------------- the rest


def named_kl(model: nn.Module) -> dict[str, Tensor]:
    """The KL of each DropConnect++ layer in nats, differentiable; shared parameters count once.

    It is the divergence itself, whatever the layers' ``kl_weight``.
    """
    seen: set[Any] = set()
    result: dict[str, Tensor] = {}
    for layer_name, layer in masked_layers(model).items():
        if not isinstance(layer, DropConnectPPLayer):
            continue
        fresh = [name for name in layer.synapse_names if layer.tie(name) not in seen]
        seen.update(layer.tie(name) for name in fresh)
        parts = [posterior_ops.kl_sum(layer, name) for name in fresh]
        result[layer_name] = torch.stack(parts).sum() if parts else layer.weight.new_zeros(())
    return result


def kl_divergence(model: nn.Module) -> Tensor:
    """KL of the whole model's posterior from its prior, Eq. (20) + Eq. (21), in nats, differentiable.

    It is the divergence itself, whatever the layers' ``kl_weight``.

    >>> kl_divergence(dropconnectpp.DropConnectPPLinear(10, 10, bias=False))
    tensor(24.1564, grad_fn=<SumBackward0>)
    """
    values = list(named_kl(model).values())
    if not values:
        return torch.zeros(())
    return torch.stack([value.to(values[0].device) for value in values]).sum()


def parameter_groups(
    model: nn.Module, lr: float, *, logit_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for a torch optimiser: "weights", which decay, and "posterior", which never does.

    The posterior's group holds logits (or probabilities) and Beta parameters, at step size
    ``logit_lr``; by default at ``lr`` times their layer's ``logit_step``, with one group named
    "posterior" for each step that occurs. Parameters that need no gradient are left out.

    >>> groups = parameter_groups(dropconnectpp.DropConnectPPLinear(3, 2), lr=0.01, logit_lr=0.1)
    >>> [(group["name"], group["lr"], len(group["params"])) for group in groups]
    [('weights', 0.01, 2), ('posterior', 0.1, 2)]
    >>> model = torch.nn.Sequential(*(dropconnectpp.DropConnectPPLinear(3, 3, logit_step=s) for s in (1.0, 5.0)))
    >>> [(group["name"], group["lr"], len(group["params"])) for group in parameter_groups(model, lr=0.01)]
    [('weights', 0.01, 4), ('posterior', 0.01, 2), ('posterior', 0.05, 2)]
    """
    steps: dict[int, float] = {}
    for layer in masked_layers(model).values():
        if isinstance(layer, DropConnectPPLayer):
            for key in layer.posterior_names:  # shared ones keep the first layer's step
                steps.setdefault(id(getattr(layer, key)), 1.0 if logit_lr is not None else layer.logit_step)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in trained if id(p) not in steps]
    posterior: dict[float, list[nn.Parameter]] = {}
    for parameter in trained:
        if id(parameter) in steps:
            posterior.setdefault(steps[id(parameter)], []).append(parameter)
    base = lr if logit_lr is None else logit_lr
    groups: list[dict[str, Any]] = [{"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay}]
    for step, parameters in posterior.items():
        size = base if step == 1.0 else base * step  # a tensor stays the caller's own
        groups.append({"name": "posterior", "params": parameters, "lr": size, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]
