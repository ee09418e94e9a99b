"""Methods that make a network small, as frozen settings: the sparsity plan, its opponents, its controls.

Each works on the gated layers of a network that is given as a list of layers. Shares count weights; biases stay.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from dropconnectpp.inference.schedule import SparsitySchedule, kl_weight_of_price, price_of_kl_weight
from dropconnectpp.lab.config.settings import ProtocolError, check_fields, require

Noise = Literal["none", "dropconnect", "dropout"]
Ranking = Literal["global", "layer"]
Support = Literal["posterior", "magnitude", "random"]
Granularity = Literal["synapse", "input", "unit"]
PriorKL = Literal["optimal", "marginal"]


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """What all of them share."""

    title: ClassVar[str] = ""
    """What tables call it."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check()

    def _check(self) -> None:
        """Raise if a setting breaks a rule."""

    @property
    def name(self) -> str:
        """Its kind."""
        return str(self.kind)  # type: ignore[attr-defined]

    @property
    def label(self) -> str:
        """What tables call it, with the share to keep and the settings that are not the defaults."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        shown = [n for n, (value, default) in values.items() if value != default or (n == "keep" and value is not None)]
        return self.title + (f" ({', '.join(f'{n}={values[n][0]}' for n in shown)})" if shown else "")


def _share(name: str, value: float | None) -> None:
    require(value is None or 0.0 < value <= 1.0, f"{name} is a share kept and must lie in (0, 1], got {value}.")


def _positive(settings: Pruning, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(value is None or value > 0, f"{name} must be positive, got {value}.")


def _noise(noise: str, rate: float) -> None:
    require(0.0 <= rate < 1.0, f"rate is the share dropped and must lie in [0, 1), got {rate}.")
    require((noise == "none") == (rate == 0.0), f"noise {noise!r} and rate {rate} do not fit: give both, or none.")


@dataclass(frozen=True, kw_only=True)
class Plan(Pruning):
    """DropConnect++ with the library's sparsity plan: the KL rises, the support is fixed, the weights go on alone.

    Give one of `price`, `keep` and `kl_weight`; the price is the KL weight times log(beta / alpha).
    """

    title: ClassVar[str] = "Sparsity plan"
    kind: Literal["sparsity-plan"] = "sparsity-plan"
    keep: float | None = None
    """Share of gated weights to end with: the price is steered towards it."""
    price: float | None = None
    """Nats that a kept connection must earn."""
    kl_weight: float | None = None
    alpha: float = 1.0
    beta: float = 99.0
    hyper: PriorKL = "marginal"
    """The KL: of z alone, whose prior is Bernoulli(alpha / (alpha + beta)), or with q(pi) at its optimum."""
    keep_probability: float = 0.9
    """Where pi~ starts."""
    warmup: float = 0.3
    """Share of the steps over which the KL rises from 0."""
    fix_at: float = 0.8
    """Share of the steps after which the support is {pi~ > 1/2} for good; 1: never, it is taken at the end."""
    noise: float = 0.0
    """DropConnect's rate on what is kept, before the support is fixed and after."""
    logit_lr: float | None = None
    """Step size of the logits, by Adam whatever the weights' optimiser is. None: by the number of steps."""
    granularity: Granularity = "synapse"
    """What one gate switches: a weight, all weights of an input (a map, for a convolution), all weights of a unit."""
    support: Support = "posterior"
    """Controls: of each layer as many weights as the posterior would keep, but the largest, or any."""
    learning: bool = True
    """A control: False leaves every pi~ where it starts, and the support is the `keep` largest weights."""

    def _check(self) -> None:
        given = [name for name in ("keep", "price", "kl_weight") if getattr(self, name) is not None]
        require(
            len(given) == 1,
            f"give one of keep, price and kl_weight, got {' and '.join(given) if given else 'none of them'}.",
        )
        _positive(self, "price", "kl_weight", "alpha", "beta", "logit_lr")
        require(0.0 < self.keep_probability < 1.0, f"keep_probability must lie in (0, 1), got {self.keep_probability}.")
        try:
            self.schedule(1000)
            price_of_kl_weight(1.0, self.alpha, self.beta)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if not self.learning:
            require(self.keep is not None, "learning = false needs keep: nothing else says how many weights to keep.")
            require(self.support == "posterior", "learning = false takes the largest weights: leave support out.")
            idle = ("alpha", "beta", "hyper", "warmup", "logit_lr")
            for item in fields(self):
                if item.name in idle and getattr(self, item.name) != item.default:
                    raise ProtocolError(f"{item.name} does nothing with learning = false. Leave it out.")
        if self.granularity != "synapse":
            require(self.learning and self.support == "posterior", "controls are for granularity 'synapse' alone.")

    @property
    def structured(self) -> bool:
        """Whether whole inputs or units are removed."""
        return self.granularity != "synapse"

    def schedule(self, steps: int) -> SparsitySchedule:
        """The library's schedule for a training of so many steps."""
        price = self.price
        if self.kl_weight is not None:
            price = price_of_kl_weight(self.kl_weight, self.alpha, self.beta)
        return SparsitySchedule(
            steps,
            keep=self.keep,
            price=price,
            warmup=self.warmup,
            fix_at=self.fix_at,
            noise=self.noise,
            logit_lr=self.logit_lr,
        )

    def kl_weight_of(self, price: float) -> float:
        """The KL weight at a price."""
        return kl_weight_of_price(price, self.alpha, self.beta)


