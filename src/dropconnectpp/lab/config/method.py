"""How the dense layer is regularised: every option of a method, the paper's methods and the presets.

Nothing here imports torch: a report reads methods back anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from dropconnectpp import presets
from dropconnectpp.lab.config.settings import LATE, ProtocolError, check_fields, require

Kind = Literal["none", "dropout", "dropconnect", "dropconnect++"]
PredictionRule = Literal["mean", "gaussian"]
EstimatorName = Literal["bbvi", "eq16", "straight-through", "local", "concrete", "disarm"]
Baseline = Literal["running", "mean-network", "leave-one-out", "same-sample"]
Hyper = Literal["learned", "optimal"]
Parameterisation = Literal["logit", "probability"]
Reward = Literal["likelihood", "random-sign"]
MaskKind = Literal["batch", "example"]
Scaling = Literal["prediction", "training"]
MethodName = Literal[Kind, "sparse", "per-example"]
"""What `METHODS` has."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the dense layer is regularised."""

    kind: Kind = "dropconnect++"
    rate: float | None = None
    """Share that is dropped, by Dropout and DropConnect. None: "selected on the grounds of performance
    maximization", on training data held out for it."""
    evaluation: PredictionRule = "mean"
    """How DropConnect predicts: by the mean network, or by the Gaussian moment matching of the DropConnect paper."""
    estimator: EstimatorName = "bbvi"
    baseline: Baseline = "running"
    """varpi of Eq. (10), which one sample cannot give: from earlier minibatches, or another baseline."""
    decay: float = 0.9
    """Memory of the running baseline."""
    temperature: float = 2.0 / 3.0
    """Of the concrete estimator."""
    hyper: Hyper = "learned"
    """alpha~ and beta~ by gradient as in the paper, or at their known optimum."""
    alpha: float = 1.0
    beta: float = 1.0
    """"In all cases, we set the prior hyperparameters of DropConnect++ to alpha = beta = 1"."""
    keep_probability: float = 0.5
    """Not stated: where pi~ starts."""
    posterior_alpha: float | None = None
    posterior_beta: float | None = None
    """Not stated: where alpha~ and beta~ start. None: at the best values for the initial pi~."""
    parameterisation: Parameterisation = "logit"
    """Not stated: what Adagrad moves, pi~'s log-odds or pi~ itself."""
    num_samples: int = 1
    """"drawing just one sample per minibatch; that is, we use L = 1". For DropConnect too: masks of a minibatch."""
    logit_step: float | None = 1.0
    """Step size of the posterior's parameters as a multiple of the weights'. None: choose it on held-out training
    data, as rates are."""
    kl_weight: float = 1.0
    reward: Reward = field(default="likelihood", metadata=LATE)
    """What multiplies a score. "random-sign" is a control: the reward's size with a random sign, so that the
    posterior does a random walk."""
    kl_warmup: int = field(default=0, metadata=LATE)
    """Epochs over which the KL's weight rises: in epoch e, counted from 0, it is kl_weight min(1, e / kl_warmup).
    0: none."""
    learn_after: int = field(default=0, metadata=LATE)
    """Epochs in which the posterior stays where it starts and the weights alone train; then it learns, with Adagrad's
    sums for it at zero. 0: none."""
    freeze_after: int | None = field(default=None, metadata=LATE)
    """Epochs after which the posterior stays as it is; masks are still drawn from it, and the weights train on.
    None: never."""
    slab: float | None = field(default=None, metadata=LATE)
    """Standard deviation of a Gaussian prior on a weight or bias that is on: the loss gains pi~ W^2 / (2 slab^2 N)
    for each, whatever the KL's weight is; for DropConnect pi~ is the keep probability. None: no such prior."""
    mask: MaskKind = field(default="batch", metadata=LATE)
    """Of DropConnect: one mask for a minibatch, or one for each example, as the DropConnect paper draws them."""
    scaling: Scaling = field(default="prediction", metadata=LATE)
    """Of DropConnect: where the keep probability p is made up for. Either prediction multiplies by p, or training
    divides by it and prediction uses W as it is. Under Adagrad that is another training: for p W it is the first with
    a step size 1/p times as large and a start 1/p times as far out, in the regularised layer alone."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rate is not None:
            require(0.0 <= self.rate < 1.0, f"rate is the share dropped and must lie in [0, 1), got {self.rate}.")
        require(0.0 < self.keep_probability < 1.0, f"keep_probability must lie in (0, 1), got {self.keep_probability}.")
        require(self.num_samples >= 1, f"num_samples must be at least 1, got {self.num_samples}.")
        for name in ("alpha", "beta", "posterior_alpha", "posterior_beta", "temperature", "logit_step", "slab"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be positive, got {value}.")
        require(0.0 <= self.decay < 1.0, f"decay must lie in [0, 1), got {self.decay}.")
        require(self.kl_weight >= 0, f"kl_weight must not be negative, got {self.kl_weight}.")
        require(self.kl_warmup >= 0, f"kl_warmup must not be negative, got {self.kl_warmup}.")
        require(self.learn_after >= 0, f"learn_after must not be negative, got {self.learn_after}.")
        require(
            self.freeze_after is None or self.freeze_after > self.learn_after,
            f"freeze_after must be at least {self.learn_after + 1}, got {self.freeze_after}.",
        )
        foreign = {"bbvi": ("same-sample",), "eq16": ("mean-network", "leave-one-out")}.get(self.estimator, ())
        require(self.baseline not in foreign, f"estimator {self.estimator!r} has no baseline {self.baseline!r}.")
        if self.baseline == "leave-one-out":
            require(self.num_samples >= 2, "baseline 'leave-one-out' needs num_samples of at least 2.")
        require(self.estimator != "eq16" or self.hyper == "learned", "estimator 'eq16' needs hyper 'learned'.")
        alone = self.mask == "batch" or (self.slab is None and self.num_samples == 1 and self.scaling == "prediction")
        require(alone, "mask 'example' goes with one sample, no slab, and scaling 'prediction'.")
        require(self.scaling == "prediction" or self.slab is None, "scaling 'training' goes without a slab.")
        self._refuse_idle_settings()

    def _refuse_idle_settings(self) -> None:
        """A setting that does nothing would still name another experiment."""
        used = {
            "none": {"kind"},
            "dropout": {"kind", "rate"},
            "dropconnect": {"kind", "rate", "evaluation", "num_samples", "slab", "mask", "scaling"},
            "dropconnect++": {item.name for item in fields(self)} - {"rate", "evaluation", "mask", "scaling"},
        }[self.kind]
        idle = {
            "baseline": self.estimator not in ("bbvi", "eq16"),
            "decay": self.estimator not in ("bbvi", "eq16") or self.baseline != "running",
            "temperature": self.estimator != "concrete",
            "posterior_alpha": self.hyper != "learned",
            "posterior_beta": self.hyper != "learned",
            "reward": self.estimator not in ("bbvi", "eq16", "disarm"),
            "kl_warmup": self.kl_weight == 0.0,
        }
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default and (item.name not in used or idle.get(item.name, False)):
                raise ProtocolError(f"{item.name} = {value!r} does nothing for {self.kind} as it is set. Leave it out.")

    def estimator_options(self) -> dict[str, Any]:
        """The estimator, as `dropconnectpp.estimators.resolve` takes it."""
        options: dict[str, Any] = {"name": self.estimator}
        if self.estimator in ("bbvi", "eq16"):
            options |= {"baseline": self.baseline, "decay": self.decay}
        elif self.estimator == "concrete":
            options |= {"temperature": self.temperature}
        return options

    def layer_options(self) -> dict[str, Any]:
        """Options of the library's layer that computes what this method trains; none where the layer is a plain one.

        What belongs to training and not to a layer is left out: the number of samples, the start of alpha~ and beta~,
        the reward, the slab, and what changes from epoch to epoch.

        >>> Method(kind="dropconnect", rate=0.75).layer_options()
        {'keep_probability': 0.25, 'evaluation': 'mean'}
        """
        if self.kind == "dropconnect" and self.rate:  # the library's layer always drops something
            mask = {} if self.mask == "batch" else {"mask": self.mask}
            return {"keep_probability": 1.0 - self.rate, "evaluation": self.evaluation, **mask}
        if self.kind != "dropconnect++":
            return {}
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "keep_probability": self.keep_probability,
            "hyper": self.hyper,
            "estimator": self.estimator_options(),
            "parameterisation": self.parameterisation,
            "kl_weight": self.kl_weight,
            "logit_step": self.gate_step,
        }

    @property
    def gate_step(self) -> float:
        """`logit_step`, once it is chosen."""
        assert self.logit_step is not None
        return self.logit_step

    def gate_step_in(self, epoch: int) -> float:
        """`gate_step` in an epoch, counted from 0: 0 before the posterior learns and once it is frozen."""
        frozen = self.freeze_after is not None and epoch >= self.freeze_after
        return 0.0 if frozen or epoch < self.learn_after else self.gate_step

    def kl_weight_in(self, epoch: int) -> float:
        """`kl_weight` in an epoch, counted from 0.

        >>> [Method(kl_weight=3.0, kl_warmup=2).kl_weight_in(epoch) for epoch in range(4)]
        [0.0, 1.5, 3.0, 3.0]
        """
        return self.kl_weight * min(1.0, epoch / self.kl_warmup) if self.kl_warmup else self.kl_weight

    @property
    def complete(self) -> bool:
        """Whether nothing is left to choose."""
        return self.logit_step is not None and not (self.has_rate and self.rate is None)

    @property
    def has_rate(self) -> bool:
        """Whether there is a rate to choose."""
        return self.kind in ("dropout", "dropconnect")

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.kind == "none":
            return "No regularization"
        for preset, method in PRESETS.items():
            if self == method:
                return f"DropConnect++ ({preset})"
        name = {"dropout": "Dropout", "dropconnect": "DropConnect", "dropconnect++": "DropConnect++"}[self.kind]
        shown = [f for f in fields(self) if not self.has_rate or f.metadata == LATE or f.name == "num_samples"]
        changed = [f"{f.name}={getattr(self, f.name)}" for f in shown if getattr(self, f.name) != f.default]
        return name + (f" ({', '.join(changed)})" if changed else "")


PAPER_METHODS: dict[str, Method] = {kind: Method(kind=kind) for kind in get_args(Kind)}
LIBRARY_PRESETS = {"sparse": "sparse-beta10", "per-example": "per-example"}
"""The library's names of `PRESETS`. "sparse" is here what rows were recorded under by that name; the library's own
"sparse" of today goes with a `SparsityPlan`."""
PRESETS: dict[str, Method] = {name: Method(**presets.PRESETS[theirs]) for name, theirs in LIBRARY_PRESETS.items()}
"""The library's presets that were measured for the paper's network, but for "paper": that is its own method."""
METHODS = {**PAPER_METHODS, **PRESETS}
