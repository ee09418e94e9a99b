"""Population-based training as frozen settings: how many networks, what of theirs may change, and when.

Jaderberg et al., Population based training of neural networks, 2017. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from dropconnectpp.lab.config.method import METHODS, Method
from dropconnectpp.lab.config.settings import check_fields, require

MEMBERS = 14
"""A fifth of what step size and rate cost by grid: three step sizes, eight rates, three networks each."""
MOST = 1000
"""Members are one stack, and no memory holds more of the paper's network."""
USUAL = ("dropout", "dropconnect", "per-example", "sparse")
"""Methods that `dcpp run population` trains."""


@dataclass(frozen=True, kw_only=True)
class Population:
    """Networks of one stack that are judged on held-out images and take over from the best.

    Each starts with settings of its own, spread evenly over the ranges on a scale of ratios (of rates, of odds). Every
    few epochs the worst take over the weights, the optimiser's state, the posterior and the settings of one of the
    best, and the settings are disturbed.
    """

    members: int = MEMBERS
    every: int = 5
    """Epochs between two judgements."""
    wait: float = 0.3
    """Share of the epochs before anybody takes over. Noise pays late: at first networks without it lead, and a judge
    in a hurry would do away with high rates."""
    share: float = 0.25
    """Share of the members that is replaced, and share that may be taken over."""
    disturbance: float = 0.3
    """The most by which the logarithm of a setting, of a rate that of its odds, changes when it is taken over."""
    step_sizes: tuple[float, ...] = (0.003, 0.05)
    """The range of step sizes at the start; later they may leave it. Rates and KL weights likewise."""
    rates: tuple[float, ...] = (0.1, 0.9)
    """Of Dropout and DropConnect, and of the noise of a sparsity plan, which is at most 0.5."""
    kl_weights: tuple[float, ...] = (0.25, 4.0)
    """Of DropConnect++, as multiples of the method's own. The price of a connection is the KL weight times
    log(beta / alpha)."""
    keep: float | None = None
    """The judge's network: all of it, or with this share of its weights, those of largest pi~ |W|."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(2 <= self.members <= MOST, f"members must be at least 2 and at most {MOST:,}, got {self.members}.")
        require(self.every >= 1, f"every must be at least 1, got {self.every}.")
        require(0.0 <= self.wait < 1.0, f"wait must lie in [0, 1), got {self.wait}.")
        require(0.0 < self.share <= 0.5, f"share must lie in (0, 0.5], got {self.share}.")
        require(self.disturbance >= 0, f"disturbance must not be negative, got {self.disturbance}.")
        for name in ("step_sizes", "rates", "kl_weights"):
            values, most = getattr(self, name), 1.0 if name == "rates" else float("inf")
            good = len(values) == 2 and 0.0 < values[0] <= values[1] < most
            require(good, f"{name} must be two rising numbers between 0 and {most:g}, got {values}.")
            object.__setattr__(self, name, tuple(map(float, values)))
        require(self.keep is None or 0.0 < self.keep < 1.0, f"keep must be a share in (0, 1), got {self.keep}.")

    @property
    def replaced(self) -> int:
        """Members that take over from others at a judgement."""
        return max(1, int(self.share * self.members))

    def ranges(self, method: Method, plan: bool = False) -> dict[str, tuple[float, float]]:
        """The settings of a method that change, with their ranges at the start; those of a sparsity plan on request.

        >>> Population().ranges(Method(kind="dropout"))
        {'step_size': (0.003, 0.05), 'rate': (0.1, 0.9)}
        """
        found = {"step_size": _pair(self.step_sizes)}
        if method.has_rate or plan:
            found["rate"] = _pair(self.rates)
        elif method.kind == "dropconnect++" and method.kl_weight:
            low, high = self.kl_weights
            found["kl_weight"] = (low * method.kl_weight, high * method.kl_weight)
        return found

    def judges(self, epoch: int, epochs: int) -> bool:
        """Whether members are judged after ``epoch`` epochs; after the last they always are."""
        return epoch % self.every == 0 or epoch == epochs

    def replaces(self, epoch: int, epochs: int) -> bool:
        """Whether members take over from others after ``epoch`` epochs; after the last nobody does.

        >>> [epoch for epoch in range(1, 41) if Population().replaces(epoch, 40)]
        [15, 20, 25, 30, 35]
        """
        return self.judges(epoch, epochs) and self.wait * epochs <= epoch < epochs

    def judgements(self, epochs: int) -> int:
        """How often members are judged."""
        return -(-epochs // self.every)


def keeps_few(method: Method) -> bool:
    """Whether a method is judged by what it is with few connections: the preset `sparse`."""
    return method == METHODS["sparse"]


def _pair(values: tuple[float, ...]) -> tuple[float, float]:
    low, high = values
    return low, high
