"""DropConnect++: a keep probability learned for every synapse, or group of them, with its Beta hyper-posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, get_args

import torch
from torch import Tensor, nn

from dropconnectpp import functional
from dropconnectpp.errors import ArgumentError, check_choice, check_not_negative, check_positive, check_probability
from dropconnectpp.estimators import Concrete, Eq16, Estimator, EstimatorName, StraightThrough, resolve
from dropconnectpp.layers.granularity import Granularity, check_granularity
from dropconnectpp.layers.grouped import GroupedLayer
from dropconnectpp.layers.passes import BinaryGates, Gates, GaussianGates, RelaxedGates
from dropconnectpp.layers.untaught import watch
from dropconnectpp.ops.drawn import Draw
from dropconnectpp.ops.posterior import GatePosterior
from dropconnectpp.ops.prior import HYPERS, SHARINGS, Hyper, Prior, Sharing

Parameterisation = Literal["logit", "probability"]
"""Whether pi~ or its log-odds is optimised."""
PRUNED = "_extra_state"
"""What torch calls a module's extra state; ours is how many synapses were pruned."""
EstimatorLike = EstimatorName | Estimator | dict[str, Any]


class PosteriorArguments(TypedDict, total=False):
    """The options of a DropConnect++ layer as keywords; `PosteriorOptions` says what each is and its default."""

    alpha: float
    beta: float
    keep_probability: float
    hyper: Hyper
    sharing: Sharing
    estimator: EstimatorLike
    parameterisation: Parameterisation
    kl_weight: float
    logit_step: float
    granularity: Granularity


