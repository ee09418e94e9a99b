"""From rewards to the gradient of one layer's posterior, for the estimators that take the score.

Shapes: L samples, A arms, B batch, S the shape of a parameter, E = B where masks are per example.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dropconnectpp import functional
from dropconnectpp.errors import ShapeError
from dropconnectpp.estimators import BBVI, update_moments
from dropconnectpp.layers.dropconnectpp import DropConnectPPLayer
from dropconnectpp.layers.passes import BinaryGates, ForcedGates, Gates
from dropconnectpp.layers.sampling import Sample
from dropconnectpp.ops.posterior import Likelihood, drawn_scores_supported, inject, posterior_pass, scored


@dataclass(frozen=True)
class RewardedPasses:
    """The masks of every pass and what each was worth."""

    samples: list[Sample]
    rewards: Tensor  # (L, A, B) log-likelihoods
    mean_network: Tensor | None  # (B,) log-likelihoods of Eq. (19)


@dataclass
class Scored:
    """One layer's part in the loss."""

    kl: Tensor  # () nats
    loss: Tensor  # () kl_scale * kl in value, the posterior's gradient behind it
    moments: dict[str, Tensor]  # what the running moments become


def moment_names(layer: DropConnectPPLayer) -> tuple[str, ...]:
    """The running moments that a layer's estimator keeps: one pair for the layer, or one for each gate."""
    if not layer.estimator.needs_moments:
        return ()
    return layer.gate_names if isinstance(layer.estimator, BBVI) and layer.estimator.per_synapse else ("layer",)


def initial_moments(layer: DropConnectPPLayer) -> dict[str, Tensor]:
    """The running moments' start: (2,) for a layer, or (2, *S) for its gates."""
    device = layer.weight.device
    dtype = torch.float64 if layer.weight.dtype == torch.float64 else torch.float32
    shapes = {name: () if name == "layer" else layer.gate_shape(name) for name in moment_names(layer)}
    return {name: torch.zeros((2, *shape), device=device, dtype=dtype) for name, shape in shapes.items()}


def prefix_of(name: str) -> str:
    """What a layer's running moments are named by."""
    return f"{name.replace('.', '/') or 'model'}/"


def score_layer(
    layer: DropConnectPPLayer,
    passes: RewardedPasses,
    moments: dict[str, Tensor],
    kl_scale: Tensor | float,
    generator: torch.Generator | None,
    done: set[Any],
) -> Scored:
    """KL, gradient and new moments of a layer; parameters in ``done`` were met in another layer."""
    names = [name for name in layer.gate_names if layer.tie(name) not in done]
    done.update(layer.tie(name) for name in names)
    gates = [[arm[layer] for arm in sample.arms] for sample in passes.samples]
    device = layer.weight.device
    reward = passes.rewards.to(device)
    mean = None if passes.mean_network is None else passes.mean_network.to(device)
    example = _is_per_example(layer, gates[0][0])
    seen = _examples(gates[0][0])
    if example and seen not in (None, reward.shape[-1]):
        raise ShapeError(
            f"mask='example' needs the examples on the first axis of the layer's input: it saw {seen} rows "
            f"for a batch of {reward.shape[-1]}. Put the batch first, as (B, T, I), or use mask='batch'."
        )
    if not example:
        reward = reward.mean(-1)
        mean = None if mean is None else mean.mean()
    work = _Work(layer, gates, reward, mean, moments, kl_scale, generator)
    if isinstance(layer.estimator, BBVI) and layer.estimator.per_synapse:
        return work.per_synapse(names, example)
    return work.per_example(names) if example else work.per_batch(names)


def _is_per_example(layer: DropConnectPPLayer, gates: Gates) -> bool:
    if isinstance(gates, ForcedGates):
        return gates.weight.ndim > layer.weight.ndim
    return isinstance(gates, BinaryGates) and gates.each_example


def _examples(gates: Gates) -> int | None:
    """How many examples a layer with a mask for each has seen; None if it was not called."""
    if isinstance(gates, ForcedGates):
        return gates.weight.shape[0]
    assert isinstance(gates, BinaryGates)
    return gates.draw.examples.get(gates.streams["weight"])


