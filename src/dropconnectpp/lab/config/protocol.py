"""An experiment as frozen settings: the paper's are the defaults, and each reading of it is a field that quotes it.

Nothing here imports torch: a report reads protocols back anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from dropconnectpp.errors import DropConnectError

VERSION = 1
"""Part of every digest: raised when the same settings come to mean another experiment."""

LATE = {"late": True}
"""Marks a setting that was added after results had been stored."""
Kind = Literal["none", "dropout", "dropconnect", "dropconnect++"]
T = TypeVar("T")


class ProtocolError(DropConnectError, ValueError):
    """A setting of an experiment breaks a rule: the message names it, the rule and the value."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProtocolError(message)


def _check_fields(settings: object) -> None:
    """Every field that is a Literal must hold one of its values, and every number must be finite."""
    hints = typing.get_type_hints(type(settings))
    for item in fields(settings):  # type: ignore[arg-type]
        hint, value = hints[item.name], getattr(settings, item.name)
        if typing.get_origin(hint) is Literal:
            choices = typing.get_args(hint)
            _require(value in choices, f"{item.name} must be one of {', '.join(map(str, choices))}, got {value!r}.")
        if hint in (float, float | None) and value is not None:
            _require(math.isfinite(value), f"{item.name} must be finite, got {value}.")
            object.__setattr__(settings, item.name, float(value))  # 1 and 1.0 are one experiment with one digest


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """How pictures are standardised: "normalized with local zero mean and unit variance; no other pre-processing"."""

    scope: Literal["image", "channel", "data-set"] = "image"
    """Over what mean and standard deviation are taken: each picture whole (a stereo pair as a pair), each
    channel of each picture (a stereo pair per camera), or each channel over the training set."""
    local_contrast: bool = False
    """Before that, subtract from each pixel the mean of its neighbourhood and divide by its spread there."""
    window: int = 9
    """Side of that neighbourhood in pixels; odd."""

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.window >= 3 and self.window % 2 == 1, f"window must be odd and at least 3, got {self.window}.")


