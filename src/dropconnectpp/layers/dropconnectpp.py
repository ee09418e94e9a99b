"""DropConnect++: a keep probability learned for every synapse, with its Beta hyper-posterior."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from dropconnectpp import functional
from dropconnectpp.errors import check_choice, check_not_negative, check_positive, check_probability
from dropconnectpp.estimators import Concrete, Estimator, StraightThrough, resolve
from dropconnectpp.layers.base import MaskedLayer
from dropconnectpp.layers.sampling import transformed
from dropconnectpp.ops import gated_weight


class DropConnectPPLayer(MaskedLayer):
    """A masked layer that learns each synapse's keep probability: Eq. (11)-(14).

    Parameters: `weight`, `bias`; `weight_logit`, `bias_logit` (or `weight_probability`,
    `bias_probability`, which optimise pi~ itself and are kept inside (0, 1)); and with
    hyper="learned" `weight_alpha`, `weight_beta`, `bias_alpha`, `bias_beta` behind a softplus.

    `kl_weight` and `logit_step` may be changed between steps. Layers that share a parameter's
    posterior count once in the loss: by the weight and step of the first of them.
    """

    kl_weight: float = 1.0
    """What multiplies this layer's KL in the loss, on top of the ELBO's own weight."""
    logit_step: float = 1.0
    """The posterior's step size as a multiple of the weights': for `dropconnectpp.parameter_groups`."""

    def _set_up_posterior(
        self,
        alpha: float,
        beta: float,
        keep_probability: float,
        hyper: str,
        estimator: str | Estimator | dict[str, Any],
        parameterisation: str,
        kl_weight: float,
        logit_step: float,
        factory: dict[str, Any],
    ) -> None:
        self.alpha = check_positive("alpha", alpha)
        self.beta = check_positive("beta", beta)
        self.initial_keep_probability = check_probability("keep_probability", keep_probability)
        self.hyper = check_choice("hyper", hyper, ("optimal", "learned"))
        self.parameterisation = check_choice("parameterisation", parameterisation, ("logit", "probability"))
        self.kl_weight = check_not_negative("kl_weight", kl_weight)
        self.logit_step = check_positive("logit_step", logit_step)
        self.estimator = resolve(estimator)
        self.estimator.check(hyper=self.hyper)
        for name in self.synapse_names:
            for key in self.posterior_names_of(name):
                shape = getattr(self, name).shape
                self.register_parameter(key, nn.Parameter(torch.empty(shape, **factory)))
        self.reset_parameters()
        self.reset_posterior()

    @torch.no_grad()
    def reset_posterior(
        self,
        keep_probability: float | None = None,
        posterior_alpha: float | None = None,
        posterior_beta: float | None = None,
    ) -> None:
        """Set every pi~, and with hyper="learned" every alpha~ and beta~, to one value.

        The defaults are the constructor's keep probability and the hyper-posterior that is best
        for it. The paper does not say where it starts.
        """
        keep = self.initial_keep_probability if keep_probability is None else keep_probability
        keep = check_probability("keep_probability", keep)
        values = {
            "logit": math.log(keep) - math.log1p(-keep),
            "probability": keep,
            "alpha": functional.inverse_positive(
                check_positive("posterior_alpha", self.alpha + keep if posterior_alpha is None else posterior_alpha)
            ),
            "beta": functional.inverse_positive(
                check_positive("posterior_beta", self.beta + 1 - keep if posterior_beta is None else posterior_beta)
            ),
        }
        for name in self.synapse_names:
            for suffix, value in values.items():
                parameter = getattr(self, f"{name}_{suffix}", None)
                if parameter is not None:
                    parameter.fill_(value)

    @property
    def pathwise(self) -> bool:
        return not self.estimator.scores

    @property
    def straight_through(self) -> bool:
        return isinstance(self.estimator, StraightThrough)

    @property
    def antithetic(self) -> bool:
        return self.estimator.arms == 2

    @property
    def temperature(self) -> float | None:
        return self.estimator.temperature if isinstance(self.estimator, Concrete) else None

    def posterior_names_of(self, name: str) -> list[str]:
        """The posterior's parameters behind "weight" or "bias", by name."""
        suffixes = [self.parameterisation, *(("alpha", "beta") if self.hyper == "learned" else ())]
        return [f"{name}_{suffix}" for suffix in suffixes]

    @property
    def posterior_names(self) -> list[str]:
        """All the posterior's parameters, by name."""
        return [key for name in self.synapse_names for key in self.posterior_names_of(name)]

    def gate_parameter(self, name: str) -> nn.Parameter:
        """The parameter behind pi~: `weight_logit` or `weight_probability`, likewise for the bias."""
        parameter: nn.Parameter = getattr(self, f"{name}_{self.parameterisation}")
        return parameter

    def logit(self, name: str) -> Tensor:
        parameter = self.gate_parameter(name)
        if self.parameterisation == "logit":
            return parameter
        # Clamped by value alone: a probability pushed to the edge must be able to come back.
        inside = parameter.clamp(functional.PROBABILITY_MARGIN, 1 - functional.PROBABILITY_MARGIN)
        return torch.logit(parameter + (inside - parameter).detach())

    def hyper_posterior(self, name: str = "weight") -> tuple[Tensor, Tensor]:
        """alpha~ and beta~ of Eq. (14), learned or at their optimum."""
        if self.hyper == "optimal":
            return functional.optimal_hyper_posterior(self.logit(name), self.alpha, self.beta)
        return tuple(functional.positive(getattr(self, f"{name}_{s}")) for s in ("alpha", "beta"))  # type: ignore[return-value]

    def kl(self, name: str = "weight") -> Tensor:
        """Eq. (20) + Eq. (21) of each synapse in nats, 0 where it was pruned; shaped like the parameter."""
        if self.hyper == "optimal":
            kl = functional.beta_bernoulli_kl(self.logit(name), self.alpha, self.beta)
        else:
            posterior = self.hyper_posterior(name)
            kl = functional.bernoulli_kl(self.logit(name), *posterior)
            kl = kl + functional.beta_kl(*posterior, self.alpha, self.beta)
        kept = self.kept(name)
        return kl if kept is None else kl * kept

    @torch.no_grad()
    def project(self) -> None:
        """Bring probabilities that a step carried outside (0, 1) back to its edge."""
        if self.parameterisation == "probability":
            for name in self.synapse_names:
                margin = functional.PROBABILITY_MARGIN
                self.gate_parameter(name).clamp_(margin, 1 - margin)

    def tie(self, name: str) -> Hashable:
        return id(self.gate_parameter(name))

    def gate_kind(self, relaxed: bool) -> str:
        if relaxed and self.estimator.gate == "gaussian":
            return "gaussian"
        if self.mask == "example":
            return "example"
        return "noise" if relaxed and self.estimator.gate == "concrete" else "mask"

    def _gate(self, name: str, gate: Tensor) -> Tensor:
        parameter: Tensor = getattr(self, name)
        kept = self.kept(name)
        if gate.dtype != torch.bool:
            assert self.temperature is not None
            gate = functional.relax_mask(self.logit(name), gate, self.temperature).to(parameter.dtype)
            return parameter * gate if kept is None else parameter * gate * kept
        if not self.straight_through:
            return super()._gate(name, gate)
        if transformed():
            pi = torch.sigmoid(self.logit(name))
            slope = pi - pi.detach() if kept is None else (pi - pi.detach()) * kept
            return parameter * (gate + slope)
        return gated_weight.straight_through(parameter, self.logit(name), gate, kept)

    def options(self) -> dict[str, Any]:
        return {
            **super().options(),
            "alpha": self.alpha,
            "beta": self.beta,
            "keep_probability": self.initial_keep_probability,
            "hyper": self.hyper,
            "estimator": self.estimator.options(),
            "parameterisation": self.parameterisation,
            "kl_weight": self.kl_weight,
            "logit_step": self.logit_step,
        }

    def extra_repr(self) -> str:
        shown = {**self.arguments(), "hyper": self.hyper, "mask": self.mask, "estimator": self.estimator.name}
        factors = {"kl_weight": self.kl_weight, "logit_step": self.logit_step}
        shown |= {key: value for key, value in factors.items() if value != 1.0}
        return ", ".join(f"{key}={value!r}" for key, value in shown.items())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any) -> None:
        own = self.posterior_names
        if f"{prefix}weight" in state_dict and not any(prefix + name in state_dict for name in own):
            # A plain model's state: the posterior keeps its start.
            state_dict.update({prefix + name: getattr(self, name) for name in own})
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)
