"""DropConnect++ with the sparsity plan: the library's schedule decides, for each replica of a stack.

The price of a connection rises, is steered where a share to keep is given, and the support is fixed before the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropconnectpp.inference.schedule import BRAKE, SparsitySchedule, Steering
from dropconnectpp.lab.config.pruning import GradualMagnitude, Plan
from dropconnectpp.lab.kernels import synapses as kernels
from dropconnectpp.lab.philox import Stream
from dropconnectpp.lab.replicas.pruning.gating import Gating, Table, largest, sigmoid
from dropconnectpp.lab.replicas.pruning.magnitude import magnitude_support

SURE = 20.0
"""Log-odds of a gate that a control sets."""
LOGIT_EPSILON = 1e-5
"""Adam's epsilon for the logits, in nats over the training set, as the library's `SparsityPlan` has it."""


HIGHEST = 1e30
"""Log-odds where there is no ceiling; finite, so that float32 holds them."""


def log_odds(probability: float) -> float:
    """logit; infinite for 1."""
    return math.inf if probability == 1.0 else math.log(probability) - math.log1p(-probability)


def _is_control(settings: Plan) -> bool:
    return settings.support != "posterior" or not settings.learning


class PlannedGates(Gating):
    """A learned gate for each weight; its straight-through gradient and its KL's go into one step of Adam."""

    kind = "bernoulli"
    settings: tuple[Plan, ...]

    def prepare(self) -> None:
        self.schedules: list[SparsitySchedule] = [one.schedule(self.steps) for one in self.settings]
        self.add_gates(
            [
                min(log_odds(one.keep_probability), log_odds(schedule.ceiling))
                for one, schedule in zip(self.settings, self.schedules, strict=True)
            ]
        )
        for synapses in self.synapses:
            synapses.gate_epsilon = LOGIT_EPSILON / self.num_data
        self.shares = torch.ones_like(self.kl_weights)
        """The share kept at the last reading, where one is to be met."""
        self.steerings: list[Steering] = [schedule.start() for schedule in self.schedules]
        self._set_prices()

    def follow(self, settings: Sequence[Plan]) -> None:
        changed = [one.noise != other.noise for one, other in zip(settings, self.settings, strict=True)]
        if any(changed):  # nothing else of a plan changes from epoch to epoch
            self.settings = tuple(settings)
            self.schedules = [
                one.schedule(self.steps) if new else schedule
                for one, new, schedule in zip(settings, changed, self.schedules, strict=True)
            ]

    def take_over(self, here: Tensor, there: Tensor) -> None:
        super().take_over(here, there)
        self.shares[here] = self.shares[there]
        for loser, winner in zip(here.tolist(), there.tolist(), strict=True):
            self.steerings[loser] = self.steerings[winner]

    def _set_prices(self) -> None:
        weights = [
            one.kl_weight_of(state.price) if one.learning else 0.0
            for one, state in zip(self.settings, self.steerings, strict=True)
        ]
        self.kl_weights.copy_(torch.tensor(weights, dtype=self.kl_weights.dtype))

    def columns(self, first: int, count: int, table: Table) -> None:
        found: dict[Any, np.ndarray[Any, Any]] = {}
        targets: dict[Any, list[float]] = {}
        for row, (one, schedule) in enumerate(zip(self.settings, self.schedules, strict=True)):
            key: Any = schedule.warmup, schedule.fix_at, schedule.logit_lr  # the price comes apart
            if key not in found:
                found[key] = np.array(
                    [
                        (schedule.logit_lr_at(step), schedule.kl_factor(step), schedule.fixed(step))
                        for step in range(first, first + count)
                    ]
                )
            lr, factor, fixed = found[key].T
            table[:, row, kernels.GATE_LR] = lr if one.learning else 0.0
            table[:, row, kernels.KL] = factor
            table[:, row, kernels.FIXED] = fixed
            table[:, row, kernels.KEEP] = schedule.ceiling
            table[:, row, kernels.CEILING] = min(log_odds(schedule.ceiling), HIGHEST)
            table[:, row, kernels.LEAST] = log_odds(schedule.threshold)
            if schedule.keep is not None and one.learning:
                aim = schedule.keep, schedule.fix_at
                if aim not in targets:
                    targets[aim] = self._targets(schedule, first, count)
                table[:, row, kernels.TARGET] = targets[aim]
            alone = one.hyper == "marginal"
            table[:, row, kernels.ALPHA] = math.log(one.alpha / one.beta) if alone else one.alpha
            table[:, row, kernels.BETA] = 0.0 if alone else one.beta

    @staticmethod
    def _targets(schedule: SparsitySchedule, first: int, count: int) -> list[float]:
        """Shares below which logits stand still, so that no more is lost than was asked for."""
        return [BRAKE * schedule.target_share(step) for step in range(first, first + count)]

    def brake(self, now: Tensor) -> None:
        """Let the logits stand still where fewer connections are left than are aimed at."""
        now[:, kernels.GATE_LR].mul_(self.shares >= now[:, kernels.TARGET])

    # ------------------------------------------------------------------------------- steering and fixing

    @property
    def event_steps(self) -> set[int]:
        found: set[int] = set()
        for schedule in {(s.fix_step, s.read_every): s for s in self.schedules}.values():
            found |= {step for step in range(1, self.steps + 1) if schedule.reads(step)}
            found.add(schedule.fix_step)
        return found

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        if any(s.reads(step) for s in self.schedules):
            shares = [sum(counts) / self.total for counts in self.counts()]
            self.steerings = [
                schedule.steer(state, step, share) if schedule.reads(step) else state
                for schedule, state, share in zip(self.schedules, self.steerings, shares, strict=True)
            ]
            self._set_prices()
            self.shares.copy_(torch.tensor([state.share for state in self.steerings], dtype=self.shares.dtype))
        rows = [row for row, schedule in enumerate(self.schedules) if schedule.fix_step == step]
        self._choose([row for row in rows if _is_control(self.settings[row])])

    def _choose(self, rows: list[int]) -> None:
        """The supports of controls, set as gates that are sure."""
        if not rows:
            return
        learned = [row for row in rows if self.settings[row].learning]
        for synapses, layer in zip(self.synapses, self.layers, strict=True):
            gate = synapses.gates()[0]
            for row in learned:
                count = (gate[row : row + 1] > log_odds(self.schedules[row].threshold)).flatten(1).sum(1)
                kept = largest(self._scores(row, synapses.weight, layer.name), count)
                gate[row] = torch.where(kept.view(gate.shape[1:]), SURE, -SURE)
        still = [row for row in rows if not self.settings[row].learning]
        if still:
            ranked = [GradualMagnitude(keep=self.settings[row].keep or 1.0) for row in still]
            weights = [synapses.weight[still] for synapses in self.synapses]
            for synapses, kept in zip(
                self.synapses, magnitude_support(weights, ranked, [one.keep for one in ranked]), strict=True
            ):
                gate = synapses.gates()[0]
                gate[still] = torch.where(kept, SURE, -SURE).to(gate.dtype)

    def _scores(self, row: int, weight: Tensor, name: str) -> Tensor:  # (1, n)
        if self.settings[row].support == "magnitude":
            return weight[row : row + 1].flatten(1).abs()
        stream = Stream(self.root_seed, f"support:{name}")
        return stream.uniform(self.replicas[row : row + 1], 0, weight[0].numel())

    # ------------------------------------------------------------------------------------ what was learned

    def _logit(self, number: int) -> Tensor:
        """Log-odds of each weight's gate."""
        return self.synapses[number].gates()[0]

    def support(self, number: int) -> Tensor:
        logit = self._logit(number)
        return logit > self._per_replica([log_odds(schedule.threshold) for schedule in self.schedules], logit)

    def whole_weight(self, number: int) -> Tensor:
        weight = self.synapses[number].weight
        kept = self._per_replica([schedule.ceiling for schedule in self.schedules], weight) * self.support(number)
        fixed = self._per_replica([float(schedule.fixed(self.step)) for schedule in self.schedules], weight) > 0
        return weight * torch.where(fixed, kept, sigmoid(self._logit(number)))

    def kl(self) -> Tensor:
        total = super().kl()
        for gate in self._all_gates():
            for row, one in enumerate(self.settings):
                alone = one.hyper == "marginal"
                alpha, beta = (math.log(one.alpha / one.beta), 0.0) if alone else (one.alpha, one.beta)
                pair = (torch.full((), value, dtype=torch.float64, device=gate.device) for value in (alpha, beta))
                total[row] += kernels.gate_kl(gate[row].double(), *pair).sum()
        return total

    def _all_gates(self) -> list[Tensor]:
        """Each layer's gates, (R, ...)."""
        return [synapses.gates()[0] for synapses in self.synapses]

    def prices(self) -> list[float | None]:
        return [state.price if one.learning else None for one, state in zip(self.settings, self.steerings, strict=True)]

    def state(self) -> dict[str, Any]:
        return super().state() | {"steerings": [tuple(one) for one in self.steerings]}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.steerings = [Steering(*one) for one in state["steerings"]]
        self.shares.copy_(torch.tensor([one.share for one in self.steerings], dtype=self.shares.dtype))