@dataclass(frozen=True)
class PosteriorOptions:
    """How a DropConnect++ layer's posterior starts, what it costs and how it learns."""

    alpha: float = 1.0
    beta: float = 1.0
    """The hyper-prior's, Eq. (12)."""
    keep_probability: float = 0.5
    """Where every pi~ starts."""
    hyper: Hyper = "marginal"
    """What becomes of pi: "marginal" sums it out, "optimal" uses its best q(pi), "learned" trains alpha~ and beta~."""
    sharing: Sharing = "synapse"
    """Which gates share one pi."""
    estimator: EstimatorLike = "straight-through"
    """How the likelihood's gradient reaches pi~; see `dropconnectpp.estimators`."""
    parameterisation: Parameterisation = "logit"
    """Whether pi~ or its log-odds is optimised."""
    kl_weight: float = 1.0
    """What multiplies the layer's KL in the loss."""
    logit_step: float = 1.0
    """The posterior's step size as a multiple of the weights'."""
    granularity: Granularity = "synapse"
    """Which synapses share one gate: "synapse", "input", "unit", "kernel", or the shape of a block."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "alpha": check_positive("alpha", self.alpha),
            "beta": check_positive("beta", self.beta),
            "keep_probability": check_probability("keep_probability", self.keep_probability),
            "hyper": check_choice("hyper", self.hyper, HYPERS),
            "sharing": check_choice("sharing", self.sharing, SHARINGS),
            "estimator": resolve(self.estimator),
            "parameterisation": check_choice("parameterisation", self.parameterisation, get_args(Parameterisation)),
            "kl_weight": check_not_negative("kl_weight", self.kl_weight),
            "logit_step": check_positive("logit_step", self.logit_step),
            "granularity": check_granularity(self.granularity),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        checked["estimator"].check(hyper=self.hyper)
        if self.granularity in ("input", "unit") and self.sharing in ("input", "unit"):
            raise ArgumentError(
                f"sharing={self.sharing!r} asks which gates of a layer share one pi, and with "
                f"granularity={self.granularity!r} they are a row without inputs and units of their own. "
                "Use sharing='layer', or 'synapse' for one pi a gate."
            )

    @property
    def prior(self) -> Prior:
        """What a pass over the synapses must know of it."""
        return Prior(self.alpha, self.beta, self.hyper, self.sharing)


class DropConnectPPLayer(GroupedLayer):
    """A masked layer that learns each gate's keep probability: Eq. (11)-(14).

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

    alpha: float
    beta: float
    hyper: Hyper
    sharing: Sharing
    estimator: Estimator
    parameterisation: Parameterisation

    def _set_up_posterior(self, options: PosteriorOptions, factory: dict[str, Any]) -> None:
        self.alpha, self.beta = options.alpha, options.beta
        self.initial_keep_probability = options.keep_probability
        self.hyper, self.sharing = options.hyper, options.sharing
        self.parameterisation = options.parameterisation
        self.kl_weight, self.logit_step = options.kl_weight, options.logit_step
        self.estimator = resolve(options.estimator)
        self.prior = options.prior
        self._set_up_groups(options.granularity)
        for name in self.gate_names:
            for key in self.posterior_names_of(name):
                shape = self.gate_shape(name)
                self.register_parameter(key, nn.Parameter(torch.empty(shape, **factory)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start weights and biases as the `nn` counterpart does, and the posterior as `reset_posterior` does."""
        super().reset_parameters()
        self.reset_posterior()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`to`, `to_empty` and their like; gates that came without values, from the meta device, start anew."""
        without = [key for key in self.posterior_names if getattr(self, key).is_meta]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if without and not any(getattr(self, key).is_meta for key in without):
            self.reset_posterior()
        return self

    def posterior_start(
        self,
        keep_probability: float | None = None,
        posterior_alpha: float | None = None,
        posterior_beta: float | None = None,
    ) -> dict[str, float]:
        """The values that `reset_posterior` sets, by the end of a parameter's name."""
        keep = self.initial_keep_probability if keep_probability is None else keep_probability
        keep = check_probability("keep_probability", keep)
        return {
            "logit": math.log(keep) - math.log1p(-keep),
            "probability": keep,
            "alpha": functional.inverse_positive(
                check_positive("posterior_alpha", self.alpha + keep if posterior_alpha is None else posterior_alpha)
            ),
            "beta": functional.inverse_positive(
                check_positive("posterior_beta", self.beta + 1 - keep if posterior_beta is None else posterior_beta)
            ),
        }

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
        values = self.posterior_start(keep_probability, posterior_alpha, posterior_beta)
        for name in self.gate_names:
            for suffix, value in values.items():
                parameter = getattr(self, f"{name}_{suffix}", None)
                if parameter is not None:
                    parameter.fill_(value)

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if self.training and self.estimator.scores:
            watch(self, output, self.estimator.name)
        return output

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
        """The posterior's parameters behind "weight" or "bias", by name; none where the gates are another's."""
        if self.gate_of(name) != name:
            return []
        suffixes = [self.parameterisation, *(("alpha", "beta") if self.hyper == "learned" else ())]
        return [f"{name}_{suffix}" for suffix in suffixes]

    @property
    def posterior_names(self) -> list[str]:
        """All the posterior's parameters, by name."""
        return [key for name in self.synapse_names for key in self.posterior_names_of(name)]

    def gate_parameter(self, name: str) -> nn.Parameter:
        """The parameter behind pi~: `weight_logit` or `weight_probability`, likewise for the bias."""
        return self.parameter(f"{self.gate_of(name)}_{self.parameterisation}")  # type: ignore[return-value]

    def gate_logit(self, name: str) -> Tensor:
        parameter = self.gate_parameter(name)
        if self.parameterisation == "logit":
            return parameter
        # Clamped by value alone: a probability pushed to the edge must be able to come back.
        inside = parameter.clamp(functional.PROBABILITY_MARGIN, 1 - functional.PROBABILITY_MARGIN)
        return torch.logit(parameter + (inside - parameter).detach())

    def hyper_posterior(self, name: str = "weight") -> tuple[Tensor, Tensor]:
        """alpha~ and beta~ of Eq. (14) of the gates: learned, or the best for each pi~ or each group that shares pi."""
        name = self.gate_of(name)
        if self.hyper == "learned":
            return tuple(functional.positive(getattr(self, f"{name}_{s}")) for s in ("alpha", "beta"))  # type: ignore[return-value]
        logit = self.gate_logit(name)
        if self.sharing == "synapse":
            return functional.optimal_hyper_posterior(logit, self.alpha, self.beta)
        axes = self.prior.group_axes(logit.ndim)
        on, off = (torch.sigmoid(sign * logit) for sign in (1.0, -1.0))
        kept = self.gate_kept(name)
        on, off = (on, off) if kept is None else (on * kept, off * kept)
        return self.alpha + on.sum(axes, keepdim=True), self.beta + off.sum(axes, keepdim=True)

    def posterior_of(self, name: str) -> GatePosterior:
        """q(z) and q(pi) of the gates of "weight" or "bias", as the passes over them take them."""
        name = self.gate_of(name)
        return GatePosterior(
            {key: self.parameter(key) for key in self.posterior_names_of(name)},
            self.prior,
            self.gate_kept(name),
            direct=self.parameterisation == "probability",
            scores_pi=isinstance(self.estimator, Eq16),
        )

    def kl(self, name: str = "weight") -> Tensor:
        """Eq. (20) + Eq. (21) of each of a parameter's gates in nats, 0 where nothing is left of it; of their shape."""
        if self.gate_of(name) != name:
            return torch.zeros_like(getattr(self, name))  # counted with the gates it has
        kept, logit = self.gate_kept(name), self.gate_logit(name)
        if self.sharing != "synapse":
            return functional.shared_kl(logit, self.alpha, self.beta, self.prior.group_axes(logit.ndim), kept)[0]
        if self.hyper == "marginal":
            kl = functional.marginal_kl(logit, self.alpha, self.beta)
        elif self.hyper == "optimal":
            kl = functional.beta_bernoulli_kl(logit, self.alpha, self.beta)
        else:
            posterior = self.hyper_posterior(name)
            kl = functional.bernoulli_kl(logit, *posterior)
            kl = kl + functional.beta_kl(*posterior, self.alpha, self.beta)
        return kl if kept is None else kl * kept

    def project(self) -> None:
        """Bring probabilities that a step carried outside (0, 1) back to its edge."""
        if self.parameterisation == "probability":
            margin = functional.PROBABILITY_MARGIN
            with torch.no_grad():
                for name in self.gate_names:
                    self.gate_parameter(name).clamp_(margin, 1 - margin)

    def tie(self, name: str) -> Hashable:
        return id(self.gate_parameter(name))

    def gates(self, draw: Draw, streams: Mapping[str, int], *, relaxed: bool, mirrored: bool) -> Gates:
        each = self.mask == "example"
        if relaxed and self.estimator.gate == "gaussian":
            return GaussianGates(draw, streams)
        if relaxed and self.temperature is not None:
            return RelaxedGates(draw, streams, self.temperature, each)
        return BinaryGates(draw, streams, each_example=each, mirrored=mirrored)

    def options(self) -> dict[str, Any]:
        return {
            **super().options(),
            "alpha": self.alpha,
            "beta": self.beta,
            "keep_probability": self.initial_keep_probability,
            "hyper": self.hyper,
            "sharing": self.sharing,
            "estimator": self.estimator.options(),
            "parameterisation": self.parameterisation,
            "kl_weight": self.kl_weight,
            "logit_step": self.logit_step,
        }

    def extra_repr(self) -> str:
        shown = {**self.arguments(), "hyper": self.hyper, "mask": self.mask, "estimator": self.estimator.name}
        others = {"sharing": "synapse", "kl_weight": 1.0, "logit_step": 1.0, "granularity": "synapse"}
        shown |= {key: getattr(self, key) for key, usual in others.items() if getattr(self, key) != usual}
        return ", ".join(f"{key}={value!r}" for key, value in shown.items())

    # ------------------------------------------------------------------------------------- the state

    def get_extra_state(self) -> Tensor:
        """How many synapses are off for good: so that a state whose masks were lost on the way is known."""
        masks = [kept for name in self.synapse_names if (kept := self.kept(name)) is not None and not kept.is_meta]
        return torch.tensor(sum(kept.numel() - int(kept.sum()) for kept in masks))

    def set_extra_state(self, state: Any) -> None:
        """Nothing: the masks are buffers, and `_load_from_state_dict` compares."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any) -> None:
        own = self.posterior_names
        if f"{prefix}weight" in state_dict and not any(prefix + name in state_dict for name in own):
            # A plain model's state: the posterior keeps its start.
            state_dict.update({prefix + name: self._start_of(name, state_dict[f"{prefix}weight"]) for name in own})
        lost = state_dict.setdefault(f"{prefix}{PRUNED}", torch.tensor(0))
        if (
            not lost.is_meta
            and bool(lost)
            and not any(f"{prefix}{name}_kept" in state_dict for name in self.synapse_names)
        ):
            arguments[-1].append(
                f"{prefix.rstrip('.') or 'the model'}: {int(lost)} synapses are pruned in this state, and its masks "
                "are missing, since the model that it was read for has none. Prune the model in any way first, or use "
                "dropconnectpp.save and load."
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)

    def _start_of(self, key: str, weight: Tensor) -> Tensor:
        """What a posterior's parameter is before any training; on a weight's device where it has no values yet."""
        own: Tensor = getattr(self, key)
        if not own.is_meta or weight.is_meta:
            return own
        return torch.full_like(own, self.posterior_start()[key.rpartition("_")[2]], device=weight.device)