@dataclass(frozen=True, kw_only=True)
class GradualMagnitude(Pruning):
    """Gradual magnitude pruning (Zhu and Gupta 2017): the share kept falls by a cubic to `keep`, the smallest go."""

    title: ClassVar[str] = "Gradual magnitude pruning"
    kind: Literal["gradual-magnitude"] = "gradual-magnitude"
    keep: float = 0.1
    begin: float = 0.1
    end: float = 0.7
    """Shares of the steps between which weights are removed."""
    every: int = 100
    """Steps between two removals."""
    ranking: Ranking = "global"
    """Whether all layers are ranked together or each alone, at the same share."""
    floor: float = 0.0
    """The least share that a layer keeps under the global ranking."""
    noise: Noise = "none"
    rate: float = 0.0
    """Share dropped by the noise: of kept connections, or of the inputs of gated layers after the first."""

    def _check(self) -> None:
        _share("keep", self.keep)
        _noise(self.noise, self.rate)
        require(0.0 <= self.begin < self.end <= 1.0, f"0 <= begin < end <= 1, got {self.begin} and {self.end}.")
        require(self.every >= 1, f"every must be at least 1, got {self.every}.")
        require(0.0 <= self.floor <= 1.0, f"floor must lie in [0, 1], got {self.floor}.")
        require(self.ranking == "global" or not self.floor, "floor does nothing where each layer is ranked alone.")

    def keep_at(self, share: float) -> float:
        """The share kept when a share of the steps is over.

        >>> [round(GradualMagnitude(keep=0.1, begin=0.0, end=1.0).keep_at(t), 4) for t in (0.0, 0.5, 1.0)]
        [1.0, 0.2125, 0.1]
        """
        rest = 1.0 - min(1.0, max(0.0, (share - self.begin) / (self.end - self.begin)))
        return self.keep + (1.0 - self.keep) * rest**3


@dataclass(frozen=True, kw_only=True)
class OneShot(Pruning):
    """The smallest weights are removed at once; the others go on training."""

    title: ClassVar[str] = "One-shot magnitude pruning"
    kind: Literal["one-shot"] = "one-shot"
    keep: float = 0.1
    at: float = 0.5
    """Share of the steps after which it is done; 1: at the end, without fine-tuning."""
    ranking: Ranking = "global"
    floor: float = 0.0
    noise: Noise = "none"
    rate: float = 0.0

    def _check(self) -> None:
        _share("keep", self.keep)
        _noise(self.noise, self.rate)
        require(0.0 < self.at <= 1.0, f"at must lie in (0, 1], got {self.at}.")
        require(0.0 <= self.floor <= 1.0, f"floor must lie in [0, 1], got {self.floor}.")
        require(self.ranking == "global" or not self.floor, "floor does nothing where each layer is ranked alone.")


