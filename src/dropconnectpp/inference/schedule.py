"""When a network gets sparse: the price of a connection over a training, as plain numbers.

`SparsityPlan` steps one of these for a model; a stack of networks steps one for each of them, without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dropconnectpp.errors import ArgumentError, check_count, check_positive

Phase = Literal["rise", "learn", "fixed"]
"""The KL rises; connections are learned at its full weight; the support is fixed and the weights go on alone."""

START_PRICE = 0.02
"""Nats that a connection must earn where steering begins: few networks lose connections at less."""
GAIN = 30.0
"""How fast the price follows: over a whole training, a share that is 1% off would move it by 30%."""
MET_AT = 0.95
"""The share of the steps before the support is fixed after which the target is ``keep`` itself."""
BRAKE = 0.98
"""Logits stand still while the share kept is below this much of its target: what is lost hardly ever comes back."""
MOST_PRICE_CHANGE = 1.0
"""The most by which the logarithm of the price changes between two readings."""


class Steering(NamedTuple):
    """What steering remembers between two readings: plain floats, to be stored with a checkpoint."""

    price: float
    """Nats that a kept connection must earn once the KL has risen."""
    share: float = 1.0
    """The share of connections with pi~ > 1/2 at the last reading."""
    step: float = 0.0
    """The step of the last reading."""


def logit_step_size(steps: int) -> float:
    """Adam's step size for the logits of a training of this length: gates must get where they should in time.

    >>> [round(logit_step_size(steps), 4) for steps in (500, 2000, 50_000)]
    [0.0984, 0.0492, 0.0098]
    """
    return min(2.2 / math.sqrt(check_count("steps", steps)), 0.2)


def kl_weight_of_price(price: float, alpha: float, beta: float) -> float:
    """The KL weight at which a connection kept must earn ``price`` nats: price / log(beta / alpha).

    >>> round(kl_weight_of_price(1.0, 1.0, 99.0), 4)
    0.2176
    """
    return price / _log_odds(alpha, beta)


def price_of_kl_weight(kl_weight: float, alpha: float, beta: float) -> float:
    """Nats that a connection must earn to be kept at a KL weight: kl_weight * log(beta / alpha)."""
    return kl_weight * _log_odds(alpha, beta)


def _log_odds(alpha: float, beta: float) -> float:
    if not beta > alpha > 0.0:
        raise ArgumentError(
            f"a connection has a price where beta is above alpha, got alpha={alpha!r} and beta={beta!r}: "
            "otherwise the prior would rather keep it. Use alpha=1, beta=99, as the preset 'sparse' does."
        )
    odds: float = math.log(beta / alpha)
    return odds


@dataclass(frozen=True)
class SparsitySchedule:
    """Phases, prices and step sizes of a training that ends with few connections.

    Steps count from 0: ``step`` is how many optimiser steps were made before the one in question.
    Give ``keep``, the share of connections to end with, or ``price``, the nats that each must earn.
    """

    steps: int
    """Optimiser steps of the whole training."""
    keep: float | None = None
    """The share of connections to keep: the price is steered towards it."""
    price: float | None = None
    """Nats of log-likelihood, summed over the training set, that a kept connection must earn."""
    warmup: float = 0.3
    """The share of the steps over which the KL rises from 0."""
    fix_at: float = 0.8
    """The share of the steps after which the support is fixed; at 1 it never is."""
    noise: float = 0.0
    """DropConnect's rate on what is kept: no pi~ is above 1 - noise, and on the fixed support each is just that."""
    logit_lr: float | None = None
    """Adam's step size for the logits; None: `logit_step_size` of the steps."""
    read_every: int | None = None
    """Steps between two readings of the share kept; None: a two-hundredth of the training."""

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        if (self.keep is None) == (self.price is None):
            raise ArgumentError(
                f"give either keep, the share of connections to keep, or price, the nats that each must earn; "
                f"got keep={self.keep!r} and price={self.price!r}."
            )
        if self.keep is not None and not 0.0 < self.keep < 1.0:
            raise ArgumentError(f"keep must lie strictly between 0 and 1, got {self.keep!r}. For all use no plan.")
        if self.price is not None:
            check_positive("price", self.price)
        for name in ("warmup", "fix_at"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ArgumentError(
                    f"{name} is a share of the steps and must lie in [0, 1], got {getattr(self, name)!r}."
                )
        if self.fix_at <= self.warmup:
            raise ArgumentError(
                f"fix_at must be above warmup, so that connections are learned at the full price: "
                f"got fix_at={self.fix_at!r} and warmup={self.warmup!r}."
            )
        if self.fix_step == 0:
            raise ArgumentError(
                f"steps={self.steps} and fix_at={self.fix_at!r} fix the support before the first step. "
                "steps is the number of optimiser steps of the whole training."
            )
        if not 0.0 <= self.noise <= 0.5:
            raise ArgumentError(f"noise is the share dropped and must lie in [0, 0.5], got {self.noise!r}.")
        if self.logit_lr is not None:
            check_positive("logit_lr", self.logit_lr)
        if self.read_every is not None:
            check_count("read_every", self.read_every)

    # ------------------------------------------------------------------------------------- phases

    @property
    def fix_step(self) -> int:
        """The step from which on the support is fixed; `steps` if it never is."""
        return min(round(self.fix_at * self.steps), self.steps)

    def fixed(self, step: int) -> bool:
        """Whether the support is fixed: it is {pi~ > threshold} as it was then."""
        return self.fix_at < 1.0 and step >= self.fix_step

    def phase(self, step: int) -> Phase:
        """Which phase a step belongs to."""
        if self.fixed(step):
            return "fixed"
        return "rise" if step < self.warmup * self.steps else "learn"

    def kl_factor(self, step: int) -> float:
        """What the KL's weight is multiplied by: it rises from 0 to 1 over the warmup.

        >>> [SparsitySchedule(100, price=1.0).kl_factor(step) for step in (0, 15, 30, 90)]
        [0.0, 0.5, 1.0, 1.0]
        """
        warmup = self.warmup * self.steps
        return min(1.0, step / warmup) if warmup else 1.0

    @property
    def ceiling(self) -> float:
        """The highest pi~ there is: 1 - noise."""
        return 1.0 - self.noise

    @property
    def threshold(self) -> float:
        """The support is where pi~ is above this: half of the ceiling, 1/2 without noise."""
        return self.ceiling / 2

    def logit_lr_at(self, step: int, state: Steering | None = None) -> float:
        """Adam's step size for the logits at a step: falling to 0 over the second half; 0 once fixed.

        With the state of steering, 0 too while fewer connections are left than are aimed at.
        """
        if self.fixed(step) or (state is not None and self.keep is not None and self._ahead(state, step)):
            return 0.0
        full = logit_step_size(self.steps) if self.logit_lr is None else self.logit_lr
        return full * max(0.0, min(1.0, 2.0 * (1.0 - step / self.steps)))

    # ------------------------------------------------------------------------------------ the price

    def start(self) -> Steering:
        """What `steer` begins with."""
        return Steering(START_PRICE if self.price is None else self.price)

    def reads(self, step: int) -> bool:
        """Whether the share kept is to be read after ``step`` steps: now and then, and before the support is fixed."""
        if step == 0 or step > self.fix_step:
            return False
        every = max(1, self.steps // 200) if self.read_every is None else self.read_every
        return step % every == 0 or step == self.fix_step

    def target_share(self, step: int) -> float:
        """The share that steering by ``keep`` aims at after ``step`` steps; without ``keep``, 1."""
        if self.keep is None:
            return 1.0
        rest = max(0.0, 1.0 - step / (MET_AT * self.fix_step))
        return math.exp(math.log(self.keep) * (1.0 - rest * rest))

    def _ahead(self, state: Steering, step: int) -> bool:
        return state.share < BRAKE * self.target_share(step)

    def steer(self, state: Steering, step: int, share_now: float) -> Steering:
        """The state after the share kept was read: with ``keep``, a price that leads towards the target."""
        if self.keep is None or self.fixed(step + 1):
            return state._replace(share=share_now, step=float(step))
        floor = 0.01 * self.keep  # of a share whose logarithm is taken
        target, before = self.target_share(step), self.target_share(int(state.step))
        share, last = max(share_now, floor), max(state.share, floor)
        error = math.log(share / target)
        trend = math.log(share / last) - math.log(target / before)
        change = GAIN * (step - state.step) / self.steps * error + trend
        change = max(-MOST_PRICE_CHANGE, min(MOST_PRICE_CHANGE, change))
        return Steering(state.price * math.exp(change), share_now, float(step))

    def price_at(self, state: Steering, step: int) -> float:
        """Nats that a connection must earn at a step: the state's price times `kl_factor`."""
        return state.price * self.kl_factor(step)

    def kl_weight_at(self, state: Steering, step: int, alpha: float, beta: float) -> float:
        """The KL weight of a step for gates with a Beta(alpha, beta) prior; 0 once the support is fixed."""
        return 0.0 if self.fixed(step) else kl_weight_of_price(self.price_at(state, step), alpha, beta)