def pooled_side(side: int, size: int, stride: int, ceil_mode: bool) -> int:
    """The side of a pooled map, as torch has it: the last window must begin inside the map.

    >>> pooled_side(32, 3, 2, True), pooled_side(32, 3, 2, False)
    (16, 15)
    """
    steps, rest = divmod(side - size, stride)
    return steps + 1 + int(rest > 0 and ceil_mode and (steps + 1) * stride < side)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The network: convolutions, one regularised dense layer, a plain output layer; ReLU throughout."""

    maps: tuple[int, ...] = (32, 32, 64)
    """"32 feature maps in the first layer, 32 feature maps in the second layer, 64 feature maps in the third"."""
    filter_size: int = 5
    padding: int = 2
    """Not stated. 2 keeps the size of a map, and with `pooled` gives the "almost 300K synapses" of Figure 1(b)."""
    pool_size: int = 3
    pool_stride: int = 2
    """Not stated: "a max-pooling sublayer with a pool size of 3x3"."""
    pooled: tuple[bool, ...] = (True, True, False)
    """Which layers are pooled. Pooling all three would leave 65,600 synapses; two leave 262,208."""
    ceil_mode: bool = True
    """A pool that sticks out at the edge counts: 32 -> 16 -> 8."""
    hidden: int = 64
    """"a dense layer with 64 hidden units" for CIFAR-10, 512 for the others."""

    def __post_init__(self) -> None:
        _require(
            len(self.maps) == len(self.pooled) > 0, f"pooled must say yes or no for each of {len(self.maps)} layers."
        )
        sizes = (*self.maps, self.filter_size, self.pool_size, self.pool_stride, self.hidden)
        _require(all(size >= 1 for size in sizes) and self.padding >= 0, f"sizes must be at least 1, got {self}.")

    def sides(self, side: int) -> tuple[int, ...]:
        """The side of the map after each layer, for square pictures."""
        result = []
        for pooled in self.pooled:
            side = side + 2 * self.padding - self.filter_size + 1
            if pooled:
                side = pooled_side(side, self.pool_size, self.pool_stride, self.ceil_mode)
            _require(side >= 1, f"the pictures are too small for this network: a map would have side {side}.")
            result.append(side)
        return tuple(result)

    def dense_inputs(self, side: int) -> int:
        """Inputs of the regularised layer."""
        return self.maps[-1] * self.sides(side)[-1] ** 2


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the dense layer is regularised."""

    kind: Kind = "dropconnect++"
    rate: float | None = None
    """Share that is dropped, for Dropout and DropConnect. None: "selected on the grounds of performance
    maximization", on training data held out for it."""
    evaluation: Literal["mean", "gaussian"] = "mean"
    """DropConnect's prediction: the mean network, or the Gaussian moment matching of the DropConnect paper."""
    estimator: Literal["bbvi", "eq16", "straight-through", "local", "concrete", "disarm"] = "bbvi"
    baseline: Literal["running", "mean-network", "leave-one-out", "same-sample"] = "running"
    """varpi of Eq. (10), which one sample cannot give: from earlier minibatches, or another baseline."""
    decay: float = 0.9
    """Memory of the running baseline."""
    temperature: float = 2.0 / 3.0
    """Of the concrete estimator."""
    hyper: Literal["learned", "optimal"] = "learned"
    """alpha~ and beta~ by gradient as in the paper, or at their known optimum."""
    alpha: float = 1.0
    beta: float = 1.0
    """"In all cases, we set the prior hyperparameters of DropConnect++ to alpha = beta = 1"."""
    keep_probability: float = 0.5
    """Not stated: where pi~ starts."""
    posterior_alpha: float | None = None
    posterior_beta: float | None = None
    """Not stated: where alpha~ and beta~ start. None: at the best values for the initial pi~."""
    parameterisation: Literal["logit", "probability"] = "logit"
    """Not stated: what Adagrad moves, pi~'s log-odds or pi~ itself."""
    num_samples: int = 1
    """"drawing just one sample per minibatch; that is, we use L = 1". Of DropConnect, masks of a minibatch too."""
    logit_step: float | None = 1.0
    """Step size of the posterior's parameters as a multiple of the weights'. None: choose it on held-out training
    data, as a rate."""
    kl_weight: float = 1.0
    reward: Literal["likelihood", "random-sign"] = field(default="likelihood", metadata=LATE)
    """What a score is weighed by. "random-sign" is a control: as large as ever, but its sign is thrown, so that what
    the posterior then learns is a random walk."""
    kl_warmup: int = field(default=0, metadata=LATE)
    """Epochs over which the KL's weight rises: in epoch e, counted from 0, it is kl_weight min(1, e / kl_warmup). 0:
    none."""
    learn_after: int = field(default=0, metadata=LATE)
    """Epochs in which the posterior stays where it starts, so that the weights come first to what the data want of
    them; then it learns, with Adagrad's sums for it at zero. 0: none."""
    freeze_after: int | None = field(default=None, metadata=LATE)
    """Epochs after which the posterior stays as it is, while masks are drawn from it and the weights train on. None:
    never."""
    slab: float | None = field(default=None, metadata=LATE)
    """Standard deviation of a Gaussian prior on a weight or bias that is on: the loss gets pi~ W^2 / (2 slab^2 N) for
    each, whatever the KL's weight is; of DropConnect pi~ is the keep rate. None: no such prior."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.rate is not None:
            _require(0.0 <= self.rate < 1.0, f"rate is the share dropped and must lie in [0, 1), got {self.rate}.")
        _require(
            0.0 < self.keep_probability < 1.0, f"keep_probability must lie in (0, 1), got {self.keep_probability}."
        )
        _require(self.num_samples >= 1, f"num_samples must be at least 1, got {self.num_samples}.")
        for name in ("alpha", "beta", "posterior_alpha", "posterior_beta", "temperature", "logit_step", "slab"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive, got {value}.")
        _require(0.0 <= self.decay < 1.0, f"decay must lie in [0, 1), got {self.decay}.")
        _require(self.kl_weight >= 0, f"kl_weight must not be negative, got {self.kl_weight}.")
        _require(self.kl_warmup >= 0, f"kl_warmup must not be negative, got {self.kl_warmup}.")
        _require(self.learn_after >= 0, f"learn_after must not be negative, got {self.learn_after}.")
        _require(
            self.freeze_after is None or self.freeze_after > self.learn_after,
            f"freeze_after must be at least {self.learn_after + 1}, got {self.freeze_after}.",
        )
        alien = {"bbvi": ("same-sample",), "eq16": ("mean-network", "leave-one-out")}.get(self.estimator, ())
        _require(self.baseline not in alien, f"estimator {self.estimator!r} has no baseline {self.baseline!r}.")
        if self.baseline == "leave-one-out":
            _require(self.num_samples >= 2, "baseline 'leave-one-out' needs num_samples of at least 2.")
        _require(self.estimator != "eq16" or self.hyper == "learned", "estimator 'eq16' needs hyper 'learned'.")
        self._refuse_idle_settings()

    def _refuse_idle_settings(self) -> None:
        """A setting that does nothing would still name another experiment."""
        used = {
            "none": {"kind"},
            "dropout": {"kind", "rate"},
            "dropconnect": {"kind", "rate", "evaluation", "num_samples", "slab"},
            "dropconnect++": {item.name for item in fields(self)} - {"rate", "evaluation"},
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


@dataclass(frozen=True, kw_only=True)
class Training:
    """Adagrad, as the paper has it."""

    step_size: float | None = None
    """"chosen from the set {0.005, 0.01, 0.05}, based on the network performance on the training set in the
    first few iterations". None: choose it so."""
    epsilon: float = 1e-6
    epsilon_inside: bool = True
    """Not stated: step * g / sqrt(sum g^2 + epsilon), as in Lasagne; False puts epsilon outside the root."""
    batch_size: int = 128
    last_batch: Literal["drop", "keep"] = "drop"
    """Not stated: whether the last examples of an epoch, too few for a batch, are used."""
    epochs: int = 100
    """"We train all networks for 100 epochs"."""
    holdout: int = 0
    """Training examples kept back, on which the network is evaluated instead of the test set."""

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(self.step_size is None or self.step_size > 0, f"step_size must be positive, got {self.step_size}.")
        # Without it the first step of a synapse that a mask dropped would be 0 / 0.
        _require(self.epsilon > 0, f"epsilon must be positive, got {self.epsilon}.")
        _require(self.batch_size >= 1 and self.epochs >= 1, "batch_size and epochs must be at least 1.")
        _require(self.holdout >= 0, f"holdout must not be negative, got {self.holdout}.")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured of a network, and when."""

    every: int = 5
    """Epochs between evaluations; the last epoch is always one."""
    curve_samples: int = 30
    """Not stated: Monte Carlo samples of Eq. (18) along the curve of Figure 1(a); 0 leaves it out."""
    samples: tuple[int, ...] = (1, 30, 50, 100, 500)
    """Monte Carlo samples of Table 3, at the end."""
    shares: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25, 0.1, 0.05)
    """Shares of synapses kept when pruning."""
    bins: int = 15
    """Calibration bins."""
    predictive_samples: int = 30
    """Whole networks drawn for entropy and mutual information; 0 leaves them out."""
    foreign: str | None = None
    """Another data set whose pictures should make the network unsure."""

    def __post_init__(self) -> None:
        _require(self.every >= 1 and self.bins >= 1, "every and bins must be at least 1.")
        counts = (self.curve_samples, self.predictive_samples, *self.samples)
        _require(
            all(n >= 0 for n in counts) and list(self.samples) == sorted(self.samples), "samples must rise from 0."
        )
        _require(all(0.0 < share <= 1.0 for share in self.shares), f"shares must lie in (0, 1], got {self.shares}.")
        object.__setattr__(self, "shares", tuple(map(float, self.shares)))


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Everything about one experiment but the replica's number. `digest` identifies it."""

    data: str = "cifar10"
    method: Method = field(default_factory=Method)
    architecture: Architecture = field(default_factory=Architecture)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    normalisation: Normalisation = field(default_factory=Normalisation)
    root_seed: int = 0
    precision: Literal["mixed", "float32", "float64"] = "mixed"
    """"mixed": bf16 convolutions with float32 weights and gradients where the device has tensor cores; there
    "float32" means TF32 products."""

    def __post_init__(self) -> None:
        _check_fields(self)
        _require(0 <= self.root_seed < 2**63, f"root_seed must lie in [0, 2^63), got {self.root_seed}.")

    @property
    def complete(self) -> bool:
        """Whether step size, rate and logit step are chosen."""
        return self.training.step_size is not None and self.method.complete

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Settings that came late are left out at their defaults: older digests stay what they were."""
        values = asdict(self)
        for item in fields(Method):
            if item.metadata == LATE and values["method"][item.name] == item.default:
                del values["method"][item.name]
        return values

    @property
    def digest(self) -> str:
        """The experiment's identity: 16 hexadecimal digits of a sha256 over every setting."""
        text = json.dumps([VERSION, self.to_dict()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def stackable(self, other: Protocol) -> bool:
        """Whether replicas of both can train in one stack: all but method and step size agree."""

        def shared(one: Protocol) -> Protocol:
            return replace(one, method=Method(), training=replace(one.training, step_size=None))

        return shared(self) == shared(other)


def from_dict(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Settings from plain data, such as a TOML file; unknown names and wrong types are errors.

    >>> from_dict(Protocol, {"data": "svhn", "method": {"kind": "dropout", "rate": 0.5}}).method.rate
    0.5
    """
    hints = typing.get_type_hints(kind)
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        _require(name in known, f"{where}{name} is no setting. Known: {', '.join(sorted(known))}.")
    return kind(**{name: _convert(hints[name], value, f"{where}{name}") for name, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _convert(next(o for o in options if o is not types.NoneType), value, where)
    if is_dataclass(hint):
        _require(isinstance(value, Mapping), f"{where} must be a table of settings, got {value!r}.")
        return from_dict(hint, value, f"{where}.")  # type: ignore[arg-type]
    if origin is tuple:
        _require(isinstance(value, list | tuple), f"{where} must be a list, got {value!r}.")
        return tuple(_convert(options[0], item, where) for item in value)
    if origin is Literal:
        return value
    if hint is float and type(value) is int:
        return float(value)
    _require(type(value) is hint, f"{where} must be of type {hint.__name__}, got {value!r}.")
    return value


# ------------------------------------------------------------------------------ the paper's settings

WIDE = ("cifar100", "svhn", "norb")
"""Sets with "a dense layer comprising 512 hidden units"."""
STEP_SIZES = (0.005, 0.01, 0.05)
PAPER_METHODS: dict[str, Method] = {
    "none": Method(kind="none"),
    "dropout": Method(kind="dropout"),
    "dropconnect": Method(kind="dropconnect"),
    "dropconnect++": Method(kind="dropconnect++"),
}

PRESETS: dict[str, Method] = {
    "sparse": Method(estimator="straight-through", hyper="optimal", alpha=10.0, beta=90.0, logit_step=100.0),
    "per-example": Method(estimator="local", hyper="optimal", alpha=10.0, beta=90.0, kl_weight=4.0, logit_step=100.0),
}
"""The library's presets beyond the paper's setting."""
METHODS = {**PAPER_METHODS, **PRESETS}


def paper(data: str, method: Method | str) -> Protocol:
    """The paper's experiment on a data set; step size and rate are still to be chosen.

    >>> paper("svhn", "dropout").architecture.hidden
    512
    """
    if isinstance(method, str):
        _require(method in METHODS, f"method must be one of {', '.join(METHODS)}, got {method!r}.")
        method = METHODS[method]
    hidden = 512 if data in WIDE else 64
    return Protocol(data=data, method=method, architecture=Architecture(hidden=hidden))
