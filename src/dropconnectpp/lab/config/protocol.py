"""An experiment as frozen settings: the paper's are the defaults, and each reading of it is a field that quotes it.

Nothing here imports torch: a report reads protocols back anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from dropconnectpp.lab.config.by_epoch import ByEpoch
from dropconnectpp.lab.config.corruptions import CORRUPTIONS
from dropconnectpp.lab.config.layers import NETWORKS, Layer, LayeredShape, NetworkName
from dropconnectpp.lab.config.method import METHODS, Method, MethodName
from dropconnectpp.lab.config.population import Population
from dropconnectpp.lab.config.pruning import AnyPruning, Plan
from dropconnectpp.lab.config.settings import LATE, check_fields, late_settings, require

VERSION = 1
"""Part of every digest: raised when the same settings come to mean another experiment."""
WIDE = ("cifar100", "svhn", "norb")
"""Sets with "a dense layer comprising 512 hidden units"."""

Scope = Literal["image", "channel", "data-set", "given"]
Optimiser = Literal["adagrad", "adam", "sgd"]
StepSchedule = Literal["constant", "second-half", "cosine"]
HoldoutKind = Literal["random", "last"]
LastBatch = Literal["drop", "keep"]
Precision = Literal["mixed", "float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """How images are standardised: "normalized with local zero mean and unit variance; no other pre-processing"."""

    scope: Scope = "image"
    """Over what mean and standard deviation are taken: each image whole (a stereo pair as a pair), each
    channel of each image (a stereo pair by camera), or each channel over the training set; or they are given."""
    local_contrast: bool = False
    """Before that, subtract from each pixel the mean of its neighbourhood and divide by its spread there."""
    window: int = 9
    """Side of that neighbourhood in pixels; odd."""
    mean: float = field(default=0.0, metadata=LATE)
    standard_deviation: float = field(default=1.0, metadata=LATE)
    """For scope "given", of grey levels that go from 0 to 1: 0.1307 and 0.3081 are usual for MNIST."""
    crop: int = field(default=0, metadata=LATE)
    """Pixels that are cut off at each edge: 2 gives MNIST's images, which are stored as 32 x 32, their 28 x 28 back."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.crop >= 0, f"crop must not be negative, got {self.crop}.")
        require(self.standard_deviation > 0, f"standard_deviation must be positive, got {self.standard_deviation}.")
        given = (self.mean, self.standard_deviation) != (0.0, 1.0)
        require(self.scope == "given" or not given, f"mean and standard_deviation do nothing for scope {self.scope!r}.")
        require(self.scope != "given" or not self.local_contrast, "local_contrast has no scope 'given'.")
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
    name: NetworkName = field(default="paper", metadata=LATE)
    """Another network: one by name, or "layers" as listed. The settings above are then unused."""
    layers: tuple[Layer, ...] = field(default=(), metadata=LATE)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.layers and self.name == "paper":
            object.__setattr__(self, "name", "layers")
        require(
            (self.name == "layers") == bool(self.layers),
            f"give name or layers, got name {self.name!r} and {len(self.layers)} layers.",
        )
        if self.layered:
            changed = [f.name for f in fields(self) if f.metadata != LATE and getattr(self, f.name) != f.default]
            require(not changed, f"{', '.join(changed)} belong to the paper's network. Leave them out.")
        require(
            len(self.maps) == len(self.pooled) > 0, f"pooled must say yes or no for each of {len(self.maps)} layers."
        )
        sizes = (*self.maps, self.filter_size, self.pool_size, self.pool_stride, self.hidden)
        require(all(size >= 1 for size in sizes) and self.padding >= 0, f"sizes must be at least 1, got {self}.")

    @property
    def layered(self) -> bool:
        """Whether it is a list of layers, and not the paper's network."""
        return self.name != "paper"

    def shape(self, channels: int, side: int, classes: int) -> LayeredShape:
        """The list of layers for images of a size."""
        return LayeredShape(self.layers or NETWORKS[self.name], channels, side, classes)

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
    holdout_kind: HoldoutKind = field(default="random", metadata=LATE)
    """Which: any, the same for all networks, or the last of the training set."""
    optimiser: Optimiser = field(default="adagrad", metadata=LATE)
    """Of weights and biases. For the paper's network Adagrad, as the paper has it, or Adam, which then moves the
    posterior too; SGD is for networks given as layers."""
    schedule: StepSchedule = field(default="constant", metadata=LATE)
    """Of the step size: constant, falling to 0 in a line over the second half, or as half a cosine."""
    momentum: float = field(default=0.9, metadata=LATE)
    """Of SGD."""
    examples: int = field(default=0, metadata=LATE)
    """Training examples that a network has: the first of a shuffled order of its own, so that fewer are among more.
    0: all. Networks with one number have the same ones, whatever the method."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(0.0 <= self.momentum < 1.0, f"momentum must lie in [0, 1), got {self.momentum}.")
        require(self.optimiser == "sgd" or self.momentum == 0.9, f"momentum does nothing for {self.optimiser}.")
        require(self.holdout > 0 or self.holdout_kind == "random", "holdout_kind does nothing without a holdout.")
        require(self.step_size is None or self.step_size > 0, f"step_size must be positive, got {self.step_size}.")
        # Without it the first step of a synapse that a mask dropped would be 0 / 0.
        require(self.epsilon > 0, f"epsilon must be positive, got {self.epsilon}.")
        require(self.batch_size >= 1 and self.epochs >= 1, "batch_size and epochs must be at least 1.")
        require(self.holdout >= 0, f"holdout must not be negative, got {self.holdout}.")
        few = self.examples == 0 or self.examples >= self.batch_size
        require(few, f"examples must be 0 for all, or at least a batch of {self.batch_size}, got {self.examples}.")


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
    judged: bool = field(default=False, metadata=LATE)
    """Whether NLL, ECE and Brier score are measured by one pass and over whole networks, and how well the entropy tells
    foreign images."""
    corruptions: tuple[str, ...] = field(default=(), metadata=LATE)
    """Corruptions of the test images, each at five severities, on which all that is judged too."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.every >= 1 and self.bins >= 1, "every and bins must be at least 1.")
        counts = (self.curve_samples, self.predictive_samples, *self.samples)
        require(all(n >= 0 for n in counts) and list(self.samples) == sorted(self.samples), "samples must rise from 0.")
        require(all(0.0 < share <= 1.0 for share in self.shares), f"shares must lie in (0, 1], got {self.shares}.")
        object.__setattr__(self, "shares", tuple(map(float, self.shares)))
        unknown = [name for name in self.corruptions if name not in CORRUPTIONS]
        require(not unknown, f"corruptions must be of {', '.join(CORRUPTIONS)}, got {', '.join(unknown)}.")
        require(
            len(set(self.corruptions)) == len(self.corruptions), f"corruptions names one twice: {self.corruptions}."
        )
        require(self.judged or not self.corruptions, "corruptions do nothing unless judged is true.")


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
    pruning: AnyPruning | None = field(default=None, metadata=LATE)
    """How a network given as layers is made small. `method`, where it is not given, is then "none"."""
    by_epoch: ByEpoch | None = field(default=None, metadata=LATE)
    """Step size, rate and KL weight by epoch. Where they are given here, the method's rate and KL weight and the step
    size, if given at all, are those of the last epoch."""
    population: Population | None = field(default=None, metadata=LATE)
    """Networks that take over weights and settings from each other. Step size and rate are then open for good."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.by_epoch is not None:
            self._end_with(self.by_epoch)
        if (self.pruning is not None or self.architecture.layered) and self.method == Method():
            object.__setattr__(self, "method", METHODS["none"])
        self._check_layered()
        require(0 <= self.root_seed < 2**63, f"root_seed must lie in [0, 2^63), got {self.root_seed}.")

    def _end_with(self, by_epoch: ByEpoch) -> None:
        """Fill in what the schedule says of the last epoch: there networks are measured."""
        last, method, training = by_epoch.in_epoch(self.training.epochs - 1), self.method, self.training
        late = [f"{epoch}" for epoch in by_epoch.at if epoch >= training.epochs]
        require(not late, f"by_epoch names epoch {', '.join(late)}, and there are {training.epochs}, counted from 0.")
        noisy = isinstance(self.pruning, Plan)
        has_rate = method.has_rate or noisy
        require("rate" not in last or has_rate, f"by_epoch has a rate, and {method.kind!r} has none.")
        learned = method.kind == "dropconnect++" and method.kl_weight > 0
        require("kl_weight" not in last or learned, f"by_epoch has a KL weight, and {method.kind!r} has none.")
        for name, value in last.items():
            usual = {"kl_weight": Method.kl_weight, "rate": Plan.noise if noisy else None}.get(name)
            given = training.step_size if name == "step_size" else self._setting(name)
            fits = given in (None, usual, value)
            require(fits, f"by_epoch ends with {name} {value:g}, and {name} is {given}. Leave it out.")
        for name, value in self._changed(last).items():
            object.__setattr__(self, name, value)

    def _setting(self, name: str) -> Any:
        """Rate or KL weight, wherever it stands: the rate of a sparsity plan is its noise."""
        return self.pruning.noise if name == "rate" and isinstance(self.pruning, Plan) else getattr(self.method, name)

    def _changed(self, values: Mapping[str, float]) -> dict[str, Any]:
        """The parts of the protocol in which step size, rate or KL weight are these."""
        changes: dict[str, Any] = {name: value for name, value in values.items() if name != "step_size"}
        found: dict[str, Any] = {}
        if isinstance(self.pruning, Plan):
            found["pruning"] = replace(self.pruning, noise=changes.pop("rate", self.pruning.noise))
        found["method"] = replace(self.method, **changes)
        found["training"] = replace(self.training, step_size=values.get("step_size", self.training.step_size))
        return found

    def _check_layered(self) -> None:
        """Settings that only a network given as layers has, and those that it does not have."""
        training, method = self.training, self.method
        if not self.architecture.layered:
            later = self.pruning is not None or training.optimiser == "sgd" or training.schedule != "constant"
            require(
                not later and self.normalisation.scope != "given" and not self.normalisation.crop,
                "pruning, crop, scope 'given' and other optimisers than Adagrad and Adam with a constant step are for "
                "networks given by name or as layers. Set architecture.name or architecture.layers.",
            )
            late = training.optimiser == "adam" and method.learn_after > 0
            require(not late, "learn_after is for Adagrad: Adam's corrections count the steps from the first.")
            self._check_population()
            return
        if self.by_epoch is not None or self.population is not None:
            plan = self.pruning
            known = isinstance(plan, Plan) and plan.granularity == "synapse" and plan.support == "posterior"
            require(
                known and isinstance(plan, Plan) and plan.learning,
                "by_epoch and population are for the paper's network and for sparsity plans that learn each synapse.",
            )
            self._check_population()
        if self.pruning is not None:
            require(method.kind == "none", f"{self.pruning.name} has its own noise: leave method {method.kind!r} out.")
        require(
            method.kind in ("none", "dropout", "dropconnect"),
            f"{method.kind!r} is for the paper's network. For {self.architecture.name!r} use kind 'sparsity-plan'.",
        )
        plain = (method.num_samples, method.evaluation, method.slab) == (1, "mean", None)
        require(plain, "num_samples, evaluation and slab are for the paper's network.")
        require(training.last_batch == "drop", "last_batch 'keep' is for the paper's network.")
        require(self.evaluation.foreign is None, "foreign is for the paper's network.")
        require(not self.evaluation.judged, "judged is for the paper's network.")
        require(not training.examples, "examples is for the paper's network.")

    def _check_population(self) -> None:
        if self.population is None:
            return
        plan = self.pruning if isinstance(self.pruning, Plan) else None
        open_there = self.training.step_size is None and self.method.rate is None and self.by_epoch is None
        open_there = open_there and (plan is None or plan.noise == Plan.noise)
        require(open_there, "a population finds step size and rate: leave step_size, rate, noise and by_epoch out.")
        low = plan is None or max(self.population.rates) <= 0.5
        require(low, f"the noise of a sparsity plan is at most 0.5: rates are {self.population.rates}.")
        require(self.training.holdout > 0, "a population is judged on held-out images: give a holdout.")
        every, measured = self.population.every, self.evaluation.every
        require(every == measured, f"members are judged where they are measured: every is {every} and {measured}.")
        few = self.population.keep is not None
        require(
            not few or self.method.kind == "dropconnect++", f"keep is for methods that learn, not {self.method.kind!r}."
        )

    @property
    def label(self) -> str:
        """What tables call the method."""
        label = self.method.label if self.pruning is None else self.pruning.label
        return label if self.by_epoch is None else f"{label}, {self.by_epoch.label}"

    @property
    def complete(self) -> bool:
        """Whether step size, rate and logit step are chosen, or will be on the way."""
        if self.population is not None:
            return self.method.logit_step is not None
        return self.training.step_size is not None and self.method.complete

    def in_epoch(self, epoch: int) -> Protocol:
        """The protocol with the settings of an epoch, counted from 0."""
        return self if self.by_epoch is None else self.with_settings(self.by_epoch.in_epoch(epoch))

    def with_settings(self, values: Mapping[str, float]) -> Protocol:
        """The protocol with other values of step size, rate or KL weight, whatever epoch it is."""
        return replace(self, **self._changed(values), by_epoch=None, population=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Settings that came late are left out at their defaults: older digests stay what they were."""
        return late_settings(self)

    @cached_property
    def digest(self) -> str:
        """The experiment's identity: 16 hexadecimal digits of a sha256 over every setting."""
        text = json.dumps([VERSION, self.to_dict()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def stackable(self, other: Protocol) -> bool:
        """Whether replicas of both can train in one stack: all but method and step size agree.

        A population is a stack of its own.
        """
        if self.population is not None or other.population is not None:
            return self == other

        def shared(one: Protocol) -> Protocol:
            method = METHODS["none"] if one.architecture.layered else Method()
            training = replace(one.training, step_size=None)
            return replace(one, method=method, pruning=None, by_epoch=None, training=training)

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