@dataclass(frozen=True, kw_only=True)
class FixedSupport(Pruning):
    """A random support from the first step on, each layer with a share of its own: a control."""

    title: ClassVar[str] = "Random support"
    kind: Literal["fixed-support"] = "fixed-support"
    shares: tuple[float, ...] = ()
    """Share of each gated layer's weights, such as those of a finished network of the plan."""
    noise: Noise = "none"
    rate: float = 0.0

    def _check(self) -> None:
        object.__setattr__(self, "shares", tuple(map(float, self.shares)))
        require(bool(self.shares), "shares must give a share for each gated layer.")
        require(all(0.0 <= share <= 1.0 for share in self.shares), f"shares must lie in [0, 1], got {self.shares}.")
        _noise(self.noise, self.rate)


@dataclass(frozen=True, kw_only=True)
class SparseVD(Pruning):
    """Sparse variational dropout (Molchanov et al. 2017): a log-uniform prior, noise on what reaches a unit."""

    title: ClassVar[str] = "Sparse VD"
    kind: Literal["sparse-vd"] = "sparse-vd"
    kl_weight: float = 1.0
    warmup: float = 0.3
    """Share of the steps over which the KL rises from 0."""
    log_variance: float = -10.0
    """Where log sigma^2 starts."""
    threshold: float = 3.0
    """A weight is kept if its log alpha is below."""
    keep: float | None = None
    """Instead of the threshold: the share of gated weights kept at the end, those of smallest log alpha."""
    variance_step: float = 1.0
    """Step size of log sigma^2 as a multiple of the weights'."""

    def _check(self) -> None:
        _share("keep", self.keep)
        _positive(self, "variance_step")
        require(self.kl_weight >= 0, f"kl_weight must not be negative, got {self.kl_weight}.")
        require(0.0 <= self.warmup <= 1.0, f"warmup must lie in [0, 1], got {self.warmup}.")
        require(self.keep is None or self.threshold == 3.0, "threshold does nothing where keep is given.")


@dataclass(frozen=True, kw_only=True)
class L0(Pruning):
    """L0 regularisation by hard concrete gates (Louizos et al. 2018), one for each weight."""

    title: ClassVar[str] = "L0"
    kind: Literal["l0"] = "l0"
    weight: float = 1.0
    """Nats, over the training set, that a gate costs while it is open; the paper's lambda times N."""
    warmup: float = 0.0
    """Share of the steps over which that weight rises from 0; the paper has none."""
    temperature: float = 2.0 / 3.0
    stretch: float = 0.1
    """gamma = -stretch, zeta = 1 + stretch."""
    keep_probability: float = 0.9
    """Where a gate's sigmoid(log alpha) starts."""
    gate_step: float = 1.0
    """Step size of log alpha as a multiple of the weights'."""
    keep: float | None = None
    """The share of gated weights kept at the end, those whose gates are most open. None: all whose gate is not 0."""

    def _check(self) -> None:
        _share("keep", self.keep)
        _positive(self, "temperature", "stretch", "gate_step")
        require(self.weight >= 0, f"weight must not be negative, got {self.weight}.")
        require(0.0 <= self.warmup <= 1.0, f"warmup must lie in [0, 1], got {self.warmup}.")
        require(0.0 < self.keep_probability < 1.0, f"keep_probability must lie in (0, 1), got {self.keep_probability}.")


AnyPruning = Plan | GradualMagnitude | OneShot | FixedSupport | SparseVD | L0
PRUNING: dict[str, type[Pruning]] = {str(kind.kind): kind for kind in get_args(AnyPruning)}
"""By the name that `[[methods]]` gives as `kind`."""
