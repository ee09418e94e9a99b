"""The stacked learned gates: DropConnect++ for many replicas, by any of the estimators.

The maths is the library's: `functional`, `estimators`, `ops.gated_weight`. Only the source of random numbers differs.
Shapes: R replicas of one segment of the stack, B batch, P passes of a step, L samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dropconnectpp import _polynomials as polynomials
from dropconnectpp import functional
from dropconnectpp.estimators import Concrete, Eq16, Estimator, resolve
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.kernels.baseline import fold_in_, weigh
from dropconnectpp.lab.kernels.dense import beside, draw_masks, linear, score_pass
from dropconnectpp.lab.kernels.gates import Gate, LearnedGate
from dropconnectpp.lab.kernels.local import MARGIN, LocalGate
from dropconnectpp.lab.kernels.noise import draw_gamma, draw_normal, draw_uniform
from dropconnectpp.lab.replicas.regularisers import SYNAPSES, DropConnect
from dropconnectpp.ops import gated_weight


class DropConnectPP(DropConnect):
    """Each synapse has its own learned keep probability: Eq. (11)-(16)."""

    def __init__(
        self,
        methods: Sequence[Method],
        replicas: Tensor,
        shape: tuple[int, int],
        num_data: int,
        root_seed: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(methods, replicas, shape, num_data, root_seed, dtype)
        method = self.method
        self.estimator, keep = estimator_of(method), method.keep_probability
        values: dict[str, float] = {
            method.parameterisation: keep if method.parameterisation == "probability" else math.log(keep / (1 - keep))
        }
        if method.hyper == "learned":
            alpha, beta = method.posterior_alpha, method.posterior_beta
            values["alpha"] = functional.inverse_positive(method.alpha + keep if alpha is None else alpha)
            values["beta"] = functional.inverse_positive(method.beta + 1 - keep if beta is None else beta)
        self.parameters = {
            f"{name}_{key}": torch.full((len(replicas), *self.shapes[name]), value, device=replicas.device, dtype=dtype)
            for name in SYNAPSES
            for key, value in values.items()
        }
        if self.estimator.needs_moments:
            self.moments = torch.zeros((2, len(replicas)), device=replicas.device, dtype=dtype)
        self._masks: list[dict[str, Tensor]] = []
        self._step: Tensor | None = None

    @property
    def passes(self) -> int:
        return self.method.num_samples * self.estimator.arms

    @property
    def needs_mean_network(self) -> bool:
        return self.estimator.needs_mean_network

    def logit(self, name: str) -> Tensor:
        """pi~'s log-odds, (R, ...)."""
        if self.method.parameterisation == "logit":
            return self.parameters[f"{name}_logit"]
        probability = self.parameters[f"{name}_probability"]
        inside = probability.clamp(functional.PROBABILITY_MARGIN, 1 - functional.PROBABILITY_MARGIN)
        return torch.logit(probability + (inside - probability).detach())

    def keep_probability(self, name: str = "weight") -> Tensor:
        return torch.sigmoid(self.logit(name).detach())

    def _trained_keep(self, name: str) -> Tensor:
        return torch.sigmoid(self.logit(name))

    def train_pass(self, x: Tensor, weight: Tensor, bias: Tensor, step: Tensor, index: int) -> Tensor:
        if index == 0:
            self._masks, self._step = [], step
        if self.estimator.gate == "gaussian":
            return self._gaussian_pass(x, weight, bias, step, index)
        gates = {
            name: self._training_gate(name, value, step, index) for name, value in (("weight", weight), ("bias", bias))
        }
        return torch.relu(linear(x, gates["weight"], gates["bias"]))

    def _training_gate(self, name: str, value: Tensor, step: Tensor, index: int) -> Tensor:
        """A gated weight, differentiable by the weight and, for pathwise estimators, by the logit."""
        stream, (sample, arm) = self._stream(f"mask:{name}"), divmod(index, self.estimator.arms)
        if isinstance(self.estimator, Concrete):
            noise = draw_uniform(stream, value, self.replicas, step, sample)
            return value * functional.relax_mask(self.logit(name), noise, self.estimator.temperature)
        if self.estimator.arms == 1:
            mask = draw_masks(stream, self.keep_probability(name), self.replicas, step, sample)
        else:
            noise = draw_uniform(stream, value, self.replicas, step, sample)
            draw = functional.draw_antithetic_mask if arm else functional.draw_mask
            mask = draw(self.logit(name).detach(), noise)
        if not self.estimator.scores:
            return gated_weight.straight_through(value, self.logit(name), mask, None)
        if name == "weight":
            self._masks.append({})
        self._masks[index][name] = mask
        return gated_weight.masked(value, mask)

    def _gaussian_pass(self, x: Tensor, weight: Tensor, bias: Tensor, step: Tensor, index: int) -> Tensor:
        means, variances = zip(
            functional.gaussian_gate_moments(self.logit("weight"), weight),
            functional.gaussian_gate_moments(self.logit("bias"), bias),
            strict=True,
        )
        mean, variance = linear(x, *means), linear(x.square(), *variances)
        noise = draw_normal(self._stream("local"), mean.detach(), self.replicas, step, index)
        return torch.relu(mean + torch.sqrt(variance.clamp_min(0.0) + MARGIN) * noise)

    def mean_pass(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.relu(linear(x, weight * self.keep_probability("weight"), bias * self.keep_probability("bias")))

    # ------------------------------------------------------------------------ the posterior's gradient

    @torch.no_grad()
    def gradients(self, rewards: Tensor, mean_reward: Tensor | None) -> dict[str, Tensor]:
        """KL and, for score estimators, likelihood: rewards (P, R) are mean log-likelihoods per example."""
        samples, coefficients = self.method.num_samples, None
        if self.estimator.scores:
            arms = rewards.view(samples, self.estimator.arms, -1)
            baseline = self.moments if self.estimator.needs_moments else mean_reward
            assert self._step is not None
            coefficients = self._signed(self.estimator.coefficients(arms, baseline), self._step) / samples  # (L, R)
            if self._in_one_pass:
                return self._score_gradients(coefficients[0], arms.mean(1))
            self.fold_in(arms.mean(1), [torch.stack([self._squared_score(masks) for masks in self._masks])])
        found: dict[str, Tensor] = {}
        for name in SYNAPSES:
            found.update(self._posterior_gradient(name, coefficients))
        self._masks = []
        return found

    def _signed(self, coefficients: Tensor, step: Tensor) -> Tensor:  # (L, R)
        """The coefficients as they are or, for the control, each with a random sign."""
        if self.method.reward == "likelihood":
            return coefficients
        noise = self._stream("reward").uniform(self.replicas, step, len(coefficients))  # (R, L)
        return torch.where(noise.mT < 0.5, coefficients, -coefficients)

    @property
    def _in_one_pass(self) -> bool:
        """Whether this is the common case: one mask, the uniform prior, the best q(pi)."""
        method = self.method
        return method.hyper == "optimal" and method.alpha == method.beta == 1.0 and self.passes == 1

    def _score_gradients(self, coefficient: Tensor, rewards: Tensor) -> dict[str, Tensor]:
        (masks,), self._masks = self._masks, []
        found, squares = {}, []
        for name in SYNAPSES:
            logit = self.logit(name)
            grad_logit, squared = score_pass(logit, masks[name], coefficient, self.kl_scale)
            found[f"{name}_{self.method.parameterisation}"] = self._grad_parameter(grad_logit, logit)
            squares.append(squared)
        self.fold_in(rewards, [square[None, :, None] for square in squares])
        return found

    def _grad_parameter(self, grad_logit: Tensor, logit: Tensor) -> Tensor:
        """The gradient with respect to what is optimised, from that with respect to the logits."""
        if self.method.parameterisation == "logit":
            return grad_logit
        return grad_logit / (torch.sigmoid(logit) * torch.sigmoid(-logit))

    def _posterior_gradient(self, name: str, coefficients: Tensor | None) -> dict[str, Tensor]:
        method, logit = self.method, self.logit(name)
        scale = beside(self.kl_scale, logit)
        found: dict[str, Tensor] = {}
        if method.hyper == "optimal":
            _, grad_kl = functional.collapsed_kl(logit, method.alpha, method.beta, value=False)
            assert grad_kl is not None
            grad_logit = grad_kl * scale
        else:
            raw = {key: self.parameters[f"{name}_{key}"] for key in ("alpha", "beta")}
            alpha, beta = (functional.positive(value) for value in raw.values())
            _, grad_kl, *others = functional.learned_kl(logit, alpha, beta, method.alpha, method.beta)
            grad_logit = grad_kl * scale
            scores = self._beta_scores(name, alpha, beta, coefficients)
            for (key, value), grad, score in zip(raw.items(), others, scores, strict=True):
                found[f"{name}_{key}"] = (grad * scale - score) * torch.sigmoid(value)
        if coefficients is not None:
            grad_logit = grad_logit - self._likelihood_gradient(name, logit, coefficients)
        return {f"{name}_{method.parameterisation}": self._grad_parameter(grad_logit, logit), **found}

    def _likelihood_gradient(self, name: str, logit: Tensor, coefficients: Tensor) -> Tensor:
        """sum_l c_l (z_l - pi~), Eq. (8), or the antithetic pair's."""
        arms = self.estimator.arms
        total = torch.zeros_like(logit)
        for sample, coefficient in enumerate(coefficients):
            weight = beside(coefficient, logit)
            masks = [self._masks[sample * arms + arm][name] for arm in range(arms)]
            total.addcmul_(masks[0].to(logit.dtype), weight)
            if arms == 2:
                total.addcmul_(masks[1].to(logit.dtype), weight, value=-1.0)
        if arms == 2:
            return functional.disarm_gradient(logit, total)
        return functional.score_gradient(logit, total, beside(coefficients.sum(0), logit))

    def _squared_score(self, masks: dict[str, Tensor]) -> Tensor:  # (R, 2)
        parts = [
            functional.bernoulli_score(masks[name], self.logit(name)).square().flatten(1).sum(1) for name in SYNAPSES
        ]
        return torch.stack(parts, 1)

    def _beta_scores(
        self, name: str, alpha: Tensor, beta: Tensor, coefficients: Tensor | None
    ) -> tuple[Tensor | float, Tensor | float]:
        """The last line of Eq. (16): the score of a draw of pi from q(pi); nothing for other estimators."""
        if not isinstance(self.estimator, Eq16) or coefficients is None:
            return 0.0, 0.0
        assert self._step is not None
        heads, tails = (
            draw_gamma(shape, self._stream(f"{kind}:{name}"), self.replicas, self._step)
            for kind, shape in (("heads", alpha), ("tails", beta))
        )
        total = beside(coefficients.sum(0), alpha)
        score_alpha, score_beta = functional.beta_score(heads / (heads + tails), alpha, beta)
        return total * score_alpha, total * score_beta

    # ------------------------------------------------------------- where the weights go through kernels

    def gate(self, name: str = "weight") -> Gate | None:
        method = self.method
        supported = (
            method.estimator in ("bbvi", "straight-through", "local")
            and method.parameterisation == "logit"
            and (method.hyper == "learned" or polynomials.prior_polynomial(method.alpha, method.beta) is not None)
        )
        if not supported:
            return None
        raw = {key: self.parameters[f"{name}_{key}"].detach() for key in ("alpha", "beta") if method.hyper == "learned"}
        gaussian = self.estimator.gate == "gaussian"
        kind: type[LearnedGate] = LocalGate if gaussian else LearnedGate
        return kind(
            self.logit(name).detach(),
            self._stream("local" if gaussian else f"mask:{name}"),
            self.kl_scale,
            "score" if self.estimator.scores else "straight-through",
            prior_alpha=method.alpha,
            prior_beta=method.beta,
            samples=method.num_samples,
            slab_scale=self._slab_scale,
            **raw,
        )

    @torch.no_grad()
    def coefficient(self, rewards: Tensor, mean_reward: Tensor | None, step: Tensor) -> Tensor:
        """What multiplies each sample's score, from the step's rewards: both (L, R)."""
        if self.moments is None:
            weighed = self.estimator.coefficients(rewards.unsqueeze(1), mean_reward) / len(rewards)
        else:
            weighed = weigh(rewards, self.moments)
        return self._signed(weighed, step)

    @torch.no_grad()
    def fold_in(self, rewards: Tensor, squared: Sequence[Tensor]) -> None:
        """Rewards (L, R) and squared scores, pieces (L, R, any number) to be added up, into the moments."""
        if self.moments is not None:
            fold_in_(self.moments, rewards, squared, self.estimator.decay)  # type: ignore[attr-defined]

    def kl(self) -> Tensor:
        parts = []
        for name in SYNAPSES:
            logit = self.logit(name)
            if self.method.hyper == "optimal":
                kl, _ = functional.collapsed_kl(logit, self.method.alpha, self.method.beta, grad=False)
                assert kl is not None
            else:
                alpha, beta = (functional.positive(self.parameters[f"{name}_{key}"]) for key in ("alpha", "beta"))
                kl = functional.learned_kl(logit, alpha, beta, self.method.alpha, self.method.beta)[0]
            parts.append(kl.flatten(1).sum(1))
        return parts[0] + parts[1]

    @torch.no_grad()
    def after_step(self) -> None:
        if self.method.parameterisation == "probability":
            margin = functional.PROBABILITY_MARGIN
            for name in SYNAPSES:
                self.parameters[f"{name}_probability"].clamp_(margin, 1 - margin)


def estimator_of(method: Method) -> Estimator:
    """The library's estimator that a method names."""
    estimator = resolve(method.estimator_options())
    estimator.check(hyper=method.hyper, num_samples=method.num_samples)
    return estimator
