"""An experiment as frozen settings: the paper's are the defaults, and each reading of it is a field that quotes it.

Nothing here imports torch: a report reads protocols back anywhere.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from dropconnectpp.lab.config.method import LATE, METHODS, Method, MethodName
from dropconnectpp.lab.config.settings import check_fields, require

VERSION = 1
"""Part of every digest: raised when the same settings come to mean another experiment."""
WIDE = ("cifar100", "svhn", "norb")
"""Sets with "a dense layer comprising 512 hidden units"."""

Scope = Literal["image", "channel", "data-set"]
LastBatch = Literal["drop", "keep"]
Precision = Literal["mixed", "float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """How images are standardised: "normalized with local zero mean and unit variance; no other pre-processing"."""

    scope: Scope = "image"
    """Over what mean and standard deviation are taken: each image whole (a stereo pair as a pair), each
    channel of each image (a stereo pair by camera), or each channel over the training set."""
    local_contrast: bool = False
    """Before that, subtract from each pixel the mean of its neighbourhood and divide by its spread there."""
    window: int = 9
    """Side of that neighbourhood in pixels; odd."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.window >= 3 and self.window % 2 == 1, f"window must be odd and at least 3, got {self.window}.")


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
        require(
            len(self.maps) == len(self.pooled) > 0, f"pooled must say yes or no for each of {len(self.maps)} layers."
        )
        sizes = (*self.maps, self.filter_size, self.pool_size, self.pool_stride, self.hidden)
        require(all(size >= 1 for size in sizes) and self.padding >= 0, f"sizes must be at least 1, got {self}.")

    def sides(self, side: int) -> tuple[int, ...]:
        """The side of the map after each layer, for square images."""
        result = []
        for pooled in self.pooled:
            side = side + 2 * self.padding - self.filter_size + 1
            if pooled:
                side = pooled_side(side, self.pool_size, self.pool_stride, self.ceil_mode)
            require(side >= 1, f"the images are too small for this network: a map would have side {side}.")
            result.append(side)
        return tuple(result)

    def dense_inputs(self, side: int) -> int:
        """Inputs of the regularised layer."""
        return self.maps[-1] * self.sides(side)[-1] ** 2


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
    last_batch: LastBatch = "drop"
    """Not stated: whether the last examples of an epoch, too few for a batch, are used."""
    epochs: int = 100
    """"We train all networks for 100 epochs"."""
    holdout: int = 0
    """Training examples kept back, on which the network is evaluated instead of the test set."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.step_size is None or self.step_size > 0, f"step_size must be positive, got {self.step_size}.")
        # Without it the first step of a synapse that a mask dropped would be 0 / 0.
        require(self.epsilon > 0, f"epsilon must be positive, got {self.epsilon}.")
        require(self.batch_size >= 1 and self.epochs >= 1, "batch_size and epochs must be at least 1.")
        require(self.holdout >= 0, f"holdout must not be negative, got {self.holdout}.")


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
    """Another data set, on whose images the network should be unsure."""

    def __post_init__(self) -> None:
        require(self.every >= 1 and self.bins >= 1, "every and bins must be at least 1.")
        counts = (self.curve_samples, self.predictive_samples, *self.samples)
        require(all(n >= 0 for n in counts) and list(self.samples) == sorted(self.samples), "samples must rise from 0.")
        require(all(0.0 < share <= 1.0 for share in self.shares), f"shares must lie in (0, 1], got {self.shares}.")
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
    precision: Precision = "mixed"
    """"mixed": bf16 convolutions with float32 weights and gradients where the device has tensor cores; there
    "float32" means TF32 products."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(0 <= self.root_seed < 2**63, f"root_seed must lie in [0, 2^63), got {self.root_seed}.")

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


def paper(data: str, method: Method | MethodName | str) -> Protocol:
    """The paper's experiment on a data set; step size and rate are still to be chosen.

    >>> paper("svhn", "dropout").architecture.hidden
    512
    """
    if isinstance(method, str):
        require(method in METHODS, f"method must be one of {', '.join(METHODS)}, got {method!r}.")
        method = METHODS[method]
    hidden = 512 if data in WIDE else 64
    return Protocol(data=data, method=method, architecture=Architecture(hidden=hidden))