@dataclass
class _Work:
    layer: DropConnectPPLayer
    gates: list[list[Gates]]  # L lists of A
    reward: Tensor  # (L, A) or (L, A, B)
    mean: Tensor | None  # () or (B,)
    moments: dict[str, Tensor]
    kl_scale: Tensor | float
    generator: torch.Generator | None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)

    def _coefficients(self) -> Tensor:  # (L, E)
        estimator = self.layer.estimator
        baseline = self.moments.get("layer") if estimator.needs_moments else self.mean
        return estimator.coefficients(self.reward, baseline)

    def _mirrored(self) -> bool:
        return self.layer.antithetic

    def _pass(self, name: str, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
        """KL and squared scores of one parameter; its gradient is kept for `_scored`."""
        wanted, posterior = torch.is_grad_enabled(), self.layer.posterior_of(name)
        found = posterior_pass(posterior, kl_scale=self.kl_scale, likelihood=likelihood, gradients=wanted)
        self.gradients.update(found.gradients)
        return found.kl, found.squared_score

    def _drawn_pass(self, name: str, coefficients: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The pass for masks that an operation draws again; None where they must be at hand."""
        first = [sample[0] for sample in self.gates]
        draws = [gates.draw for gates in first if isinstance(gates, BinaryGates)]
        posterior = self.layer.posterior_of(name)
        if len(draws) < len(first) or not torch.is_grad_enabled() or not drawn_scores_supported(posterior, draws):
            return None
        assert isinstance(first[0], BinaryGates)
        synapses = self.layer.synapses(name, first[0])
        return scored(posterior, synapses, draws, coefficients, self.kl_scale, self._mirrored())

    def _mask(self, name: str, gates: Gates) -> Tensor:
        """The mask of one parameter's gates in one pass."""
        assert isinstance(gates, BinaryGates | ForcedGates)
        return self.layer.gate_mask(name, gates)

    def _scored(self, kl: list[Tensor], moments: dict[str, Tensor]) -> Scored:
        total = sum(kl[1:], kl[0]) if kl else torch.zeros((), device=self.layer.weight.device)
        if self.losses:
            return Scored(total, sum(self.losses[1:], self.losses[0]), moments)
        parameters = [getattr(self.layer, key) for key in self.gradients]
        return Scored(total, inject(self.kl_scale * total, parameters, list(self.gradients.values())), moments)

    def _updated(self, reward: Tensor, squared: Tensor) -> dict[str, Tensor]:
        if "layer" not in self.moments:
            return {}
        # Samples of one minibatch count as one observation of E[f h] and E[h^2].
        fresh = update_moments(self.moments["layer"], reward, squared, self.layer.estimator.decay)  # type: ignore[attr-defined]
        return {"layer": fresh}

    def per_batch(self, names: list[str]) -> Scored:
        """One mask a sample: the masks are at hand and the pass streams over them."""
        count = len(self.gates)
        coefficients = self._coefficients()
        coefficients = coefficients if count == 1 else coefficients / count
        kl: list[Tensor] = []
        squared: Tensor | None = None  # (L,)
        wide = functional.widen(self.layer.weight[..., :0]).dtype
        found = [self._drawn_pass(name, coefficients.to(wide)) for name in names]
        for name, drawn in zip(names, found, strict=True):
            if drawn is not None and None not in found:
                loss, part, score = drawn
                self.losses.append(loss)
            else:
                masks = Likelihood(
                    [self._mask(name, sample[0]) for sample in self.gates],
                    [self._mask(name, sample[1]) for sample in self.gates] if self._mirrored() else [],
                    coefficients.to(wide),
                    generator=self.generator,
                )
                part, score = self._pass(name, masks)
            kl.append(part)
            squared = score if squared is None else squared + score
        if squared is None or "layer" not in self.moments or not torch.is_grad_enabled():
            return self._scored(kl, {})
        reward, squared = self.reward.mean(1), squared.to(self.reward.dtype)
        if count > 1:
            total = squared.sum()
            reward = (reward * squared).sum() / total.clamp_min(torch.finfo(total.dtype).tiny)
            return self._scored(kl, self._updated(reward, total / count))
        return self._scored(kl, self._updated(reward[0], squared[0]))

    def per_example(self, names: list[str]) -> Scored:
        """One mask an example: masks are redrawn block by block and summed with their weights."""
        layer, reward = self.layer, self.reward
        samples, _, batch = reward.shape
        coefficients = self._coefficients() / (samples * batch)  # (L, B)
        running = "layer" in self.moments
        ones = torch.ones_like(coefficients)
        rows = [coefficients, reward.mean(1), ones] if running else [coefficients]
        weights = torch.stack(rows)  # (K, L, B)
        totals = self._weighted(weights, 0)
        if self._mirrored():
            mirror = self._weighted(weights, 1)
            totals = {name: totals[name] - mirror[name] for name in totals}
        kl: list[Tensor] = []
        squared = torch.zeros(2, device=reward.device, dtype=reward.dtype)
        for name in names:
            logit = layer.gate_logit(name).detach()
            if self._mirrored():
                gradient = functional.disarm_gradient(logit, totals[name][0])
            else:
                gradient = functional.score_gradient(logit, totals[name][0], coefficients.sum())
            ready = Likelihood(coefficients=coefficients.sum(1), gradient=gradient, generator=self.generator)
            kl.append(self._pass(name, ready)[0])
            if running:
                squared = squared + torch.stack(
                    [_squared_score(layer, name, totals[name][row], weights[row].sum()).sum() for row in (1, 2)]
                ).to(squared.dtype)
        if not running or not names:
            return self._scored(kl, {})
        seen = squared[1].clamp_min(torch.finfo(squared.dtype).tiny)
        return self._scored(kl, self._updated(squared[0] / seen, squared[1] / (samples * batch)))

    def per_synapse(self, names: list[str], example: bool) -> Scored:
        """varpi of Eq. (10) for each synapse; the gradient is formed whole."""
        layer = self.layer
        reward = self.reward.mean(1)  # (L,) or (L, B)
        weights = torch.stack([reward, torch.ones_like(reward)])  # (2, L, ...)
        totals = self._weighted(weights, 0) if example else self._stacked(weights)
        kl: list[Tensor] = []
        fresh: dict[str, Tensor] = {}
        for name in names:
            logit, known, count = layer.gate_logit(name).detach(), self.moments[name], weights[1].sum()
            varpi = functional.control_weight(known[0], known[1])
            rewarded = functional.score_gradient(logit, totals[name][0], weights[0].sum())
            plain = functional.score_gradient(logit, totals[name][1], count)
            gradient = torch.where(known[1] > 0, (rewarded - varpi * plain) / count, 0.0).to(logit.dtype)
            kl.append(self._pass(name, Likelihood(gradient=gradient, generator=self.generator))[0])
            observed = torch.stack(
                [_squared_score(layer, name, totals[name][row], weights[row].sum()) / count for row in (0, 1)]
            )
            fresh[name] = torch.lerp(observed.to(known.dtype), known, layer.estimator.decay)  # type: ignore[attr-defined]
        return self._scored(kl, fresh)

    def _weighted(self, weights: Tensor, arm: int) -> dict[str, Tensor]:
        """sum over samples and examples of weight times mask: (K, *S) for each parameter."""
        totals: dict[str, Tensor] = {}
        for index, sample in enumerate(self.gates):
            found = self.layer.example_gates(sample[arm]).weighted_sum(weights[:, index])
            totals = {name: found[name] + totals[name] if totals else found[name] for name in found}
        return totals

    def _stacked(self, weights: Tensor) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        for name in self.layer.gate_names:
            ndim = len(self.layer.gate_shape(name))
            parts = [
                weights[:, index].view(-1, *[1] * ndim) * self._mask(name, sample[0])
                for index, sample in enumerate(self.gates)
            ]
            totals[name] = sum(parts[1:], parts[0])
        return totals


def _squared_score(layer: DropConnectPPLayer, name: str, weighted_mask: Tensor, total: Tensor) -> Tensor:
    """sum_s w_s (z_s - pi~)^2 from sum_s w_s z_s: since z^2 = z, h^2 = z (1 - 2 pi~) + pi~^2."""
    pi = torch.sigmoid(layer.gate_logit(name).detach())
    value = weighted_mask * (1.0 - 2.0 * pi) + total * pi.square()
    kept = layer.gate_kept(name)
    return value if kept is None else value * kept
